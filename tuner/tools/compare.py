"""`tuner compare`: runs side by side (different settings, curves, common tasks), and a proof."""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from tuner.errors import ProofError, TunerError
from tuner.runs.directory import RunDirectory
from tuner.runs.estimates import Estimate, differing_settings, estimate, read_run
from tuner.runs.statistics import Comparison, Decision, Plan
from tuner.tasks.datasets import row_text, told_apart
from tuner.traces import Trace, read_traces

if TYPE_CHECKING:
    from rich.table import Table


_SHOWN = (
    "reward/mean",
    "calls/completion_tokens",
    "train/entropy",
    "train/kl_reference",
    "time/step",
)
"""Curves shown in addition to those of evaluations."""
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH, _TEXT = 40, 60
_TRAIN = "train"


class TaskRewards(BaseModel):
    """One task and the mean reward of its rollouts in each run; None if a run has no reward for
    it."""

    task: dict[str, Any]
    rewards: list[float | None]


class SplitTasks(BaseModel):
    """The tasks of one split, each from the latest step of a run that contains it.

    Attributes:
        steps: The latest step of each run.
        common: Tasks that every run has, sorted by difference in reward, largest first.
        others: For each run, how many tasks it has that are not common.
        differences: Mean over the tasks of the run's reward minus the first run's; None for the
            first run.
    """

    steps: list[int]
    common: list[TaskRewards]
    others: list[int]
    differences: list[Estimate | None]


class RunComparison(BaseModel):
    """Runs side by side; lists have one item for each run, in the order given.

    Attributes:
        runs: Their names.
        settings: The settings that differ, by key; None if a run does not have one.
        curves: The (step, value) pairs of each run, by metric.
        tasks: The compared tasks, by split.
    """

    runs: list[str]
    settings: dict[str, list[Any]]
    curves: dict[str, list[list[tuple[int, float]]]]
    tasks: dict[str, SplitTasks]

    def text(self, most: int) -> str:
        """The tables as text, with a maximum of `most` tasks for each split."""
        from rich.console import Console

        console = Console(file=io.StringIO(), record=True, width=100, highlight=False)
        console.print(*self._tables(most), sep="\n\n", markup=False)
        return "\n".join(line.rstrip() for line in console.export_text().splitlines())

    def _tables(self, most: int) -> Iterator[Table | str]:
        yield _table("settings that differ", ["", *self.runs], self._settings())
        if self.curves:
            columns = ["", "run", "first", "last", "highest", "over the steps"]
            yield _table("curves (each metric on one scale)", columns, self._curves())
        for split, tasks in self.tasks.items():
            steps = ", ".join(map(str, tasks.steps))
            title = f"{split}: {len(tasks.common)} tasks in every run, after step {steps}"
            yield _table(title, ["task", *self.runs], _task_rows(tasks, most))
            yield "\n".join(self._changes(tasks))

    def _settings(self) -> Iterator[list[str]]:
        for key, values in self.settings.items():
            yield [key, *("-" if value is None else str(value) for value in values)]

    def _curves(self) -> Iterator[list[str]]:
        for metric, curves in self.curves.items():
            points = [point for curve in curves for point in curve]
            steps, values = zip(*points, strict=True)
            for number, (run, curve) in enumerate(zip(self.runs, curves, strict=True)):
                name = "" if number else metric
                if not curve:
                    yield [name, run, "-", "-", "-", ""]
                    continue
                own = [value for _, value in curve]
                line = sparkline(curve, (min(steps), max(steps)), (min(values), max(values)))
                shown = [f"{value:.4g}" for value in (own[0], own[-1], max(own))]
                yield [name, run, *shown, line]

    def _changes(self, tasks: SplitTasks) -> Iterator[str]:
        for number, (run, found) in enumerate(zip(self.runs, tasks.differences, strict=True)):
            if number and found is not None:
                pairs = [(row.rewards[0], row.rewards[number]) for row in tasks.common]
                both = [(old, new) for old, new in pairs if old is not None and new is not None]
                counts = Counter((new > old) - (new < old) for old, new in both)
                yield (
                    f"{run} against {self.runs[0]}: {counts[1]} better, {counts[-1]} worse, "
                    f"{counts[0]} the same; reward {found.text('+.3f')}"
                )
            if tasks.others[number]:
                yield f"{run}: {tasks.others[number]} more that are not in every run"


