"""Where rollouts were recorded: runs, files of traces, a server's store, logs of chats."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

from tuner.data.chat_logs import Row, is_trace, read_log
from tuner.data.dataset import row_text
from tuner.errors import DatasetError, TunerError
from tuner.traces import Trace, read_traces
from tuner.traces.store import SERVED, complete_lines

# Reads the sessions of a server; above this room, so it is named and not imported.
SESSIONS = "tuner.serving.serving_store", "ServingStore"


@dataclass(frozen=True)
class Stored:
    """A rollout as it was found.

    Attributes:
        trace: One attempt at it.
        source: The run, file or server that it comes from.
        group: Of a served session, the group that it was opened in.
        tags, metadata: Of a served session.
    """

    trace: Trace
    source: str
    group: str | None = None
    tags: frozenset[str] = frozenset()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def task(self) -> str:
        """What tells its task from others: group, row, or what the model was first asked."""
        if self.group is not None:
            return f"group {self.group}"
        if self.trace.task or not self.trace.calls:
            return row_text(self.trace.task)
        return row_text({"messages": self.trace.calls[0].messages})


@dataclass(frozen=True)
class LogRow:
    """A conversation or a pair of a log.

    Attributes:
        where: File and line.
        row: What it holds, in the columns of `tuner.data.recorded`.
        started: Unix time, where the log says it.
    """

    where: str
    row: Row
    started: float | None

    @property
    def task(self) -> str:
        """What tells its task from others: what the model was asked."""
        messages = self.row["messages"] if isinstance(self.row["messages"], list) else []
        return row_text({"messages": messages if "chosen" in self.row else messages[:-1]})


def found_in(source: Path) -> Iterator[Stored | LogRow | str]:
    """What a source holds: rollouts, rows of logs with where they are and when they began, and
    reasons why a line of a log is nothing to learn from."""
    if source.is_dir():
        folder = source / "traces" if (source / "traces").is_dir() else source
        served = source / SERVED
        files = sorted(folder.glob("*.jsonl"))
        if served.is_file():
            yield from _served(served)
        elif not files:
            raise DatasetError(
                f"tuner.history.sources: {source} has neither a folder traces/, nor .jsonl files, "
                f"nor a {SERVED}"
            )
        for file in files:
            yield from _of_file(file)
    elif source.is_file():
        with source.open("rb") as opened:
            is_database = opened.read(16).startswith(b"SQLite format 3")
        yield from _served(source) if is_database else _of_file(source)
    else:
        raise DatasetError(f"tuner.history.sources: {source} does not exist")


def _of_file(path: Path) -> Iterator[Stored | LogRow | str]:
    begun = fnmatch(path.name, "*step_*.jsonl") and next(complete_lines(path), None) is None
    first = None if begun else next(_objects(path), None)
    if first is None:  # a run may have been killed in its first line
        return
    if is_trace(first[1]):
        folder = str(path.parent.resolve())
        yield from (Stored(trace, folder) for trace in read_traces(path))
        return
    for number, found in read_log(path, _objects(path)):
        if found.row is None:
            yield found.reason or "nothing"
        else:
            yield LogRow(f"{path}, line {number}", found.row, found.started)


def _objects(path: Path) -> Iterator[tuple[int, Any]]:
    """The number from 1 and the value of each line that is not empty."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise DatasetError(f"{path}, line {number} is not JSON: {error}") from None


def _served(path: Path) -> Iterator[Stored]:
    """The sessions of a server's store, which may be serving meanwhile.

    Raises:
        DatasetError: The file is no such store.
    """
    module, name = SESSIONS
    try:
        store: Any = getattr(import_module(module), name)(path, readonly=True)
    except (ImportError, sqlite3.Error, TunerError) as error:
        raise DatasetError(f"{path} cannot be read as a server's sessions: {error}") from error
    try:
        for session in store.every():
            group = session.group and f"{session.application}: {session.group}"
            yield Stored(
                store.trace(session.id),
                str(path.resolve()),
                group=group,
                tags=frozenset(session.tags),
                metadata=session.metadata,
            )
    finally:
        store.close()
