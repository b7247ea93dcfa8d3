"""What can be asked of the traces of a run without reading them: a database beside them.

Each line of a file of traces is read once, when it is complete, and leaves a row, its texts, and
what it adds to the tables. The database is a cache: where it does not fit the files it is made
anew, and where it cannot be written it is a temporary one.
"""

from __future__ import annotations

import json
import math
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tuner.data.dataset import row_text
from tuner.errors import TunerError
from tuner.traces.store import NOT_A_TRACE
from tuner.viewer.facts import (
    SEARCHED,
    SHOWN,
    Tally,
    TraceRow,
    answered,
    asked,
    clean,
    folded,
    row,
    tallies,
)
from tuner.viewer.follow import LineFollower, branch_rows

NAME = ".traces.sqlite"
VERSION = 1
_FILES = "*step_*.jsonl"
BUSY_SECONDS = 10.0

_TEXTS = ("asked", "answered", "same")
_COLUMNS = tuple(field.name for field in fields(TraceRow) if field.name not in _TEXTS)
SUMS = tuple(field.name for field in fields(Tally))
_SCHEMA = f"""
CREATE TABLE born (token TEXT);
CREATE TABLE files (name TEXT PRIMARY KEY, offset INTEGER, tail BLOB, stamp TEXT) WITHOUT ROWID;
CREATE TABLE problems (text TEXT);
CREATE TABLE texts (id INTEGER PRIMARY KEY, hash BLOB UNIQUE, shown TEXT, folded BLOB);
CREATE TABLE traces (
    id INTEGER PRIMARY KEY, {", ".join(_COLUMNS)}, asked INTEGER, answered INTEGER, counted INTEGER
);
CREATE INDEX of_task ON traces (asked, split, step);
CREATE INDEX to_count ON traces (id) WHERE NOT counted;
CREATE TABLE branches (cause TEXT, trace INTEGER, PRIMARY KEY (cause, trace)) WITHOUT ROWID;
CREATE TABLE tallies (
    kind TEXT, name TEXT, split TEXT, step INTEGER, {", ".join(SUMS)},
    PRIMARY KEY (kind, name, split, step)
) WITHOUT ROWID;
CREATE TABLE tasks (
    split TEXT, asked INTEGER, step INTEGER, n INTEGER, reward REAL,
    PRIMARY KEY (split, asked, step)
) WITHOUT ROWID;
PRAGMA user_version = {VERSION};
"""
_ADD = f"""
INSERT INTO tallies VALUES ({", ".join("?" * (4 + len(SUMS)))})
ON CONFLICT (kind, name, split, step) DO UPDATE SET
{", ".join(f"{column} = {column} + excluded.{column}" for column in SUMS)}
"""
# A cache may be lost with the machine, and come with a run from somebody else. The tables are those
# that `fill` fills.
_SETTINGS = """
PRAGMA trusted_schema = OFF;
PRAGMA synchronous = OFF;
PRAGMA cache_size = -65536;
CREATE TEMP TABLE hit (id INTEGER PRIMARY KEY);
CREATE TEMP TABLE change (asked INTEGER, split, by, PRIMARY KEY (asked, split)) WITHOUT ROWID;
"""
_ROWS = f"""
SELECT {", ".join(f"traces.{name}" for name in _COLUMNS)}, task.shown, answer.shown, traces.asked
FROM traces JOIN texts AS task ON task.id = traces.asked
JOIN texts AS answer ON answer.id = traces.answered
"""


