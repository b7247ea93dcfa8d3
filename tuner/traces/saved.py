"""Rollouts in a file of their own: what a test of an agent needs, without the run.

A line of JSON for each:

    {"name": "refund", "model": "Qwen/Qwen3-8B", "defaults": {"temperature": 1.0, ...},
     "context": 4096, "trace": {...}}

`trace` is in the stored form (`tuner.traces.packing`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner.errors import TunerError
from tuner.traces.store import NOT_A_TRACE, trace_from_json, trace_line, trace_to_json
from tuner.traces.trace import Trace


@dataclass(frozen=True)
class SavedRollout:
    """A rollout that can be given back without the run that it comes from.

    Attributes:
        name: No other of its file has it.
        trace: Its calls, task and answer.
        model: What requests must give as `model`.
        defaults: What requests that do not say were sampled with: "temperature", "top_p", "top_k",
            "max_tokens"; empty for a model behind a URL.
        context: Tokens of prompt and answer together; None where limits of answers depended on
            something else.
    """

    name: str
    trace: Trace
    model: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    context: int | None = None


def read_rollouts(path: str | Path) -> dict[str, SavedRollout]:
    """The rollouts of a file by their names, in its order; none where there is no file.

    Raises:
        TunerError: A line is not a saved rollout, or has the name of an earlier one.
    """
    found: dict[str, SavedRollout] = {}
    path = Path(path)
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            trace = trace_from_json(data.pop("trace"))
            one = SavedRollout(trace=trace, **data)
        except NOT_A_TRACE as error:
            raise TunerError(
                f"{path}, line {number} is not a saved rollout: {error!r}; delete the line, and "
                "record or save it again"
            ) from error
        if one.name in found:
            raise TunerError(
                f"{path}, line {number}: there is a rollout {one.name!r} above; delete one of them"
            )
        found[one.name] = one
    return found


def write_rollouts(path: str | Path, rollouts: Iterable[SavedRollout]) -> None:
    """Add rollouts to a file, which is made if need be; those of the same names are replaced.

    Raises:
        TunerError: The file holds something else.
    """
    known = read_rollouts(path)
    known |= {one.name: one for one in rollouts}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(b"".join(map(_line, known.values())))
    os.replace(temporary, path)


def _line(one: SavedRollout) -> bytes:
    return trace_line(
        {
            "name": one.name,
            "model": one.model,
            "defaults": dict(one.defaults),
            "context": one.context,
            "trace": trace_to_json(one.trace),
        }
    )
