"""Reading files that grow, and why their traces branch, counted after they are listed.

To know a trace's branches takes its tokens and messages, and so much longer than to list it. The
list comes first, and the causes of ten thousand traces follow in parts.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tuner.errors import TunerError
from tuner.traces import branches
from tuner.traces.packing import is_one_path
from tuner.traces.store import NOT_A_TRACE, trace_from_json

# What a list shows of an error; the trace itself has all of it.
SHOWN_ERROR = 160


class LineFollower:
    """The complete lines of a growing file. A torn last line is left until it is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._inode = 0

    def replaced(self) -> bool:
        """Whether the file is no longer the one that was read so far; starts over if so."""
        if not self._offset:
            return False
        try:
            status = self.path.stat()
            changed = status.st_ino != self._inode or status.st_size < self._offset
        except FileNotFoundError:
            changed = True
        if changed:
            self._offset = 0
        return changed

    def new_lines(self) -> Iterator[tuple[int, bytes]]:
        """(byte offset, line) of each line that was completed since it was last asked."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            status = os.fstat(file.fileno())
            self._inode = status.st_ino
            if status.st_size <= self._offset:
                return
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                start = self._offset
                self._offset += len(line)
                yield start, line


class MetricsFollower:
    """The rows of a `metrics.jsonl`.

    Attributes:
        rows: What was read so far.
        generation: Goes up when a resumed run rewrote the file and `rows` began anew.
    """

    def __init__(self, path: Path) -> None:
        self._file = LineFollower(path)
        self.rows: list[dict[str, Any]] = []
        self.generation = 0

    def refresh(self) -> None:
        """Read what is new.

        Raises:
            TunerError: A complete line is not JSON.
        """
        if self._file.replaced():
            self.rows = []
            self.generation += 1
        for start, line in self._file.new_lines():
            try:
                self.rows.append(json.loads(line))
            except ValueError as error:
                raise TunerError(
                    f"{self._file.path}, byte {start}: not a row of metrics: {error}"
                ) from error


@dataclass(frozen=True)
class TraceRow:
    """A trace as a list shows it, and where its line begins.

    Attributes:
        file: Name of the file in the folder of traces.
        offset: Byte at which its line starts.
        size: Bytes of the line.
        tokens: Sampled tokens.
        error: The beginning of the error, or None.
        one_path: Whether it has no branches for certain; False says nothing.
    """

    file: str
    offset: int
    size: int
    split: str
    step: int
    task: int
    rollout: int
    attempt: int
    final: bool
    outcome: str
    reward: float | None
    calls: int
    tokens: int
    error: str | None
    one_path: bool

    @property
    def key(self) -> str:
        """Names the trace in links: `<file>:<offset>`."""
        return f"{self.file}:{self.offset}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class TraceIndex:
    """One row per trace of a folder; holds no trace, so it stays small whatever they hold.

    Attributes:
        rows: In order of reading: files by step, lines as they were written.
        problems: Complete lines that are no trace, by file and byte.
        generation: Goes up when a file was replaced and `rows` began anew.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._start(generation=0)

    def _start(self, generation: int) -> None:
        self.generation = generation
        self.rows: list[TraceRow] = []
        self.problems: list[str] = []
        self._files: dict[str, LineFollower] = {}

    def refresh(self, seconds: float = math.inf) -> bool:
        """Read what is new, for at most about `seconds`; returns whether that was everything."""
        deadline = time.monotonic() + seconds
        for name in sorted(self._names(), key=_by_step):
            self._files.setdefault(name, LineFollower(self.folder / name))
        if any(follower.replaced() for follower in self._files.values()):
            self._start(self.generation + 1)
            return self.refresh(seconds)
        for name, follower in self._files.items():
            for start, line in follower.new_lines():
                try:
                    self.rows.append(_row(name, start, line, json.loads(line)))
                except NOT_A_TRACE as error:
                    self.problems.append(f"{name}, byte {start}: not a trace: {error!r}")
                if time.monotonic() > deadline:
                    return False
        return True

    def read(self, file: str, offset: int) -> dict[str, Any]:
        """The trace whose line starts at byte `offset` of `file`, as it was stored.

        Raises:
            TunerError: The folder has no such file, or no trace begins there.
        """
        if file not in self._names():
            raise TunerError(f"there is no file {file!r} among the traces of this run")
        path = self.folder / file
        with path.open("rb") as stream:
            # Beyond the end, or what a file system can count to, there is no line.
            stream.seek(min(offset, path.stat().st_size))
            line = stream.readline()
        try:
            trace: dict[str, Any] = json.loads(line)
            _row(file, offset, line, trace)
        except NOT_A_TRACE as error:
            raise TunerError(f"{file}, byte {offset}: no trace begins there") from error
        return trace

    def _names(self) -> list[str]:
        return [path.name for path in self.folder.glob("*step_*.jsonl")]


def _by_step(name: str) -> tuple[str, str]:
    prefix, _, number = name.removesuffix(".jsonl").rpartition("step_")
    return number, prefix


def _row(file: str, offset: int, line: bytes, trace: dict[str, Any]) -> TraceRow:
    error = trace["error"]
    return TraceRow(
        file=file,
        offset=offset,
        size=len(line),
        **{part: trace["id"][part] for part in ("split", "step", "task", "rollout")},
        attempt=trace["attempt"],
        final=trace["final"],
        outcome=trace["outcome"],
        reward=trace["reward"],
        calls=len(trace["calls"]),
        tokens=sum(len(call["completion_ids"]) for call in trace["calls"]),
        error=error if error is None else error[:SHOWN_ERROR],
        one_path=is_one_path(trace),
    )


Causes = dict[str, int]


class CauseIndex:
    """How many branches of each cause each listed trace has.

    Attributes:
        counts: For the first traces of the list, in its order.
        generation: Of the list of traces that `counts` belongs to.
        problems: Listed traces whose branches are not known, and why.
    """

    def __init__(self, traces: TraceIndex) -> None:
        self._traces = traces
        self._start()

    def _start(self) -> None:
        self.generation = self._traces.generation
        self.counts: list[Causes] = []
        self.problems: list[str] = []

    def refresh(self, seconds: float = math.inf) -> bool:
        """Look at listed traces for at most about `seconds`; returns whether that was all."""
        if self.generation != self._traces.generation:
            self._start()
        deadline = time.monotonic() + seconds
        for row in self._traces.rows[len(self.counts) :]:
            try:
                self.counts.append(causes(self._traces, row))
            except TunerError as error:
                self.counts.append({})
                self.problems.append(str(error))
            if time.monotonic() > deadline:
                break
        return len(self.counts) == len(self._traces.rows)


def causes(traces: TraceIndex, row: TraceRow) -> Causes:
    """How many branches of each cause a listed trace has; reads it unless it has none.

    Raises:
        TunerError: It cannot be read any more, or is none that this version knows.
    """
    if row.one_path:
        return {}
    found = branch_rows(traces.read(row.file, row.offset), row.key)
    return dict(Counter(branch["cause"] for branch in found))


def branch_rows(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The branches of a trace, as the page gets them.

    Args:
        trace: The trace as it was stored.
        name: What an error calls it.

    Returns:
        For each the index of the `call`, the `cause`, and the index of the `earlier` call that it
        was compared with, or None.

    Raises:
        TunerError: It is no trace that this version knows.
    """
    try:
        found = branches(trace_from_json(trace).calls)
    except NOT_A_TRACE as error:
        raise TunerError(f"{name} is no trace that this version knows: {error!r}") from error
    return [
        {"call": branch.call, "cause": branch.cause.value, "earlier": branch.earlier}
        for branch in found
    ]
