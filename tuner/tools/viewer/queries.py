"""Queries of the page: select and sort traces, and sum over them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tuner.errors import TunerError
from tuner.tools.viewer.index import SUMS, Json, TraceIndex, TraceRow, folded
from tuner.traces import RolloutId
from tuner.training.forks import Point, point_values, resolved, trunk_of

NOT_COMPLETED = "not completed"
RETRIED = "replaced by a retry"
# Maximum number of traces of one task to show, from the first and the last steps.
SAME_TASK = 200

# Training tasks to show: number for each order, and number of columns of steps.
TASKS_BY_ORDER = 50
TASK_COLUMNS = 40

# Tasks with a reward in at least two steps, and its change.
_CHANGES = """
SELECT last.asked, last.split, last.reward / last.n - first.reward / first.n
FROM (
    SELECT split, asked, MIN(step) AS first, MAX(step) AS last FROM tasks
    GROUP BY split, asked HAVING MIN(step) < MAX(step)
) AS ends
JOIN tasks AS first ON (first.split, first.asked, first.step) = (ends.split, ends.asked, ends.first)
JOIN tasks AS last ON (last.split, last.asked, last.step) = (ends.split, ends.asked, ends.last)
"""
_DRAWN_AGAIN = (
    "SELECT 1 FROM tasks WHERE split = 'train' GROUP BY asked HAVING COUNT(*) > 1 LIMIT 1"
)
_ORDERS = {
    "": "id",
    "new": "id DESC",
    "worst": "reward IS NOT NULL, reward, id",
    "best": "reward IS NULL, reward DESC, id",
    "long": "tokens DESC, id",
    "changed": "change.by IS NULL, ABS(change.by) DESC, traces.asked, traces.split, id",
}

_BEGINS = {
    "start": "within IS NULL",
    "inside": "within IS NOT NULL",
    "diverged": "diverged IS NOT NULL",
}


@dataclass(frozen=True)
class TraceQuery:
    """Selects and sorts traces. Empty values and None select all.

    Attributes:
        split: "train", or the name of an evaluation set.
        step: The step.
        outcome: An outcome, or `NOT_COMPLETED`, or `RETRIED`.
        cause: A cause of branches, "any" or "none"; selects traces whose branches are known.
        begins: "start", "inside" another rollout, or "diverged" from the rollout to start in.
        low: Minimum reward.
        high: Maximum reward.
        text: Text that the task or the answer must contain; case is ignored.
        order: One of `new`, `worst` (failures, then low rewards), `best`, `long`, and `changed`
            (tasks whose mean reward changed most between their first and last step).
    """

    split: str = ""
    step: int | None = None
    outcome: str = ""
    cause: str = ""
    begins: str = ""
    low: float | None = None
    high: float | None = None
    text: str = ""
    order: str = ""

    def condition(self, traces: TraceIndex) -> tuple[str, list[Any]]:
        """The condition in SQL, with the values of its placeholders."""
        parts: list[tuple[str, list[Any]]] = []
        if self.split:
            parts.append(("traces.split = ?", [self.split]))
        if self.step is not None:
            parts.append(("step = ?", [self.step]))
        if self.outcome == NOT_COMPLETED:
            parts.append(("outcome != 'completed'", []))
        elif self.outcome == RETRIED:
            parts.append(("NOT final", []))
        elif self.outcome:
            parts.append(("outcome = ?", [self.outcome]))
        if self.cause == "none":
            parts.append(("counted AND id NOT IN (SELECT trace FROM branches)", []))
        elif self.cause == "any":
            parts.append(("id IN (SELECT trace FROM branches)", []))
        elif self.cause:
            parts.append(("id IN (SELECT trace FROM branches WHERE cause = ?)", [self.cause]))
        if self.begins:
            if self.begins not in _BEGINS:
                raise TunerError(
                    f"begins is {self.begins!r}: it must be one of {', '.join(_BEGINS)}"
                )
            parts.append((_BEGINS[self.begins], []))
        if self.low is not None:
            parts.append(("reward >= ?", [self.low]))
        if self.high is not None:
            parts.append(("reward <= ?", [self.high]))
        if needle := folded(self.text):
            # In a separate query, or the texts would be searched twice.
            traces.fill("hit", "SELECT id FROM texts WHERE INSTR(folded, ?)", [needle])
            parts.append(("(traces.asked IN hit OR answered IN hit)", []))
        condition = " AND ".join(["1", *(part for part, _ in parts)])
        return condition, [value for _, values in parts for value in values]


def find(
    traces: TraceIndex, wanted: TraceQuery, first: int = 0, most: int | None = None
) -> list[int]:
    """The numbers of the selected traces, in order, starting at position `first`."""
    if wanted.order not in _ORDERS:
        names = ", ".join(name for name in _ORDERS if name)
        raise TunerError(f"order is {wanted.order!r}: it must be one of {names}, or empty")
    where, values = wanted.condition(traces)
    joined = ""
    if wanted.order == "changed":
        traces.fill("change", _CHANGES)
        joined = "LEFT JOIN change ON (change.asked, change.split) = (traces.asked, traces.split)"
    found = traces.ask(
        f"SELECT traces.id FROM traces {joined} WHERE {where} ORDER BY {_ORDERS[wanted.order]} "
        "LIMIT ? OFFSET ?",
        [*values, -1 if most is None else most, first],
    )
    return [number for (number,) in found]


def count(traces: TraceIndex, wanted: TraceQuery) -> int:
    """Number of selected traces."""
    if replace(wanted, order="") == TraceQuery():
        return traces.total
    where, values = wanted.condition(traces)
    return int(traces.ask(f"SELECT COUNT(*) FROM traces WHERE {where}", values)[0][0])


def changes(traces: TraceIndex) -> dict[tuple[str, int], float]:
    """Change of tasks' mean reward from first step to last, by split and `same`."""
    return {(split, same): by for same, split, by in traces.ask(_CHANGES)}


