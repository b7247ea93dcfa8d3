"""The loop on one machine, top to bottom: take, train, publish, record.

    for each step:
        found = take(step)                                      rollouts, or rows of recorded data
        scored = compute_ref_logp(compute_advantages(batch))
        metrics = ppo_update(scored)                            the weights change
        step_lr_scheduler()
        publish                                                 the engine goes on with them
        evaluate, log, save, diagnose

A step that is interrupted at any point is taken up from what is on disk: the last checkpoint, and
the traces of the steps after it. Recorded traces are trained again without generating, so no
rollout that ended is lost and `save_interval` only decides how much training is repeated.

With `synchronizer.sync_offset` collection runs ahead: training is in a thread, the engine has
weights of its own, and `tuner.rollout.schedule` says what is begun when and what a step takes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch

from tuner.assembly.stack import Stack, build_stack, build_trainer
from tuner.config import RunConfig
from tuner.data.order import is_due, planned_steps
from tuner.data.recorded import Examples
from tuner.errors import TrainingError
from tuner.gateway import SamplingDefaults
from tuner.result import TuneResult
from tuner.rollout import Rollouts, StepPlan
from tuner.run.directory import TRAINER_STATE, Report, reported
from tuner.run.record import RunRecord, finished_result, open_directory
from tuner.sources import RolloutSource, RowSource, Source, read_examples
from tuner.traces import Outcome, Trace, TraceStore
from tuner.training import Batch, PolicyTrainer, RecordedBatch, recorded_update

logger = logging.getLogger("tuner")
Task = dict[str, Any]
T = TypeVar("T")


def run_local(
    config: RunConfig,
    *,
    workflow: Callable[..., Any] | None,
    judge: Callable[..., Any] | None,
    train_tasks: list[Task],
    eval_tasks: Mapping[str, list[Task]],
    report: Report = lambda directory, stopped: None,
) -> TuneResult:
    """Train until `total_steps`, or go on with a run that was interrupted.

    Must be called where no event loop is running.

    Args:
        config: The effective configuration.
        workflow, judge: The user's functions; without a workflow nothing is rolled out.
        train_tasks: Tasks, or with `mode: train` the rows of the recorded data.
        eval_tasks: Rows of each evaluation set, by its name.
        report: Leaves a report of the run however it ends.

    Raises:
        TrainingError: Nothing could be learned, or training failed; the message is the diagnosis.
        FunctionError: A function returned something of the wrong type.
        ConfigError: The run directory holds a run with other settings or data.
        DatasetError: A row of recorded data is not what the configuration says.
    """
    examples = read_examples(config, train_tasks) if config.mode == "train" else None
    directory = open_directory(config, {"train": train_tasks, **eval_tasks})
    total_steps = planned_steps(config, len(train_tasks if examples is None else examples.used))
    finished = finished_result(directory, total_steps)
    if finished is not None:
        logger.warning("%s is complete; returning its result", directory.path)
        return finished
    record = RunRecord(config, directory, total_steps)
    data = train_tasks if examples is None else examples
    with reported(directory, report), deterministic_torch(config.tuner.deterministic):
        return asyncio.run(_run(config, record, workflow, judge, data, eval_tasks))


async def _run(
    config: RunConfig,
    record: RunRecord,
    workflow: Callable[..., Any] | None,
    judge: Callable[..., Any] | None,
    data: list[Task] | Examples,
    eval_tasks: Mapping[str, list[Task]],
) -> TuneResult:
    """One run, from its last checkpoint to its last step: its parts, opened and closed."""
    stack = build_stack(
        config, workflow=workflow, judge=judge, weights=record.weights, version=record.version
    )
    source: Source | None = None
    try:
        trainer = build_trainer(config, stack, total_steps=record.total_steps)
        if record.weights is not None:
            trainer.load(record.weights / TRAINER_STATE)
        record.open(stack.decisions)
        with record.console, ThreadPoolExecutor(1, "tuner-training") as thread:
            rollouts = None
            if stack.runner is not None:
                rollouts = Rollouts(
                    stack.runner,
                    TraceStore(record.directory.traces),
                    max_running=_most_rollouts(config),
                    on_end=record.timeline.rollout,
                )
            if isinstance(data, Examples):
                source = RowSource(config, record, data)
            else:
                assert rollouts is not None, "prepare() lets no rollouts be without a workflow"
                source = RolloutSource(config, record, data, rollouts)
            evaluation = Evaluation(config, record, eval_tasks, rollouts)
            await _steps(config, record, stack, trainer, source, evaluation, thread)
        return record.finish(trainer.step, rows=source.rows)
    finally:
        if source is not None:
            await source.close()
        record.close()
        await stack.aclose()


def _most_rollouts(config: RunConfig) -> int:
    """Rollouts at the same time. One after the other the global random states belong to one."""
    return 1 if config.tuner.deterministic else config.explorer.runner_per_model


async def _steps(
    config: RunConfig,
    record: RunRecord,
    stack: Stack,
    trainer: PolicyTrainer,
    source: Source,
    evaluation: Evaluation,
    thread: ThreadPoolExecutor,
) -> None:
    """The loop; what would keep generation waiting is done in `thread`.

    Raises:
        TrainingError: There is nothing to learn, or training failed.
    """
    timeline = record.timeline

    async def aside(work: Callable[[], T]) -> T:
        """The result of `work`, in the thread where generation goes on meanwhile."""
        if stack.shares_weights:
            return work()
        return await asyncio.get_running_loop().run_in_executor(thread, work)

    if not record.history and config.explorer.eval_on_startup and evaluation.tasks:
        started = time.perf_counter()
        metrics = await evaluation.run(0)
        record.log(0, {**metrics, "time/step": time.perf_counter() - started})

    for step in record.remaining():
        started = time.perf_counter()
        found = await source.take(step, trainer.step)
        idle, sync = time.perf_counter() - started, 0.0
        metrics = found.metrics

        if found.batch.rows:
            async with stack.training():
                with timeline.span("training", version=trainer.step + 1):
                    update = await aside(partial(_update, trainer, found.batch))
                trained = time.perf_counter()
                with timeline.span("weights", version=trainer.step):
                    await stack.publish(trainer)
            sync = time.perf_counter() - trained
            metrics |= {f"train/{name}": value for name, value in update.items()}

        metrics |= source.advance(step)
        training = time.perf_counter() - started - idle - sync
        metrics |= found.seconds(idle, training, sync)
        if stack.engine.failure is not None:
            raise TrainingError(f"step {step}: {stack.engine.failure}")

        last = step == record.total_steps
        if evaluation.tasks and (last or is_due(step, config.explorer.eval_interval)):
            metrics |= await evaluation.run(step)
        metrics["time/step"] = time.perf_counter() - started
        record.log(step, metrics)
        if last or is_due(step, config.trainer.save_interval):
            with timeline.span("checkpoint", step=step):
                await aside(partial(record.save, step, trainer, stack.save_weights))
        reason = source.diagnosis()
        if reason is not None:
            raise TrainingError(reason)


def _update(trainer: PolicyTrainer, batch: Batch | RecordedBatch) -> dict[str, float]:
    """What the trainer does with a batch of rollouts, or of recorded data."""
    if isinstance(batch, RecordedBatch):
        metrics = recorded_update(trainer, batch)
    else:
        scored = trainer.compute_ref_logp(trainer.compute_advantages(batch))
        metrics = trainer.ppo_update(scored)
    trainer.step_lr_scheduler()
    return metrics


class Evaluation:
    """Rollouts that are not trained.

    Args:
        config: The effective configuration.
        record: Where people look.
        tasks: Rows of each evaluation set, by its name.
        rollouts: Runs them; None where nothing can be rolled out, and there are no tasks.
    """

    def __init__(
        self,
        config: RunConfig,
        record: RunRecord,
        tasks: Mapping[str, list[Task]],
        rollouts: Rollouts | None,
    ) -> None:
        self._config = config
        self._record = record
        self._rollouts = rollouts
        self.tasks = tasks

    async def run(self, step: int) -> dict[str, float]:
        """Mean reward on each evaluation set, and how many rollouts failed, which have none."""
        metrics: dict[str, float] = {}
        settings = {t.name: t for t in self._config.buffer.explorer_input.eval_tasksets}
        with self._record.timeline.span("evaluation", step=step):
            for name, tasks in self.tasks.items():
                defaults = SamplingDefaults(
                    **self._config.rollout_args(settings[name]).model_dump()
                )
                plan = StepPlan(split=name, step=step, tasks=tasks, repeat=1, defaults=defaults)
                final = [trace for trace in await self._traces(plan) if trace.final]
                rewards = [trace.reward for trace in final if trace.reward is not None]
                if rewards:
                    metrics[f"eval/{name}/reward"] = sum(rewards) / len(rewards)
                failed = sum(trace.outcome is not Outcome.COMPLETED for trace in final)
                metrics[f"eval/{name}/failed"] = failed
        return metrics

    async def _traces(self, plan: StepPlan) -> list[Trace]:
        assert self._rollouts is not None, "prepare() lets no evaluation be without a workflow"
        console = self._record.console
        console.begin(f"evaluation {plan.split}", len(plan.ids), step=plan.step)
        return await self._rollouts.run(
            plan.wanted,
            plan.defaults,
            known=self._rollouts.known(plan.split, plan.step),
            on_trace=lambda trace: console.rollout_done() if trace.final else None,
        )


class deterministic_torch:
    """While the block runs, torch refuses operations whose result may differ between runs."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._before = torch.are_deterministic_algorithms_enabled()

    def __enter__(self) -> None:
        if self._enabled:
            torch.use_deterministic_algorithms(True)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(self._before)
