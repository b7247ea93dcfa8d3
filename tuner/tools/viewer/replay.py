"""`tuner replay`: stored traces scored by another judge. No model is run and none is loaded."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tuner.errors import FunctionError, TunerError
from tuner.tasks.functions import (
    StoredResponse,
    call_judge,
    check_judge_function,
    judges_groups,
    where,
)
from tuner.traces import Outcome, Trace, TraceStore, read_traces

logger = logging.getLogger("tuner")

# The workflow returned a response in these; in the others there is nothing to judge.
JUDGED = (
    Outcome.COMPLETED,
    Outcome.JUDGE_ERROR,
    Outcome.JUDGE_TIMEOUT,
    Outcome.INVALID_REWARD,
)
MAX_RUNNING = 16


class NoModels(dict[str, Any]):
    """The auxiliary models of a replay: none."""

    def __missing__(self, name: str) -> NoReturn:
        raise FunctionError(
            f"the judge asks for the auxiliary model {name!r}, but tuner replay runs no model; "
            "call a model of your own in the judge, or judge while the run goes on"
        )


@dataclass(frozen=True)
class Score:
    """What the judge gave one trace.

    Attributes:
        trace: The trace as stored.
        reward: The new reward, or None when the judge failed.
        metrics: The judge's numbers.
        error: One line on how it failed, or None.
        error_type: The error's class, or "invalid reward".
    """

    trace: Trace
    reward: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    error_type: str | None = None

    @property
    def changed(self) -> bool:
        """Whether there are an old and a new reward, and they differ."""
        old = self.trace.reward
        return old is not None and self.reward is not None and old != self.reward

    def to_json(self) -> dict[str, Any]:
        return {
            "id": vars(self.trace.id),
            "attempt": self.trace.attempt,
            "old_reward": self.trace.reward,
            "reward": self.reward,
            "metrics": self.metrics,
            "error": self.error,
        }


@dataclass
class Tally:
    """The scores of one step, or of several.

    Attributes:
        scored: Traces that the judge was given.
        before, after: How many rewards there are, and their sum.
        changed: Scores that are another reward.
        errors: By their type: scores that failed, and what the first of them said.
        unscored: Traces without a response, by how they ended.
    """

    scored: int = 0
    before: tuple[int, float] = (0, 0.0)
    after: tuple[int, float] = (0, 0.0)
    changed: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    said: dict[str, str] = field(default_factory=dict)
    unscored: Counter[str] = field(default_factory=Counter)

    def add(self, score: Score) -> None:
        self.scored += 1
        self.changed += score.changed
        if score.trace.reward is not None:
            self.before = self.before[0] + 1, self.before[1] + score.trace.reward
        if score.reward is not None:
            self.after = self.after[0] + 1, self.after[1] + score.reward
        if score.error_type is not None:
            self.errors[score.error_type] += 1
            self.said.setdefault(score.error_type, score.error or "")

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.scored + other.scored,
            (self.before[0] + other.before[0], self.before[1] + other.before[1]),
            (self.after[0] + other.after[0], self.after[1] + other.after[1]),
            self.changed + other.changed,
            self.errors + other.errors,
            {**other.said, **self.said},
            self.unscored + other.unscored,
        )


@dataclass(frozen=True)
class Replay:
    """What became of all scores, and where they were written.

    Attributes:
        steps: By step.
        path: The JSONL file with one line per score.
    """

    steps: dict[int, Tally]
    path: Path


def replay(
    run: Path,
    judge: Callable[..., Any],
    *,
    name: str,
    split: str = "train",
    steps: tuple[int, int] | None = None,
) -> Replay:
    """Score stored traces again; writes `replay_<name>.jsonl` into the run directory.

    Attempts that a retry replaced are left out. The judge gets `task`, a `StoredResponse` and no
    auxiliary models. Must be called where no event loop is running.

    Args:
        run: The run directory.
        judge: The judge.
        name: Names the judge in the file's name.
        split: "train", or the name of an evaluation set.
        steps: First and last step; None takes all.

    Raises:
        FunctionError: The judge cannot be called, returned something of the wrong type, asked for
            a field that the task does not have, or for an auxiliary model.
        TunerError: The run has no such traces.
    """
    check_judge_function(judge)
    if judges_groups(judge):
        raise FunctionError(
            f"{where(judge)} judges groups, and a replay scores each response alone: give a judge "
            "that takes `response`"
        )
    path = run / f"replay_{re.sub(r'[^A-Za-z0-9_.-]+', '.', name).strip('.')}.jsonl"
    unfinished = path.with_name(f".{path.name}")
    tallies: dict[int, Tally] = {}
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            for step, stored in _files(run, split, steps):
                tally = tallies[step] = Tally()
                final = [trace for trace in read_traces(stored, skip=True) if trace.final]
                judged = [trace for trace in final if trace.outcome in JUDGED]
                tally.unscored.update(t.outcome.value for t in final if t.outcome not in JUDGED)
                for score in asyncio.run(_score_all(judged, judge)):
                    tally.add(score)
                    file.write(json.dumps(score.to_json()) + "\n")
    except BaseException:
        unfinished.unlink()
        raise
    unfinished.replace(path)
    return Replay(steps=tallies, path=path)


def parse_steps(text: str | None) -> tuple[int, int] | None:
    """`3-7`, `3` or None as first and last step.

    Raises:
        TunerError: It is something else.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None or (match[2] and int(match[2]) < int(match[1])):
        raise TunerError(f"--steps is {text!r}: write first-last, 3-7 for instance, or one step")
    return int(match[1]), int(match[2] or match[1])


