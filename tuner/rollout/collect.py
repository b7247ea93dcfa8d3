"""Running many rollouts: what is on disk already is kept, what is missing is run and stored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.errors import TrainingError
from tuner.gateway import SamplingDefaults
from tuner.rollout.limits import Ending
from tuner.rollout.runner import RolloutRunner
from tuner.traces import Outcome, RolloutId, Trace, TraceStore

Wanted = Mapping[RolloutId, dict[str, Any]]
_NOBODY: Mapping[RolloutId, Ending] = {}


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


class Rollouts:
    """Runs rollouts, at most `max_running` at a time, first come first served.

    Args:
        runner: Runs one.
        store: Where traces go.
        max_running: Rollouts at the same time, whoever asked for them.
        on_end: Sees every attempt that was run, once it is stored.
    """

    def __init__(
        self,
        runner: RolloutRunner,
        store: TraceStore,
        *,
        max_running: int,
        on_end: Callable[[Trace], None] = lambda trace: None,
    ) -> None:
        self._runner = runner
        self._on_end = on_end
        self._store = store
        self._slots = asyncio.Semaphore(max_running)

    async def run(
        self,
        wanted: Wanted,
        defaults: SamplingDefaults,
        *,
        known: Sequence[Trace] = (),
        endings: Mapping[RolloutId, Ending] = _NOBODY,
        abort_on_failure: bool = False,
        on_trace: Callable[[Trace], None] = lambda trace: None,
    ) -> list[Trace]:
        """Run each rollout that is not known, and store it as it ends.

        Args:
            wanted: The task of each rollout.
            defaults: What calls that do not say are sampled with.
            known: Traces of these rollouts that the store already holds.
            endings: Who may end them from outside.
            abort_on_failure: Whether a rollout that fails by itself ends the run.
            on_trace: Sees every attempt of every rollout, known ones first.

        Returns:
            Every attempt of every rollout, sorted by rollout and attempt.

        Raises:
            FunctionError: The workflow or judge returned something of the wrong type.
            TrainingError: `abort_on_failure` is set and a rollout did not complete.
        """
        done = {trace.id for trace in known if trace.final}
        # Attempts of a rollout that never got to its final one are run again from the start.
        traces = [trace for trace in known if trace.id in done]
        for trace in traces:
            on_trace(trace)

        async def run(id: RolloutId, task: dict[str, Any]) -> None:
            asked, ending = time.perf_counter(), endings.get(id)
            async with self._slots:
                queued = time.perf_counter() - asked
                attempts = await self._runner.run(task, id, defaults, ending=ending, queued=queued)
            for trace in attempts:
                self._store.append(trace)
                self._on_end(trace)
                on_trace(trace)
            traces.extend(attempts)
            if ending is not None and ending.reason is not None:
                return
            if abort_on_failure and not _went_well(attempts[-1]):
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


def _went_well(trace: Trace) -> bool:
    return trace.outcome in (Outcome.COMPLETED, Outcome.REJECTED)
