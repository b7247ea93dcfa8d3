"""Traces on disk: one JSONL per step, written as rollouts end, readable while the run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tuner.engines.base import SamplingParams
from tuner.errors import TunerError
from tuner.traces.call import Call
from tuner.traces.trace import Outcome, RolloutId, Trace


class TraceStore:
    """Appends traces to `<folder>/<split>_step_<n>.jsonl` (`step_<n>.jsonl` for training).

    A line is written and flushed when its rollout ends, so a process that is killed loses at most
    the line it was writing; `read` leaves such a torn last line out and `append` cuts it off.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._mended: set[Path] = set()

    def path(self, split: str, step: int) -> Path:
        prefix = "" if split == "train" else f"{split}_"
        return self.folder / f"{prefix}step_{step:06d}.jsonl"

    def append(self, trace: Trace) -> None:
        path = self.path(trace.id.split, trace.id.step)
        if path not in self._mended:
            _cut_torn_line(path)
            self._mended.add(path)
        line = json.dumps(trace_to_json(trace), default=_unserializable, ensure_ascii=False)
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def read(self, split: str, step: int) -> list[Trace]:
        """Every attempt recorded so far for one step of one split, in order of arrival."""
        path = self.path(split, step)
        return list(read_traces(path)) if path.exists() else []


def read_traces(path: Path) -> Iterator[Trace]:
    """The traces of one file.

    Raises:
        TunerError: A line other than a torn last one is not a trace; names file and line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield trace_from_json(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise TunerError(f"{path}, line {number} is not a trace: {error!r}") from error


def trace_to_json(trace: Trace) -> dict[str, Any]:
    """A trace as plain data; `trace_from_json` gives an equal trace back."""
    return {
        "id": asdict(trace.id),
        "task": trace.task,
        "calls": [_call_to_json(call) for call in trace.calls],
        "outcome": trace.outcome.value,
        "reward": trace.reward,
        "metrics": trace.metrics,
        "response": trace.response,
        "error": trace.error,
        "attempt": trace.attempt,
        "final": trace.final,
        "seconds": trace.seconds,
    }


def trace_from_json(data: dict[str, Any]) -> Trace:
    calls = tuple(
        Call(
            **{
                **call,
                "prompt_ids": tuple(call["prompt_ids"]),
                "completion_ids": tuple(call["completion_ids"]),
                "logprobs": tuple(call["logprobs"]),
                "versions": tuple(call["versions"]),
                "sampling": SamplingParams(
                    **{**call["sampling"], "stop": tuple(call["sampling"]["stop"])}
                ),
            }
        )
        for call in data["calls"]
    )
    return Trace(
        **{
            **data,
            "id": RolloutId(**data["id"]),
            "calls": calls,
            "outcome": Outcome(data["outcome"]),
        }
    )


def _call_to_json(call: Call) -> dict[str, Any]:
    # Not `asdict`: it copies every token id and every message.
    return {**vars(call), "sampling": vars(call.sampling)}


def _unserializable(value: Any) -> Any:
    """Dataset rows may hold dates, arrays or images; keep what reads well, else its repr."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return repr(value)


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