class TraceIndex:
    """A row for each trace of a folder, and sums over them.

    Traces have numbers, from 1, in order of reading: files by step, lines as they were written.
    """

    def __init__(self, folder: Path, *, keep: bool = False) -> None:
        """
        Args:
            folder: Where the files of traces are.
            keep: Keep the database in a hidden file of the folder, for the next time.
        """
        self.folder = folder
        self._connection = self._open(str(folder / NAME) if keep else "")

    def _open(self, name: str) -> sqlite3.Connection:
        """A database of this version; a temporary one, which is what "" names, if need be."""
        self._name = name
        self._filled: dict[str, tuple[str, tuple[Any, ...], str]] = {}
        connection: sqlite3.Connection | None = None
        try:
            connection = sqlite3.connect(
                name, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            connection.executescript(_SETTINGS)
            connection.execute("BEGIN IMMEDIATE")
            if connection.execute("PRAGMA user_version").fetchone() != (VERSION,):
                _make(connection)
            connection.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            if connection is not None:
                connection.close()
            if not name:
                raise
            if isinstance(error, sqlite3.OperationalError):  # no place to write, or in use
                return self._open("")
            Path(name).unlink()  # damaged
            return self._open(name)
        return connection

    def close(self) -> None:
        self._connection.close()

    @property
    def total(self) -> int:
        """How many traces there are."""
        return int(self.ask("SELECT COALESCE(MAX(id), 0) FROM traces")[0][0])

    @property
    def counted(self) -> int:
        """Of how many the branches are known."""
        return self.total - int(self.ask("SELECT COUNT(*) FROM traces WHERE NOT counted")[0][0])

    @property
    def state(self) -> str:
        """Another text when other traces are listed."""
        ((token,),) = self.ask("SELECT token FROM born")
        return f"{token}.{self.total}"

    @property
    def problems(self) -> list[str]:
        """Lines that are no trace, and traces whose branches are not known, by file and byte."""
        return [text for (text,) in self.ask("SELECT text FROM problems")]

    def ask(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows that a query of the database gives."""
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise TunerError(
                f"{self._name or 'the temporary index of traces'} cannot be read ({error}); delete "
                "it and start again: it is made anew from the traces"
            ) from error

    def fill(self, table: str, query: str, values: Sequence[Any] = ()) -> None:
        """Let a table of what is looked up for one question, `hit` or `change`, hold a query's."""
        what = query, tuple(values), self.state
        if self._filled.get(table) == what:
            return
        self._connection.execute(f"DELETE FROM {table}")
        self._connection.execute(f"INSERT INTO {table} {query}", values)
        self._filled[table] = what

    def rows(self, numbers: Sequence[int] | None = None) -> list[TraceRow]:
        """The traces of these numbers, in their order; all by default."""
        if numbers is None:
            return [_row(found) for found in self.ask(f"{_ROWS} ORDER BY traces.id")]
        marks = ", ".join("?" * len(numbers))
        found = self.ask(
            f"{_ROWS.replace('SELECT', 'SELECT traces.id,')} WHERE traces.id IN ({marks})", numbers
        )
        by_number = {number: _row(values) for number, *values in found}
        return [by_number[number] for number in numbers]

    def read(self, file: str, offset: int) -> dict[str, Any]:
        """The trace whose line starts at byte `offset` of `file`, as it was stored.

        Raises:
            TunerError: The folder has no such file, or no trace begins there.
        """
        path = self.folder / file
        if path.name != file or not path.match(_FILES) or not path.is_file():
            raise TunerError(f"there is no file {file!r} among the traces of this run")
        with path.open("rb") as stream:
            # Beyond the end, or what a file system can count to, there is no line.
            stream.seek(min(offset, path.stat().st_size))
            line = stream.readline()
        try:
            trace: dict[str, Any] = json.loads(line)
            row(file, offset, len(line), trace)
        except NOT_A_TRACE as error:
            raise TunerError(f"{file}, byte {offset}: no trace begins there") from error
        return trace

    def refresh(self, seconds: float = math.inf) -> bool:
        """Read what is new, for at most about `seconds`; returns whether that was everything."""
        deadline = time.monotonic() + seconds
        known = dict(self.ask("SELECT name, stamp FROM files"))
        stamps = {name: _stamp(self.folder / name) for name in self._names()}
        if stamps == known:
            return True
        return self._write(lambda: self._read(known, stamps, deadline))

    def _read(self, known: Mapping[str, str], stamps: Mapping[str, str], deadline: float) -> bool:
        changed = [name for name, stamp in stamps.items() if known.get(name) != stamp]
        followers = [self._follower(name) for name in changed]
        if known.keys() - stamps.keys() or any(one.replaced() for one in followers):
            _make(self._connection)
            followers = [self._follower(name) for name in stamps]
        followers.sort(key=lambda one: _by_step(one.path.name))
        return all(self._read_on(one, stamps[one.path.name], deadline) for one in followers)

    def _follower(self, name: str) -> LineFollower:
        found = self.ask("SELECT offset, tail FROM files WHERE name = ?", (name,))
        return LineFollower(self.folder / name, *(found[0] if found else ()))

    def _read_on(self, follower: LineFollower, stamp: str, deadline: float) -> bool:
        name, late = follower.path.name, False
        for start, line in follower.new_lines():
            self._add(name, start, line)
            if late := time.monotonic() > deadline:
                break
        self._connection.execute(
            "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)",
            (name, follower.offset, follower.tail, "" if late else stamp),
        )
        return not late

    def _add(self, name: str, start: int, line: bytes) -> None:
        try:
            trace = json.loads(line)
            listed = row(name, start, len(line), trace)
            added = tallies(trace) if listed.final else {}
            task = self._text(asked(trace["task"]), row_text(trace["task"]))
            answer = answered(trace)
        except NOT_A_TRACE as error:
            self._problem(f"{name}, byte {start}: not a trace: {error!r}")
            return
        values = *astuple(listed)[: len(_COLUMNS)], task, self._text(answer, answer)
        self._insert("traces", None, *values, listed.one_path)
        at = listed.split, listed.step
        for (kind, called), tally in added.items():
            self._tally(kind, called, *at, *tally.values())
        self._tally("attempt", listed.outcome, *at, 1)
        if listed.final and listed.one_path:
            self._tally("counted", "", *at, 1)
        if listed.final and listed.reward is not None:
            self._connection.execute(
                "INSERT INTO tasks VALUES (?, ?, ?, 1, ?) ON CONFLICT (split, asked, step) "
                "DO UPDATE SET n = n + 1, reward = reward + excluded.reward",
                (listed.split, task, listed.step, listed.reward),
            )

    def _text(self, text: str, whole: str) -> int:
        """The number of a text, which is kept once for all that are the same as a whole."""
        digest = identity(whole)
        if found := self.ask("SELECT id FROM texts WHERE hash = ?", (digest,)):
            return int(found[0][0])
        shown = " ".join(clean(text[: 2 * SHOWN]).split())[:SHOWN]
        return self._insert("texts", None, digest, shown, folded(text[:SEARCHED]))

    def _tally(self, kind: str, name: str, split: str, step: int, *sums: float) -> None:
        missing = (0,) * (len(SUMS) - len(sums))
        self._connection.execute(_ADD, (kind, name, split, step, *sums, *missing))

    def _insert(self, table: str, *values: Any) -> int:
        marks = ", ".join("?" * len(values))
        number = self._connection.execute(f"INSERT INTO {table} VALUES ({marks})", values).lastrowid
        return number or 0

    def _problem(self, text: str) -> None:
        self._insert("problems", text)

    def count_branches(self, seconds: float = math.inf) -> bool:
        """Find out why traces branch, for at most about `seconds`; returns whether that was all.

        It takes a trace's tokens and messages, and so much longer than to list it.
        """
        deadline = time.monotonic() + seconds
        waiting = (
            "SELECT id, file, offset, split, step, final FROM traces WHERE NOT counted "
            "ORDER BY id LIMIT 200"
        )
        while self.ask(waiting):
            done = self._write(
                lambda: all(self._count(deadline, *one) for one in self.ask(waiting))
            )
            if not done:
                break
        return self.counted == self.total

    def _count(
        self,
        deadline: float,
        number: int,
        file: str,
        offset: int,
        split: str,
        step: int,
        final: bool,
    ) -> bool:
        found: Counter[str] = Counter()
        try:
            found = causes(self, file, offset)
        except TunerError as error:
            self._problem(str(error))
        self._connection.execute("UPDATE traces SET counted = 1 WHERE id = ?", (number,))
        for cause, times in found.items():
            self._insert("branches", cause, number)
            if final:
                self._tally("cause", cause, split, step, times)
        if final:
            self._tally("counted", "", split, step, 1)
        return time.monotonic() <= deadline

    def _write(self, work: Callable[[], bool]) -> bool:
        """What `work` returns, which is one transaction.

        A kept database that cannot be written is given up for a temporary one: it is a cache. Then
        nothing is done, and the answer is False.
        """
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            done = work()
            self._connection.execute("COMMIT")
            return done
        except BaseException as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            if not isinstance(error, sqlite3.OperationalError):
                raise
            if not self._name:
                raise TunerError(
                    f"the index of the traces in {self.folder} cannot be written ({error}); make "
                    "room there, or in the folder for temporary files"
                ) from error
            self._connection.close()
            self._connection = self._open("")
            return False

    def _names(self) -> list[str]:
        return [path.name for path in self.folder.glob(_FILES)]


def identity(text: str) -> bytes:
    """What tells a text from others."""
    return blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()


def causes(traces: TraceIndex, file: str, offset: int) -> Counter[str]:
    """How many branches of each cause a trace has; reads it.

    Raises:
        TunerError: It cannot be read any more, or is none that this version knows.
    """
    found = branch_rows(traces.read(file, offset), f"{file}:{offset}")
    return Counter(branch["cause"] for branch in found)


def _make(connection: sqlite3.Connection) -> None:
    """Empty tables, in place of those there are."""
    for (table,) in connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table'"
    ).fetchall():
        connection.execute(f"DROP TABLE {table}")
    for statement in _SCHEMA.strip().rstrip(";").split(";"):
        connection.execute(statement)
    connection.execute("INSERT INTO born VALUES (?)", (secrets.token_hex(8),))


def _row(values: Sequence[Any]) -> TraceRow:
    named = dict(zip((*_COLUMNS, *_TEXTS), values, strict=True))
    return TraceRow(**named | {name: bool(named[name]) for name in ("final", "one_path")})


def _stamp(path: Path) -> str:
    """Another text when the file has changed."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return ""
    return f"{status.st_ino}.{status.st_size}.{status.st_mtime_ns}"


def _by_step(name: str) -> tuple[str, str]:
    prefix, _, number = name.removesuffix(".jsonl").rpartition("step_")
    return number, prefix
