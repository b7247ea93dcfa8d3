"""Settings of the algorithm, or of its source of data, that nothing reads or that contradict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tuner.algorithms.spec import ADVANTAGES, POLICY_LOSSES, TURN_DISCOUNTED, PPOLoss
from tuner.algorithms.table import ALGORITHMS, Recorded
from tuner.config.algorithm import PARTS
from tuner.config.schema import RunConfig
from tuner.config.tuner_section import Penalize

BUFFER = "buffer.trainer_input.experience_buffer"
# Columns that the other kind of recorded data has.
NOT_READ: Mapping[Recorded, tuple[str, ...]] = {
    "conversations": ("chosen_key", "rejected_key"),
    "pairs": ("response_key", "enable_concatenated_multi_turn"),
}
# Of `tuner.algorithm`: what is done with rewards, which a teacher does not need.
REWARDS = (
    "reward_scale",
    "reward_bias",
    "overlong_buffer",
    "overlong_penalty",
    "dynamic_sampling",
    "success_rate_lb",
    "success_rate_ub",
)
# What only a loss with a ratio to the policy that a step began with can use.
CORRECTIONS = (
    "proximal",
    "importance_sampling",
    "importance_cap",
    "rejection_low",
    "rejection_high",
)


def algorithm_conflicts(config: RunConfig) -> Iterator[str]:
    """Every setting of `algorithm` and `tuner.algorithm` that would be without use or sense."""
    algorithm, extras = config.algorithm, config.tuner.algorithm
    for key, users in algorithm.unused():
        choice = key.removeprefix("algorithm.").partition("_args.")[0]
        yield (
            f"{key} is set, but algorithm.{choice} is {getattr(algorithm, choice)} (of "
            f"algorithm.algorithm_type {algorithm.algorithm_type}), which does not use it: remove "
            f"it, or set algorithm.{choice} to {users}"
        )
    longest = longest_answer(config)
    if algorithm.loss_agg_mode == "seq-mean-token-sum-norm" and longest is None:
        yield (
            "algorithm.loss_agg_mode is seq-mean-token-sum-norm, which divides by the tokens that "
            "an answer may have: set model.max_response_tokens"
        )
    if ALGORITHMS[algorithm.algorithm_type].recorded is not None:
        # Nothing is rolled out: `recorded_conflicts` has what matters then.
        return
    yield from _of_recorded_data(config)
    if (algorithm.advantage_fn == "best_of_group") != (algorithm.policy_loss_fn == "sft"):
        yield (
            f"algorithm.policy_loss_fn {algorithm.policy_loss_fn} and algorithm.advantage_fn "
            f"{algorithm.advantage_fn} do not go together: sft imitates what best_of_group keeps; "
            "set both, as algorithm.algorithm_type raft does, or neither"
        )
    if algorithm.advantage_fn == "best_of_group" and algorithm.kl_penalty_fn != "none":
        yield (
            f"algorithm.kl_penalty_fn is {algorithm.kl_penalty_fn}, but raft chooses by rewards "
            "before they are changed: set algorithm.kl_loss_fn instead"
        )
    tau_pos, tau_neg = (
        getattr(algorithm.policy_loss_fn_args, key) for key in ("tau_pos", "tau_neg")
    )
    if tau_pos is not None and tau_neg is not None and tau_neg < tau_pos:
        yield (
            f"algorithm.policy_loss_fn_args.tau_neg is {tau_neg}, below tau_pos "
            f"{tau_pos}: bad answers would be pushed further than good ones; raise it"
        )
    if isinstance(algorithm.policy_loss, PPOLoss) and algorithm.policy_loss.low >= 1:
        yield (
            "algorithm.policy_loss_fn_args.clip_range_low is 1: a ratio never falls below 0, so "
            "nothing would be clipped; lower it"
        )
    if extras.success_rate_lb > extras.success_rate_ub:
        yield (
            f"tuner.algorithm.success_rate_lb is {extras.success_rate_lb}, above success_rate_ub "
            f"{extras.success_rate_ub}: every group would be left out"
        )
    if (extras.rejection_low is None) != (extras.rejection_high is None):
        yield (
            f"tuner.algorithm.rejection_low is {extras.rejection_low} and rejection_high is "
            f"{extras.rejection_high}: set both or none"
        )
    if extras.overlong_buffer is None and "overlong_penalty" in extras.changed():
        yield (
            f"tuner.algorithm.overlong_penalty is {extras.overlong_penalty}, but long answers are "
            "not punished: set tuner.algorithm.overlong_buffer too"
        )
    if extras.importance_sampling == "none" and "importance_cap" in extras.changed():
        yield (
            f"tuner.algorithm.importance_cap is {extras.importance_cap}, but "
            "tuner.algorithm.importance_sampling is none: remove one of them"
        )
    yield from _groups(config)
    yield from _branching(config)
    yield from _critic(config)
    yield from _corrections(config)
    if extras.overlong_buffer is not None and (longest is None or extras.overlong_buffer > longest):
        yield (
            f"tuner.algorithm.overlong_buffer is {extras.overlong_buffer}, but an answer may have "
            f"{longest or 'any number of'} tokens: set model.max_response_tokens to more"
        )


def _of_recorded_data(config: RunConfig) -> Iterator[str]:
    """Parts that only algorithms without rollouts have."""
    algorithm = config.algorithm
    for key, name, owner in (
        ("advantage_fn", "none", "sft or dpo"),
        ("policy_loss_fn", "dpo", "dpo"),
    ):
        if getattr(algorithm, key) == name:
            yield (
                f"algorithm.{key} is {name}, which is for recorded data: set "
                f"algorithm.algorithm_type to {owner}"
            )


def _groups(config: RunConfig) -> Iterator[str]:
    """What needs a group, or what calls lead to, where the advantage looks at neither."""
    algorithm, extras = config.algorithm, config.tuner.algorithm
    advantage = algorithm.advantage_fn
    rolls_out = config.mode != "train"  # else groups are as large as they were recorded
    if rolls_out and algorithm.repeat_times == 1 and ADVANTAGES[advantage].needs_group:
        yield (
            f"algorithm.repeat_times is 1, but algorithm.advantage_fn {advantage} compares the "
            "rollouts of a task with each other: set it to 2 or more, or algorithm.algorithm_type "
            "to ppo"
        )
    if rolls_out and algorithm.repeat_times == 1 and extras.dynamic_sampling:
        yield (
            "tuner.algorithm.dynamic_sampling is true, but algorithm.repeat_times is 1: the one "
            "reward of a group is always equal to itself and every group would be left out; "
            "remove it"
        )
    if extras.turn_discount is not None and advantage not in TURN_DISCOUNTED:
        mend = {
            "ppo": "set algorithm.advantage_fn_args.gamma, which discounts from token to token",
            "reinforceplusplus": "set algorithm.advantage_fn_args.gamma, which discounts from "
            "token to token of an answer, or another algorithm",
        }.get(advantage, "remove it")
        yield (
            f"tuner.algorithm.turn_discount is {extras.turn_discount}, but algorithm.advantage_fn "
            f"{advantage} does not compare what calls lead to: {mend}"
        )


def _branching(config: RunConfig) -> Iterator[str]:
    """Rollouts inside others, where the rest of the settings has no use for them."""
    algorithm, section = config.algorithm, config.tuner.branching
    if algorithm.advantage_fn == "tree" and algorithm.kl_penalty_fn != "none":
        yield (
            f"algorithm.kl_penalty_fn is {algorithm.kl_penalty_fn}, but algorithm.advantage_fn "
            "tree compares rewards of whole rollouts: set algorithm.kl_loss_fn instead"
        )
    if section is None:
        return
    if algorithm.advantage_fn != "tree":
        yield (
            f"tuner.branching is set, but algorithm.advantage_fn is {algorithm.advantage_fn}, for "
            "which the rollouts of a group must not share anything: set algorithm.algorithm_type "
            "to tree"
        )
    if (section.trunks or 2) >= algorithm.repeat_times:
        yield (
            f"tuner.branching.trunks is {section.trunks or 2}, but algorithm.repeat_times is "
            f"{algorithm.repeat_times}: no rollout is left to begin inside others; raise that"
        )
    for name in sorted(section.changed() & {"ends", "trunks"} if section.where == "best" else ()):
        yield (
            f"tuner.branching.{name} is {getattr(section, name)}, but tuner.branching.where is "
            "best, which chooses it: remove it"
        )
    if section.seed_functions and config.explorer.runner_per_model > 1:
        yield (
            "tuner.branching.seed_functions is true, but random states are the process's own and "
            f"{config.explorer.runner_per_model} rollouts run at a time: set "
            "explorer.runner_per_model to 1"
        )
    if config.explorer.over_rollout.ratio:
        yield (
            f"explorer.over_rollout.ratio is {config.explorer.over_rollout.ratio}, but with "
            "tuner.branching a group's rollouts begin one after the other: remove it"
        )


def _critic(config: RunConfig) -> Iterator[str]:
    """Settings of a critic where there is none."""
    if config.algorithm.advantage_fn == "ppo":
        return
    given = [f"tuner.critic.{name}" for name in sorted(config.tuner.critic.changed())]
    if config.model.critic_model_path:
        given.append("model.critic_model_path")
    if config.trainer.critic_warmup:
        given.append("trainer.critic_warmup")
    for key in given:
        yield (
            f"{key} is set, but algorithm.advantage_fn {config.algorithm.advantage_fn} has no "
            "critic: remove it, or set algorithm.algorithm_type to ppo"
        )


def _corrections(config: RunConfig) -> Iterator[str]:
    """What only a loss with a ratio to the policy that a step began with can use."""
    loss, extras = config.algorithm.policy_loss_fn, config.tuner.algorithm
    if POLICY_LOSSES[loss].ratio_to == "proximal":
        return
    for name in CORRECTIONS:
        if name in extras.changed():
            yield (
                f"tuner.algorithm.{name} is {getattr(extras, name)}, but algorithm.policy_loss_fn "
                f"{loss} has no ratio to the weights that a step began with: remove it"
            )


def longest_answer(config: RunConfig) -> int | None:
    """The most tokens that an answer may have while training, or None where only the context
    limits it."""
    return config.rollout_args(config.buffer.explorer_input.taskset).max_tokens


def recorded_conflicts(config: RunConfig, foreign: Mapping[str, Any]) -> Iterator[str]:
    """Every setting that the chosen source of training data has no use for."""
    name = config.algorithm.algorithm_type
    recorded = ALGORITHMS[name].recorded
    storage = foreign.get(f"{BUFFER}.storage_type")
    if recorded is None:
        if config.mode == "train" and config.tuner.history is None:
            yield (
                f"mode is train, but algorithm.algorithm_type {name} trains on its own rollouts: "
                "set mode to both, tuner.history.sources to rollouts that were recorded before, or "
                "algorithm.algorithm_type to sft or dpo"
            )
        if config.mode != "train" and storage not in (None, "queue"):
            yield (
                f"{BUFFER}.storage_type is {storage!r}, but rollouts are trained as they come: "
                "set it to queue, or remove it"
            )
        yield from _teacher(config)
        yield from _prompt(config)
        return
    if config.mode != "train":
        yield (
            f"mode is {config.mode}, but algorithm.algorithm_type {name} trains on recorded data "
            "and makes no rollouts: set mode to train, or remove it"
        )
    if storage not in (None, "file"):
        yield (
            f"{BUFFER}.storage_type is {storage!r}, but recorded data is read from files: set it "
            "to file, or remove it"
        )
    yield from _parts(config)
    yield from _without_rollouts(config, recorded)


def _parts(config: RunConfig) -> Iterator[str]:
    """An algorithm on recorded data is one formula: its parts cannot be exchanged."""
    algorithm = config.algorithm
    row = ALGORITHMS[algorithm.algorithm_type]
    keys = [*PARTS, *(["loss_agg_mode"] if row.recorded == "pairs" else [])]
    for key in keys:
        own, value = getattr(row, key, "none"), getattr(algorithm, key)
        if value != own:
            hint = ""
            if row.recorded == "pairs" and key == "kl_loss_fn":
                hint = " (algorithm.policy_loss_fn_args.beta is what holds dpo at the reference)"
            yield (
                f"algorithm.{key} is {value}, which algorithm.algorithm_type "
                f"{algorithm.algorithm_type} has no place for: remove it{hint}"
            )


def _without_rollouts(config: RunConfig, recorded: Recorded) -> Iterator[str]:
    name, extras = config.algorithm.algorithm_type, config.tuner.algorithm
    unread = {f"tuner.algorithm.{key}": getattr(extras, key) for key in sorted(extras.changed())}
    if config.tuner.on_failure != "drop":
        unread["tuner.on_failure"] = config.tuner.on_failure
    form = config.buffer.trainer_input.experience_buffer.format
    unread_keys = set(NOT_READ[recorded]) if config.tuner.history is None else set()
    for key in sorted(form.changed() & unread_keys):
        unread[f"{BUFFER}.format.{key}"] = getattr(form, key)
    for path, value in unread.items():
        yield (
            f"{path} is {value}, but algorithm.algorithm_type {name} does not read it: remove it"
        )
    if config.buffer.explorer_input.taskset.path is not None and config.tuner.history is None:
        path = "buffer.explorer_input.taskset.path"
        yield (
            f"{path} is set, but algorithm.algorithm_type {name} makes no rollouts: set "
            f"{BUFFER}.path instead"
        )


def _prompt(config: RunConfig) -> Iterator[str]:
    """The prompt that an algorithm needs, or has no use for."""
    extras, advantage = config.tuner.algorithm, config.algorithm.advantage_fn
    if advantage == "prompt_distill":
        if extras.prompt is None:
            yield (
                "tuner.algorithm.prompt is not set, but prompt_distill needs the system prompt "
                "that the model is to do without: write it there, or use tuner distill-prompt"
            )
        return
    for name in sorted(extras.changed() & {"prompt", "prompt_teacher"}):
        yield (
            f"tuner.algorithm.{name} is {getattr(extras, name)!r:.60}, but algorithm.advantage_fn "
            f"{advantage} has no use for a prompt: remove it, or set algorithm.algorithm_type to "
            "prompt_distill"
        )


def _teacher(config: RunConfig) -> Iterator[str]:
    extras, algorithm = config.tuner.algorithm, config.algorithm
    names = [model.name for model in config.explorer.auxiliary_models]
    if algorithm.advantage_fn != "on_policy_distill":
        if extras.teacher is not None:
            yield (
                f"tuner.algorithm.teacher is {extras.teacher!r}, but algorithm.advantage_fn "
                f"{algorithm.advantage_fn} has no teacher: remove it"
            )
    elif not names:
        yield (
            "explorer.auxiliary_models is empty, but on_policy_distill needs a teacher: name one "
            "there, with its model_path"
        )
    elif extras.teacher is not None and extras.teacher not in names:
        yield (
            f"tuner.algorithm.teacher is {extras.teacher!r}, but explorer.auxiliary_models has "
            f"{', '.join(names)}"
        )
    if ADVANTAGES[algorithm.advantage_fn].needs_reward:
        return
    unread = {f"tuner.algorithm.{key}" for key in extras.changed() & set(REWARDS)}
    if isinstance(config.tuner.on_failure, Penalize):
        unread.add("tuner.on_failure")
    if algorithm.kl_penalty_fn != "none":
        unread.add("algorithm.kl_penalty_fn")
    for path in sorted(unread):
        yield (
            f"{path} is about rewards, which {algorithm.advantage_fn} does not train on: remove it"
        )
