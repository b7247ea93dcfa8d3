"""The store of a server, one SQLite file: sessions, calls, rewards, replies, applications.

Runs keep their traces in JSONL files, which suits rollouts that are written once, when they have
ended. Here rewards arrive late, for a session or for one call, and the queries are: whose session
is this, which are not judged, which belong to one group, which are not trained yet. SQLite answers
them from its indexes and changes one row at a time.

A call is stored as `tuner.traces.store` packs it: with references to earlier calls of its session,
and the messages and tools that are new in it. So a row grows with what is new.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from tuner.encoding import displayable
from tuner.errors import TunerError
from tuner.gateway import ChatRenderer
from tuner.gateway.conversations import Conversations
from tuner.gateway.request_error import RequestError
from tuner.gateway.service import Replay, Reply
from tuner.gateway.sessions import KeptResponse
from tuner.traces import Call, Outcome, ReasoningPolicy, RolloutId, Trace
from tuner.traces.reading import Count, InvalidRecord, JsonReader, Number
from tuner.traces.store import (
    FORMAT,
    STORED_CALLS,
    Packer,
    call_packer,
    from_plain,
    stored_form,
    to_plain,
    trace_line,
    unpack,
)

logger = logging.getLogger("tuner.serving")

# The file of a server: its tables, the types of their rows, transactions, and concurrent readers.
#
# SQLite in WAL mode with `synchronous = NORMAL`: committed data survive the process, however it
# ends. A machine that loses power may lose the last moments, and the file stays intact.


VERSION = 1
BUSY_SECONDS = 10.0
SPLIT = "serve"
"""The split of the traces of sessions."""

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
    """A stored session.

    Attributes:
        number: Its row; the order in which sessions were opened.
        id: "s-" and hexadecimal digits, which sort by time.
        application: Its application; None: opened with the admin key.
        group: Sessions of one application with an equal group are compared with each other.
        seed: Source of the seeds of its calls.
        task_number, rollout: Number of its group, and of the session within it, also without a
            group. Never reused.
        opened, last_call, ended: Unix times, seconds; None: not yet.
        calls, sampled_tokens, redacted: Counts, including undelivered and redacted calls.
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
    task_number: Count
    rollout: Count
    opened: float
    last_call: float | None
    ended: float | None
    calls: Count
    sampled_tokens: Count
    redacted: Count
    lowest: Count | None
    highest: Count | None
    reward: float | None
    feedback: str | None
    judged: bool
    trained: Count | None
    task: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    limits: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def rollout_id(self) -> RolloutId:
        """Its id as a trace: the step is the update that trained it, 0 before that."""
        return RolloutId(self.trained or 0, self.task_number, self.rollout, SPLIT)


@dataclass(frozen=True)
class StoredCall:
    """A stored call; `call.reward` is its latest reward.

    Attributes:
        redacted: Whether its messages were changed before they were stored.
    """

    call: Call
    redacted: bool


@dataclass(frozen=True)
class StoredReply:
    """The answer to a request with an idempotency key.

    Attributes:
        request: SHA-256 of the request's body.
    """

    request: bytes
    body: bytes
    content_type: str


class DamagedSession(TunerError, RequestError):
    """A row of a session in the store is damaged; the client gets a 410 with this message."""

    def __init__(self, problem: str) -> None:
        RequestError.__init__(self, problem, status=410, code="damaged_session")


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
    """The stored digest of a key. Keys are random and long, so that a plain hash hides them."""
    return hashlib.sha256(key.encode()).digest()


