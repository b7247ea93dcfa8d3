"""What was served, in one SQLite file: sessions, calls, rewards, replies, applications.

Runs keep their traces in files of lines, which is right where a rollout is written once, when it
has ended. Here a reward comes late, to a session or to one call, and the questions are: whose
session is this, which are not judged, which are of one group, what is not trained yet. SQLite
answers them from its indexes and changes one row at a time.

A call is stored as `tuner.traces.packing` writes it in a trace: with references to the calls of its
session before it, and the messages and tools that are new in it. So a row grows with what is new.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tuner.serving.replies import Replies
from tuner.serving.tables import StoredCall, StoredSession, trace_of
from tuner.traces import Call, Trace
from tuner.traces.packing import FORMAT, Packer, unpack
from tuner.traces.plain import from_plain, to_plain
from tuner.traces.store import call_packer, trace_line

_PACKERS = 4096  # sessions whose calls can be added to without reading what is there


_JSON = ("task", "metadata", "tags", "limits", "sampling")
_COLUMNS = ", ".join(f'"{one.name}"' for one in fields(StoredSession))


class ServingStore(Replies):
    """What one server keeps; see `Tables` for how it is opened, written and read."""

    def __init__(self, path: Path, *, readonly: bool = False) -> None:
        super().__init__(path, readonly=readonly)
        self._packers: OrderedDict[str, tuple[int, Packer]] = OrderedDict()  # and their rows

    def _rolled_back(self) -> None:
        self._packers.clear()  # what was packed refers to calls that are not there

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
        """A new session.

        Args:
            id_: Used by no other.
            key: Digest of its key.
            seed: At least 0, below 2**63.
            application, group: As `StoredSession`.
            name: What the application calls it; used by no other session of it.
            opening: Digest of what was asked for, where it was with an idempotency key.
            opened: Unix time; now.
            given: `task`, `metadata`, `tags`, `limits`, `sampling`: as `StoredSession`.
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
        """
        Raises:
            LookupError: There is none of this id.
        """
        return self._one("id = ?", id_)

    def session_of_key(self, key: bytes) -> StoredSession:
        """The session whose key has this digest.

        Raises:
            LookupError: There is none.
        """
        return self._one("key = ?", key)

    def id_of_key(self, key: bytes) -> str | None:
        """The id of the session whose key has this digest, or None: asked with each request."""
        found = self.ask("SELECT id FROM sessions WHERE key = ?", key)
        return found[0][0] if found else None

    def opening(self, key: bytes) -> bytes | None:
        """`opening` of the session whose key has this digest; None where it has none."""
        found: bytes | None = self.ask("SELECT opening FROM sessions WHERE key = ?", key)[0][0]
        return found

    def _one(self, where: str, value: Any) -> StoredSession:
        found = self._sessions(f"WHERE {where}", value)
        if not found:
            raise LookupError("there is no such session")
        return found[0]

    def _sessions(self, rest: str, *values: Any) -> list[StoredSession]:
        names = [one.name for one in fields(StoredSession)]
        found = []
        for row in self.ask(f"SELECT {_COLUMNS} FROM sessions {rest}", *values):
            data = dict(zip(names, row, strict=True))
            data |= {name: json.loads(data[name]) for name in _JSON}
            data |= {"tags": tuple(data["tags"]), "judged": bool(data["judged"])}
            found.append(StoredSession(**data))
        return found

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
        """Sessions in the order in which they were opened; None asks for all of them.

        Args:
            after: The id of a session: only those after it.
            limit: Not more than so many.
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
            asked.append(("EXISTS (SELECT 1 FROM json_each(tags) WHERE value = ?)", tag))
        where = " AND ".join(condition for condition, _ in asked)
        values = [value for _, value in asked]
        return self._sessions(f"WHERE {where} ORDER BY id LIMIT ?", *values, limit)

    def every(self) -> Iterator[StoredSession]:
        """As `sessions`, all of them, read in parts."""
        after = ""
        while part := self.sessions(after=after):
            yield from part
            after = part[-1].id

    def end(self, id_: str, when: float | None = None) -> None:
        """Seal a session; again changes nothing."""
        moment = time.time() if when is None else when
        self.change("UPDATE sessions SET ended = ? WHERE id = ? AND ended IS NULL", moment, id_)

    def idle(self, since: float) -> list[str]:
        """Open sessions that have had no call from a moment on; Unix time."""
        query = "SELECT id FROM sessions WHERE ended IS NULL AND COALESCE(last_call, opened) < ?"
        return [row[0] for row in self.ask(query, since)]

    def expired(self, ended_before: float) -> list[str]:
        """Sessions that ended before a moment; Unix time."""
        return [row[0] for row in self.ask("SELECT id FROM sessions WHERE ended < ?", ended_before)]

    def delete(self, id_: str) -> bool:
        """Delete a session with all that belongs to it; whether it was there."""
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
            id_: The session's.
            request: The idempotency key that they came with.
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
        """The row of a session, and what packs its calls."""
        found = self._packers.get(id_)
        if found is None:
            found = self._packers[id_] = self.number_of(id_), call_packer()
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
            found = json.loads(data)
            calls.append(found["call"])
            for name, items in distinct.items():
                items += found[name]
        plain: list[dict[str, Any]] = unpack(
            {"format": FORMAT, "distinct": distinct, "calls": calls}
        )["calls"]
        return plain

    def calls(self, id_: str) -> list[StoredCall]:
        """The calls of a session in order of commitment; undelivered and redacted ones too.

        Raises:
            LookupError: There is no such session.
        """
        number = self.number_of(id_)
        said = self.ask(
            "SELECT undelivered, redacted, reward FROM calls WHERE session = ? ORDER BY number",
            number,
        )
        return [
            StoredCall(
                replace(from_plain(Call, plain), undelivered=bool(undelivered), reward=reward),
                bool(redacted),
            )
            for plain, (undelivered, redacted, reward) in zip(
                self._plain_calls(number), said, strict=True
            )
        ]

    # What is said of calls and sessions, and what is done with them.

    def reward(
        self,
        id_: str,
        reward: float | None = None,
        feedback: str | None = None,
        call: str | None = None,
    ) -> None:
        """A reward, words or both, for a session or one of its calls; the latest counts.

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
        return dict(self.ask(query, self.number_of(id_)))

    def untrained(self, *, limit: int = 1000, also_open: bool = False) -> list[StoredSession]:
        """Judged sessions that no update has trained, in the order in which they were opened.

        Sessions without a call that can be trained (all redacted or undelivered) are left out.

        Args:
            also_open: Whether sessions that have not ended are among them.
        """
        ended = "" if also_open else "AND ended IS NOT NULL"
        return self._sessions(
            f"WHERE judged AND trained IS NULL {ended} AND EXISTS (SELECT 1 FROM calls "
            "WHERE session = sessions.number AND NOT undelivered AND NOT redacted) "
            "ORDER BY id LIMIT ?",
            limit,
        )

    def mark_trained(self, ids: Iterable[str], update: int) -> None:
        """An update, counted from 1, has trained these sessions; all or none are marked."""
        with self.writing():
            for id_ in ids:
                self.change("UPDATE sessions SET trained = ? WHERE id = ?", update, id_)

    def trace(self, id_: str) -> Trace:
        """A session as a trace, whose id is unique in this store.

        Its step is the update that trained it, 0 before; its task the number of its group, and its
        rollout the place there. `reward` is None where the session, or all of it, is not judged.

        Raises:
            LookupError: There is no such session.
        """
        return trace_of(self.session(id_), self.calls(id_))
