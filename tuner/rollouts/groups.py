"""Groups of rollouts: stored rollouts are reused, the others run, ahead of their step if
allowed."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from tuner.config import RunConfig
from tuner.errors import TrainingError
from tuner.gateway import SamplingDefaults
from tuner.rollouts.branching import Branching
from tuner.rollouts.limits import RolloutEnd
from tuner.rollouts.runner import BranchStart, RolloutRunner, panels_of
from tuner.tasks.selection import Curriculum, batch_indices
from tuner.traces import Outcome, RolloutId, Trace, TraceStore, without_vote
from tuner.traces.reading import Count, JsonReader
from tuner.traces.store import closed, cut_torn_line

# Rules for collection ahead of training, in groups and updates: when a group begins, and which
# groups a step takes.
#
# A group that begins at version b has tokens of version b and later. In the step that makes update
# v + 1 (the weights have v updates) its staleness is at most v - b: within a bound s its *deadline*
# is the step at v = b + s. `admissible` limits new groups to those that steps can take before their
# deadlines; `in_time` prevents a step from leaving more groups than later steps can take.


T = TypeVar("T")


def admissible(
    *, max_running: int, running: int, accepted: int, batch: int, version: int, staleness: int
) -> int:
    """Groups that may begin now, at least 0 (AReaL, arXiv 2505.24298, equation 3).

    A step uses `batch` groups, so a group that begins now is trained after all earlier ones:
    `(accepted + running) // batch` steps from the start, of which `version` are finished. A
    staleness of 0 is synchronous.

    Args:
        max_running: Maximum number of running groups.
        running: Running groups.
        accepted: Groups since the start of the run that have ended and are trained.
        batch: Groups per step.
        version: Number of updates of the weights.
        staleness: Maximum number of updates between the weights that sampled and those that train.
    """
    ahead = (staleness + version + 1) * batch - (accepted + running)
    return max(0, min(max_running - running, ahead))


def in_time(left: Iterable[int], *, batch: int, version: int, staleness: int) -> bool:
    """Whether every group that a step leaves can still be trained within the bound.

    The groups with deadlines up to d must fit into the steps up to d: for every d,
    `#{begun + staleness <= d} <= (d - version) * batch`.

    Args:
        left: The initial version of each group that is neither trained nor in this step.
        batch: Groups per step.
        version: Number of updates of the weights that this step trains.
        staleness: The bound.
    """
    deadlines = sorted(begun + staleness for begun in left)
    return all(
        count <= max(0, deadline - version) * batch for count, deadline in enumerate(deadlines, 1)
    )


class WorkAhead(Generic[T]):
    """Numbered tasks until they are taken; `on_end` is called with each number that ends."""

    def __init__(self, on_end: Callable[[int], None] = lambda number: None) -> None:
        self._on_end = on_end
        self._running: dict[int, asyncio.Task[T]] = {}
        self._ended: dict[int, T] = {}
        self._errors: list[BaseException] = []
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Number of tasks that began and were not taken."""
        return len(self._running) + len(self._ended)

    @property
    def running(self) -> list[int]:
        """Numbers of running tasks, ascending."""
        return sorted(self._running)

    @property
    def ended(self) -> list[int]:
        """Numbers of tasks that can be taken, ascending: the oldest first."""
        return sorted(self._ended)

    def begin(self, number: int, work: Coroutine[Any, Any, T]) -> None:
        """Start a task; an event loop must be running."""
        task = asyncio.ensure_future(work)
        self._running[number] = task
        task.add_done_callback(lambda task: self._end(number, task))

    def add(self, number: int, result: T) -> None:
        """Add the result of a task that ended earlier."""
        self._ended[number] = result

    def _end(self, number: int, task: asyncio.Task[T]) -> None:
        if self._running.pop(number, None) is None:
            return  # cancelled by `cancel`
        if task.cancelled():
            self._errors.append(TrainingError(f"group {number} was cancelled from outside"))
        elif (error := task.exception()) is not None:
            self._errors.append(error)
        else:
            self._ended[number] = task.result()
        self._changed.set()
        self._on_end(number)

    async def until(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`, which is checked whenever a task ends."""
        while True:
            if self._errors:
                raise self._errors.pop(0)
            if ready():
                return
            self._changed.clear()
            await self._changed.wait()

    def take(self, numbers: Sequence[int]) -> list[T]:
        """Remove tasks that have ended and return their results."""
        return [self._ended.pop(number) for number in numbers]

    async def cancel(self) -> None:
        """Cancel and remove all tasks."""
        tasks = list(self._running.values())
        self._running.clear()
        self._ended.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(eq=False)
class Schedule(Generic[T]):
    """The groups of a run, numbered from 0: begun in order, trained when they are complete.

    Group `n` begins once the weights have `n // batch - staleness` updates and there is room for
    its rollouts. A step takes the oldest `batch` complete groups. With `waits` it first waits for
    groups that would otherwise make later steps exceed the staleness; without it, slow groups may
    exceed the staleness and their old tokens must be skipped.

    Args:
        run: Runs the group with a number; calls `rollout_ended` for each of its rollouts.
        batch: Groups per step.
        total: Groups in the run.
        repeat: Rollouts per group.
        max_running: Maximum number of concurrent rollouts.
        staleness: Maximum number of updates that collection may be ahead; 0 is synchronous.
        waits: Whether a step waits for groups that would become too old.
        version: Number of updates of the weights.
        hold: Version before which no group begins: earlier steps take stored groups.
    """

    run: Callable[[int], Coroutine[Any, Any, T]]
    _: KW_ONLY
    batch: int
    total: int
    repeat: int
    max_running: int
    staleness: int
    waits: bool = True
    version: int = 0
    hold: int = 0

    def __post_init__(self) -> None:
        self._next = 0
        self._begun: dict[int, int] = {}
        self._skipped: set[int] = set()
        self._earliest: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._ahead: WorkAhead[T] = WorkAhead(self._group_ended)

    @property
    def complete(self) -> int:
        """Number of groups that have ended and were not taken by a step."""
        return len(self._ahead.ended)

    @property
    def running(self) -> int:
        """Number of running rollouts."""
        return sum(self._left.values())

    def restore(
        self,
        *,
        trained: Collection[int],
        complete: Mapping[int, tuple[T, int]],
        begun: Mapping[int, int],
    ) -> None:
        """Resume a run from its stored groups. Call it before any group begins.

        Args:
            trained: Groups that steps have taken.
            complete: Result and initial version of each other group that ended.
            begun: Initial version of each unfinished group with stored rollouts.
        """
        self._skipped = {*trained, *complete}
        for number, (result, version) in complete.items():
            self._ahead.add(number, result)
            self._begun[number] = version
        self._earliest = dict(begun)
        self._begun.update(begun)  # their remaining rollouts may wait for room, and become older

    def advance(self, version: int) -> None:
        """Set the number of updates of the weights."""
        self.version = version
        self.fill()

    def rollout_ended(self, number: int) -> None:
        """Record that a rollout of a group ended."""
        if self._left.get(number, 0) > 0:
            self._left[number] -= 1
            self.fill()

    def fill(self) -> None:
        """Start all groups that may begin."""
        if self.version < self.hold:
            return
        while True:
            while self._next in self._skipped:
                self._next += 1
            running = len(self._left)
            # A group begins as soon as one of its rollouts can; later ones use newer weights.
            room = -(-(self.max_running - self.running) // self.repeat)
            allowed = admissible(
                max_running=running + room,
                running=running,
                accepted=self._next - running,
                batch=self.batch,
                version=self.version,
                staleness=self.staleness,
            )
            if not allowed or self._next >= self.total:
                return
            number, self._next = self._next, self._next + 1
            self._begun[number] = self._earliest.get(number, self.version)
            self._left[number] = self.repeat
            self._ahead.begin(number, self.run(number))

    def _group_ended(self, number: int) -> None:
        self._left.pop(number, None)
        self.fill()

    async def take(self, numbers: Sequence[int] | None = None) -> dict[int, T]:
        """The groups that the next step trains, by number, oldest first.

        Args:
            numbers: The groups that the step took before it was interrupted; None: as they
                complete.
        """
        self.fill()
        if numbers is not None:
            wanted = set(numbers)
            await self._ahead.until(lambda: wanted <= set(self._ahead.ended))
            chosen = sorted(wanted)
        else:
            await self._ahead.until(self._ready)
            chosen = self._choice()
        for number in chosen:
            del self._begun[number]
        return dict(zip(chosen, self._ahead.take(chosen), strict=True))

    def _choice(self) -> list[int]:
        # After a kill, a group may be older than an earlier one that was restarted.
        oldest = sorted(self._ahead.ended, key=lambda number: (self._begun[number], number))
        return sorted(oldest[: self.batch])

    def _ready(self) -> bool:
        chosen = self._choice()
        if len(chosen) < self.batch:
            return False
        if not self.waits or not self._ahead.running:
            return True
        left = (begun for number, begun in self._begun.items() if number not in chosen)
        return in_time(left, batch=self.batch, version=self.version, staleness=self.staleness)

    async def cancel(self) -> None:
        """Cancel all running groups."""
        self._left.clear()
        self.total = 0
        await self._ahead.cancel()


# The groups of each step, recorded before they are trained.


_BATCHES = JsonReader[dict[str, Any]](
    closed("TakenGroups", {"step": Count, "groups": list[Count]}), "a batch"
)


class BatchLog:
    """One line per step, written before it is trained, so that a killed run repeats it.

        {"step": 3, "groups": [4, 5, 7]}

    Groups are numbered from 0 in the order of the tasks.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[int, list[int]]:
        """The groups of each step; an incomplete last line is skipped."""
        return {row["step"]: row["groups"] for _, _, row in _BATCHES.lines(self._path)}

    def cut(self, step: int) -> None:
        """Delete the entries from this step on."""
        if not self._path.exists():
            return
        kept = [line for _, line, row in _BATCHES.lines(self._path) if row["step"] < step]
        unfinished = self._path.with_name(f".{self._path.name}")
        unfinished.write_bytes(b"".join(kept))
        unfinished.replace(self._path)

    def append(self, step: int, groups: Sequence[int]) -> None:
        """Record the groups of a step."""
        cut_torn_line(self._path)
        with self._path.open("ab") as file:
            file.write(json.dumps({"step": step, "groups": list(groups)}).encode() + b"\n")


def taken_until(taken: Mapping[int, Sequence[int]], step: int, *, batch: int) -> set[int]:
    """The groups taken by the steps up to `step`: those in `taken`, and the others in order."""
    found: set[int] = set()
    for one in range(1, step + 1):
        found.update(taken.get(one, range((one - 1) * batch, one * batch)))
    return found


Wanted = Mapping[RolloutId, dict[str, Any]]
_NOBODY: Mapping[RolloutId, RolloutEnd] = {}
_NOWHERE: Mapping[RolloutId, BranchStart] = {}
WENT_WELL = (Outcome.COMPLETED, Outcome.REJECTED)


@dataclass(frozen=True)
class StepPlan:
    """Rollouts of one step: `repeat` of each task."""

    split: str
    step: int
    tasks: Sequence[dict[str, Any]]
    repeat: int
    defaults: SamplingDefaults

    @property
    def ids(self) -> list[RolloutId]:
        return list(self.wanted)

    @property
    def wanted(self) -> Wanted:
        """The task of each rollout."""
        return {
            RolloutId(self.step, number, rollout, self.split): task
            for number, task in enumerate(self.tasks)
            for rollout in range(self.repeat)
        }


@dataclass(eq=False)
class Rollouts:
    """Runs rollouts, up to `max_running` concurrently, in order of request.

    Traces are written to `store`, if any; `on_end` receives every attempt that ran, after it is
    stored.
    """

    runner: RolloutRunner
    store: TraceStore | None
    _: KW_ONLY
    max_running: int
    on_end: Callable[[Trace], None] = lambda trace: None

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.max_running)

    def known(self, split: str, step: int) -> list[Trace]:
        """The stored traces of a step."""
        return [] if self.store is None else self.store.read(split, step)

    async def run(
        self,
        wanted: Wanted,
        defaults: SamplingDefaults,
        *,
        known: Sequence[Trace] = (),
        endings: Mapping[RolloutId, RolloutEnd] = _NOBODY,
        again: Mapping[RolloutId, BranchStart] = _NOWHERE,
        abort_on_failure: bool = False,
        on_trace: Callable[[Trace], None] = lambda trace: None,
    ) -> list[Trace]:
        """Run each rollout that is not known, and store it when it ends.

        Args:
            wanted: The task of each rollout.
            defaults: Sampling settings of calls that do not set them.
            known: Traces of these rollouts that are already stored.
            endings: Ends rollouts from outside.
            again: The beginnings of those that begin inside others.
            abort_on_failure: Whether a rollout that fails by itself ends the run.
            on_trace: Receives every attempt of every rollout, known ones first.

        Returns:
            Every attempt of every rollout, sorted by rollout and attempt.
        """
        panels = panels_of(self.runner, wanted)
        done = {trace.id for trace in known if trace.final}
        # Rollouts that are judged together are run together.
        done -= {
            id for panel in panels.values() for id in panel.ids if not done.issuperset(panel.ids)
        }
        # A rollout without a final attempt is run again from the start.
        traces = [trace for trace in known if trace.id in done]
        for trace in traces:
            on_trace(trace)

        async def run(id: RolloutId, task: dict[str, Any]) -> None:
            asked, ending = time.perf_counter(), endings.get(id)

            async def attempted(**options: Any) -> list[Trace]:
                async with self._slots:
                    queued = time.perf_counter() - asked
                    return await self.runner.run(
                        task,
                        id,
                        defaults,
                        ending=ending,
                        queued=queued,
                        again=again.get(id),
                        **options,
                    )

            panel = panels.get((id.step, id.task))
            attempts = await (attempted() if panel is None else panel.run(id, attempted))
            for trace in attempts:
                if self.store is not None:
                    self.store.append(trace)
                self.on_end(trace)
                on_trace(trace)
            traces.extend(attempts)
            if ending is not None and ending.reason is not None:
                return
            if abort_on_failure and attempts[-1].outcome not in WENT_WELL:
                raise TrainingError(
                    f"rollout {id} ended with {attempts[-1].outcome}: {attempts[-1].error} "
                    "(tuner.on_failure is 'abort')"
                )

        try:
            async with asyncio.TaskGroup() as group:
                for id, task in wanted.items():
                    if id not in done:
                        group.create_task(run(id, task))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if lost := wanted.keys() - {trace.id for trace in traces if trace.final}:
            raise AssertionError(
                f"{len(lost)} rollouts ended without an outcome, the first is {min(lost)}; this "
                "is a bug in tuner"
            )
        return sorted(traces, key=lambda trace: (trace.id, trace.attempt))


