"""Judge responses outside rollouts, such as recorded ones with another judge.

`tuner replay` only scores them; `tuner rebase` trains on the new rewards; `tuner check --judge`
judges responses of known quality in the same way.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tuner.errors import FunctionError, RewardTimeout, TunerError
from tuner.rollouts.limits import without_exit
from tuner.rollouts.runner import JudgeResult, judgements
from tuner.tasks.functions import (
    JudgeOutput,
    StoredResponse,
    call_group_judge,
    call_judge,
    check_judge_function,
    judges_groups,
)
from tuner.tasks.selection import derive_seed
from tuner.traces import Outcome, Trace, TraceStore, read_traces

logger = logging.getLogger("tuner")

# Outcomes with a response from the workflow; with other outcomes there is nothing to judge.
JUDGED = (
    Outcome.COMPLETED,
    Outcome.JUDGE_ERROR,
    Outcome.JUDGE_TIMEOUT,
    Outcome.INVALID_REWARD,
)
MAX_RUNNING = 16


@dataclass(eq=False)
class JudgeCalls:
    """Calls a judge, of single responses or of groups, outside a rollout.

    Args:
        models: Opens the auxiliary models of one call, by its session and seed.
        timeout: Maximum seconds of one call; None for no limit.
        retries: Further calls of a judge that fails.

    Attributes:
        seconds: Time of each call, retries included.
    """

    judge: Callable[..., Any]
    models: Callable[[str, int], AbstractContextManager[Mapping[str, Any]]]
    seed: int = 0
    timeout: float | None = None
    retries: int = 0
    max_running: int = MAX_RUNNING
    seconds: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._running = asyncio.Semaphore(self.max_running)

    async def call(
        self, task: Mapping[str, Any], responses: Sequence[Any], session: str, seed: int
    ) -> list[JudgeResult]:
        """Judgements of one call; `responses` are those of a group, or a single one."""

        async def ask() -> list[JudgeOutput]:
            with self.models(session, seed) as models:
                shared: Any = {"task": task, "auxiliary_models": models, "logger": logger}
                if judges_groups(self.judge):
                    return await call_group_judge(self.judge, responses=responses, **shared)
                return [await call_judge(self.judge, response=responses[0], **shared)]

        async def limited() -> list[JudgeOutput]:
            try:
                async with asyncio.timeout(self.timeout) as deadline:
                    return await without_exit(ask())
            except FunctionError:
                raise
            except Exception:
                if not deadline.expired():
                    raise
                raise RewardTimeout(
                    f"no verdict within {self.timeout:g} s (explorer.max_timeout)"
                ) from None

        async with self._running:
            began = time.perf_counter()
            try:
                return await judgements(limited, len(responses), retries=self.retries)
            finally:
                self.seconds.append(time.perf_counter() - began)

    async def judge_traces(
        self, traces: Sequence[Trace], wanted: Callable[[Trace], bool]
    ) -> list[JudgeResult | None]:
        """A new judgement of each wanted trace, with the response stored as text."""
        groups = defaultdict[tuple[int, int, int], list[int]](list)
        for place, trace in enumerate(traces):
            if wanted(trace):
                alone = 0 if judges_groups(self.judge) else place
                groups[trace.id.step, trace.id.task, alone].append(place)
        found: list[JudgeResult | None] = [None] * len(traces)

        async def judge(places: Sequence[int]) -> None:
            mine = sorted((traces[place] for place in places), key=lambda trace: trace.id)
            first = mine[0]
            attempt: int | str = "judge" if judges_groups(self.judge) else first.attempt
            given = await self.call(
                dict(first.task),
                [StoredResponse(trace.response) for trace in mine],
                f"{first.id}-{attempt}",
                derive_seed(self.seed, first.id, attempt),
            )
            by_id = dict(zip((trace.id for trace in mine), given, strict=True))
            for place in places:
                found[place] = by_id[traces[place].id]

        # In a group of asyncio tasks, the first mistake of the judge's code cancels the others.
        try:
            async with asyncio.TaskGroup() as group:
                for places in groups.values():
                    group.create_task(judge(places))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return found


def was_judged(trace: Trace) -> bool:
    """True if a rollout reached its judge.

    A reward function that failed inside the workflow leaves a judge's outcome but no response.
    """
    if not trace.final or trace.outcome is Outcome.COMPLETED:
        return trace.final
    asked = trace.outcome in JUDGED and bool(trace.seconds.get("judge"))
    return asked and not all(call.undelivered for call in trace.calls)


def asks_for_models(judge: Callable[..., Any]) -> bool:
    parameters = inspect.signature(judge).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return takes_any or "auxiliary_models" in parameters


# `tuner replay`: score stored traces with another judge; loads no model.


class NoModels(dict[str, Any]):
    """The auxiliary models of a replay: every access fails."""

    def __missing__(self, name: str) -> NoReturn:
        raise FunctionError(
            f"the judge uses the auxiliary model {name!r}, but tuner replay loads no model; "
            "call an external model in the judge, or judge during the run"
        )


@dataclass
class StepScores:
    """Sums over the scores of one step, or of several.

    `before` and `after` are count and sum of rewards; `said` has the first error of each class.
    """

    scored: int = 0
    before: tuple[int, float] = (0, 0.0)
    after: tuple[int, float] = (0, 0.0)
    changed: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    said: dict[str, str] = field(default_factory=dict)
    unscored: Counter[str] = field(default_factory=Counter)

    def add(self, old: float | None, judgement: JudgeResult) -> None:
        new = judgement.reward
        self.scored += 1
        self.changed += None not in (old, new) and old != new
        if old is not None:
            self.before = self.before[0] + 1, self.before[1] + old
        if new is not None:
            self.after = self.after[0] + 1, self.after[1] + new
        if judgement.error is not None:
            self.errors[judgement.kind] += 1
            self.said.setdefault(judgement.kind, judgement.error)

    def __add__(self, other: StepScores) -> StepScores:
        return StepScores(
            self.scored + other.scored,
            (self.before[0] + other.before[0], self.before[1] + other.before[1]),
            (self.after[0] + other.after[0], self.after[1] + other.after[1]),
            self.changed + other.changed,
            self.errors + other.errors,
            {**other.said, **self.said},
            self.unscored + other.unscored,
        )


@dataclass(frozen=True)
class ReplayResult:
    """Sums by step, and the JSONL file with one line for each score."""

    steps: dict[int, StepScores]
    path: Path

    def __str__(self) -> str:
        """For each step: traces scored, mean reward before and after, number of changes, errors."""
        names = ("step", "scored", "old mean", "new mean", "changed", "errors")
        lines, total = [_line(*names)], StepScores()
        for step, scores in sorted(self.steps.items()):
            lines.append(_scores_line(str(step), scores))
            total += scores
        lines.append(_scores_line("all", total))
        for kind, count in total.errors.most_common():
            lines.append(f"{count} x {kind}, for instance: {total.said[kind]}")
        if total.unscored:
            counts = ", ".join(f"{count} {name}" for name, count in total.unscored.most_common())
            lines.append(f"not scored, because there is no response to judge: {counts}")
        return "\n".join([*lines, f"scores: {self.path}"])


def _line(step: str, scored: Any, old: str, new: str, changed: Any, errors: Any) -> str:
    return f"{step:>6} {scored:>7} {old:>9} {new:>9} {changed:>8} {errors:>7}"


def _scores_line(name: str, scores: StepScores) -> str:
    old, new = (f"{s / n:.4f}" if n else "-" for n, s in (scores.before, scores.after))
    return _line(name, scores.scored, old, new, scores.changed, scores.errors.total())


def replay(
    run: Path,
    judge: Callable[..., Any],
    *,
    name: str,
    split: str = "train",
    steps: tuple[int, int] | None = None,
) -> ReplayResult:
    """Score stored traces again; writes `replay_<name>.jsonl` into the run directory.

    Skips attempts that a retry replaced. The judge gets `task`, a `StoredResponse` or those of a
    group, and no auxiliary models. Must not be called from a running event loop.

    Args:
        run: The run directory.
        judge: The judge.
        name: Name of the judge in the file's name.
        split: "train", or the name of an evaluation set.
        steps: First and last step; None for all.

    Raises:
        FunctionError: The judge cannot be called, returned the wrong type, or needs a field that
            the task does not have, or an auxiliary model.
        TunerError: The run has no such traces.
    """
    check_judge_function(judge)
    path = run / f"replay_{re.sub(r'[^A-Za-z0-9_.-]+', '.', name).strip('.')}.jsonl"
    unfinished = path.with_name(f".{path.name}")
    found: dict[int, StepScores] = {}
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            for step, stored in _files(run, split, steps):
                scores = found[step] = StepScores()
                for trace, judgement in asyncio.run(_replayed(stored, judge)):
                    if judgement is None:
                        scores.unscored[trace.outcome.value] += 1
                    else:
                        scores.add(trace.reward, judgement)
                        file.write(json.dumps(_row(trace, judgement)) + "\n")
    except BaseException:
        unfinished.unlink()
        raise
    unfinished.replace(path)
    return ReplayResult(steps=found, path=path)


async def _replayed(
    stored: Path, judge: Callable[..., Any]
) -> Iterator[tuple[Trace, JudgeResult | None]]:
    final = [trace for trace in read_traces(stored, skip=True) if trace.final]
    calls = JudgeCalls(judge, lambda session, seed: nullcontext(NoModels()))
    found = await calls.judge_traces(final, lambda trace: trace.outcome in JUDGED)
    return zip(final, found, strict=True)


def _row(trace: Trace, judgement: JudgeResult) -> dict[str, Any]:
    return {
        "id": vars(trace.id),
        "attempt": trace.attempt,
        "old_reward": trace.reward,
        "reward": judgement.reward,
        "metrics": judgement.metrics,
        "error": judgement.error,
    }


def parse_steps(text: str | None) -> tuple[int, int] | None:
    """First and last step of `3-7` or `3`; None for None."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None or (match[2] and int(match[2]) < int(match[1])):
        raise TunerError(f"--steps is {text!r}: write first-last, 3-7 for instance, or one step")
    return int(match[1]), int(match[2] or match[1])


def _files(run: Path, split: str, steps: tuple[int, int] | None) -> list[tuple[int, Path]]:
    folder = run / "traces"
    if not folder.is_dir():
        raise TunerError(f"{run} is not a run: it has no traces/ folder")
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
