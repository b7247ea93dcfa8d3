"""Components of algorithms: advantage, policy loss, KL, entropy, aggregation; names and arguments.

The arguments of a component are a class. The section of the configuration is generated from it
(`tuner.config.schema`), and the component's function receives it whole, so a new argument is a
field here and a line in that function. Names, bounds and defaults are Trinity-RFT's;
`docs/algorithms.md` has the formulas and the differences. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

AdvantageName = Literal[
    "step_wise_grpo",
    "grpo",
    "rloo",
    "reinforceplusplus",
    "opmd",
    "asymre",
    "reinforce",
    "best_of_group",
    "tree",
    "gigpo",
    "ppo",
    "on_policy_distill",
    "prompt_distill",
    "none",
]
PolicyLossName = Literal[
    "ppo", "gspo", "cispo", "sapo", "opmd", "topr", "importance_sampling", "sft", "dpo"
]
Aggregation = Literal[
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "rollout-mean",
]
KLName = Literal["none", "k1", "k2", "k3", "abs"]
StdLevel = Literal["group", "batch", "none"]
TreeNorm = Literal["none", "forks", "trunks", "all"]
StateNorm = Literal["none", "std"]
OPMDBaseline = Literal["mean", "logavgexp"]
EntropyName = Literal["none", "default"]

# The model that reads the prompt of `prompt_distill`: the frozen initial model, or the policy at
# the start of the step.
PromptTeacher = Literal["start", "policy"]

# The denominator of a policy loss's ratio: the policy at the start of the step, or the one that
# sampled; a loss without a ratio needs neither.
RatioTo = Literal["proximal", "behaviour", "nothing"]


class Args(BaseModel):
    """Arguments of a component, as read from the configuration and passed to its function.

    Keys, bounds, defaults and descriptions are defined only here. A null is the default.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, given: Any) -> Any:
        return cls.completed(given) if isinstance(given, Mapping) else given

    @classmethod
    def completed(cls, given: Mapping[str, Any], row: Mapping[str, Any] = {}) -> dict[str, Any]:
        """`given`, completed with the defaults of an algorithm's row, then of the component.

        If `clip_range` is set, both of its sides get it.
        """
        filled = {key: value for key, value in given.items() if value is not None}
        own = {**{name: info.default for name, info in cls.model_fields.items()}, **row}
        if "clip_range" in filled:
            own |= {side: None for side in ("clip_range_low", "clip_range_high") if side in own}
        return own | filled


class AdvantageArgs(Args):
    """Arguments of an advantage.

    Attributes:
        needs_group: Whether nothing is learned from a rollout alone in its group.
        needs_reward: Whether nothing is learned from a rollout without a reward.
    """

    needs_group: ClassVar[bool] = True
    needs_reward: ClassVar[bool] = True


_Gamma = Annotated[
    float,
    Field(
        gt=0,
        le=1,
        description="Discount per token (1), for gigpo per call. For ppo (across all calls), "
        "reinforceplusplus, gigpo.",
    ),
]
_Epsilon = Annotated[float, Field(gt=0, description="Added to a standard deviation (1e-6).")]


class GRPOAdvantage(AdvantageArgs):
    """Rewards, normalized within their group."""

    epsilon: _Epsilon = 1e-6
    std_threshold: float | None = Field(
        default=None,
        ge=0,
        description="Groups whose rewards have at most this standard deviation are not trained; "
        "not set: all groups are. For grpo.",
    )
    std_cal_level: StdLevel = Field(
        default="group",
        description="Standard deviation to divide by: the group's (the default), the batch's "
        "(LitePPO), or none (Dr.GRPO; not a value of Trinity-RFT's). For grpo.",
    )


class RLOOAdvantage(AdvantageArgs):
    """Rewards minus the mean of the others."""


class ReinforcePlusPlusAdvantage(AdvantageArgs):
    """Returns of single tokens, normalized over those of a step."""

    needs_group = False
    gamma: _Gamma = 1.0


class PPOAdvantage(AdvantageArgs):
    """Generalized advantage estimates, from a critic."""

    needs_group = False
    gamma: _Gamma = 1.0
    lam: float = Field(default=1.0, ge=0, le=1, description="Lambda of GAE (1). For ppo.")


class OPMDAdvantage(AdvantageArgs):
    """Rewards minus a mean or a soft maximum."""

    opmd_baseline: OPMDBaseline = Field(
        default="mean", description="Baseline that is subtracted from the rewards (mean). For opmd."
    )
    tau: float = Field(default=1.0, gt=0, description="Temperature of `logavgexp` (1). For opmd.")