def number_of(traces: TraceIndex, file: str, offset: int) -> int | None:
    """The number of the trace whose line starts there, or None."""
    found = traces.ask("SELECT id FROM traces WHERE file = ? AND offset = ?", (file, offset))
    return int(found[0][0]) if found else None


def same_task(traces: TraceIndex, split: str, identity: bytes) -> list[TraceRow]:
    """Final attempts at a task, by step; a long list omits the middle."""
    found = traces.ask(
        "SELECT id FROM traces WHERE asked = (SELECT id FROM texts WHERE hash = ?) "
        "AND split = ? AND final ORDER BY step, id",
        (identity, split),
    )
    numbers = [number for (number,) in found]
    half = SAME_TASK // 2
    return traces.rows(numbers if len(numbers) <= 2 * half else numbers[:half] + numbers[-half:])


def tree(traces: TraceIndex, rollout: RolloutId) -> Json | None:
    """The rollouts that share a beginning with one, and the values of their forks, from the traces
    read so far.

    Args:
        traces: The traces of a run.
        rollout: The rollout.

    Returns:
        `trunk`, the rollout that starts at the beginning; `ends`, the rows of all, whose `within`,
        `at_call` and `at_token` say where they start; `forks`, the starting points with the `mean`
        reward of the `ends` that continue from there, or None and 0 if none has a reward. None if
        nothing starts inside the rollout and it starts inside no other.
    """
    found = traces.ask(
        "SELECT id, within FROM traces WHERE (split, step, task, final) = (?, ?, ?, 1) ORDER BY id",
        (rollout.split, rollout.step, rollout.task),
    )
    if all(within is None for _, within in found):
        return None
    rows = {row.rollout: row for row in traces.rows([number for number, _ in found])}
    origins = {
        number: Point(row.within, row.at_call, row.at_token)
        for number, row in rows.items()
        if row.within is not None
    }
    values = point_values({n: r.reward for n, r in rows.items() if r.reward is not None}, origins)
    trunk = trunk_of(rollout.rollout, origins)
    at = {n: point for n, point in resolved(origins).items() if trunk_of(n, origins) == trunk}
    if not at:
        return None
    for n, point in at.items():
        rows[n] = replace(rows[n], within=point.rollout, at_call=point.call, at_token=point.token)
    nothing = {"mean": None, "ends": 0}
    return {
        "trunk": trunk,
        "ends": [row.to_json() for n, row in rows.items() if n in at or n == trunk],
        "forks": [
            asdict(point) | (asdict(values[point]) if point in values else nothing)
            for point in sorted(set(at.values()), key=lambda point: (point.rollout, point.position))
        ],
    }


def summary(traces: TraceIndex) -> dict[str, Any]:
    """Names to choose from, sums over the traces, and how they changed.

    Returns:
        `splits`, `steps`, `outcomes`, `causes`: names that traces have.
        `trees`: True if rollouts start inside others.
        `tasks`: True if a training task was drawn in several steps, so that it has a course.
        `tables`: rows of the tables, each with its `kind`, `name` and `split`, and the sums of
        `Tally` over final attempts.
        `curves`: for each training step `role/<name>`, the mean reward of a role's calls,
        `tokens/<name>`, sampled tokens per call, and `tool/<name>`, the share of a tool's calls
        that failed.
        `branches`: of final training attempts: their number, the number whose branches are known,
        and the number of branches by cause.
    """
    kinds = traces.ask("SELECT DISTINCT kind, name FROM tallies")
    sums = ", ".join(f"SUM({name})" for name in SUMS)
    tables = traces.ask(
        f"SELECT kind, name, split, {sums} FROM tallies WHERE kind IN ('outcome', 'tool', 'role') "
        "GROUP BY kind, name, split ORDER BY kind, SUM(n) DESC, name"
    )
    names = ("kind", "name", "split", *SUMS)
    named = [dict(zip(names, found, strict=True)) for found in tables]
    attempts = traces.ask("SELECT DISTINCT split, step FROM tallies WHERE kind = 'attempt'")
    return {
        "splits": sorted({split for split, _ in attempts}),
        "steps": sorted({step for _, step in attempts}),
        "outcomes": sorted(name for kind, name in kinds if kind == "attempt"),
        "causes": sorted({cause for (cause,) in traces.ask("SELECT DISTINCT cause FROM branches")}),
        "trees": bool(traces.ask("SELECT 1 FROM traces WHERE within IS NOT NULL LIMIT 1")),
        "tasks": bool(traces.ask(_DRAWN_AGAIN)),
        "tables": named,
        "curves": _curves(traces),
        "branches": _training_branches(traces),
    }


