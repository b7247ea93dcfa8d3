"""What the loops of a run share: opening and closing its parts, evaluating, logging, saving."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from tuner.backends.collector import Collector
from tuner.backends.order import is_due
from tuner.backends.record import RunRecord, Task
from tuner.backends.run_directory import RunDirectory
from tuner.backends.stack import Stack, build_stack
from tuner.config import RunConfig
from tuner.errors import TrainingError
from tuner.result import TuneResult
from tuner.traces import TraceStore
from tuner.training import PolicyTrainer


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
        self.rollouts = Collector(
            config, TraceStore(directory.traces), eval_tasks, self.record.console
        )

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
            record.open_monitors()
            with record.console:
                await self._steps(stack, trainer)
            return self.result(trainer)
        finally:
            record.close()
            await stack.aclose()

    async def _steps(self, stack: Stack, trainer: PolicyTrainer) -> None:
        config, record = self.config, self.record
        evaluates = bool(self.rollouts.eval_tasks)
        if not record.history and config.explorer.eval_on_startup and evaluates:
            started = time.perf_counter()
            metrics = await self.rollouts.evaluate(stack, step=0)
            record.log(0, {**metrics, "time/step": time.perf_counter() - started})
        for step in range(record.start + 1, record.total_steps + 1):
            started = time.perf_counter()
            metrics = await self.step(step, stack, trainer)
            last = step == record.total_steps
            if evaluates and (last or is_due(step, config.explorer.eval_interval)):
                metrics |= await self.rollouts.evaluate(stack, step)
            metrics["time/step"] = time.perf_counter() - started
            record.log(step, metrics)
            if last or is_due(step, config.trainer.save_interval):
                record.save(step, stack, trainer)
            reason = self.diagnosis()
            if reason is not None:
                raise TrainingError(reason)