class AsymREAdvantage(AdvantageArgs):
    """Rewards minus a shifted mean."""

    baseline_shift: float = Field(
        default=-0.1, description="Added to the group's mean (-0.1). For asymre."
    )


class ReinforceAdvantage(AdvantageArgs):
    """Unchanged rewards."""

    needs_group = False


class BestOfGroupAdvantage(AdvantageArgs):
    """1 for the best of a group; the others are skipped."""


class TreeAdvantage(AdvantageArgs):
    """Rewards of the rollouts that continue with a token, minus those of rollouts that took
    another."""

    normalize: TreeNorm = Field(
        default="none",
        description="Rewards to divide by their standard deviation: those of rollouts from the "
        "same point (`forks`), from the beginning (`trunks`), or `all`; the gradient is then "
        "biased. For tree.",
    )
    epsilon: _Epsilon = 1e-6


class GiGPOAdvantage(AdvantageArgs):
    """Returns of rollouts compared in their group, plus returns of calls compared with those of
    the group's other calls in the same state."""

    omega: float = Field(
        default=1.0,
        ge=0,
        description="Weight of the comparison inside states (1). For gigpo.",
    )
    gamma: _Gamma = 1.0
    fnorm: StateNorm = Field(
        default="none",
        description="`std` divides what is compared by its standard deviation, in groups and in "
        "states; `none` does not (none). For gigpo.",
    )
    epsilon: _Epsilon = 1e-6


class DistillAdvantage(AdvantageArgs):
    """A teacher's log-prob of each token minus the student's."""

    needs_group = False
    needs_reward = False
    kl_coef: float = Field(
        default=1.0,
        gt=0,
        description="The advantage is `kl_coef * (teacher - student)` (1). For "
        "on_policy_distill and prompt_distill.",
    )


class NoAdvantage(AdvantageArgs):
    """No advantage, for algorithms without rollouts."""


ADVANTAGES: Mapping[AdvantageName, type[AdvantageArgs]] = {
    "step_wise_grpo": GRPOAdvantage,
    "grpo": GRPOAdvantage,
    "rloo": RLOOAdvantage,
    "reinforceplusplus": ReinforcePlusPlusAdvantage,
    "ppo": PPOAdvantage,
    "opmd": OPMDAdvantage,
    "asymre": AsymREAdvantage,
    "reinforce": ReinforceAdvantage,
    "best_of_group": BestOfGroupAdvantage,
    "tree": TreeAdvantage,
    "gigpo": GiGPOAdvantage,
    "on_policy_distill": DistillAdvantage,
    "prompt_distill": DistillAdvantage,
    "none": NoAdvantage,
}

# Advantages that may credit calls with later rewards (`tuner.algorithm.turn_discount`).
TURN_DISCOUNTED: frozenset[AdvantageName] = frozenset(
    {"step_wise_grpo", "grpo", "rloo", "opmd", "asymre", "reinforce"}
)


class PolicyLossArgs(Args):
    """Arguments of a policy loss.

    Attributes:
        ratio_to: The policy in the denominator of its ratio.
    """

    ratio_to: ClassVar[RatioTo] = "nothing"


_Range = Annotated[
    float | None,
    Field(
        gt=0,
        description="Maximum distance of the ratio from 1, in both directions (0.2). For ppo, "
        "gspo.",
    ),
]
_Low = Annotated[
    float | None,
    Field(
        gt=0,
        le=1,
        description="Maximum distance of the ratio below 1; not set: `clip_range` (gspo 3e-4, "
        "cispo 1). For ppo, gspo, cispo.",
    ),
]
_High = Annotated[
    float | None,
    Field(
        gt=0,
        description="Maximum distance of the ratio above 1; not set: `clip_range` (gspo 4e-4, "
        "cispo and dapo 0.28). For ppo, gspo, cispo.",
    ),
]


class _ClipOfRatios(PolicyLossArgs):
    ratio_to = "proximal"
    clip_range: _Range = None
    clip_range_low: _Low = None
    clip_range_high: _High = None

    @property
    def low(self) -> float:
        """Maximum distance of the ratio below 1."""
        return _first(self.clip_range_low, self.clip_range)

    @property
    def high(self) -> float:
        """Maximum distance of the ratio above 1."""
        return _first(self.clip_range_high, self.clip_range)


class PPOLoss(_ClipOfRatios):
    """Clips tokens' ratios, with a second clip for negative advantages."""

    clip_range: _Range = 0.2
    clip_ratio_c: float = Field(
        default=3.0,
        gt=1,
        description="Dual clip: bound of the ratio for negative advantages (3). For ppo.",
    )


