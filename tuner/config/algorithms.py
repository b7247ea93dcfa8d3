"""The parts of algorithms: advantage, policy loss, KL, entropy, aggregation; names and arguments.

The arguments of a part are a class, of which the section of the file is made
(`tuner.config.schema`) and which the part's function is given whole: a new one is a field here
and a line in that function. Names, bounds and defaults are Trinity-RFT's; `docs/algorithms.md` has
the formulas, and says where we differ. Nothing here needs torch.
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
OPMDBaseline = Literal["mean", "logavgexp"]
EntropyName = Literal["none", "default"]

# Who reads the prompt that `prompt_distill` teaches the policy to do without: its frozen start, or
# the policy itself as a step begins.
PromptTeacher = Literal["start", "policy"]

# What the log-ratio of a policy loss is taken to: the policy that the step began with, or the one
# that sampled; a loss without a ratio needs neither.
RatioTo = Literal["proximal", "behaviour", "nothing"]


class Args(BaseModel):
    """The numbers of a part: its arguments in the file, and what its function is given.

    Key, bounds, default and meaning are said here and nowhere else. A null is the default.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, given: Any) -> Any:
        return cls.completed(given) if isinstance(given, Mapping) else given

    @classmethod
    def completed(cls, given: Mapping[str, Any], row: Mapping[str, Any] = {}) -> dict[str, Any]:
        """`given` with what it leaves out: as an algorithm's row has it, else the part's default.

        A `clip_range` that was set stands for both of its sides.
        """
        filled = {key: value for key, value in given.items() if value is not None}
        own = {**{name: info.default for name, info in cls.model_fields.items()}, **row}
        if "clip_range" in filled:
            own |= {side: None for side in ("clip_range_low", "clip_range_high") if side in own}
        return own | filled


class AdvantageArgs(Args):
    """Arguments of an advantage.

    Attributes:
        needs_group: Whether a rollout alone in its group teaches nothing.
        needs_reward: Whether a rollout without a reward teaches nothing.
    """

    needs_group: ClassVar[bool] = True
    needs_reward: ClassVar[bool] = True


_Gamma = Annotated[
    float,
    Field(
        gt=0, le=1, description="Discount per token (1). For ppo (of all calls), reinforceplusplus."
    ),
]
_Epsilon = Annotated[float, Field(ge=0, description="Added to a standard deviation (1e-6).")]


class GRPOAdvantage(AdvantageArgs):
    """Rewards, normalised in their group."""

    epsilon: _Epsilon = 1e-6
    std_threshold: float | None = Field(
        default=None,
        ge=0,
        description="Groups whose rewards have a standard deviation of at most this teach "
        "nothing; not set: every group does. For grpo.",
    )
    std_cal_level: StdLevel = Field(
        default="group",
        description="Whose standard deviation divides: the group's (the default), the batch's "
        "(LitePPO), or none (Dr.GRPO; not a value of Trinity-RFT's). For grpo.",
    )


class RLOOAdvantage(AdvantageArgs):
    """Rewards less the mean of the others."""


class ReinforcePlusPlusAdvantage(AdvantageArgs):
    """Returns of single tokens, normalised over those of a step."""

    needs_group = False
    gamma: _Gamma = 1.0


class PPOAdvantage(AdvantageArgs):
    """Generalised advantage estimates, from a critic."""

    needs_group = False
    gamma: _Gamma = 1.0
    lam: float = Field(default=1.0, ge=0, le=1, description="Lambda of GAE (1). For ppo.")


class OPMDAdvantage(AdvantageArgs):
    """Rewards less a mean, or a soft maximum."""

    opmd_baseline: OPMDBaseline = Field(
        default="mean", description="The value that rewards are compared with (mean). For opmd."
    )
    tau: float = Field(default=1.0, gt=0, description="Temperature of `logavgexp` (1). For opmd.")


class AsymREAdvantage(AdvantageArgs):
    """Rewards less a mean that is shifted."""

    baseline_shift: float = Field(
        default=-0.1, description="Added to the group's mean (-0.1). For asymre."
    )


class ReinforceAdvantage(AdvantageArgs):
    """Rewards as they are."""

    needs_group = False


class BestOfGroupAdvantage(AdvantageArgs):
    """1 for the best of a group; the others are left out."""


class TreeAdvantage(AdvantageArgs):
    """Rewards of the rollouts that continue a token, less those of rollouts that took another."""

    normalize: TreeNorm = Field(
        default="none",
        description="Rewards that are divided by their standard deviation: those that began at "
        "one point (`forks`), at the beginning (`trunks`), or `all`; the gradient is then "
        "biased. For tree.",
    )
    epsilon: _Epsilon = 1e-6


