"""The table of algorithms: advantage + policy loss + KL + entropy + aggregation + defaults.

Names and defaults are Trinity-RFT's. An algorithm is a choice of parts (`tuner.algorithms.spec`):
every part can be exchanged by its own key (`algorithm.advantage_fn`, `algorithm.policy_loss_fn`,
...), then with that part's own defaults. It is data that the configuration is checked against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tuner.algorithms.spec import AdvantageName, Aggregation, EntropyName, KLName, PolicyLossName

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
