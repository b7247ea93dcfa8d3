"""What a plan answers, on a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import StringIO
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from tuner.planning.step_model import Change, Place, StepTime

Kind = Literal["measured", "fitted", "assumed"]
_WORDS = {
    "generation": "the engine: more engines, a faster GPU, shorter answers",
    "gateway": "the gateway, one process: fewer calls, or tuner.backend: trinity, which has many",
    "agent": "the agents' own code: tuner.workers, or more cores",
    "rollouts": "judges and records of rollouts: fewer of them",
    "waiting": "waiting for tools, or for the longest rollouts: explorer.runner_per_model, "
    "synchronizer.sync_offset",
    "training": "the update: more or faster GPUs that train, fewer unique tokens",
    "weights": "giving the engines the weights",
    "rest": "what else the step does",
}


@dataclass(frozen=True)
class Number:
    """One number that the plan is made of."""

    name: str
    value: float
    kind: Kind
    source: str


@dataclass(frozen=True)
class Plan:
    """What is to be expected.

    Attributes:
        title: What is planned, on what.
        place: What runs where.
        time: Seconds of a step.
        numbers: All it is made of.
        changes: What saves most, if it alone is changed.
        warnings: What was never measured, by name, and what else to know.
        errors: Of each run that was fitted, seconds of a step as the model tells and as measured.
    """

    title: str
    place: Place
    time: StepTime
    numbers: Sequence[Number]
    changes: Sequence[Change] = ()
    warnings: Sequence[str] = ()
    errors: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "title": self.title,
            "seconds": self.time.seconds,
            "parts": dict(self.time.parts),
            "busy": dict(self.time.busy),
            "answers_in_a_pass": self.time.batch,
            "unique_tokens": self.time.unique,
            "limit": self.time.limit,
            "place": asdict(self.place),
            "changes": [
                {"what": one.what, "seconds": one.time.seconds, "limit": one.time.limit}
                for one in self.changes
            ],
            "numbers": [asdict(one) for one in self.numbers],
            "runs": {
                name: {"predicted": told, "measured": took}
                for name, (told, took) in self.errors.items()
            },
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        written = StringIO()
        console = Console(file=written, width=120, highlight=False)
        console.print(self.title)
        whole = self.time.seconds
        console.print(_table(("part of a step", "seconds", "share"), self._rows(), right=(1, 2)))
        busy = ", ".join(f"{name} {s / whole:.0%}" for name, s in self.time.busy.items())
        console.print(f"busy: {busy}; answers in a pass: {self.time.batch:.1f}")
        console.print(f"limit: {self.time.limit}, {_WORDS[self.time.limit]}", markup=False)
        if self.changes:
            rows = [
                (one.what, _said(time.seconds), f"{whole / time.seconds:.2f}x", time.limit)
                for one in self.changes
                for time in [one.time]
            ]
            heads = ("change first (each alone)", "seconds", "faster", "then the limit is")
            console.print(_table(heads, rows, right=(1, 2)))
        else:
            console.print("no change that is known here saves 3 % or more")
        numbers = [(one.name, f"{one.value:.4g}", one.kind, one.source) for one in self.numbers]
        console.print(_table(("number", "value", "is", "from"), numbers, right=(1,)))
        if self.errors:
            worst = max(abs(told / took - 1) for told, took in self.errors.values())
            console.print(
                f"the model tells a step of the {len(self.errors)} runs within {worst:.0%}"
            )
        for warning in self.warnings:
            console.print(f"warning: {warning}", markup=False)
        return "\n".join(line.rstrip() for line in written.getvalue().splitlines())

    def _rows(self) -> list[tuple[str, ...]]:
        whole = self.time.seconds
        parts = self.time.parts
        rows = [
            (name, _said(seconds), f"{seconds / whole:.0%}")
            for name, seconds in parts.items()
            if abs(seconds) > 1e-9 * whole
        ]
        return [*rows, ("a step", _said(whole), "")]


def _said(seconds: float) -> str:
    return f"{seconds:,.0f}" if abs(seconds) >= 100 else f"{seconds:.3g}"


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()
) -> Table:
    table = Table()
    for place, head in enumerate(heads):
        table.add_column(head, justify="right" if place in right else "left")
    for row in rows:
        table.add_row(*row)
    return table