class GSPOLoss(_ClipOfRatios):
    """Clips ratios of whole answers."""

    clip_range_low: _Low = 3e-4
    clip_range_high: _High = 4e-4


class CISPOLoss(PolicyLossArgs):
    """Clips weights instead of gradients."""

    ratio_to = "proximal"
    clip_range_low: _Low = 1.0
    clip_range_high: _High = 0.28

    @property
    def low(self) -> float:
        """Maximum distance of the weight below 1."""
        return _first(self.clip_range_low)

    @property
    def high(self) -> float:
        """Maximum distance of the weight above 1."""
        return _first(self.clip_range_high)


class SAPOLoss(PolicyLossArgs):
    """A soft gate instead of a clip."""

    ratio_to = "proximal"
    tau_pos: float = Field(
        default=1.0, gt=0, description="Steepness of the gate for A > 0 (1). For sapo."
    )
    tau_neg: float = Field(
        default=1.05, gt=0, description="Steepness of the gate for A <= 0 (1.05). For sapo."
    )


class OPMDLoss(PolicyLossArgs):
    """No ratio: the policy that sampled the token does not matter."""

    tau: float = Field(
        default=1.0, ge=0, description="The loss is divided by 1 + tau (1). For opmd."
    )


class TOPRLoss(PolicyLossArgs):
    """Tapered weights for failures."""

    ratio_to = "behaviour"
    advantage_threshold: float = Field(
        default=0.0,
        description="Weights are tapered for advantages up to this value (0). For topr.",
    )


class ImportanceSamplingLoss(PolicyLossArgs):
    """A ratio without a bound."""

    ratio_to = "proximal"


class SFTLoss(PolicyLossArgs):
    """Imitation of the sampled tokens."""


class DPOLoss(PolicyLossArgs):
    """A preference between two answers."""

    beta: float = Field(
        default=0.1,
        gt=0,
        description="Strength of the preference against the distance from the reference (0.1). "
        "For dpo.",
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="Assumed probability that a preference is the wrong way round (0). For dpo.",
    )


POLICY_LOSSES: Mapping[PolicyLossName, type[PolicyLossArgs]] = {
    "ppo": PPOLoss,
    "gspo": GSPOLoss,
    "cispo": CISPOLoss,
    "sapo": SAPOLoss,
    "opmd": OPMDLoss,
    "topr": TOPRLoss,
    "importance_sampling": ImportanceSamplingLoss,
    "sft": SFTLoss,
    "dpo": DPOLoss,
}


class KLLoss(Args):
    """KL(policy || reference), added to the loss."""

    kl_coef: float = Field(
        default=0.001,
        ge=0,
        description="Weight of the KL term (0.001); with 0 no reference model is needed. Not "
        "with `none`.",
    )


class KLPenalty(Args):
    """KL(policy || reference), subtracted from the rewards."""

    kl_coef: float = Field(
        default=0.001, ge=0, description="Weight of the KL penalty (0.001). Not with `none`."
    )


class EntropyLoss(Args):
    """The entropy bonus."""

    entropy_coef: float = Field(
        default=0.0, ge=0, description="Weight of the entropy bonus (0). Not with `none`."
    )


def _first(*values: float | None) -> float:
    """The first value that is set; 0 if there is none, as for a loss that does not clip."""
    return next((value for value in values if value is not None), 0.0)


# The table of algorithms: advantage + policy loss + KL + entropy + aggregation + defaults.
#
# Names and defaults are Trinity-RFT's. An algorithm is a choice of the components above. Each
# component can be replaced with its own key (`algorithm.advantage_fn`, `algorithm.policy_loss_fn`,
# ...) and then has its own defaults. The configuration is checked against this table.


AlgorithmName = Literal[
    "multi_step_grpo",
    "grpo",
    "dapo",
    "gspo",
    "cispo",
    "sapo",
    "rloo",
    "reinforceplusplus",
    "ppo",
    "opmd",
    "asymre",
    "topr",
    "raft",
    "tree",
    "gigpo",
    "on_policy_distill",
    "prompt_distill",
    "sft",
    "dpo",
]
# Contents of a row of recorded data: a conversation, or a pair of a better and a worse ending.
Recorded = Literal["conversations", "pairs"]