def tasks_over_time(traces: TraceIndex) -> Json:
    """The mean reward of training tasks by step.

    Returns:
        `total`: number of tasks with a reward; `steps`: first and last step of each column;
        `field`: the task field that the selector draws by, or None; `rows`: a maximum of four times
        `TASKS_BY_ORDER` tasks, those taken most often, with the highest and the lowest mean, and
        with the largest change: `asked`, `stratum`, `taken` (number of steps), `n` rollouts with a
        reward, their `mean`, `change` from the first step to the last, and `cells`, [column,
        rollouts, mean] of each column with rollouts.
    """
    found = traces.ask(
        "SELECT asked, MAX(stratum), COUNT(*), SUM(n), SUM(reward) / SUM(n) FROM tasks "
        "WHERE split = 'train' GROUP BY asked"
    )
    by = {same: change for (split, same), change in changes(traces).items() if split == "train"}
    orders = (
        sorted(found, key=lambda task: -task[2]),
        sorted(found, key=lambda task: task[4]),
        sorted(found, key=lambda task: -task[4]),
        sorted(found, key=lambda task: -abs(by.get(task[0], 0.0))),
    )
    chosen = {task[0]: task for order in orders for task in order[:TASKS_BY_ORDER]}
    ((first, last),) = traces.ask("SELECT MIN(step), MAX(step) FROM tasks WHERE split = 'train'")
    width = 1 if first is None else -(-(last - first + 1) // TASK_COLUMNS)
    steps = [] if first is None else [(at, at + width - 1) for at in range(first, last + 1, width)]
    marks = ", ".join("?" * len(chosen))
    cells: dict[int, list[tuple[int, int, float]]] = defaultdict(list)
    for asked, column, n, mean in traces.ask(
        f"SELECT asked, (step - ?) / ?, SUM(n), SUM(reward) / SUM(n) FROM tasks "
        f"WHERE split = 'train' AND asked IN ({marks}) GROUP BY 1, 2 ORDER BY 1, 2",
        [first or 0, width, *chosen],
    ):
        cells[asked].append((column, n, mean))
    texts = dict(traces.ask(f"SELECT id, shown FROM texts WHERE id IN ({marks})", list(chosen)))
    return {
        "total": len(found),
        "field": traces.field,
        "steps": steps,
        "rows": [
            {
                **dict(zip(("same", "stratum", "taken", "n", "mean"), task, strict=True)),
                "asked": traces.task(texts[same]),
                "change": by.get(same),
                "cells": cells[same],
            }
            for same, task in sorted(chosen.items())
        ],
    }


def _curves(traces: TraceIndex) -> list[dict[str, float]]:
    rows: dict[int, dict[str, float]] = defaultdict(dict)
    for kind, name, step, n, failures, tokens, reward, rewarded in traces.ask(
        "SELECT kind, name, step, n, failures, tokens, reward, rewarded FROM tallies "
        "WHERE split = 'train' AND kind IN ('role', 'tool') ORDER BY step"
    ):
        row = rows[step]
        row["step"] = step
        if kind == "tool":
            row[f"tool/{name}"] = failures / n
        elif name:
            row[f"tokens/{name}"] = tokens / n
            if rewarded:
                row[f"role/{name}"] = reward / rewarded
    return list(rows.values())


def _training_branches(traces: TraceIndex) -> dict[str, Any]:
    sums: Mapping[tuple[str, str], int] = {
        (kind, name): n
        for kind, name, n in traces.ask(
            "SELECT kind, name, SUM(n) FROM tallies WHERE split = 'train' "
            "AND kind IN ('outcome', 'cause', 'counted') GROUP BY kind, name"
        )
    }
    return {
        "traces": sum(n for (kind, _), n in sums.items() if kind == "outcome"),
        "looked_at": sums.get(("counted", ""), 0),
        "counts": {name: n for (kind, name), n in sums.items() if kind == "cause"},
    }
