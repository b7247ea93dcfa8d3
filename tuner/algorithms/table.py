"""The table of algorithms: advantage + policy loss + KL + entropy + aggregation + defaults.

Names and defaults are Trinity-RFT's; `docs/algorithms.md` has the formulas, and says where we
differ. An algorithm is a choice of parts: every part can be exchanged by its own key
(`algorithm.advantage_fn`, `algorithm.policy_loss_fn`, ...), then with that part's own defaults.

The table is data that the configuration is checked against, so this module does not need torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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
    "on_policy_distill",
    "sft",
    "dpo",
]
AdvantageName = Literal[
    "step_wise_grpo",
    "grpo",
    "rloo",
    "reinforceplusplus",
    "opmd",
    "asymre",
    "reinforce",
    "best_of_group",
    "ppo",
    "on_policy_distill",
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
OPMDBaseline = Literal["mean", "logavgexp"]
EntropyName = Literal["none", "default"]

# What the log-ratio of a policy loss is taken to: the policy that the step began with, or the one
# that sampled; a loss without a ratio needs neither.
RatioTo = Literal["proximal", "behaviour", "nothing"]
# What a row of recorded data is: one conversation, or a good and a bad end of one.
Recorded = Literal["conversations", "pairs"]


@dataclass(frozen=True)
class Part:
    """An exchangeable part: the settings that it reads, by Trinity-RFT's key, with defaults.

    Attributes:
        needs_group: Of an advantage: whether a rollout alone in its group teaches nothing.
        needs_reward: Of an advantage: whether a rollout without a reward teaches nothing.
    """

    args: Mapping[str, Any] = field(default_factory=dict)
    ratio_to: RatioTo = "nothing"
    needs_group: bool = True
    needs_reward: bool = True


_NORMALIZED = {"epsilon": 1e-6, "std_threshold": None, "std_cal_level": "group"}

ADVANTAGES: Mapping[AdvantageName, Part] = {
    "step_wise_grpo": Part(_NORMALIZED),
    "grpo": Part(_NORMALIZED),
    "rloo": Part(),
    "reinforceplusplus": Part({"gamma": 1.0}, needs_group=False),
    "opmd": Part({"opmd_baseline": "mean", "tau": 1.0}),
    "asymre": Part({"baseline_shift": -0.1}),
    "reinforce": Part(needs_group=False),
    "best_of_group": Part(),
    "ppo": Part({"gamma": 1.0, "lam": 1.0}, needs_group=False),
    "on_policy_distill": Part({"kl_coef": 1.0}, needs_group=False, needs_reward=False),
    # Of algorithms that make no rollouts.
    "none": Part(),
}

# Advantages that may compare what calls lead to (`tuner.algorithm.turn_discount`).
TURN_DISCOUNTED: frozenset[AdvantageName] = frozenset(
    {"step_wise_grpo", "grpo", "rloo", "opmd", "asymre", "reinforce"}
)

POLICY_LOSSES: Mapping[PolicyLossName, Part] = {
    "ppo": Part(
        {
            "clip_range": 0.2,
            "clip_range_low": None,
            "clip_range_high": None,
            "clip_ratio_c": 3.0,
        },
        "proximal",
    ),
    "gspo": Part({"clip_range": None, "clip_range_low": 3e-4, "clip_range_high": 4e-4}, "proximal"),
    "cispo": Part({"clip_range_low": 1.0, "clip_range_high": 0.28}, "proximal"),
    "sapo": Part({"tau_pos": 1.0, "tau_neg": 1.05}, "proximal"),
    "opmd": Part({"tau": 1.0}),
    "topr": Part({"advantage_threshold": 0.0}, "behaviour"),
    "importance_sampling": Part({}, "proximal"),
    "sft": Part(),
    "dpo": Part({"beta": 0.1, "label_smoothing": 0.0}),
}

KL_COEF = 0.001
ENTROPY_COEF = 0.0


@dataclass(frozen=True)
class Algorithm:
    """A row of the table.

    Attributes:
        summary: One line for people.
        policy_loss_args: Defaults that differ from the loss's own.
        dynamic_sampling: Whether groups whose rewards are all equal are left out.
        recorded: What it is trained on instead of rollouts; its parts cannot be exchanged.
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
    "on_policy_distill": Algorithm(
        "A teacher's log-probs are the reward of every token that the student wrote.",
        "on_policy_distill",
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
