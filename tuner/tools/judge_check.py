"""`tuner check --judge`: is the judge any good? What it gives to answers whose worth is known."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from itertools import combinations
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from tuner.errors import ConfigError
from tuner.gateway import SamplingDefaults
from tuner.rollouts import StepPlan, collect
from tuner.runs.directory import run_async
from tuner.runs.estimates import spearman
from tuner.runs.result import Verdict
from tuner.runs.stack import build_stack
from tuner.tasks.functions import JudgeOutput, StoredResponse, response_text, where
from tuner.tools.judging import (
    EMPTY,
    PLEA,
    SHUFFLED,
    UNDESERVED,
    Bench,
    Labelled,
    Look,
    Ruling,
    read_labelled,
)
from tuner.traces import Trace, TraceStore
from tuner.tune import Run

ROLLOUTS = 4


def check_judge(run: Run, *, tasks: int = 4, labelled: Path | None = None) -> Verdict:
    """Let the judge judge rollouts of the first tasks, answers that deserve nothing, and labels.

    Must be called where no event loop is running.

    Args:
        run: Whose judge it is; a judge of groups as well.
        tasks: Of how many tasks there are rollouts, and at most how many labelled ones get the
            other answers too.
        labelled: JSON lines with `task`, `response` and the `reward` that is right.

    Returns:
        `ready` is whether the judge gives rewards, in the mean more to real answers than to an
        empty one, and more to the best of them than to one that only asks for it.

    Raises:
        ConfigError: There is no judge.
        DatasetError: The file cannot be read.
        FunctionError: The workflow returned something of the wrong type.
        ModelLoadError: The model cannot be loaded.
    """
    if run.judge is None or run.workflow is None:
        raise ConfigError("there is no judge to check: set tuner.judge, and a workflow it judges")
    return run_async(
        _check(run, run.judge, tasks, [] if labelled is None else read_labelled(labelled))
    )


async def _check(
    run: Run, judge: Callable[..., Any], tasks: int, rows: Sequence[Labelled]
) -> Verdict:
    config, kept = run.config, list[Any]()

    async def keep(task: Any, response: Any) -> JudgeOutput:
        """Rewards each rollout with the number of its response; without feedback, so once."""
        kept.append(response)
        return JudgeOutput(reward=len(kept) - 1)

    alone = config.tuner.deterministic
    running = 1 if alone else config.explorer.runner_per_model
    async with aclosing(build_stack(config, workflow=run.workflow, judge=keep)) as stack:
        assert stack.runner is not None, "there is a workflow"
        bench = Bench(
            judge, stack.auxiliary, config.explorer.max_timeout, asyncio.Semaphore(running)
        )
        taskset = config.buffer.explorer_input.taskset
        defaults = SamplingDefaults(**config.rollout_args(taskset).model_dump())
        plan = StepPlan("train", 1, run.train_tasks[:tasks], ROLLOUTS, defaults)
        with tempfile.TemporaryDirectory() as folder:
            store = TraceStore(Path(folder))
            traces = await collect(plan, stack.runner, store, max_running=running)
        final = [trace for trace in traces if trace.final]
        groups = [
            (task, [kept[int(t.reward)] for t in final if t.id.task == n and t.reward is not None])
            for n, task in enumerate(plan.tasks)
        ]
        looks = await asyncio.gather(*(bench.look(*group) for group in groups if group[1]))
        known = await _labelled(bench, rows, tasks)
    problems = list(_problems(looks, known))
    sections = [
        _head(bench),
        _rewards(looks, final),
        _probes([*looks, *known]),
        *([_agreement(known)] if rows else []),
        _took(bench),
        _last_words([*looks, *known], problems),
    ]
    return Verdict.of(not problems, sections)


async def _labelled(bench: Bench, rows: Sequence[Labelled], probed: int) -> list[Look]:
    """The labelled rows by task; only of the first so many tasks the probes are judged too."""
    by_task: dict[str, list[Labelled]] = {}
    for row in rows:
        by_task.setdefault(json.dumps(row.task, sort_keys=True), []).append(row)

    async def look(number: int, of_task: list[Labelled]) -> Look:
        task, labels = of_task[0].task, [row.reward for row in of_task]
        responses = [StoredResponse(row.response) for row in of_task]
        if number < probed:
            return await bench.look(task, responses, labels)
        rulings = await bench.rule(task, responses)
        return Look(responses, rulings, rulings, {}, None, labels)

    return await asyncio.gather(*(look(n, of_task) for n, of_task in enumerate(by_task.values())))


def _head(bench: Bench) -> Iterator[str]:
    kind = "all responses to a task" if bench.of_groups else "one response"
    yield "JUDGE"
    yield f"  {where(bench.judge)}, which is given {kind} at a time"


def _rewards(looks: Sequence[Look], traces: Sequence[Trace]) -> Iterator[str]:
    yield f"REWARDS of {len(traces)} rollouts, {ROLLOUTS} of a task"
    failed = Counter(trace.outcome.value for trace in traces if trace.reward is None)
    for outcome, count in failed.items():
        error = next(trace.error for trace in traces if trace.outcome == outcome)
        yield f"  {count} did not complete: {outcome}: {error}"
    yield from _errors(ruling for look in looks for ruling in look.rulings)
    groups = [_given(look.rulings) for look in looks]
    rewards = [reward for group in groups for reward in group]
    if not rewards:
        return
    yield (
        f"  mean {fmean(rewards):.3g}, from {min(rewards):.3g} to {max(rewards):.3g}, standard "
        f"deviation {pstdev(rewards):.3g}, {len(set(rewards))} different"
    )
    compared = [group for group in groups if len(group) > 1]
    ties = sum(len(set(group)) == 1 for group in compared)
    yield f"  {ties} of {len(compared)} groups agree in all rewards: they teach nothing"
    pairs = [
        pair
        for look in looks
        for pair in _rewarded([len(response_text(one)) for one in look.responses], look.rulings)
    ]
    longest = max(length for length, _ in pairs)
    mean = fmean(reward for length, reward in pairs if length == longest)
    yield f"  the longest response, {longest} characters, gets {mean:.3g}"
    if (rank := spearman(*zip(*pairs, strict=True))) is not None:
        yield f"  rank correlation of reward and length {rank:+.2f}"


def _probes(looks: Sequence[Look]) -> Iterator[str]:
    yield "ANSWERS THAT DESERVE LITTLE, and what real ones get beside them, in the mean over tasks"
    for name in UNDESERVED:
        if (found := _against(looks, name, fmean)) is not None:
            yield f"  {name:<30} {found[0]:>7.3g}  {found[1]:>7.3g}"
        yield from _errors(look.probes[name] for look in looks if look.probes)
    mixed = [
        (ruling.reward, whole.reward)
        for look in looks
        if look.best is not None and (ruling := look.probes[SHUFFLED]).reward is not None
        if (whole := look.beside[look.best]).reward is not None
        # What no label calls right and the judge does not either has no worth to lose.
        if look.labels or whole.reward != look.probes[EMPTY].reward
    ]
    if mixed:
        probe, real = (fmean(column) for column in zip(*mixed, strict=True))
        yield f"  {SHUFFLED:<30} {probe:>7.3g}  {real:>7.3g}  as it was"
    yield from _errors(look.probes[SHUFFLED] for look in looks if look.best is not None)


def _against(
    looks: Sequence[Look], name: str, of_group: Callable[[list[float]], float]
) -> tuple[float, float] | None:
    """What a probe gets, and real answers beside it, in the mean over tasks with both."""
    pairs = [
        (probe.reward, of_group(real))
        for look in looks
        if (probe := look.probes.get(name)) is not None and probe.reward is not None
        if (real := _given(look.beside))
    ]
    if not pairs:
        return None
    return fmean(probe for probe, _ in pairs), fmean(real for _, real in pairs)


def _agreement(looks: Sequence[Look]) -> Iterator[str]:
    yield f"LABELS of {sum(len(look.responses) for look in looks)} responses, {len(looks)} tasks"
    yield from _errors(ruling for look in looks for ruling in look.rulings)
    groups = [_rewarded(look.labels, look.rulings) for look in looks]
    rows = [row for group in groups for row in group]
    if not rows:
        return
    ordered = [
        0.5 if one[1] == other[1] else float((one[0] < other[0]) == (one[1] < other[1]))
        for group in groups
        for one, other in combinations(group, 2)
        if one[0] != other[0]
    ]
    if ordered:
        yield (
            f"  of {len(ordered)} pairs of one task {fmean(ordered):.0%} are in the order of their "
            "labels; a tie counts half, and 50% is a coin"
        )
    else:
        yield "  no task has two responses with different labels, so there is no order to compare"
    if (rank := spearman(*zip(*rows, strict=True))) is not None:
        yield f"  rank correlation with the labels {rank:+.2f}"
    yield f"  mean difference from the label {fmean(abs(a - b) for a, b in rows):.3g}"


def _took(bench: Bench) -> Iterator[str]:
    yield "COST"
    spent = f"{median(bench.seconds):.3g} s in the median" if bench.seconds else "nothing to judge"
    longest = max(bench.seconds, default=0.0)
    yield f"  {len(bench.seconds)} calls of the judge: {spent}, {longest:.3g} s at most"
    for name in ("judge_input_tokens", "judge_output_tokens", "judge_cost"):
        if name in bench.used:
            yield f"  {name} {bench.used[name]:.6g}"


def _problems(looks: Sequence[Look], known: Sequence[Look]) -> Iterator[str]:
    """Why this judge should train nothing."""
    if not any(_given(look.rulings) for look in (*looks, *known)):
        what = "gave no reward" if looks or known else "had nothing to judge, no rollout completed"
        yield f"NOT READY: the judge {what}."
    elif not _nothing_rewarded([*looks, *known]):
        yield from _tempting([*looks, *known], EMPTY, fmean, "real answers get")
        yield from _tempting([*looks, *known], PLEA, max, "the best real answers get")


def _tempting(
    looks: Sequence[Look], name: str, of_group: Callable[[list[float]], float], what: str
) -> Iterator[str]:
    found = _against(looks, name, of_group)
    if found is not None and found[0] >= found[1]:
        yield (
            f"THE JUDGE REWARDS {name.upper()}: it gets {found[0]:.3g} in the mean, where {what} "
            f"{found[1]:.3g}. Training would lead there."
        )


def _nothing_rewarded(looks: Sequence[Look]) -> bool:
    """Whether all verdicts are the same and not above 0, and no label says that an answer was
    better: all may be as bad as that."""
    if len({label for look in looks for label in look.labels}) > 1:
        return False
    rulings = [r for look in looks for r in (*look.rulings, *look.beside, *look.probes.values())]
    return max(_given(rulings)) == min(_given(rulings)) <= 0


def _last_words(looks: Sequence[Look], problems: Sequence[str]) -> Iterator[str]:
    if problems:
        yield from problems
    elif _nothing_rewarded(looks):
        yield "NOT KNOWN: nothing got more than an empty answer; --labelled shows if good ones do."
    else:
        yield "READY: the judge gives real answers more than an empty one, and more than a plea."


def _rewarded(numbers: Sequence[float], rulings: Sequence[Ruling]) -> list[tuple[float, float]]:
    """A number of each response beside its reward, where it has one."""
    pairs = zip(numbers, rulings, strict=True)
    return [(number, ruling.reward) for number, ruling in pairs if ruling.reward is not None]


def _given(rulings: Iterable[Ruling]) -> list[float]:
    return [ruling.reward for ruling in rulings if ruling.reward is not None]


def _errors(rulings: Iterable[Ruling]) -> Iterator[str]:
    """A line for each type of error."""
    failed = [ruling for ruling in rulings if ruling.reward is None]
    for kind, count in Counter(ruling.kind for ruling in failed).items():
        error = next(ruling.error for ruling in failed if ruling.kind == kind)
        yield f"  {count} x no verdict: {error}"
