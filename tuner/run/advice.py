"""Where the time of a run goes, and the setting that would change it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from tuner.config import RunConfig

Metrics = Mapping[str, float]
"""The metrics of a step."""

DOMINANT = 0.6
"""Share of the time from which on a part is worth a sentence."""
STEPS = 3
"""Steps that are looked at together: the first loads and compiles."""


def advice(history: Iterable[Metrics], config: RunConfig) -> tuple[str, str] | None:
    """What dominates the latest steps and what to do about it; None where nothing does, or no
    setting would change it.

    Args:
        history: Metrics of the latest steps, the last one last.
        config: The effective configuration.

    Returns:
        The part's name, and the sentence.
    """
    rows = [row for row in history if "time/idle" in row][-STEPS:]
    if len(rows) < STEPS:
        return None

    def seconds(name: str) -> float:
        return fmean(row.get(name, 0.0) for row in rows)

    of_rollouts = ("generation", "agent", "judge")
    parts = {name: seconds(f"time/{name}") for name in (*of_rollouts, "training", "sync")}
    step = sum(parts.values())
    busy = sum(seconds(f"rollout_seconds/{name}") for name in of_rollouts)
    queue = seconds("rollout_seconds/queue")
    more, slots, ahead = _more_at_once(config)
    if more and queue > busy and seconds("time/idle") >= DOMINANT * step:
        return "queue", (
            f"rollouts wait {queue:.1f} s for room and then take {busy:.1f} s: {more}, if tools "
            "and memory allow it"
        )
    name = max(parts, key=lambda part: parts[part])
    if parts[name] < DOMINANT * step:
        return None
    found = ""
    if name == "agent":
        slowest = "end the slowest early (explorer.over_rollout, tuner.max_tool_seconds)"
        found = f"is waiting for the agents' own code and tools: {_either(ahead, more, slowest)}"
    elif name == "judge" and (ahead or more):
        found = f"is waiting for the judge: {_either(ahead, more)}"
    elif name == "generation" and (more or slots):
        together = " and ".join(filter(None, (more, slots)))
        found = f"is waiting for answers: {together} to generate more of them together"
    elif name == "sync":
        found = (
            "is giving the engine the new weights: larger steps (buffer.batch_size) do it less "
            "often"
        )
    elif name == "training" and not config.synchronizer.sync_offset:  # else it is as it should be
        found = _longer_micro_batches(rows, config)
    whole = f"{parts[name] / step:.0%} of a step {found} (docs/asynchronous.md)"
    return (name, whole) if found else None


def _more_at_once(config: RunConfig) -> tuple[str, str, str]:
    """What runs more rollouts at a time, generates more answers at a time, and collects further
    ahead of training; each empty where it would change nothing."""
    offset, runners = config.synchronizer.sync_offset, config.explorer.runner_per_model
    if config.tuner.deterministic:  # one rollout at a time, and none ahead of training
        return "", "", ""
    under_way = config.buffer.batch_size * config.algorithm.repeat_times * (1 + offset)
    more = f"raise explorer.runner_per_model (now {runners})" if runners < under_way else ""
    slots, at_once = config.tuner.max_slots, under_way if more else min(runners, under_way)
    return (
        more,
        f"raise tuner.max_slots (now {slots})" if slots < at_once else "",
        f"raise synchronizer.sync_offset (now {offset})"
        if offset
        else "set synchronizer.sync_offset, so that collection runs ahead of training",
    )


def _longer_micro_batches(rows: Sequence[Metrics], config: RunConfig) -> str:
    """Where each update is cut into several micro-batches; else empty."""
    counts = [row.get("train/micro_batches", 1) for row in rows]
    if min(counts) < 2:
        return ""
    tokens = config.trainer.max_token_len_per_gpu or "not set: 2 contexts"
    return (
        f"is training, and an update is cut into {max(counts):.0f} micro-batches: a larger "
        f"trainer.max_token_len_per_gpu (now {tokens}) uses the device better, if memory allows it"
    )


def _either(*options: str) -> str:
    """The options that are not empty, as a list."""
    *others, last = filter(None, options)
    return f"{', '.join(others)}, or {last}" if others else last
