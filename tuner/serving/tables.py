"""The file of a server: its tables, what a row of them is, transactions, and who may read beside.

SQLite in WAL mode with `synchronous = NORMAL`: what was committed outlives the process, however it
ends. A machine that loses power may lose the last moments, and the file stays whole.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tuner.errors import TunerError
from tuner.traces import Call, Outcome, RolloutId, Trace

VERSION = 1
BUSY_SECONDS = 10.0
SPLIT = "serve"
"""Of the traces that sessions are."""

_SCHEMA = """
CREATE TABLE applications (name TEXT PRIMARY KEY, key BLOB NOT NULL UNIQUE, made REAL NOT NULL);
-- Numbers are not used again, so that the ids of traces stay unique where sessions are deleted.
CREATE TABLE groups (
    number INTEGER PRIMARY KEY AUTOINCREMENT, application TEXT NOT NULL, name TEXT,
    members INTEGER NOT NULL DEFAULT 1, UNIQUE (application, name)
);
CREATE TABLE sessions (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, key BLOB NOT NULL UNIQUE,
    opening BLOB, application TEXT, name TEXT, "group" TEXT, seed INTEGER NOT NULL,
    task TEXT NOT NULL DEFAULT '{}', metadata TEXT NOT NULL DEFAULT '{}',
    tags TEXT NOT NULL DEFAULT '[]', limits TEXT NOT NULL DEFAULT '{}',
    sampling TEXT NOT NULL DEFAULT '{}',
    task_number INTEGER NOT NULL, rollout INTEGER NOT NULL,
    opened REAL NOT NULL, last_call REAL, ended REAL,
    calls INTEGER NOT NULL DEFAULT 0, sampled_tokens INTEGER NOT NULL DEFAULT 0,
    redacted INTEGER NOT NULL DEFAULT 0, lowest INTEGER, highest INTEGER,
    reward REAL, feedback TEXT, judged INTEGER NOT NULL DEFAULT 0, trained INTEGER,
    UNIQUE (application, name)
);
CREATE INDEX of_group ON sessions ("group", application);
CREATE INDEX of_application ON sessions (application, id);
CREATE INDEX unjudged ON sessions (id) WHERE NOT judged;
CREATE INDEX untrained ON sessions (id) WHERE judged AND trained IS NULL;
CREATE INDEX ended_sessions ON sessions (ended) WHERE ended IS NOT NULL;
CREATE TABLE calls (
    number INTEGER PRIMARY KEY, session INTEGER NOT NULL REFERENCES sessions ON DELETE CASCADE,
    id TEXT NOT NULL, request TEXT, undelivered INTEGER NOT NULL, redacted INTEGER NOT NULL,
    talk BLOB, continued INTEGER NOT NULL DEFAULT 0, reward REAL, data BLOB NOT NULL,
    UNIQUE (session, id)
);
CREATE INDEX of_request ON calls (request, session) WHERE request IS NOT NULL;
CREATE INDEX of_talk ON calls (talk) WHERE talk IS NOT NULL;
CREATE TABLE rewards (
    number INTEGER PRIMARY KEY, session INTEGER NOT NULL REFERENCES sessions ON DELETE CASCADE,
    call TEXT, reward REAL, feedback TEXT, given REAL NOT NULL
);
CREATE INDEX of_session ON rewards (session);
CREATE TABLE replies (
    number INTEGER PRIMARY KEY, session INTEGER NOT NULL REFERENCES sessions ON DELETE CASCADE,
    key TEXT NOT NULL, request BLOB NOT NULL, body BLOB NOT NULL, content_type TEXT NOT NULL,
    given REAL NOT NULL, UNIQUE (session, key)
);
CREATE INDEX of_time ON replies (given);
CREATE TABLE responses (
    id TEXT PRIMARY KEY, session INTEGER NOT NULL REFERENCES sessions ON DELETE CASCADE,
    data TEXT NOT NULL
);
CREATE INDEX of_response ON responses (session);
"""


@dataclass(frozen=True)
class StoredSession:
    """A session as it is on disk.

    Attributes:
        number: Its row; the order in which sessions were opened.
        id: "s-" and hexadecimal digits, which sort by time.
        application: Whose it is; None: opened with the admin key.
        group: Sessions of one application with an equal one are compared with each other.
        seed: Where the seeds of its calls come from.
        task_number, rollout: Number of its group, and its own within that; of a session without
            a group, too. Never used again.
        opened, last_call, ended: Unix times, seconds; None: not yet.
        calls, sampled_tokens, redacted: How many; undelivered and redacted ones are counted.
        lowest, highest: Versions of the weights that sampled its tokens; None without any.
        reward, feedback: The latest, for the whole session; None: there was none.
        judged: Whether it, or one of its calls, has a reward.
        trained: The update that trained it, or None.
    """

    number: int
    id: str
    application: str | None
    group: str | None
    seed: int
    task_number: int
    rollout: int
    opened: float
    last_call: float | None
    ended: float | None
    calls: int
    sampled_tokens: int
    redacted: int
    lowest: int | None
    highest: int | None
    reward: float | None
    feedback: str | None
    judged: bool
    trained: int | None
    task: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    limits: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def rollout_id(self) -> RolloutId:
        """Its place among traces: the update that trained it as the step, 0 before that."""
        return RolloutId(self.trained or 0, self.task_number, self.rollout, SPLIT)


@dataclass(frozen=True)
class StoredCall:
    """A call with what was said of it since; `call.reward` is the latest.

    Attributes:
        redacted: Whether its messages were changed before they were stored.
    """

    call: Call
    redacted: bool


@dataclass(frozen=True)
class StoredReply:
    """What a request with an idempotency key was answered.

    Attributes:
        request: SHA-256 of the request's body.
    """

    request: bytes
    body: bytes
    content_type: str


def trace_of(session: StoredSession, stored: Sequence[StoredCall]) -> Trace:
    """A session as a trace; its calls in order of commitment."""
    calls = tuple(one.call for one in stored)
    delivered = [call for call in calls if not call.undelivered]
    said = delivered[-1].response.get("content") if delivered else None
    return Trace(
        id=session.rollout_id,
        task=session.task,
        calls=calls,
        outcome=Outcome.COMPLETED if calls else Outcome.NO_CALLS,
        reward=session.reward,
        response=said if isinstance(said, str) else "",
        feedback=session.feedback,
        seconds={"generation": sum(call.seconds for call in calls)},
        started=session.opened,
    )


def digest(key: str) -> bytes:
    """What is stored of a key. Keys are random and long, so that a plain hash hides them."""
    return hashlib.sha256(key.encode()).digest()


class Tables:
    """A file of tables: one process writes, in one thread, and any thread may read.

    Args:
        path: The file; made for its owner alone where it is not there.
        readonly: Change nothing, as who reads beside the writer.

    Raises:
        TunerError: The file is no database of this version, or cannot be opened.
    """

    def __init__(self, path: Path, *, readonly: bool = False) -> None:
        self.path = path
        self._writing = False
        if not readonly and not path.exists():
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        try:
            self._connection = sqlite3.connect(
                f"{path.resolve().as_uri()}?mode={'ro' if readonly else 'rw'}",
                uri=True,
                timeout=BUSY_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
            self._prepare(readonly)
        except sqlite3.DatabaseError as error:
            raise TunerError(
                f"{path} cannot be opened as the store of a server ({error}): give the run another "
                "`name`, or put the file back as a server left it"
            ) from error

    def _prepare(self, readonly: bool) -> None:
        execute = self._connection.execute
        execute("PRAGMA trusted_schema = OFF")
        execute("PRAGMA foreign_keys = ON")
        if not readonly:
            execute("PRAGMA journal_mode = WAL")
            execute("PRAGMA synchronous = NORMAL")
            execute("PRAGMA secure_delete = ON")
            execute("PRAGMA wal_autocheckpoint = 0")  # it waits for the disk: see `checkpoint`
        (found,) = execute("PRAGMA user_version").fetchone()
        if not found and not readonly:
            self._connection.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version={VERSION};COMMIT;")
        elif found != VERSION:
            raise TunerError(
                f"{self.path} is of version {found}, and this is version {VERSION} of the store: "
                "use the tuner that wrote it, or give the run another `name`"
            )
        if not readonly:
            execute("DROP INDEX IF EXISTS open_sessions")  # by their last calls: each changed it
            execute("CREATE INDEX IF NOT EXISTS not_ended ON sessions (id) WHERE ended IS NULL")

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def reader(self) -> Iterator[Self]:
        """The same, to read from in any thread, on a connection of its own."""
        own = type(self)(self.path, readonly=True)
        try:
            yield own
        finally:
            own.close()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The block is one transaction, which is committed at its end, or nothing of it is; a block
        inside of another belongs to that."""
        if self._writing:
            yield
            return
        self._connection.execute("BEGIN IMMEDIATE")
        self._writing = True
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self._rolled_back()
            raise
        finally:
            self._writing = False

    def _rolled_back(self) -> None:
        """What was written is not there."""

    def checkpoint(self) -> None:
        """Move what is in the log into the file, which waits for the disk; in any thread."""
        connection = sqlite3.connect(self.path, timeout=BUSY_SECONDS)
        try:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        finally:
            connection.close()

    def ask(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        return self._connection.execute(query, values).fetchall()

    def change(self, statement: str, *values: Any) -> sqlite3.Cursor:
        """Change something, in a transaction of its own if there is none."""
        if self._writing:
            return self._connection.execute(statement, values)
        with self.writing():
            return self._connection.execute(statement, values)