def compare(paths: Sequence[Path], *, split: str | None = None) -> RunComparison:
    """Compare runs, which may still be training.

    Args:
        paths: Two or more run directories, or candidates' folders of an evaluation.
        split: The split to compare; None for all evaluation sets that every run has, or the
            training tasks if there is none.
    """
    read = [read_run(path.expanduser()) for path in paths]
    runs = [RunDirectory(path.expanduser().resolve()) for path in paths]
    if len({run.path for run in runs}) < max(2, len(runs)):
        raise TunerError("name two or more runs, each once")
    names = Counter(run.path.name for run in runs)
    found = [_files(run) for run in runs]
    splits = [one for one in found[0] if all(one in other for other in found)]
    if split is not None:
        for run, files in zip(runs, found, strict=True):
            if split not in files:
                there = ", ".join(files) or "none"
                raise TunerError(f"{run.path} has no traces of split {split!r} (splits: {there})")
        splits = [split]
    elif len(splits) > 1:
        splits = [one for one in splits if one != _TRAIN]
    return RunComparison(
        runs=[one.path.name if names[one.path.name] == 1 else str(one.path) for one in runs],
        settings=differing_settings(read),
        curves=_curves([one.metrics for one in read]),
        tasks={one: _tasks([files[one] for files in found]) for one in splits},
    )


class Proof(BaseModel):
    """Result of testing whether the second run is better than the first, task by task.

    Attributes:
        runs: Their names.
        split: The split of the tasks.
        steps: The steps of the rollouts.
        without_reward: Tasks skipped because a run has no reward for them.
        decision: The decision on the remaining tasks; its `expected_more` counts tasks.
    """

    runs: tuple[str, str]
    split: str
    steps: tuple[int, int]
    without_reward: int
    decision: Decision

    def text(self) -> str:
        """The proof as text."""
        (old, new), (first, last) = self.runs, self.steps
        lines = [f"{new} (step {last}) against {old} (step {first}) on {self.split}"]
        if self.without_reward:
            lines.append(f"{self.without_reward} tasks skipped: a run has no reward for them")
        return "\n".join([*lines, self.decision.text])


def prove(paths: Sequence[Path], plan: Plan, *, split: str | None = None) -> Proof:
    """Test whether the second of two runs is better than the first on their common tasks.

    Args:
        paths: Two directories, as in `compare`.
        plan: What to prove.
        split: The split of the tasks; None for the only evaluation set that both runs have.
    """
    if len(paths) != 2:
        raise ProofError(f"{len(paths)} runs given: a proof needs two, the current one first")
    found = compare(paths, split=split)
    if len(found.tasks) != 1:
        raise ProofError(
            f"the runs have {', '.join(found.tasks) or 'no tasks'} in common, and a proof uses "
            "one set: name it with --split"
        )
    ((name, tasks),) = found.tasks.items()
    proving, without_reward = Comparison(plan), 0
    for row in sorted(tasks.common, key=_place):
        serving, candidate = row.rewards
        if serving is None or candidate is None:
            without_reward += 1
        else:
            proving.add_pair(serving, candidate)
    return Proof(
        runs=(found.runs[0], found.runs[1]),
        split=name,
        steps=(tasks.steps[0], tasks.steps[1]),
        without_reward=without_reward,
        decision=proving.decision(),
    )


def _place(row: TaskRewards) -> str:
    """Sort key that is independent of the rewards."""
    return hashlib.sha256(row_text(row.task).encode()).hexdigest()


