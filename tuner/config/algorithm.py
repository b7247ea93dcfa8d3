"""`algorithm.*`: how rewards become a gradient, and the optimizer.

What is not set is taken from the table of algorithms when the configuration is loaded: parts from
the algorithm's row, their numbers from the parts (`tuner.algorithms.spec`). A number that the
chosen part does not read stays null, so one that is not null was set, and is refused
(`tuner.config.conflicts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import Field, create_model, field_validator, model_validator

from tuner.algorithms.spec import (
    ADVANTAGES,
    POLICY_LOSSES,
    AdvantageArgs,
    AdvantageName,
    Aggregation,
    Args,
    EntropyLoss,
    EntropyName,
    KLLoss,
    KLName,
    KLPenalty,
    PolicyLossArgs,
    PolicyLossName,
    PromptTeacher,
)
from tuner.algorithms.table import ALGORITHMS, NOT_HERE, AlgorithmName
from tuner.config.section import Section


class OptimizerSection(Section):
    """`algorithm.optimizer.*`"""

    optimizer_type: Literal["adam"] = Field(
        default="adam", description="Adam with decoupled weight decay."
    )
    lr: float = Field(default=1e-6, gt=0, description="Learning rate after the warmup.")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.999), description="Decay of Adam's two moving averages."
    )
    weight_decay: float = Field(default=0.01, ge=0, description="Decoupled weight decay.")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="How the learning rate goes on after the warmup."
    )
    lr_warmup_steps: int = Field(
        default=-1,
        ge=-1,
        description="Steps of linear warmup; -1 takes `lr_warmup_steps_ratio` instead.",
    )
    lr_warmup_steps_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Steps of linear warmup as a share of all steps."
    )
    min_lr_ratio: float = Field(
        default=0.01, ge=0, le=1, description="Where `linear` and `cosine` end, as a share of `lr`."
    )

    def warmup_steps(self, total_steps: int) -> int:
        """Steps of linear warmup in a run of `total_steps`."""
        if self.lr_warmup_steps >= 0:
            return self.lr_warmup_steps
        return int(self.lr_warmup_steps_ratio * total_steps)


def _arguments(name: str, parts: Iterable[type[Args]]) -> type[Section]:
    """A section of every argument that one of `parts` has; null where it is not read."""
    found: dict[str, Any] = {}
    for part in parts:
        for key, info in part.model_fields.items():
            kind: Any = info.annotation
            field = Field(description=info.description)
            found.setdefault(key, (Annotated[(kind | None, *info.metadata, field)], None))
    return create_model(name, __base__=Section, __doc__=f"`algorithm.{name}.*`", **found)


AdvantageArguments = _arguments("advantage_fn_args", ADVANTAGES.values())
PolicyLossArguments = _arguments("policy_loss_fn_args", POLICY_LOSSES.values())
KLPenaltyArguments = _arguments("kl_penalty_fn_args", [KLPenalty])
KLLossArguments = _arguments("kl_loss_fn_args", [KLLoss])
EntropyLossArguments = _arguments("entropy_loss_fn_args", [EntropyLoss])


class SampleStrategyArgs(Section):
    """`algorithm.sample_strategy_args.*`"""

    max_staleness: int | None = Field(
        default=None,
        ge=0,
        description="Tokens that are older than so many updates are not trained. For "
        "staleness_control, which needs it.",
    )


class AlgorithmSection(Section):
    """`algorithm.*`"""

    algorithm_type: AlgorithmName = Field(
        default="multi_step_grpo",
        description="A row of docs/algorithms.md; what is not set below is taken from it.",
    )
    repeat_times: int = Field(
        default=8,
        ge=1,
        description="Group size: rollouts of one task in one step. 1 is for advantages that "
        "compare nothing inside a group: ppo, reinforceplusplus, reinforce, on_policy_distill, "
        "prompt_distill. Not read without rollouts. Trinity-RFT's is 1.",
    )
    optimizer: OptimizerSection = OptimizerSection()
    advantage_fn: AdvantageName = Field(
        default="step_wise_grpo",
        description="How rewards become advantages; `none` where nothing is rolled out.",
    )
    advantage_fn_args: AdvantageArguments = AdvantageArguments()  # type: ignore[valid-type]
    policy_loss_fn: PolicyLossName = Field(
        default="ppo", description="The loss of a token with an advantage."
    )
    policy_loss_fn_args: PolicyLossArguments = PolicyLossArguments()  # type: ignore[valid-type]
    kl_penalty_fn: KLName = Field(
        default="none",
        description="Estimate of KL(policy || reference) taken off the rewards. Not for raft.",
    )
    kl_penalty_fn_args: KLPenaltyArguments = KLPenaltyArguments()  # type: ignore[valid-type]
    kl_loss_fn: KLName = Field(
        default="k2",
        description="Estimate of KL(policy || reference) added to the loss. Default of "
        "multi_step_grpo.",
    )
    kl_loss_fn_args: KLLossArguments = KLLossArguments()  # type: ignore[valid-type]
    entropy_loss_fn: EntropyName = Field(
        default="default", description="Entropy bonus; it costs nothing while its coefficient is 0."
    )
    entropy_loss_fn_args: EntropyLossArguments = EntropyLossArguments()  # type: ignore[valid-type]
    loss_agg_mode: Aggregation = Field(
        default="token-mean",
        description="What each trained token of a step weighs ([algorithms](algorithms.md)); "
        "`rollout-mean` is not a value of Trinity-RFT's. Default of multi_step_grpo.",
    )
    sample_strategy: Literal["default", "staleness_control"] = Field(
        default="default",
        description="What a step does about groups that are late where `synchronizer.sync_offset` "
        "lets collection run ahead: wait for them before they are too old (`default`), or go on "
        "and leave out what is too old (`staleness_control`).",
    )
    sample_strategy_args: SampleStrategyArgs = SampleStrategyArgs()

    @model_validator(mode="before")
    @classmethod
    def _from_the_table(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        filled = {key: value for key, value in given.items() if value is not None}
        row = ALGORITHMS.get(filled.setdefault("algorithm_type", "multi_step_grpo"))
        if row is None:
            return filled
        for key in PARTS:
            filled.setdefault(key, getattr(row, key, "none"))
        filled.setdefault("loss_agg_mode", row.loss_agg_mode)
        for key in PARTS:
            args = filled.setdefault(f"{key}_args", {})
            part = part_of(key, filled[key])
            if isinstance(args, Mapping) and part is not None:
                own = filled[key] == getattr(row, key, "none")
                other = row.policy_loss_args if own and key == "policy_loss_fn" else {}
                filled[f"{key}_args"] = part.completed(args, other)
        return filled

    @field_validator("algorithm_type", mode="before")
    @classmethod
    def _on_this_backend(cls, value: Any) -> Any:
        if isinstance(value, str) and value in NOT_HERE:
            raise ValueError(f"not on this backend: {NOT_HERE[value]}")
        return value

    @property
    def advantage(self) -> AdvantageArgs:
        """The advantage with its numbers."""
        return _read(ADVANTAGES[self.advantage_fn], self.advantage_fn_args)

    @property
    def policy_loss(self) -> PolicyLossArgs:
        """The policy loss with its numbers."""
        return _read(POLICY_LOSSES[self.policy_loss_fn], self.policy_loss_fn_args)

    @property
    def kl_penalty(self) -> KLPenalty:
        """The numbers of the KL that is taken off the rewards."""
        return _read(KLPenalty, self.kl_penalty_fn_args)

    @property
    def kl_loss(self) -> KLLoss:
        """The numbers of the KL term of the loss."""
        return _read(KLLoss, self.kl_loss_fn_args)

    @property
    def entropy_loss(self) -> EntropyLoss:
        """The numbers of the entropy bonus."""
        return _read(EntropyLoss, self.entropy_loss_fn_args)

    def unused(self) -> Iterator[tuple[str, str]]:
        """(dotted key, what does use it) of each number that was set and that nothing reads."""
        for key in PARTS:
            used = part_of(key, getattr(self, key))
            for name, value in getattr(self, f"{key}_args"):
                if value is not None and used is not None and name not in used.model_fields:
                    users = [
                        other
                        for other in get_args(type(self).model_fields[key].annotation)
                        if name in getattr(part_of(key, other), "model_fields", {})
                    ]
                    yield f"algorithm.{key}_args.{name}", " or ".join(users)


PARTS = ("advantage_fn", "policy_loss_fn", "kl_penalty_fn", "kl_loss_fn", "entropy_loss_fn")


ArgsT = TypeVar("ArgsT", bound=Args)


def _read(part: type[ArgsT], given: Section) -> ArgsT:
    """What a part reads of its section."""
    return part.model_validate({name: getattr(given, name) for name in part.model_fields})


def part_of(key: str, name: Any) -> type[Args] | None:
    """The part that `algorithm.<key>: <name>` chooses, or None where there is no such part."""
    if key == "advantage_fn":
        return ADVANTAGES.get(name)
    if key == "policy_loss_fn":
        return POLICY_LOSSES.get(name)
    if name == "none":
        return Args
    return {"kl_penalty_fn": KLPenalty, "kl_loss_fn": KLLoss}.get(key, EntropyLoss)


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
    prompt: str | None = Field(
        default=None,
        min_length=1,
        description="The system prompt that prompt_distill teaches the model to do without. It "
        "takes the place of the agent's own, where there is one.",
    )
    prompt_teacher: PromptTeacher = Field(
        default="start",
        description="Who reads that prompt: the model that the run began with (`start`), or the "
        "one that is trained, as each step begins (`policy`).",
    )
