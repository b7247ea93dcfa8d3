"""What the loops of a run share: opening and closing its parts, evaluating, logging, saving."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from tuner.assembly.stack import Stack, build_stack
from tuner.backends.collector import Collector
from tuner.config import RunConfig
from tuner.data.order import is_due
from tuner.errors import TrainingError
from tuner.result import TuneResult
from tuner.run.directory import RunDirectory
from tuner.run.record import RunRecord, Task
from tuner.traces import TraceStore
from tuner.training import PolicyTrainer

T = TypeVar("T")


class Loop(ABC):
    """One run, from its last checkpoint to its last step; a subclass says what a step is."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        total_steps: int,
        eval_tasks: Mapping[str, list[Task]],
    ) -> None:
        self.config = config
        self.record = RunRecord(config, directory, total_steps)
        self._thread = ThreadPoolExecutor(1, "tuner-training")
        self.rollouts = Collector(
            config,
            TraceStore(directory.traces),
            eval_tasks,
            self.record.console,
            self.record.timeline,
        )

    def begin(self, stack: Stack) -> None:  # noqa: B027  # a loop may need nothing
        """Called once, before the first step."""

    async def end(self) -> None:  # noqa: B027  # a loop may leave nothing
        """Called once, whatever happened."""

    @abstractmethod
    async def step(self, step: int, stack: Stack, trainer: PolicyTrainer) -> dict[str, float]:
        """Collect what step `step` trains on and train on it; its metrics."""

    def diagnosis(self) -> str | None:
        """Why the run should not go on, after a step is logged and saved; None where it should."""
        return None

    def result(self, trainer: PolicyTrainer) -> TuneResult:
        return self.record.finish(trainer)

    async def run(
        self, workflow: Callable[..., Any] | None, judge: Callable[..., Any] | None
    ) -> TuneResult:
        """Train until the last step.

        Raises:
            TrainingError: There is nothing to learn, or training failed.
        """
        record = self.record
        stack = build_stack(
            self.config,
            workflow=workflow,
            judge=judge,
            weights=record.weights,
            version=record.version,
        )
        try:
            trainer = record.trainer(stack)
            if stack.arrangement is not None:
                record.console.say(str(stack.arrangement.placement))
                record.console.say(str(stack.arrangement.weights))
            record.open_monitors()
            with record.console:
                self.begin(stack)
                await self._steps(stack, trainer)
            return self.result(trainer)
        finally:
            await self.end()
            self._thread.shutdown()
            record.close()
            await stack.aclose()

    async def off_the_loop(self, stack: Stack, work: Callable[[], T]) -> T:
        """The result of `work`, in a thread where generation goes on meanwhile."""
        if stack.shares_weights:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _steps(self, stack: Stack, trainer: PolicyTrainer) -> None:
        config, record = self.config, self.record
        evaluates = bool(self.rollouts.eval_tasks)
        if not record.history and config.explorer.eval_on_startup and evaluates:
            started = time.perf_counter()
            with record.timeline.span("evaluation", step=0):
                metrics = await self.rollouts.evaluate(stack, step=0)
            record.log(0, {**metrics, "time/step": time.perf_counter() - started})
        for step in range(record.start + 1, record.total_steps + 1):
            started = time.perf_counter()
            metrics = await self.step(step, stack, trainer)
            if stack.engine.failure is not None:
                raise TrainingError(f"step {step}: {stack.engine.failure}")
            last = step == record.total_steps
            if evaluates and (last or is_due(step, config.explorer.eval_interval)):
                with record.timeline.span("evaluation", step=step):
                    metrics |= await self.rollouts.evaluate(stack, step)
            metrics["time/step"] = time.perf_counter() - started
            record.log(step, metrics)
            if last or is_due(step, config.trainer.save_interval):
                with record.timeline.span("checkpoint", step=step):
                    await self.off_the_loop(stack, partial(record.save, step, stack, trainer))
            reason = self.diagnosis()
            if reason is not None:
                raise TrainingError(reason)
