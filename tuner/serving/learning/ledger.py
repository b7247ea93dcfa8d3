"""Decisions about weights, in the store of the server: promotions, rollbacks, arms.

A row for each decision, which never changes. The serving version follows from all rows: a promotion
puts a version on top of the earlier ones, a rollback removes the top one.

    start 0, promote 12, promote 25, rollback, promote 40     ->  0, 12, 40: 40 serves, 12 is below
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from tuner.errors import TunerError
from tuner.runs.statistics import Arm, Decision
from tuner.serving.serving_store import Tables
from tuner.traces.reading import AnyNumber, Integer, InvalidRecord, JsonReader, Text
from tuner.traces.store import stored_form

Kind = Literal["start", "trial", "promote", "keep", "not yet", "rollback"]
_NUMBERS = ("estimate", "lower", "upper", "sessions", "expected_more")

SCHEMA = """
CREATE TABLE IF NOT EXISTS decisions (
    number INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    kind TEXT NOT NULL,
    version INTEGER NOT NULL,
    serving INTEGER NOT NULL,
    step INTEGER NOT NULL,
    reset INTEGER NOT NULL,
    why TEXT NOT NULL,
    data TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS arms (
    session TEXT PRIMARY KEY,
    candidate INTEGER NOT NULL,
    arm TEXT NOT NULL,
    reward REAL,
    counted INTEGER
);
CREATE INDEX IF NOT EXISTS arms_of_trial ON arms (candidate, counted);
"""


@dataclass(frozen=True)
class WeightsDecision:
    """A decision about a version of the weights.

    Attributes:
        number: Order of the decisions.
        at: Unix time, seconds.
        kind: "trial": it gets sessions from now on; "rollback": it serves again.
        version: The version, by the updates that it has seen.
        serving: The version that served until then.
        step: Number of updates made.
        reset: Whether training continued from the serving weights, dropping what was trained since.
        why: A sentence for people.
        data: The numbers that decided it.
    """

    number: int
    at: float
    kind: Kind
    version: int
    serving: int
    step: int
    reset: bool
    why: str
    data: dict[str, Any] = field(default_factory=dict)

    def shown(self) -> dict[str, Any]:
        """As the control API returns it."""
        names = ("at", "version", "serving", "step", "why")
        return {"decision": self.kind, **{n: getattr(self, n) for n in names}, **self.data}


def numbers(proof: Decision | None) -> dict[str, Any]:
    """The numbers of a comparison, without its sentence."""
    return {} if proof is None else {name: getattr(proof, name) for name in _NUMBERS}


@dataclass(frozen=True)
class Judgement:
    """A session of a trial that can be counted."""

    session: str
    arm: Arm
    reward: float


def promoted_versions(tables: Tables) -> list[int]:
    """The versions that rollbacks would return to, the serving one last. None if nothing was ever
    learned."""
    if not tables.ask("SELECT 1 FROM sqlite_master WHERE name = 'decisions'"):
        return []
    found: list[int] = []
    for one in _decisions(tables):
        if one.kind in ("start", "promote"):
            found.append(one.version)
        elif one.kind == "rollback" and found:
            found.pop()
    return found


_NUMBERS_OF = JsonReader[dict[str, Any]](
    dict[Text, Integer | AnyNumber | None], "the numbers of a decision"
)
_DECISIONS = JsonReader[dict[str, Any]](lambda: stored_form(WeightsDecision), "a decision")


def _decisions(tables: Tables) -> list[WeightsDecision]:
    """All decisions, in order.

    Raises:
        TunerError: One is damaged, on which it depends what serves.
    """
    names = [one.name for one in fields(WeightsDecision)]
    found = []
    for row in tables.ask(f"SELECT {', '.join(names)} FROM decisions ORDER BY number"):
        given = dict(zip(names, row, strict=True))
        try:
            given["reset"] = bool(given["reset"])
            given["data"] = _NUMBERS_OF.parse(str(given["data"]).encode())
            found.append(WeightsDecision(**_DECISIONS.check(given)))
        except InvalidRecord as error:
            raise TunerError(
                f"decision {given['number']} about the weights is damaged in {tables.path}: "
                f"{error}; put a copy of the file back"
            ) from error
    return found


class Ledger:
    """The rows of one server.

    Args:
        tables: The server's store.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        with tables.writing():
            for statement in filter(str.strip, SCHEMA.split(";")):
                tables.change(statement)

    def add(
        self,
        kind: Kind,
        version: int,
        *,
        serving: int,
        step: int,
        why: str,
        reset: bool = False,
        proof: Decision | None = None,
    ) -> None:
        """Add a decision, which is on disk when this returns; arguments as in `WeightsDecision`.

        Args:
            proof: The deciding comparison.
        """
        self._tables.change(
            "INSERT INTO decisions (at, kind, version, serving, step, reset, why, data) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            time.time(),
            kind,
            version,
            serving,
            step,
            int(reset),
            why,
            json.dumps(numbers(proof)),
        )

    def decisions(self) -> list[WeightsDecision]:
        """All decisions, in order; raises TunerError if one is damaged."""
        return _decisions(self._tables)

    @property
    def line(self) -> list[int]:
        """The versions that rollbacks would return to, the serving one last."""
        return promoted_versions(self._tables)

    @property
    def trial(self) -> int | None:
        """The candidate that gets sessions, or None."""
        for one in reversed(self.decisions()):
            if one.kind == "trial":
                return one.version
            if one.kind != "not yet":
                return None
        return None

    @property
    def reset_at(self) -> int:
        """Number of updates made when training last continued from the serving weights; or -1."""
        return max((one.step for one in self.decisions() if one.reset), default=-1)

    # Arms

    def assign(self, session: str, candidate: int, arm: Arm) -> None:
        """Remember which arm of a trial a session is in."""
        self._tables.change(
            "INSERT INTO arms (session, candidate, arm) VALUES (?, ?, ?)", session, candidate, arm
        )

    def arm(self, session: str) -> tuple[int, Arm] | None:
        """The trial and arm of a session, or None."""
        rows = self._tables.ask("SELECT candidate, arm FROM arms WHERE session = ?", session)
        return (rows[0][0], rows[0][1]) if rows else None

    def uncounted(self, candidate: int) -> dict[str, Arm]:
        """The sessions of a trial whose rewards were not counted yet, with their arms."""
        rows = self._tables.ask(
            "SELECT session, arm FROM arms WHERE candidate = ? AND counted IS NULL "
            "ORDER BY session",
            candidate,
        )
        return dict(rows)

    def count(self, found: Sequence[Judgement]) -> None:
        """Remember what was counted, in this order; later changes of a session's reward do not
        affect it."""
        with self._tables.writing():
            (before,) = self._tables.ask("SELECT COALESCE(MAX(counted), 0) FROM arms")[0]
            for place, one in enumerate(found, before + 1):
                self._tables.change(
                    "UPDATE arms SET reward = ?, counted = ? WHERE session = ?",
                    one.reward,
                    place,
                    one.session,
                )

    def counted(self, candidate: int) -> list[Judgement]:
        """What was counted in a trial, in that order."""
        rows = self._tables.ask(
            "SELECT session, arm, reward FROM arms WHERE candidate = ? AND counted IS NOT NULL "
            "ORDER BY counted",
            candidate,
        )
        return [Judgement(*row) for row in rows]
