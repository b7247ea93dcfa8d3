"""The training rollouts of a run: begun ahead, ended early, known from before, handed to steps."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.backends.batches import BatchLog
from tuner.backends.order import batch_indices
from tuner.config import RunConfig
from tuner.gateway import SamplingDefaults
from tuner.rollout import Rollouts
from tuner.rollout.limits import Ending
from tuner.rollout.schedule import Schedule
from tuner.traces import RolloutId, Trace, TraceStore

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
        store: What was recorded before, and where traces go.
        batches: What steps took before.
        tasks: Rows of the dataset.
        start: The step that the run goes on after.
        total_steps: Length of the run.
        rollouts: Runs them.
        on_rollout: Called for each rollout that ended.
    """

    def __init__(
        self,
        config: RunConfig,
        store: TraceStore,
        batches: BatchLog,
        tasks: Sequence[Task],
        *,
        start: int,
        total_steps: int,
        rollouts: Rollouts,
        on_rollout: Callable[[], None],
    ) -> None:
        self._config = config
        self._tasks = tasks
        self._batch = config.buffer.batch_size
        self._repeat = config.algorithm.repeat_times
        self._rollouts = rollouts
        self._batches = batches
        self._on_rollout = on_rollout
        self._taken = batches.read()
        taskset = config.buffer.explorer_input.taskset
        self._defaults = SamplingDefaults(**config.rollout_args(taskset).model_dump())
        self._known: dict[int, list[Trace]] = {}
        self._endings: dict[int, dict[RolloutId, Ending]] = {}
        self._complete: Counter[int] = Counter()
        self._over: set[int] = set()
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self.ahead = config.synchronizer.sync_offset
        self._schedule: Schedule[list[Trace]] = Schedule(
            self._run,
            batch=self._batch,
            total=self._batch * total_steps,
            repeat=self._repeat,
            # One after the other, the global random states belong to one rollout at a time.
            max_running=1 if config.tuner.deterministic else config.explorer.runner_per_model,
            staleness=self.ahead,
            waits=config.algorithm.sample_strategy == "default",
            version=start,
            hold=max(self._taken, default=1) - 1,
        )
        self._restore(store, start, total_steps)

    def _restore(self, store: TraceStore, start: int, total_steps: int) -> None:
        """Look at what is on disk: groups that no step has taken are not lost."""
        trained: set[int] = set()
        for step in range(1, start + 1):
            planned = range((step - 1) * self._batch, step * self._batch)
            trained.update(self._taken.get(step, planned))
        first = next(n for n in range(len(trained) + 1) if n not in trained) // self._batch + 1
        for step in range(first, total_steps + 1):
            for trace in store.read("train", step):
                number = (step - 1) * self._batch + trace.id.task
                if number not in trained:
                    self._known.setdefault(number, []).append(trace)
        complete, begun = {}, {}
        for number, traces in self._known.items():
            final = {trace.id for trace in traces if trace.final}
            oldest = min((v for t in traces for c in t.calls for v in c.versions), default=start)
            if len(final) == self._repeat:
                known = [trace for trace in traces if trace.id in final]
                complete[number] = (sorted(known, key=lambda t: (t.id, t.attempt)), oldest)
                self._complete[number // self._batch] += 1
            else:
                begun[number] = oldest
        self._schedule.restore(trained=trained, complete=complete, begun=begun)

    @property
    def waiting(self) -> int:
        """Complete groups that no step has taken."""
        return self._schedule.complete

    @property
    def running(self) -> int:
        """Rollouts that were begun and have not ended."""
        return self._schedule.running

    def advance(self, step: int) -> None:
        """Step `step` is over: begin what may be begun now."""
        self._schedule.advance(step)

    async def take(self, step: int) -> Collected:
        """What step `step` trains on, as soon as it is there.

        Raises:
            FunctionError: The workflow or judge returned something of the wrong type.
            TrainingError: A rollout failed, and `tuner.on_failure` is `abort`.
        """
        self._schedule.advance(step - 1)
        groups = await self._schedule.take(self._taken.get(step))
        if self.ahead and step not in self._taken:
            self._batches.append(step, list(groups))
        traces = [trace for group in groups.values() for trace in group]
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
                self._schedule.rollout_ended(number)
                self._on_rollout()

        traces = await self._rollouts.run(
            wanted,
            self._defaults,
            known=self._known.pop(number, ()),
            endings=endings,
            abort_on_failure=self._config.tuner.on_failure == "abort",
            on_trace=ended,
        )
        self._complete[planned] += 1
        self._watch(planned)
        return traces

    def _rows(self, step: int) -> list[int]:
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
        await self._schedule.cancel()
