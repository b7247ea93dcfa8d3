"""One sentence about where the time goes, when one part takes most of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from tuner.config import RunConfig

DOMINANT = 0.6
"""Share of the time from which on a part is worth a sentence."""
STEPS = 3
"""Steps that are looked at together: the first loads and compiles."""


def advice(history: Sequence[Mapping[str, float]], config: RunConfig) -> tuple[str, str] | None:
    """What dominates the latest steps and what to do about it, or None.

    Args:
        history: Metrics of the run's steps, the latest last.
        config: The effective configuration.

    Returns:
        The part's name, and the sentence.
    """
    rows = [row for row in history if "time/idle" in row][-STEPS:]
    if len(rows) < STEPS:
        return None

    def seconds(name: str) -> float:
        return fmean(row.get(name, 0.0) for row in rows)

    parts = {name: seconds(f"time/{name}") for name in ("generation", "agent", "judge")}
    parts |= {name: seconds(f"time/{name}") for name in ("training", "sync")}
    step = sum(parts.values())
    busy = sum(seconds(f"rollout_seconds/{name}") for name in ("generation", "agent", "judge"))
    queue = seconds("rollout_seconds/queue")
    idle = seconds("time/idle") >= DOMINANT * step
    running = config.explorer.runner_per_model
    if idle and queue > busy and not config.tuner.deterministic:
        return "queue", (
            f"rollouts wait {queue:.1f} s for room and then take {busy:.1f} s: raise "
            f"explorer.runner_per_model (now {running}), if tools and memory allow it"
        )
    name = max(parts, key=lambda part: parts[part])
    if parts[name] < DOMINANT * step:
        return None
    share = f"{parts[name] / step:.0%} of a step"
    offset = config.synchronizer.sync_offset
    ahead = (
        f"raise synchronizer.sync_offset (now {offset})"
        if offset
        else "set synchronizer.sync_offset, so that collection runs ahead of training"
    )
    more = f"raise explorer.runner_per_model (now {running})"
    sentences = {
        "agent": f"is waiting for the agents' own code and tools: {ahead}, {more}, or end the "
        "slowest early (explorer.over_rollout, tuner.max_tool_seconds)",
        "judge": f"is waiting for the judge: {ahead}, or {more}, so that more of them run at once",
        "generation": f"is waiting for answers: {more} and tuner.max_slots (now "
        f"{config.tuner.max_slots}) to generate more of them together, or limit "
        "model.max_response_tokens",
        "sync": "is giving the engine the new weights: larger steps (buffer.batch_size) do it less "
        "often",
        "training": "is training: a larger trainer.max_token_len_per_gpu uses the device better, "
        "if memory allows it",
    }
    if name == "training" and offset:
        return None  # as it should be
    return name, f"{share} {sentences[name]} (docs/asynchronous.md)"
