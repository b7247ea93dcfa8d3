"""Settings of `tuner.history` that nothing reads or that contradict others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tuner.algorithms.table import ALGORITHMS, Recorded
from tuner.config.algorithm_conflicts import BUFFER
from tuner.config.schema import RunConfig

# Of `tuner.history`: what only one kind of algorithm reads.
OF_HISTORY: Mapping[str, Recorded | None] = {
    "best": "conversations",
    "pairs": "pairs",
    "min_gap": "pairs",
    "min_effective_samples": None,
}


def history_conflicts(config: RunConfig) -> Iterator[str]:
    """Rollouts that were recorded before, where the rest of the settings has no use for them."""
    section, source = config.tuner.history, config.buffer.trainer_input.experience_buffer
    if section is None:
        return
    name = config.algorithm.algorithm_type
    if config.mode != "train":
        yield (
            f"mode is {config.mode}, but tuner.history says what was recorded before, which only "
            "mode train learns from: set mode to train, or remove tuner.history"
        )
    form = source.format
    given = {f"{BUFFER}.format.{key}": getattr(form, key) for key in form.changed()}
    given |= {f"{BUFFER}.path": source.path}
    for path, value in sorted(given.items()):
        if value is not None:
            yield (
                f"{path} is {value}, but with tuner.history what is learned from is in "
                "tuner.history.sources, whose forms are known: remove one of them"
            )
    if config.tuner.branching is not None:
        yield "tuner.branching is set, but mode train makes no rollouts: remove it"
    for key, recorded in OF_HISTORY.items():
        if key in section.changed() and ALGORITHMS[name].recorded != recorded:
            yield (
                f"tuner.history.{key} is {getattr(section, key)}, but algorithm.algorithm_type "
                f"{name} does not read it: remove it"
            )
    for what in ("reward", "version", "step"):
        low, high = (getattr(section, f"{end}_{what}") for end in ("min", "max"))
        if low is not None and high is not None and low > high:
            yield (
                f"tuner.history.min_{what} is {low}, above max_{what} {high}: nothing would be "
                "learned from"
            )