class Tables:
    """A database file: one process writes, in one thread, and any thread may read.

    Args:
        path: The file; created for its owner only if it does not exist.
        readonly: Open for reading only, next to the writer.

    Raises:
        TunerError: The file is not a database of this version, or cannot be opened.
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
            # in order of their last change, which is their last call
            execute("DROP INDEX IF EXISTS open_sessions")
            execute("CREATE INDEX IF NOT EXISTS not_ended ON sessions (id) WHERE ended IS NULL")

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def reader(self) -> Iterator[Self]:
        """The same database for reading in any thread, on a separate connection."""
        own = type(self)(self.path, readonly=True)
        try:
            yield own
        finally:
            own.close()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Run the block in one transaction, committed at its end or rolled back; nested blocks join
        it."""
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
        """What was written was rolled back."""

    def checkpoint(self) -> None:
        """Move the log into the file, which waits for the disk; in any thread."""
        connection = sqlite3.connect(self.path, timeout=BUSY_SECONDS)
        try:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        finally:
            connection.close()

    def ask(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        return self._execute(query, values).fetchall()

    def change(self, statement: str, *values: Any) -> sqlite3.Cursor:
        """Execute a statement, in a new transaction if there is none."""
        if self._writing:
            return self._execute(statement, values)
        with self.writing():
            return self._execute(statement, values)

    def _execute(self, statement: str, values: Sequence[Any]) -> sqlite3.Cursor:
        try:
            return self._connection.execute(statement, values)
        except UnicodeEncodeError:  # SQLite's text has no half of a UTF-16 pair: bytes of JSON
            given = [one if displayable(one) == one else json.dumps(one).encode() for one in values]
            return self._connection.execute(statement, given)


# The part of a server's store that repeats answers and finds the session of a request.


class Replies(Tables):
    """Replies by their idempotency keys, responses and conversations that can be continued,
    applications.

    Methods about a session raise LookupError if there is none with that id.

    Attributes:
        owners: Changes when the owner of a key may have changed.
    """

    owners = 0

    def number_of(self, id_: str) -> int:
        """The row of a session."""
        found = self.ask("SELECT number FROM sessions WHERE id = ?", id_)
        if not found:
            raise LookupError(f"there is no session {id_}")
        return int(found[0][0])

    def reply(self, id_: str, key: str) -> StoredReply | None:
        """The answer to a session's request with this idempotency key, if it was kept."""
        found = self.ask(
            "SELECT request, body, content_type FROM replies WHERE session = ? AND key = ?",
            self.number_of(id_),
            key,
        )
        return StoredReply(*found[0]) if found else None

    def keep_reply(self, id_: str, key: str, reply: StoredReply) -> None:
        """Keep the answer to a session's request with an idempotency key."""
        self.change(
            "INSERT OR REPLACE INTO replies (session, key, request, body, content_type, given) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            self.number_of(id_),
            key,
            reply.request,
            reply.body,
            reply.content_type,
            time.time(),
        )

    def forget_replies(self, given_before: float) -> None:
        """Delete the replies that were kept before a moment; Unix time."""
        self.change("DELETE FROM replies WHERE given < ?", given_before)

    def retried(self, id_: str, request: str) -> None:
        """A session's request whose answer was not kept is sampled again: mark its earlier calls as
        undelivered."""
        number, where = self.number_of(id_), "session = ? AND request = ? AND NOT undelivered"
        if self.ask(f"SELECT 1 FROM calls WHERE {where} LIMIT 1", number, request):
            self.change(f"UPDATE calls SET undelivered = 1 WHERE {where}", number, request)

    def session_of_request(self, application: str, request: str) -> str | None:
        """The latest session of an application with a call of this idempotency key, or None."""
        found = self.ask(
            "SELECT sessions.id FROM calls JOIN sessions ON sessions.number = calls.session "
            "WHERE sessions.application = ? AND calls.request = ? ORDER BY calls.number DESC "
            "LIMIT 1",
            application,
            request,
        )
        return found[0][0] if found else None

    def keep_response(self, id_: str, response: str, data: str) -> None:
        """Keep a response of the Responses API that a session can continue.

        Args:
            id_: The session's id.
            response: The response's id.
            data: The response as text.
        """
        self.change(
            "INSERT OR REPLACE INTO responses (id, session, data) VALUES (?, ?, ?)",
            response,
            self.number_of(id_),
            data,
        )

    def response(self, id_: str, response: str) -> str | None:
        """The result of `keep_response` for a session, or None."""
        found = self.ask(
            "SELECT data FROM responses WHERE id = ? AND session = ?", response, self.number_of(id_)
        )
        return found[0][0] if found else None

    def session_of_response(self, application: str, response: str) -> str | None:
        """The open session of an application that has this response, or None."""
        found = self.ask(
            "SELECT sessions.id FROM responses JOIN sessions "
            "ON sessions.number = responses.session "
            "WHERE responses.id = ? AND application = ? AND ended IS NULL",
            response,
            application,
        )
        return found[0][0] if found else None

    def session_of_name(self, application: str, name: str) -> str | None:
        """The session with this name of an application, or None."""
        found = self.ask(
            "SELECT id FROM sessions WHERE application = ? AND name = ?", application, name
        )
        return found[0][0] if found else None

    def go_on(self, application: str, talk: bytes) -> str | None:
        """The open session of an application in which a conversation was recorded, or None.

        Among several with the same words the one that was continued least often, so that two
        conversations that began alike stay two.

        Args:
            talk: Digest of the conversation, including the assistant's latest turn.
        """
        found = self.ask(
            "SELECT calls.number, sessions.id FROM calls "
            "JOIN sessions ON sessions.number = calls.session "
            "WHERE talk = ? AND application = ? AND ended IS NULL AND NOT undelivered "
            "ORDER BY continued, calls.number LIMIT 1",
            talk,
            application,
        )
        for number, id_ in found:
            self.change("UPDATE calls SET continued = continued + 1 WHERE number = ?", number)
            return str(id_)
        return None

    def add_application(self, name: str, key: bytes) -> bool:
        """Add an application; False if there is one with this name.

        Args:
            key: Digest of its key.
        """
        self.owners += 1
        query = "INSERT OR IGNORE INTO applications (name, key, made) VALUES (?, ?, ?)"
        return self.change(query, name, key, time.time()).rowcount > 0

    def applications(self) -> list[tuple[str, float]]:
        """Name and creation time of each application; Unix time."""
        return [(name, made) for name, made in self.ask("SELECT name, made FROM applications")]

    def application_of_key(self, key: bytes) -> str | None:
        """The application whose key has this digest, or None."""
        found = self.ask("SELECT name FROM applications WHERE key = ?", key)
        return found[0][0] if found else None

    def delete_application(self, name: str) -> bool:
        """Invalidate an application's key; its sessions stay. Returns whether it existed."""
        self.owners += 1
        return self.change("DELETE FROM applications WHERE name = ?", name).rowcount > 0


_PACKERS = 4096  # sessions whose calls can be added without reading the stored ones


SESSION_STATE = (
    "CASE WHEN trained IS NOT NULL THEN 'trained' WHEN ended IS NULL THEN 'open' "
    "WHEN judged THEN 'judged' ELSE 'waiting for a reward' END"
)
"""The state of a row of `sessions`, as people see it, in SQL."""
SESSION_STATES = ("open", "waiting for a reward", "judged", "trained")

_VALUES = JsonReader[Any](Any, "JSON")
_SESSIONS = JsonReader[dict[str, Any]](lambda: stored_form(StoredSession), "a session")
_REWARDS = JsonReader[float | None](Number | None, "a reward")
_CALL_REWARDS = JsonReader[dict[str, float]](dict[str, Number], "rewards of calls")
_RESPONSES = JsonReader[dict[str, Any]](lambda: stored_form(KeptResponse), "a response")
_JSON = ("task", "metadata", "tags", "limits", "sampling")
_TAGS = "CASE WHEN json_valid(tags) THEN tags ELSE '[]' END"
_COLUMNS = ", ".join(f'"{one.name}"' for one in fields(StoredSession))


class ServingStore(Replies):
    """The store of one server; see `Tables` for opening, writing and reading."""

    def __init__(self, path: Path, *, readonly: bool = False) -> None:
        super().__init__(path, readonly=readonly)
        self._packers: OrderedDict[str, tuple[int, Packer]] = OrderedDict()  # and their rows
        self._left_out: set[str] = set()

    def _rolled_back(self) -> None:
        self._packers.clear()  # packed calls refer to calls that are missing

    def open(
        self,
        id_: str,
        *,
        key: bytes,
        seed: int,
        application: str | None = None,
        group: str | None = None,
        name: str | None = None,
        opening: bytes | None = None,
        opened: float | None = None,
        **given: Any,
    ) -> StoredSession:
        """Add a session.

        Args:
            id_: Unique.
            key: Digest of its key.
            seed: At least 0, below 2**63.
            application, group: As in `StoredSession`.
            name: The application's name for it, unique in the application.
            opening: Digest of the request, if it had an idempotency key.
            opened: Unix time; default: now.
            given: `task`, `metadata`, `tags`, `limits`, `sampling`: as in `StoredSession`.
        """
        with self.writing():
            place = self._place(application, group)
            row: dict[str, Any] = {
                "id": id_,
                "key": key,
                "opening": opening,
                "application": application,
                "group": group,
                "name": name,
                "seed": seed,
                "task_number": place[0],
                "rollout": place[1],
                "opened": time.time() if opened is None else opened,
                **{name: json.dumps(value) for name, value in given.items()},
            }
            names = ", ".join(f'"{name}"' for name in row)
            marks = ", ".join("?" * len(row))
            self.change(f"INSERT INTO sessions ({names}) VALUES ({marks})", *row.values())
        return self.session(id_)

    def _place(self, application: str | None, group: str | None) -> tuple[int, int]:
        """The number of a session's group, and of the session within it."""
        name = application or ""
        if group is not None:
            found = self.ask(
                "UPDATE groups SET members = members + 1 WHERE application = ? AND name = ? "
                "RETURNING number, members - 1",
                name,
                group,
            )
            if found:
                return found[0][0], found[0][1]
        made = self.change("INSERT INTO groups (application, name) VALUES (?, ?)", name, group)
        return made.lastrowid or 0, 0

    def session(self, id_: str) -> StoredSession:
        """The session with this id; raises LookupError."""
        return self._one("id = ?", id_)

    def session_of_key(self, key: bytes) -> StoredSession:
        """The session whose key has this digest; raises LookupError."""
        return self._one("key = ?", key)

    def id_of_key(self, key: bytes) -> str | None:
        """The id of the session whose key has this digest, or None: used for each request."""
        found = self.ask("SELECT id FROM sessions WHERE key = ?", key)
        return found[0][0] if found else None

    def opening(self, key: bytes) -> bytes | None:
        """`opening` of the session whose key has this digest; None if it has none."""
        found: bytes | None = self.ask("SELECT opening FROM sessions WHERE key = ?", key)[0][0]
        return found

    def _one(self, where: str, value: Any) -> StoredSession:
        found = self.ask(f"SELECT {_COLUMNS} FROM sessions WHERE {where}", value)
        if not found:
            raise LookupError("there is no such session")
        return self._session(found[0])

    def _session(self, row: Sequence[Any]) -> StoredSession:
        data = dict(zip((one.name for one in fields(StoredSession)), row, strict=True))
        with self._damaged(data["id"]):
            data |= {name: _VALUES.parse(str(data[name]).encode()) for name in _JSON}
            if isinstance(data["feedback"], bytes):
                data["feedback"] = _VALUES.parse(data["feedback"])
            data["judged"] = bool(data["judged"])
            return from_plain(StoredSession, _SESSIONS.check(data))

    @contextmanager
    def _damaged(self, id_: Any) -> Iterator[None]:
        """Turn problems of a session's row into a `DamagedSession`."""
        try:
            yield
        except (InvalidRecord, LookupError) as error:
            raise DamagedSession(
                f"session {id_!s:.40} is damaged in {self.path}: {error}"
            ) from error

    def sessions(
        self,
        *,
        ended: bool | None = None,
        judged: bool | None = None,
        group: str | None = None,
        application: str | None = None,
        tag: str | None = None,
        after: str = "",
        limit: int = 1000,
    ) -> list[StoredSession]:
        """Sessions in the order in which they were opened; None for a filter means all.

        Args:
            after: The id of a session: only later ones.
            limit: Maximum number.
        """
        asked: list[tuple[str, Any]] = [("id > ?", after)]
        if ended is not None:
            asked.append(("(ended IS NOT NULL) = ?", ended))
        if judged is not None:
            asked.append(("judged = ?", judged))
        if group is not None:
            asked.append(('"group" = ?', group))
        if application is not None:
            asked.append(("application = ?", application))
        if tag is not None:
            asked.append((f"EXISTS (SELECT 1 FROM json_each({_TAGS}) WHERE value = ?)", tag))
        where = " AND ".join(condition for condition, _ in asked)
        values = [value for _, value in asked]
        return self._readable(f"WHERE {where} ORDER BY id LIMIT ?", *values, limit)

    def _readable(self, rest: str, *values: Any) -> list[StoredSession]:
        found = list[StoredSession]()
        for row in self.ask(f"SELECT {_COLUMNS} FROM sessions {rest}", *values):
            try:
                found.append(self._session(row))
            except DamagedSession as error:
                self.leave_out(error)
        return found

    def leave_out(self, error: DamagedSession) -> None:
        """Log, once, that a session is left out."""
        if str(error) not in self._left_out:
            self._left_out.add(str(error))
            logger.warning("left out: %s", error)

    def states(self) -> dict[str, int]:
        """Number of sessions in each of `SESSION_STATES`."""
        found = dict(self.ask(f"SELECT {SESSION_STATE}, COUNT(*) FROM sessions GROUP BY 1"))
        return {state: found.get(state, 0) for state in SESSION_STATES}

    def every(self) -> Iterator[StoredSession]:
        """All sessions, in that order."""
        for (id_,) in self.ask("SELECT id FROM sessions ORDER BY id"):
            try:
                yield self.session(id_)
            except DamagedSession as error:
                self.leave_out(error)
            except LookupError:  # deleted meanwhile
                pass

    def end(self, id_: str, when: float | None = None) -> None:
        """Seal a session; repeating it changes nothing."""
        moment = time.time() if when is None else when
        self.change("UPDATE sessions SET ended = ? WHERE id = ? AND ended IS NULL", moment, id_)

    def idle(self, since: float) -> list[str]:
        """Open sessions without a call since a moment; Unix time."""
        query = "SELECT id FROM sessions WHERE ended IS NULL AND COALESCE(last_call, opened) < ?"
        return [row[0] for row in self.ask(query, since)]

    def expired(self, ended_before: float) -> list[str]:
        """Sessions that ended before a moment; Unix time."""
        return [row[0] for row in self.ask("SELECT id FROM sessions WHERE ended < ?", ended_before)]

    def delete(self, id_: str) -> bool:
        """Delete a session with everything that belongs to it; returns whether it existed."""
        self.owners += 1
        self._packers.pop(id_, None)
        return self.change("DELETE FROM sessions WHERE id = ?", id_).rowcount > 0

    def add_calls(
        self,
        id_: str,
        calls: Iterable[Call],
        *,
        request: str | None = None,
        redacted: bool = False,
        talks: Sequence[bytes | None] = (),
    ) -> None:
        """Add calls to a session, all or none.

        Args:
            id_: The session's id.
            request: The idempotency key of their request.
            redacted: Whether their messages were changed.
            talks: For each the digest of the conversation that it ends, or None.
        """
        with self.writing():
            number, packer = self._packer(id_)
            for place, call in enumerate(calls):
                talk = talks[place] if place < len(talks) else None
                self._insert(number, call, packer, request, redacted, talk)

    def _insert(
        self,
        number: int,
        call: Call,
        packer: Packer,
        request: str | None,
        redacted: bool,
        talk: bytes | None,
    ) -> None:
        known = {name: len(items) for name, items in packer.distinct.items()}
        row: dict[str, Any] = {"call": packer.call(to_plain(call))}
        row |= {name: items[known[name] :] for name, items in packer.distinct.items()}
        self.change(
            "INSERT INTO calls (session, id, request, undelivered, redacted, talk, data) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            number,
            call.id,
            request,
            call.undelivered,
            redacted,
            talk,
            trace_line(row),
        )
        low, high = (min(call.versions), max(call.versions)) if call.versions else (None, None)
        self.change(
            "UPDATE sessions SET calls = calls + 1, sampled_tokens = sampled_tokens + ?1, "
            "redacted = redacted + ?2, last_call = ?3, "
            "lowest = MIN(COALESCE(lowest, ?4), COALESCE(?4, lowest)), "
            "highest = MAX(COALESCE(highest, ?5), COALESCE(?5, highest)) WHERE number = ?6",
            call.usage.output_tokens,
            redacted,
            time.time(),
            low,
            high,
            number,
        )

    def _packer(self, id_: str) -> tuple[int, Packer]:
        """The row of a session, and the packer of its calls."""
        found = self._packers.get(id_)
        if found is None:
            found = self._packers[id_] = self.number_of(id_), call_packer()
            with self._damaged(id_):
                for call in self._plain_calls(found[0]):
                    found[1].call(call)
            if len(self._packers) > _PACKERS:
                self._packers.popitem(last=False)
        self._packers.move_to_end(id_)
        return found

    def _plain_calls(self, number: int) -> list[dict[str, Any]]:
        """The calls of a session in format 1, in order of commitment."""
        distinct: dict[str, list[Any]] = {"messages": [], "tools": []}
        calls = []
        rows = self.ask("SELECT data FROM calls WHERE session = ? ORDER BY number", number)
        for (data,) in rows:
            found = STORED_CALLS.parse(data if isinstance(data, bytes) else str(data).encode())
            calls.append(found["call"])
            for name, items in distinct.items():
                items += found[name]
        plain: list[dict[str, Any]] = unpack(
            {"format": FORMAT, "distinct": distinct, "calls": calls}
        )["calls"]
        return plain

    def calls(self, id_: str) -> list[StoredCall]:
        """The calls of a session in order of commitment, including undelivered and redacted ones.

        Raises:
            LookupError: There is no such session.
            DamagedSession: A row of it is damaged.
        """
        number = self.number_of(id_)
        said = self.ask(
            "SELECT undelivered, redacted, reward FROM calls WHERE session = ? ORDER BY number",
            number,
        )
        with self._damaged(id_):
            return [
                StoredCall(
                    replace(
                        from_plain(Call, plain),
                        undelivered=bool(undelivered),
                        reward=_REWARDS.check(reward),
                    ),
                    bool(redacted),
                )
                for plain, (undelivered, redacted, reward) in zip(
                    self._plain_calls(number), said, strict=True
                )
            ]

    # Rewards of calls and sessions, and their use.

    def reward(
        self,
        id_: str,
        reward: float | None = None,
        feedback: str | None = None,
        call: str | None = None,
    ) -> None:
        """Store a reward, feedback or both, for a session or one of its calls; the latest counts.

        Raises:
            LookupError: There is no such session, or it has no such call.
        """
        with self.writing():
            number = self.number_of(id_)
            where = "session = ? AND id = ?"
            if call is not None and not self.ask(
                f"SELECT 1 FROM calls WHERE {where}", number, call
            ):
                raise LookupError(f"session {id_} has no call {call}")
            self.change(
                "INSERT INTO rewards (session, call, reward, feedback, given) VALUES (?,?,?,?,?)",
                number,
                call,
                reward,
                feedback,
                time.time(),
            )
            if call is None:
                self.change(
                    "UPDATE sessions SET reward = COALESCE(?, reward), "
                    "feedback = COALESCE(?, feedback) WHERE number = ?",
                    reward,
                    feedback,
                    number,
                )
            elif reward is not None:
                self.change(f"UPDATE calls SET reward = ? WHERE {where}", reward, number, call)
            if reward is not None:
                self.change("UPDATE sessions SET judged = 1 WHERE number = ?", number)

    def call_rewards(self, id_: str) -> dict[str, float]:
        """The latest reward of each call that has one of its own."""
        query = "SELECT id, reward FROM calls WHERE session = ? AND reward IS NOT NULL"
        found = dict(self.ask(query, self.number_of(id_)))
        try:
            return _CALL_REWARDS.check(found)
        except InvalidRecord as error:
            self.leave_out(DamagedSession(f"the rewards of calls of session {id_}: {error}"))
            return {}

    def untrained(self, *, limit: int = 1000, also_open: bool = False) -> list[StoredSession]:
        """Judged sessions that no update has trained, in the order in which they were opened.

        Sessions without a trainable call (all redacted or undelivered) are skipped.

        Args:
            also_open: Include sessions that have not ended.
        """
        ended = "" if also_open else "AND ended IS NOT NULL"
        return self._readable(
            f"WHERE judged AND trained IS NULL {ended} AND EXISTS (SELECT 1 FROM calls "
            "WHERE session = sessions.number AND NOT undelivered AND NOT redacted) "
            "ORDER BY id LIMIT ?",
            limit,
        )

    def mark_trained(self, ids: Iterable[str], update: int) -> None:
        """Mark sessions as trained by an update, counted from 1; all or none."""
        with self.writing():
            for id_ in ids:
                self.change("UPDATE sessions SET trained = ? WHERE id = ?", update, id_)

    def trace(self, id_: str) -> Trace:
        """A session as a trace, whose id is unique in this store.

        Its step is the update that trained it, 0 before; its task the number of its group, and its
        rollout the number within it. `reward` is None if the session as a whole is not judged.

        Raises:
            LookupError: There is no such session.
        """
        return trace_of(self.session(id_), self.calls(id_))


# Writing a session's calls and answers, and restoring a session from them.
#
# A session that the process does not know, because it was restarted, is restored when its key is
# used: its conversations from the stored calls, rendered again in the order in which they were
# committed. The rendered messages must give exactly the recorded ids: then the next turn continues
# with the sampled ids. A call for which they do not, such as one with its own template arguments,
# is skipped: a prompt that would continue it is rendered afresh, as always if an earlier turn is
# not found.
#
# An application that names no session sends whole conversations, as agents do. The digest of a
# conversation up to an assistant's turn is stored with that turn's call (`talk_of`), so that a
# request finds the session that it continues by its longest recorded prefix.


Message = dict[str, Any]
Redact = Callable[[list[Message]], list[Message]]


def restored_conversations(
    renderer: ChatRenderer, reasoning: ReasoningPolicy, calls: Iterable[Call]
) -> Conversations:
    """The conversations of a session with these calls, in order of commitment; in any thread."""
    conversations = Conversations(renderer, reasoning)
    for call in calls:
        if call.undelivered or call.dialect == "completions" or not call.prompt_ids:
            continue
        # With `tool_choice: "none"` no tools were offered to the model.
        for tools in (call.tools, []) if call.tools else ([],):
            try:
                text = renderer.render_text(call.messages, tools)
                turns = sum(message["role"] == "assistant" for message in call.messages)
                prompt = conversations.prompt(text, turns, call.messages)
            except RequestError:  # it had template arguments, without which it is rejected
                continue
            if prompt.ids == call.prompt_ids:
                cut_off = call.finish_reason == "length"
                conversations.add(prompt, call.completion_ids, tools=tools, cut_off=cut_off)
                break
    return conversations


@dataclass(frozen=True)
class CommittedCalls:
    """Committed calls, for counting.

    Attributes:
        session: The session's id.
        calls: The calls as stored.
        redacted: Whether they are stored without their tokens.
    """

    session: str
    calls: Sequence[Call]
    redacted: bool


class SessionSink:
    """Writes one session's calls and replies into the store (a `tuner.gateway.service.CallSink`).

    Args:
        store: The store.
        id_: The session's id.
        application: Its application, whose requests are matched to conversations; or None.
        redact: Changes messages before they are stored; None: unchanged.
        opening: Opens the session in the store with its first call; None if it exists.
        noted: Called with what was committed.

    Attributes:
        stored: Whether the session is in the store.
        application: Its application, or None.
        closed: Whether nothing is stored any more: the session was deleted.
    """

    def __init__(
        self,
        store: ServingStore,
        id_: str,
        *,
        application: str | None,
        redact: Redact | None,
        opening: Callable[[], None] | None,
        noted: Callable[[CommittedCalls], None],
    ) -> None:
        self._store = store
        self._id = id_
        self.application = application
        self._redact = redact
        self._opening = opening
        self._noted = noted
        self._unstored: dict[str, Replay] = {}
        self._private = False  # whether anything was redacted, so that answers stay in memory
        self.closed = False

    @property
    def stored(self) -> bool:
        return self._opening is None

    @property
    def private(self) -> bool:
        """Whether anything was redacted: complete answers are not stored then."""
        return self._private

    def add(self, calls: Sequence[Call], request: str | None) -> None:
        """See `CallSink.add`."""
        if self.closed:
            return
        kept: Sequence[Call] = calls
        found = [redacted(call, self._redact) for call in calls]
        changed = any(one is not None for one in found)
        if changed:  # the calls of one request share their prompt
            kept = [one or without_tokens(call) for call, one in zip(calls, found, strict=True)]
        talks = [
            None if self.application is None or call.undelivered else talk_of(call) for call in kept
        ]
        with self._store.writing():
            if self._opening is not None:
                self._opening()
            self._store.add_calls(self._id, kept, request=request, redacted=changed, talks=talks)
        self._opening = None
        self._private = self._private or changed
        self._noted(CommittedCalls(self._id, kept, changed))

    def begin(self, request: str) -> Replay | None:
        """See `CallSink.begin`."""
        if request in self._unstored:
            return self._unstored[request]
        if not self.stored or self.closed:
            return None
        found = self._store.reply(self._id, request)
        if found is None:
            self._store.retried(self._id, request)
            return None
        replay = Replay(found.request, Reply(200, found.body, found.content_type))
        replay.done.set()
        return replay

    def replied(self, request: str, replay: Replay) -> None:
        """See `CallSink.replied`."""
        answer = replay.answer
        if answer is None or not self.stored or self.closed:
            return
        if self._private:
            self._unstored[request] = replay
            return
        reply = StoredReply(replay.request, answer.body, answer.content_type)
        self._store.keep_reply(self._id, request, reply)


class StoredResponses(MutableMapping[str, KeptResponse]):
    """The responses that a session can continue, in the store.

    Args:
        sink: The session's sink; private responses stay in memory.
    """

    def __init__(self, store: ServingStore, id_: str, sink: SessionSink) -> None:
        self._store, self._id, self._sink = store, id_, sink
        self._unstored: dict[str, KeptResponse] = {}

    def __getitem__(self, response: str) -> KeptResponse:
        if response in self._unstored:
            return self._unstored[response]
        found = self._store.response(self._id, response) if self._sink.stored else None
        if found is None:
            raise KeyError(response)
        try:
            return KeptResponse(**_RESPONSES.parse(str(found).encode()))
        except InvalidRecord as error:
            raise DamagedSession(f"response {response} is damaged in the store: {error}") from error

    def __setitem__(self, response: str, kept: KeptResponse) -> None:
        if self._sink.private or not self._sink.stored:
            self._unstored[response] = kept
        else:
            self._store.keep_response(self._id, response, json.dumps(asdict(kept)))

    def __delitem__(self, response: str) -> None:
        del self._unstored[response]

    def __iter__(self) -> Iterator[str]:
        return iter(self._unstored)

    def __len__(self) -> int:
        return len(self._unstored)


def redacted(call: Call, redact: Redact | None) -> Call | None:
    """The call as stored, if redaction changes it; None if it does not.

    Raises:
        TunerError: The function failed, or did not return a list of messages.
    """
    if redact is None:
        return None
    messages, response = redact_messages(redact, call.messages), call.response
    said = redact_messages(redact, [call.response])
    if messages == call.messages and said == [call.response]:
        return None
    response = said[0] if len(said) == 1 else {"role": "assistant", "content": None}
    return without_tokens(replace(call, messages=messages, response=response))


def redact_messages(redact: Redact, messages: list[Message]) -> list[Message]:
    """The messages as stored; the given ones stay unchanged.

    Raises:
        TunerError: The function failed, or did not return a list of messages.
    """
    try:
        found: Any = redact(json.loads(json.dumps(messages)))
    except Exception as error:  # its message may contain what must not be seen
        raise TunerError(f"tuner.serving.redact raised {type(error).__name__}") from None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise TunerError("tuner.serving.redact must return a list of messages")
    return found


def without_tokens(call: Call) -> Call:
    """A call without anything that reveals its words: ids, log-probs, grammars, stop strings; its
    tokens are still counted."""
    return replace(
        call,
        prompt_ids=(),
        completion_ids=(),
        logprobs=(),
        kept=(),
        top_logprobs=(),
        masked=(),
        tools=[],
        sampling=replace(
            call.sampling, stop=(), grammar="", bad_words=(), logit_bias=(), stop_token_ids=()
        ),
        billed=call.usage,
        invalid="redacted: it is stored without its tokens",
    )


def talk_of(call: Call) -> bytes:
    """The digest of the conversation that a call ends."""
    *_, (_, found) = digests([*call.messages, call.response])
    return found


def beginnings(messages: list[dict[str, Any]]) -> list[bytes]:
    """The digests of all prefixes that end with an assistant's turn, longest first."""
    return [found for role, found in digests(messages) if role == "assistant"][::-1]


def digests(messages: Iterable[dict[str, Any]]) -> Iterator[tuple[str, bytes]]:
    """For each message its role and the digest of everything up to it: role, text and tool calls,
    without reasoning, ids and names."""
    so_far = b""
    for message in messages:
        said = json.dumps([message.get("role"), _text(message), _called(message)])
        so_far = hashlib.sha256(so_far + said.encode()).digest()
        yield str(message.get("role")), so_far


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content)  # as templates get it


def _called(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    return [(one.get("name", ""), _arguments(one.get("arguments"))) for one in functions]


def _arguments(given: Any) -> Any:
    """Arguments in one spelling, since clients re-encode the JSON that they got."""
    try:
        return json.dumps(json.loads(given), sort_keys=True)
    except (TypeError, ValueError):
        return given if isinstance(given, str) else json.dumps(given, sort_keys=True)
