"""Reading files that grow, and finding out why their traces branch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tuner.errors import TunerError
from tuner.traces import branches
from tuner.traces.store import NOT_A_TRACE, trace_from_json

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
            with self.path.open("rb") as file:
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
            file = self.path.open("rb")
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
