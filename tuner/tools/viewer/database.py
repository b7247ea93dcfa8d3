"""A database that may be lost at any time, since all that it holds is read from other files."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from tuner.errors import TunerError
from tuner.tools.viewer.facts import Tally, TraceRow

NAME = ".traces.sqlite"
VERSION = 3
BUSY_SECONDS = 10.0

TEXTS = ("asked", "answered", "same")
COLUMNS = tuple(field.name for field in fields(TraceRow) if field.name not in TEXTS)
SUMS = tuple(field.name for field in fields(Tally))
_SCHEMA = f"""
CREATE TABLE born (token TEXT);
CREATE TABLE files (name TEXT PRIMARY KEY, offset INTEGER, tail BLOB, stamp TEXT) WITHOUT ROWID;
CREATE TABLE problems (text TEXT);
CREATE TABLE texts (id INTEGER PRIMARY KEY, hash BLOB UNIQUE, shown TEXT, folded BLOB);
CREATE TABLE traces (
    id INTEGER PRIMARY KEY, {", ".join(COLUMNS)}, asked INTEGER, answered INTEGER, counted INTEGER
);
CREATE INDEX of_task ON traces (asked, split, step);
CREATE INDEX of_group ON traces (split, step, task);
CREATE INDEX to_count ON traces (id) WHERE NOT counted;
CREATE TABLE branches (cause TEXT, trace INTEGER, PRIMARY KEY (cause, trace)) WITHOUT ROWID;
CREATE TABLE tallies (
    kind TEXT, name TEXT, split TEXT, step INTEGER, {", ".join(SUMS)},
    PRIMARY KEY (kind, name, split, step)
) WITHOUT ROWID;
CREATE TABLE tasks (
    split TEXT, asked INTEGER, step INTEGER, n INTEGER, reward REAL, stratum TEXT,
    PRIMARY KEY (split, asked, step)
) WITHOUT ROWID;
PRAGMA user_version = {VERSION};
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


class Database:
    """The tables of the index of traces; made anew where those there are do not fit.

    A kept database that cannot be opened or written is given up for a temporary one.

    Attributes:
        folder: Where the files of traces are.
        field: The field of tasks by whose values they are drawn, or None.
    """

    def __init__(self, folder: Path, *, keep: bool = False, field: str | None = None) -> None:
        """
        Args:
            folder: Where the files of traces are.
            keep: Keep the database in a hidden file of the folder, for the next time.
            field: The field of tasks by whose values they are drawn, where there is one.
        """
        self.folder, self.field = folder, field
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
    def state(self) -> str:
        """Another text when other traces are listed."""
        ((token,),) = self.ask("SELECT token FROM born")
        return f"{token}.{self.total}"

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

    def insert(self, table: str, *values: Any) -> int:
        """Add a row; returns its number."""
        marks = ", ".join("?" * len(values))
        number = self.execute(f"INSERT INTO {table} VALUES ({marks})", *values).lastrowid
        return number or 0

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        """Change something; inside of `write`."""
        return self._connection.execute(statement, values)

    def begin_anew(self) -> None:
        """Empty tables; inside of `write`."""
        _make(self._connection)

    def write(self, work: Callable[[], bool]) -> bool:
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


def _make(connection: sqlite3.Connection) -> None:
    """Empty tables, in place of those there are."""
    for (table,) in connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table'"
    ).fetchall():
        connection.execute(f"DROP TABLE {table}")
    for statement in _SCHEMA.strip().rstrip(";").split(";"):
        connection.execute(statement)
    connection.execute("INSERT INTO born VALUES (?)", (secrets.token_hex(8),))