def replay_table(result: Replay) -> str:
    """Per step: traces scored, mean reward before and after, how many changed, what failed."""
    lines = [
        f"{'step':>6} {'scored':>7} {'old mean':>9} {'new mean':>9} {'changed':>8} {'errors':>7}"
    ]
    total = Tally()
    for step, tally in sorted(result.steps.items()):
        lines.append(_line(str(step), tally))
        total += tally
    lines.append(_line("all", total))
    for kind, count in total.errors.most_common():
        lines.append(f"{count} x {kind}, for instance: {total.said[kind]}")
    if total.unscored:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in total.unscored.most_common())
        lines.append(f"not scored, since there is no response to judge: {counts}")
    lines.append(f"scores: {result.path}")
    return "\n".join(lines)


def _line(name: str, tally: Tally) -> str:
    old, new = (_mean(*part) for part in (tally.before, tally.after))
    errors = tally.errors.total()
    return f"{name:>6} {tally.scored:>7} {old:>9} {new:>9} {tally.changed:>8} {errors:>7}"


def _mean(count: int, total: float) -> str:
    return f"{total / count:.4f}" if count else "-"


def _files(run: Path, split: str, steps: tuple[int, int] | None) -> list[tuple[int, Path]]:
    folder = run / "traces"
    if not folder.is_dir():
        raise TunerError(f"{run} is not a run: it has no folder traces/")
    store = TraceStore(folder)
    found, splits = [], set()
    for path in folder.glob("*step_*.jsonl"):
        prefix, _, number = path.stem.rpartition("step_")
        splits.add(prefix.rstrip("_") or "train")
        if number.isdecimal() and store.path(split, int(number)) == path:
            found.append((int(number), path))
    chosen = [(n, path) for n, path in found if steps is None or steps[0] <= n <= steps[1]]
    if not chosen:
        numbers = f"; steps of {split}: {min(found)[0]}-{max(found)[0]}" if found else ""
        raise TunerError(
            f"{run} has no traces of split {split!r} in the chosen steps (splits: "
            f"{', '.join(sorted(splits)) or 'none'}{numbers})"
        )
    return sorted(chosen)


async def _score_all(traces: Sequence[Trace], judge: Callable[..., Any]) -> list[Score]:
    running = asyncio.Semaphore(MAX_RUNNING)
    # A group: the first error that is the judge's own mistake ends the others.
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_score(trace, judge, running)) for trace in traces]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _score(trace: Trace, judge: Callable[..., Any], running: asyncio.Semaphore) -> Score:
    try:
        async with running:
            verdict = await call_judge(
                judge,
                task=trace.task,
                response=StoredResponse(trace.response),
                auxiliary_models=NoModels(),
                logger=logger,
            )
    except FunctionError:
        raise
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return Score(trace, None, error=text, error_type=type(error).__name__)
    metrics = verdict.metrics or {}
    if not math.isfinite(verdict.reward):
        text = f"the judge gave reward {verdict.reward}; a reward must be a finite number"
        return Score(trace, None, metrics, error=text, error_type="invalid reward")
    return Score(trace, verdict.reward, metrics)