async def collect(
    plan: StepPlan,
    runner: RolloutRunner,
    store: TraceStore,
    *,
    max_running: int,
    abort_on_failure: bool = False,
    on_trace: Callable[[Trace], None] = lambda trace: None,
) -> list[Trace]:
    """The rollouts of one step, as returned by `Rollouts.run`; stored ones are not run again."""
    return await Rollouts(runner, store, max_running=max_running).run(
        plan.wanted,
        plan.defaults,
        known=store.read(plan.split, plan.step),
        abort_on_failure=abort_on_failure,
        on_trace=on_trace,
    )


Task = dict[str, Any]
ENDED_EARLY = "ended before it was complete: its step had enough tasks (explorer.over_rollout)"


@dataclass(frozen=True)
class CollectedStep:
    """Every attempt that a step trains on, by task, groups that were stopped early as (step, task),
    and the rollouts that were recorded before this process."""

    traces: list[Trace]
    unfinished: frozenset[tuple[int, int]]
    recorded: frozenset[RolloutId] = frozenset()


class TrainingGroups:
    """All groups of a run.

    Group `n` is task `n % batch_size` of step `n // batch_size + 1` in a synchronous run; its
    traces have that step in their ids and are stored under it.

    Args:
        batches: Groups that earlier steps took.
        start: Step after which the run resumes.
        total_steps: Number of steps of the run.
        rollouts: Runs the rollouts; its store has the recorded ones.
        branching: Divides groups if some of their rollouts begin inside others.
        whole: Groups that are complete as recorded, regardless of `branching`.
        curriculum: Draws tasks by their results; None: they have a fixed order.
        on_rollout: Called with each rollout that ended.

    Attributes:
        ahead: Maximum number of updates that collection may be ahead of training.
        schedule: Running and complete groups.
    """

    def __init__(
        self,
        config: RunConfig,
        batches: BatchLog,
        tasks: Sequence[Task],
        *,
        start: int,
        total_steps: int,
        rollouts: Rollouts,
        on_rollout: Callable[[Trace], None],
        branching: Branching | None = None,
        whole: Collection[int] = (),
        curriculum: Curriculum | None = None,
    ) -> None:
        self._config = config
        self._curriculum = curriculum
        self._tasks = tasks
        self._batch = config.buffer.batch_size
        self._repeat = config.algorithm.repeat_times
        self._rollouts = rollouts
        self._batches = batches
        self._on_rollout = on_rollout
        self._branching = branching
        if branching is not None:
            branching.restore(start)
        self._taken = batches.read()
        taskset = config.buffer.explorer_input.taskset
        self._defaults = SamplingDefaults(**config.rollout_args(taskset).model_dump())
        self._known: dict[int, list[Trace]] = {}
        self._endings: dict[int, dict[RolloutId, RolloutEnd]] = {}
        self._complete: Counter[int] = Counter()
        self._over: set[int] = set()
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self.ahead = config.synchronizer.sync_offset
        self.schedule: Schedule[list[Trace]] = Schedule(
            self._run,
            batch=self._batch,
            total=self._batch * total_steps,
            repeat=self._repeat,
            max_running=rollouts.max_running,
            staleness=self.ahead,
            waits=config.algorithm.sample_strategy == "default",
            version=start,
            hold=max(self._taken, default=1) - 1,
        )
        self._restore(start, total_steps, whole)

    def _restore(self, start: int, total_steps: int, whole: Collection[int]) -> None:
        """Restore stored groups that no step has taken."""
        trained = taken_until(self._taken, start, batch=self._batch)
        first = next(n for n in range(len(trained) + 1) if n not in trained) // self._batch + 1
        for step in range(first, total_steps + 1):
            for trace in self._rollouts.known("train", step):
                number = (step - 1) * self._batch + trace.id.task
                if number not in trained:
                    self._known.setdefault(number, []).append(trace)
        self._recorded = {trace.id for traces in self._known.values() for trace in traces}
        complete, begun = {}, {}
        for number, traces in self._known.items():
            final = {trace.id for trace in traces if trace.final}
            versions = [v for t in traces for c in t.calls for v in c.versions]
            if len(final) == self._repeat or number in whole:
                known = [trace for trace in traces if trace.id in final]
                oldest = min(versions, default=total_steps)
                complete[number] = (sorted(known, key=lambda t: (t.id, t.attempt)), oldest)
                self._complete[number // self._batch] += 1
            elif versions:  # without a token it cannot be old
                begun[number] = min(versions)
        self.schedule.restore(trained=trained, complete=complete, begun=begun)

    async def take(self, step: int) -> CollectedStep:
        """The groups of step `step`, as soon as they are available."""
        self.schedule.advance(step - 1)
        groups = await self.schedule.take(self._taken.get(step))
        if self.ahead and step not in self._taken:
            self._batches.append(step, list(groups))
        traces = [trace for group in groups.values() for trace in group]
        if self._curriculum is not None:
            final = {n: [t for t in group if t.final] for n, group in groups.items()}
            rewards = {
                number: [
                    trace.reward
                    for trace in traces
                    if trace.reward is not None and without_vote(trace) is None
                ]
                for number, traces in final.items()
            }
            self._curriculum.learn(step, rewards)
        if self._branching is not None:
            self._branching.learn(step, traces)
        unfinished = {
            (trace.id.step, trace.id.task) for trace in traces if trace.error == ENDED_EARLY
        }
        if self._config.explorer.over_rollout.return_partial_tasks:
            unfinished = set()
        recorded = self._recorded.intersection(trace.id for trace in traces)
        return CollectedStep(traces, frozenset(unfinished), frozenset(recorded))

    async def _run(self, number: int) -> list[Trace]:
        """Run one group; the schedule is notified of each rollout that ends."""
        planned, index = divmod(number, self._batch)
        task = self._tasks[self._rows(planned + 1)[index]]
        wanted = {RolloutId(planned + 1, index, n): task for n in range(self._repeat)}
        endings = {id: RolloutEnd() for id in wanted}
        self._endings.setdefault(planned, {}).update(endings)
        self._watch(planned)
        if planned in self._over:
            self._end(endings)

        def ended(trace: Trace) -> None:
            if trace.final:
                del self._endings[planned][trace.id]
                self.schedule.rollout_ended(number)
                self._on_rollout(trace)

        known = self._known.pop(number, ())

        async def run(
            ids: Sequence[RolloutId], again: Mapping[RolloutId, BranchStart] = _NOWHERE
        ) -> list[Trace]:
            return await self._rollouts.run(
                {id: wanted[id] for id in ids},
                self._defaults,
                known=[trace for trace in known if trace.id in ids],
                endings=endings,
                again=again,
                abort_on_failure=self._config.tuner.on_failure == "abort",
                on_trace=ended,
            )

        ids = list(wanted)
        traces = await (self._branching.run(ids, run) if self._branching else run(ids))
        for id in ids:  # those without a branch point
            self._endings[planned].pop(id, None)
        self._complete[planned] += 1
        self._watch(planned)
        return traces

    def _rows(self, step: int) -> list[int]:
        if self._curriculum is not None:
            return self._curriculum.rows(step)
        return batch_indices(
            step,
            size=self._batch,
            rows=len(self._tasks),
            selector=self._config.buffer.explorer_input.taskset.data_selector,
        )

    def _watch(self, planned: int) -> None:
        """Once enough of the tasks planned together are complete, end the others soon."""
        over = self._config.explorer.over_rollout
        enough = math.ceil(self._batch * (1 - over.ratio))
        if over.ratio and self._complete[planned] >= enough and planned not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[planned] = loop.call_later(over.wait_after_min, self._end_rest, planned)

    def _end_rest(self, planned: int) -> None:
        self._over.add(planned)
        self._end(self._endings.get(planned, {}))

    def _end(self, endings: dict[RolloutId, RolloutEnd]) -> None:
        for ending in endings.values():
            ending.end(ENDED_EARLY)

    async def cancel(self) -> None:
        """Cancel all running groups."""
        for timer in self._timers.values():
            timer.cancel()
        await self.schedule.cancel()