class DistillAdvantage(AdvantageArgs):
    """A teacher's log-prob of each token, less the student's."""

    needs_group = False
    needs_reward = False
    kl_coef: float = Field(
        default=1.0,
        gt=0,
        description="The advantage is this times `teacher - student` (1). For on_policy_distill "
        "and prompt_distill.",
    )


class NoAdvantage(AdvantageArgs):
    """For algorithms that make no rollouts."""


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
    "on_policy_distill": DistillAdvantage,
    "prompt_distill": DistillAdvantage,
    "none": NoAdvantage,
}

# Advantages that may compare what calls lead to (`tuner.algorithm.turn_discount`).
TURN_DISCOUNTED: frozenset[AdvantageName] = frozenset(
    {"step_wise_grpo", "grpo", "rloo", "opmd", "asymre", "reinforce"}
)


class PolicyLossArgs(Args):
    """Arguments of a policy loss.

    Attributes:
        ratio_to: The policy that its ratio is taken to.
    """

    ratio_to: ClassVar[RatioTo] = "nothing"


_Range = Annotated[
    float | None,
    Field(gt=0, description="How far the ratio may leave 1 either way (0.2). For ppo, gspo."),
]
_Low = Annotated[
    float | None,
    Field(
        gt=0,
        le=1,
        description="How far it may fall below 1; not set: `clip_range` (gspo 3e-4, cispo 1). For "
        "ppo, gspo, cispo.",
    ),
]
_High = Annotated[
    float | None,
    Field(
        gt=0,
        description="How far it may rise above 1; not set: `clip_range` (gspo 4e-4, cispo and "
        "dapo 0.28). For ppo, gspo, cispo.",
    ),
]


class _ClipOfRatios(PolicyLossArgs):
    ratio_to = "proximal"
    clip_range: _Range = None
    clip_range_low: _Low = None
    clip_range_high: _High = None

    @property
    def low(self) -> float:
        """How far the ratio may fall below 1."""
        return _first(self.clip_range_low, self.clip_range)

    @property
    def high(self) -> float:
        """How far the ratio may rise above 1."""
        return _first(self.clip_range_high, self.clip_range)


class PPOLoss(_ClipOfRatios):
    """A clip of tokens' ratios, and a second one where the advantage is negative."""

    clip_range: _Range = 0.2
    clip_ratio_c: float = Field(
        default=3.0,
        gt=1,
        description="Dual clip: bound on the ratio where the advantage is negative (3). For ppo.",
    )


class GSPOLoss(_ClipOfRatios):
    """A clip of whole answers' ratios."""

    clip_range_low: _Low = 3e-4
    clip_range_high: _High = 4e-4


class CISPOLoss(PolicyLossArgs):
    """A clip of weights, not of gradients."""

    ratio_to = "proximal"
    clip_range_low: _Low = 1.0
    clip_range_high: _High = 0.28

    @property
    def low(self) -> float:
        """How far the weight may fall below 1."""
        return _first(self.clip_range_low)

    @property
    def high(self) -> float:
        """How far the weight may rise above 1."""
        return _first(self.clip_range_high)


class SAPOLoss(PolicyLossArgs):
    """A soft gate instead of a clip."""

    ratio_to = "proximal"
    tau_pos: float = Field(
        default=1.0, gt=0, description="Steepness of the gate where A > 0 (1). For sapo."
    )
    tau_neg: float = Field(
        default=1.05, gt=0, description="The same where A <= 0 (1.05). For sapo."
    )


class OPMDLoss(PolicyLossArgs):
    """No ratio: the policy that sampled the token does not matter."""

    tau: float = Field(
        default=1.0, ge=0, description="The loss is divided by 1 + tau (1). For opmd."
    )


class TOPRLoss(PolicyLossArgs):
    """Tapered weights of failures."""

    ratio_to = "behaviour"
    advantage_threshold: float = Field(
        default=0.0, description="Weights are tapered at or below it (0). For topr."
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
        description="How strongly a preference is taken against the distance from the "
        "reference (0.1). For dpo.",
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="How often a preference is thought to be the wrong way round (0). For dpo.",
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
    """KL(policy || reference) added to the loss."""

    kl_coef: float = Field(
        default=0.001,
        ge=0,
        description="Weight of the KL term (0.001); 0 also saves the reference model. Not with "
        "`none`.",
    )


class KLPenalty(Args):
    """KL(policy || reference) taken off the rewards."""

    kl_coef: float = Field(
        default=0.001, ge=0, description="Weight of the penalty (0.001). Not with `none`."
    )


class EntropyLoss(Args):
    """The entropy bonus."""

    entropy_coef: float = Field(
        default=0.0, ge=0, description="Weight of the entropy bonus (0). Not with `none`."
    )


def _first(*values: float | None) -> float:
    """The first value that is set; 0 where none is, as for a loss that does not clip."""
    return next((value for value in values if value is not None), 0.0)


# The table of algorithms: advantage + policy loss + KL + entropy + aggregation + defaults.
#
# Names and defaults are Trinity-RFT's. An algorithm is a choice of the parts above:
# every part can be exchanged by its own key (`algorithm.advantage_fn`, `algorithm.policy_loss_fn`,
# ...), then with that part's own defaults. It is data that the configuration is checked against.


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
    "on_policy_distill",
    "prompt_distill",
    "sft",
    "dpo",
]
# What a row of recorded data is: one conversation, or a good and a bad end of one.
Recorded = Literal["conversations", "pairs"]


