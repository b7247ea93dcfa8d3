"""Groups of rollouts: what is on disk is kept, the rest is run, ahead of its step if allowed."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from tuner.config import RunConfig
from tuner.data.curriculum import Curriculum
from tuner.data.order import batch_indices
from tuner.errors import TrainingError
from tuner.gateway import SamplingDefaults
from tuner.rollout.attempt import Again
from tuner.rollout.batch_log import BatchLog, taken_until
from tuner.rollout.branching import Branching
from tuner.rollout.limits import Ending
from tuner.rollout.panel import panels_of
from tuner.rollout.runner import RolloutRunner
from tuner.rollout.schedule import Schedule
from tuner.traces import Outcome, RolloutId, Trace, TraceStore

Wanted = Mapping[RolloutId, dict[str, Any]]
_NOBODY: Mapping[RolloutId, Ending] = {}
_NOWHERE: Mapping[RolloutId, Again] = {}
WENT_WELL = (Outcome.COMPLETED, Outcome.REJECTED)


@dataclass(frozen=True)
class StepPlan:
    """What one step asks for: `repeat` rollouts of each task."""

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
    """Runs rollouts, at most `max_running` at a time, first come first served.

    Args:
        runner: Runs one.
        store: Where traces go; None: nowhere.
        max_running: Rollouts at the same time, whoever asked for them.
        on_end: Sees every attempt that was run, once it is stored.
    """

    runner: RolloutRunner
    store: TraceStore | None
    _: KW_ONLY
    max_running: int
    on_end: Callable[[Trace], None] = lambda trace: None

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.max_running)

    def known(self, split: str, step: int) -> list[Trace]:
        """What was recorded before of a step."""
        return [] if self.store is None else self.store.read(split, step)

    async def run(
        self,
        wanted: Wanted,
        defaults: SamplingDefaults,
        *,
        known: Sequence[Trace] = (),
        endings: Mapping[RolloutId, Ending] = _NOBODY,
        again: Mapping[RolloutId, Again] = _NOWHERE,
        abort_on_failure: bool = False,
        on_trace: Callable[[Trace], None] = lambda trace: None,
    ) -> list[Trace]:
        """Run each rollout that is not known, and store it as it ends.

        Args:
            wanted: The task of each rollout.
            defaults: What calls that do not say are sampled with.
            known: Traces of these rollouts that the store already holds.
            endings: Who may end them from outside.
            again: Where those begin that begin inside others.
            abort_on_failure: Whether a rollout that fails by itself ends the run.
            on_trace: Sees every attempt of every rollout, known ones first.

        Returns:
            Every attempt of every rollout, sorted by rollout and attempt.

        Raises:
            FunctionError: The workflow or judge returned something of the wrong type.
            TrainingError: `abort_on_failure` is set and a rollout did not complete.
        """
        panels = panels_of(self.runner, wanted)
        done = {trace.id for trace in known if trace.final}
        # Rollouts that are judged together are made together.
        done -= {
            id for panel in panels.values() for id in panel.ids if not done.issuperset(panel.ids)
        }
        # Attempts of a rollout that never got to its final one are run again from the start.
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
                f"{len(lost)} rollouts ended without an outcome, {min(lost)} for one; a bug "
                "in tuner"
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
    """The rollouts of one step. Those that the store already holds are not run again.

    Returns and raises as `Rollouts.run`.
    """
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
class Collected:
    """What one step trains on.

    Attributes:
        traces: Every attempt of its rollouts, in the order of the tasks.
        unfinished: Groups of which rollouts were ended early, as (step, task).
    """

    traces: list[Trace]
    unfinished: frozenset[tuple[int, int]]


class TrainingGroups:
    """The groups of a run, from the first to the last.

    Group `n` is task `n % batch_size` of what step `n // batch_size + 1` would train if everything
    took its turn; its traces have that step in their ids and are stored under it.

    Args:
        config: The effective configuration.
        batches: What steps took before.
        tasks: Rows of the dataset.
        start: The step that the run goes on after.
        total_steps: Length of the run.
        rollouts: Runs them; its store has what was recorded before.
        branching: Divides groups, where some of their rollouts begin inside others.
        whole: Groups that are complete as they were recorded, whatever `branching` would do now.
        curriculum: Draws tasks by what they have shown; else they come in one order.
        on_rollout: Called with each rollout that ended.

    Attributes:
        ahead: Updates by which collection may be ahead of training.
        schedule: Which groups run, and which are complete.
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
        self._endings: dict[int, dict[RolloutId, Ending]] = {}
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
        """Look at what is on disk: groups that no step has taken are not lost."""
        trained = taken_until(self._taken, start, batch=self._batch)
        first = next(n for n in range(len(trained) + 1) if n not in trained) // self._batch + 1
        for step in range(first, total_steps + 1):
            for trace in self._rollouts.known("train", step):
                number = (step - 1) * self._batch + trace.id.task
                if number not in trained:
                    self._known.setdefault(number, []).append(trace)
        complete, begun = {}, {}
        for number, traces in self._known.items():
            final = {trace.id for trace in traces if trace.final}
            versions = [v for t in traces for c in t.calls for v in c.versions]
            if len(final) == self._repeat or number in whole:
                known = [trace for trace in traces if trace.id in final]
                oldest = min(versions, default=total_steps)
                complete[number] = (sorted(known, key=lambda t: (t.id, t.attempt)), oldest)
                self._complete[number // self._batch] += 1
            elif versions:  # without a token nothing of it is old
                begun[number] = min(versions)
        self.schedule.restore(trained=trained, complete=complete, begun=begun)

    async def take(self, step: int) -> Collected:
        """What step `step` trains on, as soon as it is there.

        Raises:
            FunctionError: The workflow or judge returned something of the wrong type.
            TrainingError: A rollout failed, and `tuner.on_failure` is `abort`.
        """
        self.schedule.advance(step - 1)
        groups = await self.schedule.take(self._taken.get(step))
        if self.ahead and step not in self._taken:
            self._batches.append(step, list(groups))
        traces = [trace for group in groups.values() for trace in group]
        if self._curriculum is not None:
            final = {n: [t for t in group if t.final] for n, group in groups.items()}
            rewards = {n: [t.reward for t in f if t.reward is not None] for n, f in final.items()}
            self._curriculum.learn(step, rewards)
        if self._branching is not None:
            self._branching.learn(step, traces)
        unfinished = {
            (trace.id.step, trace.id.task) for trace in traces if trace.error == ENDED_EARLY
        }
        if self._config.explorer.over_rollout.return_partial_tasks:
            unfinished = set()
        return Collected(traces, frozenset(unfinished))

    async def _run(self, number: int) -> list[Trace]:
        """One group; the schedule hears of each rollout that ends."""
        planned, index = divmod(number, self._batch)
        task = self._tasks[self._rows(planned + 1)[index]]
        wanted = {RolloutId(planned + 1, index, n): task for n in range(self._repeat)}
        endings = {id: Ending() for id in wanted}
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
            ids: Sequence[RolloutId], again: Mapping[RolloutId, Again] = _NOWHERE
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
        for id in ids:  # those that had no place to begin
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
        """Once enough of the tasks that were planned together are complete, end the others soon."""
        over = self._config.explorer.over_rollout
        enough = math.ceil(self._batch * (1 - over.ratio))
        if over.ratio and self._complete[planned] >= enough and planned not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[planned] = loop.call_later(over.wait_after_min, self._end_rest, planned)

    def _end_rest(self, planned: int) -> None:
        self._over.add(planned)
        self._end(self._endings.get(planned, {}))

    def _end(self, endings: dict[RolloutId, Ending]) -> None:
        for ending in endings.values():
            ending.end(ENDED_EARLY)

    async def cancel(self) -> None:
        """Cancel what runs."""
        for timer in self._timers.values():
            timer.cancel()
        await self.schedule.cancel()
