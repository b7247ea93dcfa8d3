"""Rollouts of a run: those of its steps, and evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tuner.assembly.stack import Stack
from tuner.config import RunConfig
from tuner.config.buffer import EvalTasksetSection
from tuner.gateway import SamplingDefaults
from tuner.rollout import Rollouts, StepPlan
from tuner.rollout.groups import BatchLog, TrainingGroups
from tuner.run.console import ConsoleMonitor
from tuner.run.timeline import Timeline
from tuner.traces import Outcome, Trace, TraceStore

Task = dict[str, Any]


class Collector:
    """Runs what a run asks for, stores it and shows how far it is.

    Args:
        config: The effective configuration.
        store: Where traces go; what it already holds is not run again.
        eval_tasks: Rows of each evaluation set, by its name.
        console: Where people look.
        timeline: Where rollouts are noted.
    """

    def __init__(
        self,
        config: RunConfig,
        store: TraceStore,
        eval_tasks: Mapping[str, list[Task]],
        console: ConsoleMonitor,
        timeline: Timeline,
    ) -> None:
        self._config = config
        self._store = store
        self._console = console
        self._timeline = timeline
        self._rollouts: Rollouts | None = None
        self.eval_tasks = dict(eval_tasks)

    def rollouts(self, stack: Stack) -> Rollouts:
        """What runs them; training and evaluations share the room."""
        if self._rollouts is None:
            assert stack.runner is not None, "without a workflow nothing can be rolled out"
            # One after the other, the global random states belong to one rollout at a time.
            most = 1 if self._config.tuner.deterministic else self._config.explorer.runner_per_model
            self._rollouts = Rollouts(
                stack.runner, self._store, max_running=most, on_end=self._timeline.rollout
            )
        return self._rollouts

    def training(
        self,
        stack: Stack,
        batches: BatchLog,
        tasks: Sequence[Task],
        *,
        start: int,
        total_steps: int,
    ) -> TrainingGroups:
        """The training rollouts of the run, from step `start` + 1 on."""
        return TrainingGroups(
            self._config,
            self._store,
            batches,
            tasks,
            start=start,
            total_steps=total_steps,
            rollouts=self.rollouts(stack),
            on_rollout=self._console.rollout_done,
        )

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
        self._console.begin(what, len(plan.ids), step=plan.step)

        def count(trace: Trace) -> None:
            if trace.final:
                self._console.rollout_done()

        return await self.rollouts(stack).run(
            plan.wanted,
            plan.defaults,
            known=self._store.read(plan.split, plan.step),
            on_trace=count,
        )

    def _sampling(self, taskset: EvalTasksetSection) -> SamplingDefaults:
        return SamplingDefaults(**self._config.rollout_args(taskset).model_dump())