@dataclass(frozen=True)
class Algorithm:
    """A row of the table.

    Attributes:
        summary: One line for people.
        policy_loss_args: Defaults that differ from the loss's own.
        dynamic_sampling: Whether groups whose rewards are all equal are left out.
        recorded: The data that it trains on instead of rollouts; its parts cannot be exchanged.
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
        "A rollout's reward, normalised in its group, goes to every call it made.",
        "step_wise_grpo",
        "ppo",
    ),
    "grpo": Algorithm(
        "GRPO; a group is made of rollouts, so here it is `multi_step_grpo`.", "grpo", "ppo"
    ),
    "dapo": Algorithm(
        "GRPO with a higher upper clip, without KL and without groups of equal rewards.",
        "grpo",
        "ppo",
        kl_loss_fn="none",
        policy_loss_args={"clip_range_low": 0.2, "clip_range_high": 0.28},
        dynamic_sampling=True,
    ),
    "gspo": Algorithm(
        "GRPO with the ratio of whole answers.",
        "grpo",
        "gspo",
        loss_agg_mode="seq-mean-token-mean",
    ),
    "cispo": Algorithm("GRPO whose weights are clipped, not its gradients.", "grpo", "cispo"),
    "sapo": Algorithm("GRPO with a soft gate instead of a clip.", "grpo", "sapo"),
    "rloo": Algorithm("Rewards less the mean of the other rollouts.", "rloo", "ppo"),
    "reinforceplusplus": Algorithm(
        "Returns normalised over all tokens of a step.", "reinforceplusplus", "ppo"
    ),
    "ppo": Algorithm("Advantages of single tokens, from a critic that learns too.", "ppo", "ppo"),
    "opmd": Algorithm("Off-policy mirror descent.", "opmd", "opmd"),
    "asymre": Algorithm(
        "Off-policy REINFORCE that learns more from success.",
        "asymre",
        "opmd",
        kl_loss_fn="none",
        entropy_loss_fn="none",
    ),
    "topr": Algorithm(
        "Off-policy REINFORCE with tapered weights of failures.", "reinforce", "topr"
    ),
    "raft": Algorithm(
        "The best rollouts of each group are imitated.",
        "best_of_group",
        "sft",
        kl_loss_fn="none",
        entropy_loss_fn="none",
    ),
    "tree": Algorithm(
        "Rollouts that begin inside others say what each call was worth.", "tree", "ppo"
    ),
    "on_policy_distill": Algorithm(
        "A teacher's log-probs are the reward of every token that the student wrote.",
        "on_policy_distill",
        "ppo",
        kl_loss_fn="none",
        entropy_loss_fn="none",
    ),
    "prompt_distill": Algorithm(
        "The model learns to do without a system prompt what it does with it.",
        "prompt_distill",
        "ppo",
        kl_loss_fn="none",
        entropy_loss_fn="none",
    ),
    "sft": Algorithm(
        "The assistant turns of recorded conversations are imitated.",
        "none",
        "sft",
        kl_loss_fn="none",
        entropy_loss_fn="none",
        recorded="conversations",
    ),
    "dpo": Algorithm(
        "Of two recorded answers the better one is made more likely than the other.",
        "none",
        "dpo",
        kl_loss_fn="none",
        entropy_loss_fn="none",
        loss_agg_mode="seq-mean-token-sum",
        recorded="pairs",
    ),
}

# Trinity-RFT's other algorithms: why they are not here, and what to do.
_EXPERT = "it mixes rollouts with an expert's data, and this backend trains on its own rollouts"
NOT_HERE: Mapping[str, str] = {
    "grpo_verl": "it is the trainer's copy of grpo; set grpo",
    "cpt": "it trains on text without turns; sft trains on conversations",
    "mix": _EXPERT,
    "mix_chord": _EXPERT,
    "jsd": "not in this version; on_policy_distill learns from a teacher with the reverse KL",
    "gigpo": "it needs states of the environment, which agents do not give; multi_step_grpo takes "
    "rewards of single calls",
    "rec": "not in this version; topr, asymre and opmd are of its family",
    "sppo": "not in this version; opmd is of its family",
}