@dataclass(frozen=True)
class Algorithm:
    """A row of the table.

    Attributes:
        summary: One line for people.
        policy_loss_args: Defaults that differ from the loss's own.
        dynamic_sampling: Whether groups with equal rewards are skipped.
        recorded: The recorded data that it trains on instead of rollouts; its components cannot be
            replaced.
    """

    summary: str
    advantage_fn: AdvantageName
    policy_loss_fn: PolicyLossName
    kl_loss_fn: KLName = "k2"
    entropy_loss_fn: EntropyName = "default"
    loss_agg_mode: Aggregation = "token-mean"
    policy_loss_args: Mapping[str, Any] = field(default_factory=dict)
    dynamic_sampling: bool = False
    recorded: Recorded | None = None


ALGORITHMS: Mapping[AlgorithmName, Algorithm] = {
    "multi_step_grpo": Algorithm(
        "Every call of a rollout gets its reward, normalized within the group.",
        "step_wise_grpo",
        "ppo",
    ),
    "grpo": Algorithm(
        "GRPO; a group consists of rollouts, so it equals `multi_step_grpo`.", "grpo", "ppo"
    ),
    "dapo": Algorithm(
        "GRPO with a higher upper clip, without KL, skipping groups of equal rewards.",
        "grpo",
        "ppo",
        kl_loss_fn="none",
        policy_loss_args={"clip_range_low": 0.2, "clip_range_high": 0.28},
        dynamic_sampling=True,
    ),
    "gspo": Algorithm(
        "GRPO with one ratio per answer.",
        "grpo",
        "gspo",
        loss_agg_mode="seq-mean-token-mean",
    ),
    "cispo": Algorithm("GRPO that clips weights instead of gradients.", "grpo", "cispo"),
    "sapo": Algorithm("GRPO with a soft gate instead of a clip.", "grpo", "sapo"),
    "rloo": Algorithm("Rewards minus the mean of the group's other rollouts.", "rloo", "ppo"),
    "reinforceplusplus": Algorithm(
        "Returns normalized over all tokens of a step.", "reinforceplusplus", "ppo"
    ),
    "ppo": Algorithm("Advantages per token, from a critic that is trained too.", "ppo", "ppo"),
    "opmd": Algorithm("Off-policy mirror descent.", "opmd", "opmd"),
    "asymre": Algorithm(
        "Off-policy REINFORCE that learns more from success.",
        "asymre",
        "opmd",
        kl_loss_fn="none",
        entropy_loss_fn="none",
    ),
    "topr": Algorithm(
        "Off-policy REINFORCE with tapered weights for failures.", "reinforce", "topr"
    ),
    "raft": Algorithm(
        "Imitates the best rollouts of each group.",
        "best_of_group",
        "sft",
        kl_loss_fn="none",
        entropy_loss_fn="none",
    ),
    "tree": Algorithm(
        "Rollouts that branch from others measure the value of each call.", "tree", "ppo"
    ),
    "gigpo": Algorithm(
        "Rewards compared inside groups, and what follows a call with what follows the group's "
        "other calls in the same state.",
        "gigpo",
        "ppo",
    ),
    "on_policy_distill": Algorithm(
        "A teacher's log-probs are the reward of each token of the student.",
        "on_policy_distill",
        "ppo",
        kl_loss_fn="none",
        entropy_loss_fn="none",
    ),
    "prompt_distill": Algorithm(
        "Trains the effect of a system prompt into the weights.",
        "prompt_distill",
        "ppo",
        kl_loss_fn="none",
        entropy_loss_fn="none",
    ),
    "sft": Algorithm(
        "Imitates the assistant turns of recorded conversations.",
        "none",
        "sft",
        kl_loss_fn="none",
        entropy_loss_fn="none",
        recorded="conversations",
    ),
    "dpo": Algorithm(
        "Makes the better of two recorded answers more likely.",
        "none",
        "dpo",
        kl_loss_fn="none",
        entropy_loss_fn="none",
        loss_agg_mode="seq-mean-token-sum",
        recorded="pairs",
    ),
}

# Trinity-RFT's other algorithms: why they are not supported, and alternatives.
_EXPERT = "it mixes rollouts with expert data, and this backend trains only on its own rollouts"
NOT_HERE: Mapping[str, str] = {
    "grpo_verl": "it duplicates grpo; set grpo",
    "cpt": "it trains on plain text; sft trains on conversations",
    "mix": _EXPERT,
    "mix_chord": _EXPERT,
    "jsd": "not in this version; on_policy_distill learns from a teacher with the reverse KL",
    "rec": "not in this version; topr, asymre and opmd are similar",
    "sppo": "not in this version; opmd is similar",
}
