"""Reading files that grow, and finding out why their traces branch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tuner.errors import TunerError
from tuner.runs.directory import METRICS
from tuner.traces import branches
from tuner.traces.reading import InvalidRecord, open_file
from tuner.traces.store import trace_from_json

# What messages raise that have other parts than their forms say; these are the agents' own.
NO_MESSAGES = (ValueError, LookupError, TypeError, AttributeError)
# How much of the last line that was read a file must still have to be the same file.
TAIL = 256


class LineFollower:
    """The complete lines of a growing file. A torn last line is left until it is complete.

    A file is the one that was read so far while it has the end of what was read; so a copy of it
    is, and one that was written anew under its name is not.

    Attributes:
        offset: Up to which byte it was read.
        tail: The end of what was read.
    """

    def __init__(self, path: Path, offset: int = 0, tail: bytes = b"") -> None:
        self.path = path
        self.offset = offset
        self.tail = tail

    def replaced(self) -> bool:
        """Whether the file is no longer the one that was read so far; starts over if so."""
        try:
            with open_file(self.path) as file:
                file.seek(self.offset - len(self.tail))
                changed = file.read(len(self.tail)) != self.tail
        except FileNotFoundError:
            changed = self.offset > 0
        if changed:
            self.offset, self.tail = 0, b""
        return changed

    def new_lines(self) -> Iterator[tuple[int, bytes]]:
        """(byte offset, line) of each line that was completed since it was last asked."""
        try:
            file = open_file(self.path)
        except FileNotFoundError:
            return
        with file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                start = self.offset
                self.offset += len(line)
                self.tail = line[-TAIL:]
                yield start, line


class MetricsFollower:
    """The rows of a `metrics.jsonl`.

    Attributes:
        rows: What was read so far.
        generation: Goes up when a resumed run rewrote the file and `rows` began anew.
        problems: Lines that are no row, by file and byte.
    """

    def __init__(self, path: Path) -> None:
        self._file = LineFollower(path)
        self.rows: list[dict[str, Any]] = []
        self.generation = 0
        self.problems: list[str] = []

    def refresh(self) -> None:
        """Read what is new."""
        if self._file.replaced():
            self.rows, self.problems = [], []
            self.generation += 1
        for start, line in self._file.new_lines():
            try:
                self.rows.append(METRICS.parse(line))
            except InvalidRecord as error:
                name = self._file.path.name
                self.problems.append(f"{name}, byte {start}: not {METRICS.what}: {error}")


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
    except NO_MESSAGES as error:
        raise TunerError(f"{name} is no trace that this version knows: {error!r}") from error
    return [
        {"call": branch.call, "cause": branch.cause.value, "earlier": branch.earlier}
        for branch in found
    ]
