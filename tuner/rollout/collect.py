"""All rollouts of one step: what is on disk already is kept, what is missing is run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.errors import TrainingError
from tuner.gateway import SamplingDefaults
from tuner.rollout.runner import RolloutRunner
from tuner.traces import Outcome, RolloutId, Trace, TraceStore


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
        return [
            RolloutId(self.step, task, rollout, self.split)
            for task in range(len(self.tasks))
            for rollout in range(self.repeat)
        ]


async def collect(
    plan: StepPlan,
    runner: RolloutRunner,
    store: TraceStore,
    *,
    max_running: int,
    abort_on_failure: bool = False,
    on_trace: Callable[[Trace], None] = lambda trace: None,
) -> list[Trace]:
    """Run a step's rollouts, at most `max_running` at a time, and store each as it ends.

    Rollouts that the store already holds are not run again: a killed step goes on where it
    stopped.

    Returns:
        Every attempt of every rollout, sorted by rollout and attempt.

    Raises:
        FunctionError: The workflow or judge returned something of the wrong type.
        TrainingError: `abort_on_failure` is set and a rollout did not complete.
    """
    stored = store.read(plan.split, plan.step)
    done = {trace.id for trace in stored if trace.final}
    # Attempts of a rollout that never got to its final one are run again from the start.
    traces = [trace for trace in stored if trace.id in done]
    for trace in traces:
        on_trace(trace)
    gate = asyncio.Semaphore(max_running)

    async def run(id: RolloutId) -> None:
        async with gate:
            attempts = await runner.run(plan.tasks[id.task], id, plan.defaults)
        for trace in attempts:
            store.append(trace)
            on_trace(trace)
        traces.extend(attempts)
        if abort_on_failure and attempts[-1].outcome not in (Outcome.COMPLETED, Outcome.REJECTED):
            raise TrainingError(
                f"rollout {id} ended with {attempts[-1].outcome}: {attempts[-1].error} "
                "(tuner.on_failure is 'abort')"
            )

    try:
        async with asyncio.TaskGroup() as group:
            for id in plan.ids:
                if id not in done:
                    group.create_task(run(id))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return sorted(traces, key=lambda trace: (trace.id, trace.attempt))
