"""Settings of asynchronous collection that nothing reads, or that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator

from tuner.algorithms.table import ALGORITHMS
from tuner.config.problems import Problem
from tuner.config.schema import RunConfig

_OFFSET = "synchronizer.sync_offset"
_STRATEGY = "algorithm.sample_strategy"
_STALENESS = "algorithm.sample_strategy_args.max_staleness"


def asynchronous_conflicts(config: RunConfig) -> Iterator[Problem]:
    """Every setting of running ahead that would be without use or sense."""
    offset = config.synchronizer.sync_offset
    algorithm, over = config.algorithm, config.explorer.over_rollout
    limit = algorithm.sample_strategy_args.max_staleness
    if ALGORITHMS[algorithm.algorithm_type].recorded is not None:
        for key, given in (
            (_OFFSET, offset),
            (_STRATEGY, algorithm.sample_strategy != "default"),
            ("explorer.over_rollout.ratio", over.ratio),
        ):
            if given:
                yield Problem(
                    key,
                    f"{key} is set, but algorithm.algorithm_type {algorithm.algorithm_type} makes "
                    "no rollouts: remove it",
                )
        return
    if offset and config.tuner.deterministic:
        yield Problem(
            _OFFSET,
            f"{_OFFSET} is {offset} and tuner.deterministic is true, but which weights sample a "
            "token depends on how long things take: set one of them to its default",
        )
    if algorithm.sample_strategy == "staleness_control":
        if not offset:
            yield Problem(
                _STRATEGY,
                f"{_STRATEGY} is staleness_control, but with {_OFFSET} 0 nothing is ever old: set "
                f"{_OFFSET}, or remove it",
            )
        if limit is None:
            yield Problem(
                _STALENESS,
                f"{_STALENESS} is not set, but {_STRATEGY} is staleness_control: say how old a "
                f"token may be, as {_OFFSET} does ({offset})",
            )
    elif limit is not None:
        yield Problem(
            _STALENESS,
            f"{_STALENESS} is {limit}, but {_STRATEGY} is default, under which {_OFFSET} is the "
            f"bound: remove it, or set {_STRATEGY} to staleness_control",
        )
    if not over.ratio:
        for name in sorted(over.changed()):
            yield Problem(
                f"explorer.over_rollout.{name}",
                f"explorer.over_rollout.{name} is set, but explorer.over_rollout.ratio is 0 and "
                "nothing is ended early: set ratio too, or remove it",
            )