def _curves(
    histories: Sequence[Sequence[Mapping[str, Any]]],
) -> dict[str, list[list[tuple[int, float]]]]:
    there = dict.fromkeys(name for rows in histories for row in rows for name in row)
    chosen = [name for name in there if name.startswith("eval/")]
    return {
        name: [
            [(row["step"], row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]
            for rows in histories
        ]
        for name in (*chosen, *(name for name in _SHOWN if name in there))
    }


def _files(run: RunDirectory) -> dict[str, list[tuple[int, Path]]]:
    """The files of each split with their steps, latest first."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for path in sorted(run.traces.glob("*step_*.jsonl"), reverse=True):
        split, _, number = path.stem.rpartition("step_")
        if number.isdecimal():
            found.setdefault(split.removesuffix("_") or _TRAIN, []).append((int(number), path))
    return found


def _tasks(files: Sequence[Sequence[tuple[int, Path]]]) -> SplitTasks:
    found = [_latest(of_run) for of_run in files]
    keys = [key for key in found[0] if all(key in other for other in found)]
    common = [
        TaskRewards(task=found[0][key][0].task, rewards=[_mean(one[key]) for one in found])
        for key in keys
    ]
    pairs = [[(row.rewards[0], row.rewards[n]) for row in common] for n in range(len(files))]
    return SplitTasks(
        steps=[of_run[0][0] for of_run in files],
        common=sorted(common, key=_spread, reverse=True),
        others=[len(one) - len(keys) for one in found],
        differences=[
            estimate([new - old for old, new in pair if old is not None and new is not None])
            if number
            else None
            for number, pair in enumerate(pairs)
        ],
    )


def _latest(files: Sequence[tuple[int, Path]]) -> dict[str, list[Trace]]:
    """The rollouts of each task from its latest step; evaluations contain all tasks in each
    step."""
    found: dict[str, list[Trace]] = {}
    for step, path in files:
        for trace in read_traces(path, skip=True):
            of_task = found.setdefault(row_text(trace.task), [])
            if trace.final and (not of_task or of_task[0].id.step == step):
                of_task.append(trace)
        if files[0][1].name.partition("step_")[0]:  # an evaluation
            break
    return {key: traces for key, traces in found.items() if traces}


def _mean(traces: Sequence[Trace]) -> float | None:
    rewards = [trace.reward for trace in traces if trace.reward is not None]
    return fmean(rewards) if rewards else None


def _spread(row: TaskRewards) -> float:
    rewards = [reward for reward in row.rewards if reward is not None]
    return max(rewards) - min(rewards) if rewards else 0.0


def sparkline(
    curve: Sequence[tuple[int, float]], steps: tuple[int, int], values: tuple[float, float]
) -> str:
    """A curve as a line of bars; steps that share a bar are averaged, and gaps are spaces.

    Args:
        curve: (step, value).
        steps: First and last step of the line, shared with other curves.
        values: The values of the lowest and the highest bar.
    """
    (first, last), (low, high) = steps, values
    width = min(_WIDTH, last - first + 1)
    places: dict[int, list[float]] = {}
    for step, value in curve:
        places.setdefault((step - first) * width // (last - first + 1), []).append(value)
    scale = (len(_BARS) - 1) / ((high - low) or 1.0)
    return "".join(
        _BARS[round((fmean(places[n]) - low) * scale)] if n in places else " " for n in range(width)
    )


def _task_rows(tasks: SplitTasks, most: int) -> Iterator[list[str]]:
    names = told_apart([_text(row.task) for row in tasks.common])
    for row, name in zip(tasks.common[:most], names, strict=False):
        shown = ["no reward" if one is None else f"{one:.3f}" for one in row.rewards]
        yield [name if len(name) <= _TEXT else f"{name[: _TEXT - 3]}...", *shown]
    if len(tasks.common) > most:
        yield [f"... {len(tasks.common) - most} more that differ less", *("" for _ in tasks.steps)]


def _text(task: Mapping[str, Any]) -> str:
    """The first text of a row."""
    texts = [value for value in task.values() if isinstance(value, str)]
    return texts[0] if texts else json.dumps(task)


def _table(title: str, columns: Sequence[str], rows: Iterator[list[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
