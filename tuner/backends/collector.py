"""Rollouts of a run: those of a training step, and evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.backends.stack import Stack
from tuner.config import RunConfig
from tuner.config.buffer import EvalTasksetSection, TasksetSection
from tuner.gateway import SamplingDefaults
from tuner.monitors import ConsoleMonitor
from tuner.rollout import StepPlan, collect
from tuner.traces import Outcome, Trace, TraceStore

Task = dict[str, Any]


class Collector:
    """Runs what a step asks for, stores it and shows how far it is.

    Args:
        config: The effective configuration.
        store: Where traces go; what it already holds is not run again.
        eval_tasks: Rows of each evaluation set, by its name.
        console: Where people look.
    """

    def __init__(
        self,
        config: RunConfig,
        store: TraceStore,
        eval_tasks: Mapping[str, list[Task]],
        console: ConsoleMonitor,
    ) -> None:
        self._config = config
        self._store = store
        self._console = console
        self.eval_tasks = dict(eval_tasks)

    async def training(self, step: int, tasks: list[Task], stack: Stack) -> list[Trace]:
        """The rollouts of a training step; every attempt of each."""
        plan = StepPlan(
            split="train",
            step=step,
            tasks=tasks,
            repeat=self._config.algorithm.repeat_times,
            defaults=self._sampling(self._config.buffer.explorer_input.taskset),
        )
        return await self._collect(plan, stack, f"step {step}")

    async def evaluate(self, stack: Stack, step: int) -> dict[str, float]:
        """Mean reward on each evaluation set, and how many rollouts failed, which have none."""
        metrics: dict[str, float] = {}
        settings = {t.name: t for t in self._config.buffer.explorer_input.eval_tasksets}
        for name, tasks in self.eval_tasks.items():
            plan = StepPlan(
                split=name,
                step=step,
                tasks=tasks,
                repeat=1,
                defaults=self._sampling(settings[name]),
            )
            traces = await self._collect(plan, stack, f"evaluation {name}")
            final = [trace for trace in traces if trace.final]
            rewards = [trace.reward for trace in final if trace.reward is not None]
            if rewards:
                metrics[f"eval/{name}/reward"] = sum(rewards) / len(rewards)
            failed = sum(trace.outcome is not Outcome.COMPLETED for trace in final)
            metrics[f"eval/{name}/failed"] = failed
        return metrics

    async def _collect(self, plan: StepPlan, stack: Stack, what: str) -> list[Trace]:
        assert stack.runner is not None, "without a workflow nothing can be rolled out"
        self._console.begin(what, len(plan.ids), step=plan.step)

        def count(trace: Trace) -> None:
            if trace.final:
                self._console.rollout_done()

        config, training = self._config, plan.split == "train"
        return await collect(
            plan,
            stack.runner,
            self._store,
            # One after the other, the global random states belong to one rollout at a time.
            max_running=1 if config.tuner.deterministic else config.explorer.runner_per_model,
            abort_on_failure=training and config.tuner.on_failure == "abort",
            on_trace=count,
        )

    def _sampling(self, taskset: TasksetSection | EvalTasksetSection) -> SamplingDefaults:
        return SamplingDefaults(**self._config.rollout_args(taskset).model_dump())
