"""`algorithm.*`: how rewards become a gradient, and the optimizer.

What is not set is taken from the table of algorithms when the configuration is loaded: parts from
the algorithm's row, their numbers from the parts. A number that the chosen part does not read stays
null, so one that is not null was set, and is refused (`tuner.config.conflicts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from tuner.algorithms.table import (
    ADVANTAGES,
    ALGORITHMS,
    ENTROPY_COEF,
    KL_COEF,
    NOT_HERE,
    POLICY_LOSSES,
    AdvantageName,
    Aggregation,
    AlgorithmName,
    EntropyName,
    KLName,
    OPMDBaseline,
    Part,
    PolicyLossName,
    StdLevel,
)
from tuner.config.section import Section
from tuner.config.synchronizer import SampleStrategyArgs


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


class AdvantageArgs(Section):
    """`algorithm.advantage_fn_args.*`"""

    epsilon: float | None = Field(
        default=None, ge=0, description="Added to the standard deviation (1e-6). For grpo."
    )
    std_threshold: float | None = Field(
        default=None,
        ge=0,
        description="Groups whose rewards have a standard deviation of at most this teach nothing; "
        "not set: every group does. For grpo.",
    )
    std_cal_level: StdLevel | None = Field(
        default=None,
        description="Whose standard deviation divides: the group's (the default), the batch's "
        "(LitePPO), or none (Dr.GRPO; not a value of Trinity-RFT's). For grpo.",
    )
    gamma: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Discount from token to token (1): of an answer for reinforceplusplus, on "
        "through the calls of a rollout for ppo.",
    )
    lam: float | None = Field(default=None, ge=0, le=1, description="Lambda of GAE (1). For ppo.")
    opmd_baseline: OPMDBaseline | None = Field(
        default=None, description="What rewards are compared with (mean). For opmd."
    )
    tau: float | None = Field(
        default=None, gt=0, description="Temperature of `logavgexp` (1). For opmd."
    )
    baseline_shift: float | None = Field(
        default=None, description="Added to the group's mean (-0.1). For asymre."
    )
    kl_coef: float | None = Field(
        default=None,
        gt=0,
        description="The advantage is this times `teacher - student` (1). For on_policy_distill.",
    )


class PolicyLossArgs(Section):
    """`algorithm.policy_loss_fn_args.*`"""

    clip_range: float | None = Field(
        default=None,
        gt=0,
        description="How far the ratio may leave 1 either way (0.2). For ppo, gspo.",
    )
    clip_range_low: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="How far it may fall below 1; not set: `clip_range` (gspo 3e-4, cispo 1). For "
        "ppo, gspo, cispo.",
    )
    clip_range_high: float | None = Field(
        default=None,
        gt=0,
        description="How far it may rise above 1; not set: `clip_range` (gspo 4e-4, cispo and "
        "dapo 0.28). For ppo, gspo, cispo.",
    )
    clip_ratio_c: float | None = Field(
        default=None,
        gt=1,
        description="Dual clip: bound on the ratio where the advantage is negative (3). For ppo.",
    )
    tau_pos: float | None = Field(
        default=None, gt=0, description="Steepness of the gate where A > 0 (1). For sapo."
    )
    tau_neg: float | None = Field(
        default=None, gt=0, description="The same where A <= 0 (1.05). For sapo."
    )
    tau: float | None = Field(
        default=None, ge=0, description="The loss is divided by 1 + tau (1). For opmd."
    )
    advantage_threshold: float | None = Field(
        default=None, description="Weights are tapered at or below it (0). For topr."
    )
    beta: float | None = Field(
        default=None,
        gt=0,
        description="How strongly a preference is taken against the distance from the reference "
        "(0.1). For dpo.",
    )
    label_smoothing: float | None = Field(
        default=None,
        ge=0,
        lt=0.5,
        description="How often a preference is thought to be the wrong way round (0). For dpo.",
    )

    @property
    def low(self) -> float:
        """How far the ratio may fall below 1."""
        return _first(self.clip_range_low, self.clip_range)

    @property
    def high(self) -> float:
        """How far the ratio may rise above 1."""
        return _first(self.clip_range_high, self.clip_range)


class KLLossArgs(Section):
    """`algorithm.kl_loss_fn_args.*`"""

    kl_coef: float | None = Field(
        default=None,
        ge=0,
        description="Weight of the KL term (0.001); 0 also saves the reference model. Not with "
        "`none`.",
    )


class KLPenaltyArgs(Section):
    """`algorithm.kl_penalty_fn_args.*`"""

    kl_coef: float | None = Field(
        default=None, ge=0, description="Weight of the penalty (0.001). Not with `none`."
    )


class EntropyLossArgs(Section):
    """`algorithm.entropy_loss_fn_args.*`"""

    entropy_coef: float | None = Field(
        default=None, ge=0, description="Weight of the entropy bonus (0). Not with `none`."
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
        "compare nothing inside a group: ppo, reinforceplusplus, reinforce, on_policy_distill. Not "
        "read without rollouts. Trinity-RFT's is 1.",
    )
    optimizer: OptimizerSection = OptimizerSection()
    advantage_fn: AdvantageName = Field(
        default="step_wise_grpo",
        description="How rewards become advantages; `none` where nothing is rolled out.",
    )
    advantage_fn_args: AdvantageArgs = AdvantageArgs()
    policy_loss_fn: PolicyLossName = Field(
        default="ppo", description="The loss of a token with an advantage."
    )
    policy_loss_fn_args: PolicyLossArgs = PolicyLossArgs()
    kl_penalty_fn: KLName = Field(
        default="none",
        description="Estimate of KL(policy || reference) taken off the rewards. Not for raft.",
    )
    kl_penalty_fn_args: KLPenaltyArgs = KLPenaltyArgs()
    kl_loss_fn: KLName = Field(
        default="k2",
        description="Estimate of KL(policy || reference) added to the loss. Default of "
        "multi_step_grpo.",
    )
    kl_loss_fn_args: KLLossArgs = KLLossArgs()
    entropy_loss_fn: EntropyName = Field(
        default="default", description="Entropy bonus; it costs nothing while its coefficient is 0."
    )
    entropy_loss_fn_args: EntropyLossArgs = EntropyLossArgs()
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
                filled[f"{key}_args"] = _with_defaults(args, {**part.args, **other})
        return filled

    @field_validator("algorithm_type", mode="before")
    @classmethod
    def _on_this_backend(cls, value: Any) -> Any:
        if isinstance(value, str) and value in NOT_HERE:
            raise ValueError(f"not on this backend: {NOT_HERE[value]}")
        return value

    def unused(self) -> Iterator[tuple[str, str]]:
        """(dotted key, what does use it) of each number that was set and that nothing reads."""
        for key in PARTS:
            used = part_of(key, getattr(self, key))
            for name, value in getattr(self, f"{key}_args"):
                if value is not None and used is not None and name not in used.args:
                    users = [
                        other
                        for other in get_args(type(self).model_fields[key].annotation)
                        if name in getattr(part_of(key, other), "args", {})
                    ]
                    yield f"algorithm.{key}_args.{name}", " or ".join(users)


PARTS = ("advantage_fn", "policy_loss_fn", "kl_penalty_fn", "kl_loss_fn", "entropy_loss_fn")


def part_of(key: str, name: Any) -> Part | None:
    """The part that `algorithm.<key>: <name>` chooses, or None where there is no such part."""
    if key == "advantage_fn":
        return ADVANTAGES.get(name)
    if key == "policy_loss_fn":
        return POLICY_LOSSES.get(name)
    if name == "none":
        return Part()
    if key == "entropy_loss_fn":
        return Part({"entropy_coef": ENTROPY_COEF})
    return Part({"kl_coef": KL_COEF})


def _with_defaults(args: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`args` with what is missing; a `clip_range` that was set stands for both of its sides."""
    filled = {key: value for key, value in args.items() if value is not None}
    sides = {"clip_range_low", "clip_range_high"} if "clip_range" in filled else set()
    for key, value in defaults.items():
        if value is not None and key not in sides:
            filled.setdefault(key, value)
    return filled


def _first(*values: float | None) -> float:
    """The first value that is set; 0 where none is, as for a loss that does not clip."""
    return next((value for value in values if value is not None), 0.0)
