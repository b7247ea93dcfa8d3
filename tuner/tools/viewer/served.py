"""Sessions of a server, listed and shown like traces. Each answer reads its store, also while it
serves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.errors import TunerError
from tuner.serving.serving_store import (
    SESSION_STATE,
    SESSION_STATES,
    SPLIT,
    ServingStore,
    StoredSession,
    trace_of,
)
from tuner.tools.viewer.index import SHOWN, Json, TraceRow, asked, clean, stamp_of
from tuner.tools.viewer.queries import TraceQuery
from tuner.traces.store import SERVED, STORED, trace_line, trace_to_json

# Maximum number of decisions to show, latest first.
DECISIONS = 50
_ORDERS = {
    "": "number",
    "new": "number DESC",
    "worst": "reward IS NULL, reward, number",
    "best": "reward IS NULL, reward DESC, number",
    "long": "sampled_tokens DESC, number",
    "changed": "number",
}
# The text that a search reads: a session's details, and the messages of its calls.
_KNOWN = (
    "id || ' ' || COALESCE(name, '') || ' ' || COALESCE(application, '') || ' ' || "
    "COALESCE(\"group\", '') || ' ' || task || metadata || tags || COALESCE(feedback, '')"
)
_SAID = (
    "CASE WHEN json_valid(CAST(data AS TEXT)) "
    "THEN json_extract(CAST(data AS TEXT), '$.messages') END"
)
_FOUND = (
    f"(({_KNOWN}) LIKE ? ESCAPE '!' OR ({_KNOWN}) LIKE ? ESCAPE '!' OR EXISTS "
    f"(SELECT 1 FROM calls WHERE session = sessions.number AND {_SAID} LIKE ? ESCAPE '!'))"
)


class ServedSessions:
    """The sessions in a run directory; none without a store.

    Their traces have the file `serving.sqlite` and as `offset` the session's number.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / SERVED
        self._rows: dict[int, tuple[StoredSession, TraceRow]] = {}

    @property
    def stamp(self) -> str:
        """Changes whenever the store changes."""
        return " ".join(map(stamp_of, self.files))

    @property
    def files(self) -> list[Path]:
        """The store and its log, if anything is in it: opening the store makes an empty one."""
        found = (self.path, self.path.with_name(f"{SERVED}-wal"))
        return [path for path in found if path.is_file() and path.stat().st_size]

    @contextmanager
    def _store(self) -> Iterator[ServingStore]:
        with closing(ServingStore(self.path, readonly=True)) as store:
            yield store

    def summary(self) -> Json | None:
        """Number of sessions by state, and the latest decisions of a server that learns; None
        without a store."""
        if not self.path.is_file():
            return None
        columns = ("at", "decision", "version", "beside", "why")
        with self._store() as store:
            learns = store.ask("SELECT 1 FROM sqlite_master WHERE name = 'decisions'")
            decisions = learns and store.ask(
                "SELECT at, kind, version, serving, why FROM decisions ORDER BY number DESC "
                "LIMIT ?",
                DECISIONS,
            )
            return {
                "sessions": store.states(),
                "decisions": [dict(zip(columns, row, strict=True)) for row in decisions],
            }

    def names(self) -> Json:
        """`splits`, `steps` and `outcomes` of the sessions, as in `tuner.tools.viewer.summary`."""
        if not self.path.is_file():
            return {"splits": [], "steps": [], "outcomes": []}
        with self._store() as store:
            steps = store.ask("SELECT DISTINCT COALESCE(trained, 0) FROM sessions")
            states = store.states()
        return {
            "splits": [SPLIT] if steps else [],
            "steps": sorted(step for (step,) in steps),
            "outcomes": [state for state in SESSION_STATES if states[state]],
        }

    def numbers(self, wanted: TraceQuery) -> list[int]:
        """The selected sessions, in order; those with `begins` and causes of branches are none."""
        if not self.path.is_file() or wanted.split not in ("", SPLIT):
            return []
        if wanted.cause or wanted.begins not in ("", "start"):
            return []
        parts: list[tuple[str, list[Any]]] = [("1", [])]
        if wanted.step is not None:
            parts.append(("COALESCE(trained, 0) = ?", [wanted.step]))
        if wanted.outcome:
            parts.append((f"{SESSION_STATE} = ?", [wanted.outcome]))
        if wanted.low is not None:
            parts.append(("reward >= ?", [wanted.low]))
        if wanted.high is not None:
            parts.append(("reward <= ?", [wanted.high]))
        if text := " ".join(wanted.text.split()):
            parts.append((_FOUND, [_like(text, ascii) for ascii in (True, False, False)]))
        where = " AND ".join(part for part, _ in parts)
        values = [value for _, values in parts for value in values]
        query = f"SELECT number FROM sessions WHERE {where} ORDER BY {_ORDERS[wanted.order]}"
        with self._store() as store:
            return [number for (number,) in store.ask(query, *values)]

    def rows(self, numbers: list[int]) -> list[TraceRow]:
        """These sessions as a list shows them; those that were just deleted are left out."""
        if not numbers:
            return []
        with self._store() as store:
            rows = [self._row(store, number) for number in numbers]
        return [row for row in rows if row is not None]

    def read(self, number: int) -> tuple[Json, Json]:
        """A session's trace in the stored form, and what else is known of it."""
        with self._store() as store:
            session = _session(store, number)
            trace = trace_of(session, store.calls(session.id))
            ((state,),) = store.ask(
                f"SELECT {SESSION_STATE} FROM sessions WHERE number = ?", number
            )
        known = {
            "id": session.id,
            "state": state,
            "application": session.application,
            "group": session.group,
            "tags": list(session.tags),
            "metadata": session.metadata,
            "opened": session.opened,
            "ended": session.ended,
        }
        return STORED.parse(trace_line(trace_to_json(trace))), known

    def _row(self, store: ServingStore, number: int) -> TraceRow | None:
        found = store.ask(
            f"SELECT id, {SESSION_STATE}, (SELECT SUM(LENGTH(data)) FROM calls "
            "WHERE session = sessions.number) FROM sessions WHERE number = ?",
            number,
        )
        if not found:
            return None
        ((id_, state, size),) = found
        row = TraceRow(
            file=SERVED,
            offset=number,
            size=size or 0,
            split=SPLIT,
            step=0,
            task=0,
            rollout=0,
            attempt=0,
            final=True,
            outcome=state,
            reward=None,
            calls=0,
            tokens=0,
            error=None,
            one_path=False,
            session=id_,
        )
        try:
            session = store.session(id_)
            known = self._rows.get(number)
            if known is None or known[0] != session:
                trace = trace_of(session, store.calls(id_))
                question = asked(session.task) or _first_question(trace.calls)
                row = replace(
                    row,
                    step=trace.id.step,
                    task=trace.id.task,
                    rollout=trace.id.rollout,
                    reward=session.reward,
                    calls=session.calls,
                    tokens=session.sampled_tokens,
                    asked=_line(question),
                    answered=_line(str(trace.response)),
                )
                self._rows[number] = session, row
            return self._rows[number][1]
        except LookupError:
            return None
        except TunerError as error:
            return replace(row, error=clean(str(error)[:SHOWN]))


def _session(store: ServingStore, number: int) -> StoredSession:
    found = store.ask("SELECT id FROM sessions WHERE number = ?", number)
    if not found:
        raise TunerError(f"{store.path} has no session {number}: it was deleted")
    return store.session(found[0][0])


def _first_question(calls: Any) -> str:
    """The first message of a user, for a session without a task."""
    said = [m for call in calls[:1] for m in call.messages if m.get("role") == "user"]
    return asked({"messages": said[:1]}) if said else ""


def _line(text: str) -> str:
    return " ".join(clean(text[: 2 * SHOWN]).split())[:SHOWN]


def _like(text: str, ascii: bool) -> str:
    """A pattern of SQL for a text inside JSON."""
    escaped = json.dumps(text, ensure_ascii=ascii)[1:-1]
    for sign in "!%_":
        escaped = escaped.replace(sign, f"!{sign}")
    return f"%{escaped}%"
