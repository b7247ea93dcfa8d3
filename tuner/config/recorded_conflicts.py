"""Settings that fit only one of: training on rollouts, on a teacher's opinion, on recorded data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tuner.algorithms.table import ADVANTAGES, ALGORITHMS, Recorded
from tuner.config.algorithm import PARTS
from tuner.config.problems import Problem
from tuner.config.schema import Penalize, RunConfig

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


def recorded_conflicts(config: RunConfig, foreign: Mapping[str, Any]) -> Iterator[Problem]:
    """Every setting that the chosen source of training data has no use for."""
    name = config.algorithm.algorithm_type
    recorded = ALGORITHMS[name].recorded
    storage = foreign.get(f"{BUFFER}.storage_type")
    if recorded is None:
        if config.mode == "train":
            yield Problem(
                "mode",
                f"mode is train, but algorithm.algorithm_type {name} trains on its own rollouts: "
                "set mode to both, or algorithm.algorithm_type to sft or dpo",
            )
        if storage not in (None, "queue"):
            yield Problem(
                f"{BUFFER}.storage_type",
                f"{BUFFER}.storage_type is {storage!r}, but rollouts are trained as they come: "
                "set it to queue, or remove it",
            )
        yield from _teacher(config)
        return
    if config.mode == "both":
        yield Problem(
            "mode",
            f"mode is both, but algorithm.algorithm_type {name} trains on recorded data and makes "
            "no rollouts: set mode to train, or remove it",
        )
    if storage not in (None, "file"):
        yield Problem(
            f"{BUFFER}.storage_type",
            f"{BUFFER}.storage_type is {storage!r}, but recorded data is read from files: set it "
            "to file, or remove it",
        )
    yield from _parts(config)
    yield from _without_rollouts(config, recorded)


def _parts(config: RunConfig) -> Iterator[Problem]:
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
            yield Problem(
                f"algorithm.{key}",
                f"algorithm.{key} is {value}, which algorithm.algorithm_type "
                f"{algorithm.algorithm_type} has no place for: remove it{hint}",
            )


def _without_rollouts(config: RunConfig, recorded: Recorded) -> Iterator[Problem]:
    name, extras = config.algorithm.algorithm_type, config.tuner.algorithm
    unread = {f"tuner.algorithm.{key}": getattr(extras, key) for key in sorted(extras.changed())}
    if config.tuner.on_failure != "drop":
        unread["tuner.on_failure"] = config.tuner.on_failure
    form = config.buffer.trainer_input.experience_buffer.format
    for key in sorted(form.changed() & set(NOT_READ[recorded])):
        unread[f"{BUFFER}.format.{key}"] = getattr(form, key)
    for path, value in unread.items():
        yield Problem(
            path,
            f"{path} is {value}, but algorithm.algorithm_type {name} does not read it: remove it",
        )
    if config.buffer.explorer_input.taskset.path is not None:
        path = "buffer.explorer_input.taskset.path"
        yield Problem(
            path,
            f"{path} is set, but algorithm.algorithm_type {name} makes no rollouts: set "
            f"{BUFFER}.path instead",
        )


def _teacher(config: RunConfig) -> Iterator[Problem]:
    extras, algorithm = config.tuner.algorithm, config.algorithm
    names = [model.name for model in config.explorer.auxiliary_models]
    if algorithm.advantage_fn != "on_policy_distill":
        if extras.teacher is not None:
            yield Problem(
                "tuner.algorithm.teacher",
                f"tuner.algorithm.teacher is {extras.teacher!r}, but algorithm.advantage_fn "
                f"{algorithm.advantage_fn} has no teacher: remove it",
            )
    elif not names:
        yield Problem(
            "explorer.auxiliary_models",
            "explorer.auxiliary_models is empty, but on_policy_distill needs a teacher: name one "
            "there, with its model_path",
        )
    elif extras.teacher is not None and extras.teacher not in names:
        yield Problem(
            "tuner.algorithm.teacher",
            f"tuner.algorithm.teacher is {extras.teacher!r}, but explorer.auxiliary_models has "
            f"{', '.join(names)}",
        )
    if ADVANTAGES[algorithm.advantage_fn].needs_reward:
        return
    unread = {f"tuner.algorithm.{key}" for key in extras.changed() & set(REWARDS)}
    if isinstance(config.tuner.on_failure, Penalize):
        unread.add("tuner.on_failure")
    if algorithm.kl_penalty_fn != "none":
        unread.add("algorithm.kl_penalty_fn")
    for path in sorted(unread):
        yield Problem(
            path,
            f"{path} is about rewards, which {algorithm.advantage_fn} does not train on: remove it",
        )
