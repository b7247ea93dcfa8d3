"""`tuner.algorithm.*`: settings of training that Trinity-RFT has elsewhere or not at all."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tuner.config.section import Section


class CriticSection(Section):
    """`tuner.critic.*`: the critic of `algorithm.algorithm_type: ppo`, with Trinity-RFT's numbers.

    Its path is `model.critic_model_path`, its gradient is clipped by `trainer.grad_clip`, and
    `trainer.critic_warmup` is where it starts alone.
    """

    lr: float = Field(default=1e-5, gt=0, description="Learning rate of the critic; constant.")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.999), description="Decay of Adam's two moving averages."
    )
    weight_decay: float = Field(default=0.01, ge=0, description="Decoupled weight decay.")
    cliprange_value: float = Field(
        default=0.5,
        gt=0,
        description="How far a value may leave the one that the step began with before its "
        "gradient is cut.",
    )


class AlgorithmExtras(Section):
    """`tuner.algorithm.*`"""

    reward_scale: float = Field(
        default=1.0, gt=0, description="Rewards are trained as `(reward + reward_bias) * this`."
    )
    reward_bias: float = Field(default=0.0, description="See `reward_scale`.")
    overlong_buffer: int | None = Field(
        default=None,
        ge=1,
        description="DAPO's soft punishment of long answers: the reward falls over the last so "
        "many of the tokens that an answer may have. Not set: none.",
    )
    overlong_penalty: float = Field(
        default=1.0, gt=0, description="What an answer of full length loses."
    )
    dynamic_sampling: bool | None = Field(
        default=None,
        description="Leave out groups whose rewards are all equal, unless calls have rewards of "
        "their own. Not set: as the algorithm has it (`dapo` does).",
    )
    success_rate_lb: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Groups with a smaller share of rewards above 0 are left out: too hard.",
    )
    success_rate_ub: float = Field(
        default=1.0, ge=0, le=1, description="Groups with a larger share are left out: too easy."
    )
    turn_discount: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Discount from a call to the one before it. A call is then compared by what "
        "it leads to ([algorithms](algorithms.md)). Not set: a rollout's reward goes to all its "
        "calls. For grpo, rloo, opmd, asymre and reinforce.",
    )
    updates: int = Field(
        default=1, ge=1, description="Updates of the weights on each step's batch."
    )
    proximal: Literal["auto", "recorded", "recompute", "loglinear"] = Field(
        default="auto",
        description="Decoupled PPO: where the log-probs of the weights that a step began with come "
        "from. `auto` is `recorded` for tokens that these weights sampled, else `recompute`.",
    )
    importance_sampling: Literal["truncate", "none"] = Field(
        default="truncate",
        description="Weigh tokens that other weights sampled, or not. Of no effect where the "
        "log-probs are `recorded`.",
    )
    importance_cap: float = Field(
        default=2.0, gt=0, description="Upper bound of that weight. Not with `none`."
    )
    rejection_low: float | None = Field(
        default=None,
        ge=0,
        description="Tokens whose weight is below this do not count; set both bounds or none.",
    )
    rejection_high: float | None = Field(
        default=None, gt=0, description="Tokens whose weight is above this do not count."
    )
    teacher: str | None = Field(
        default=None,
        min_length=1,
        description="Which of `explorer.auxiliary_models` is the teacher of on_policy_distill. Not "
        "set: the first.",
    )
