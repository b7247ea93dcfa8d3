"""The training loop on one machine: take, train, publish, record.

    for each step:
        found = take(step)                                      rollouts, or rows of recorded data
        scored = compute_ref_logp(compute_advantages(batch))
        metrics = ppo_update(scored)                            the weights change
        step_lr_scheduler()
        publish                                                 the engine continues with them
        evaluate, log, save, diagnose

A step that is interrupted at any point is resumed from disk: from the last checkpoint, and the
traces of the steps after it. Recorded traces are trained again without generating, so no finished
rollout is lost, and `save_interval` only decides how much training is repeated. A run that
continues from the samples of another (`tuner.runs.rebased`) trains them in the same way.

With `synchronizer.sync_offset` collection runs ahead: training is in a thread, the engine has its
own weights, and `tuner.rollouts.groups` decides when rollouts begin and which ones a step uses.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from tuner.config import RunConfig
from tuner.errors import ConfigError, TrainingError
from tuner.gateway import SamplingDefaults
from tuner.rollouts import Rollouts, StepPlan
from tuner.rollouts.chat_models import quiet_agents
from tuner.runs.console import ConsoleMonitor
from tuner.runs.directory import TRAINER_STATE, Report, reported, run_async
from tuner.runs.history import History
from tuner.runs.metrics import evaluation_metrics
from tuner.runs.record import RunRecord, finished_notice, finished_result, open_directory
from tuner.runs.recorded import Examples
from tuner.runs.result import TuneResult
from tuner.runs.sources import (
    ComparableGroups,
    Data,
    RolloutSource,
    RowSource,
    Source,
    TraceSource,
    training_data,
    units,
)
from tuner.runs.stack import Stack, build_stack, build_trainers
from tuner.tasks.selection import is_due, planned_steps
from tuner.traces import Trace, TraceStore
from tuner.training.batch import Batch, RoleBatches
from tuner.training.likelihood import (
    EffectiveSamples,
    OffPolicyBatch,
    RecordedBatch,
    TooFewEffective,
    effective_samples,
    off_policy_update,
    recorded_update,
)
from tuner.training.trainer import PolicyTrainer, RoleTrainers

logger = logging.getLogger("tuner")
Task = dict[str, Any]
T = TypeVar("T")
_THE_RUN = threading.Lock()  # of this process: it sets torch's modes, threads and random states


def run_local(
    config: RunConfig,
    *,
    workflow: Callable[..., Any] | None,
    judge: Callable[..., Any] | None,
    train_tasks: Sequence[Task],
    eval_tasks: Mapping[str, Sequence[Task]],
    history: History | None = None,
    report: Report = lambda directory, stopped: None,
) -> TuneResult:
    """Train until `total_steps`, or resume an interrupted run.

    Must be called outside of an event loop.

    Args:
        config: The effective configuration.
        workflow, judge: The user's functions; without a workflow there are no rollouts.
        train_tasks: Tasks, or with `mode: train` the rows of the recorded data.
        eval_tasks: Rows of each evaluation set, by its name.
        history: Recorded rollouts, in place of `train_tasks`.
        report: Writes a report of the run however it ends.

    Raises:
        ConfigError: Another run is training in this process.
    """
    data = training_data(config, train_tasks, history)
    total_steps = planned_steps(config, units(data))
    told = train_tasks if history is None else history.fingerprint
    with _only_run(config), open_directory(config, {"train": told, **eval_tasks}) as directory:
        finished = finished_result(directory, config, total_steps)
        if finished is not None:
            logger.warning("%s", finished_notice(directory, finished))
            report(directory, None)  # the process may have been killed before it was written
            return finished
        record = RunRecord(config, directory, total_steps)
        with (
            reported(directory, report),
            deterministic_torch(config.tuner.deterministic),
            quiet_agents() as quiet,
        ):
            record.console.say(record.beginning())
            if quiet is not None and workflow is not None:
                record.console.say(quiet)
            try:
                return run_async(_run(config, record, workflow, judge, data, eval_tasks))
            except KeyboardInterrupt:
                raise KeyboardInterrupt(record.interrupted()) from None


@contextmanager
def _only_run(config: RunConfig) -> Iterator[None]:
    if not _THE_RUN.acquire(blocking=False):
        raise ConfigError(
            "another tune() is running in this process, and both would change its settings of "
            f"PyTorch: start {config.run_dir} when the other one has ended, or in its own process"
        )
    try:
        yield
    finally:
        _THE_RUN.release()


async def _run(
    config: RunConfig,
    record: RunRecord,
    workflow: Callable[..., Any] | None,
    judge: Callable[..., Any] | None,
    data: Data,
    eval_tasks: Mapping[str, Sequence[Task]],
) -> TuneResult:
    """One run, from its last checkpoint to its last step: opens and closes its parts."""
    stack = build_stack(
        config,
        workflow=workflow,
        judge=judge,
        weights=record.weights,
        version=record.version,
        apart=True,
    )
    source: Source | None = None
    try:
        trainer = build_trainers(config, stack, total_steps=record.total_steps)
        if record.weights is not None:
            trainer.load(record.weights / TRAINER_STATE)
        record.open(stack.decisions)
        with record.console, ThreadPoolExecutor(1, "tuner-training") as thread:
            rollouts = None
            if stack.runner is not None:
                rollouts = Rollouts(
                    stack.runner,
                    TraceStore(
                        record.directory.traces, stack.model.config.get_text_config().vocab_size
                    ),
                    max_running=config.concurrent_rollouts,
                    on_end=record.timeline.rollout,
                )
            if isinstance(data, Examples):
                source = RowSource(config, record, data)
            elif isinstance(data, ComparableGroups):
                source = TraceSource(config, record, data, stack.teacher_prompt)
            else:
                assert rollouts is not None, "prepare() lets no rollouts be without a workflow"
                source = RolloutSource(
                    config,
                    record,
                    data,
                    rollouts,
                    stack.teacher_prompt,
                    stack.engine.capabilities.max_model_len,
                )
            evaluate = partial(_evaluate, config, record, rollouts, eval_tasks)
            if rollouts is not None and config.tuner.engine.urls:
                await stack.reach_servers()
            await _steps(config, record, stack, trainer, source, evaluate, thread)
        return record.finish(trainer.step, rows=source.rows)
    finally:
        if source is not None:
            await source.close()
        try:
            record.close()  # may have something left to write, but no disk space
        finally:
            await stack.aclose()


async def _steps(
    config: RunConfig,
    record: RunRecord,
    stack: Stack,
    trainer: PolicyTrainer | RoleTrainers,
    source: Source,
    evaluate: Callable[[int], Awaitable[dict[str, float]]],
    thread: ThreadPoolExecutor,
) -> None:
    """The loop; work that would block generation runs in `thread`."""
    timeline = record.timeline

    async def aside(work: Callable[[], T]) -> T:
        """The result of `work`, run in the thread while generation continues."""
        if stack.shares_weights:
            return work()
        return await asyncio.get_running_loop().run_in_executor(thread, work)

    async def measured(step: int) -> dict[str, float]:
        """Metrics of the weights: evaluations, and the loss of the held-out data."""
        began = time.perf_counter()
        metrics = await evaluate(step)
        if config.tuner.history is not None:
            assert isinstance(trainer, PolicyTrainer), "recorded data has no roles"
            async with stack.training():
                metrics |= await aside(partial(source.held_out, trainer))
        return metrics and metrics | {"time/evaluation": time.perf_counter() - began}

    def cpu() -> dict[str, float]:
        """CPU seconds of workers since the last call."""
        return {} if stack.workers is None else {"time/workers_cpu": stack.workers.cpu_since()}

    async def weigh(batch: Batch) -> EffectiveSamples:
        """Effective sample size of another run's samples for the trainer's weights."""
        assert isinstance(trainer, PolicyTrainer), "a rebased run has no roles"
        async with stack.training():
            return await aside(partial(effective_samples, trainer, batch))

    if not record.recent and config.explorer.eval_on_startup and (metrics := await measured(0)):
        record.log(0, metrics | cpu())

    if record.remaining() and (complete := source.nothing_left({})) is not None:
        record.end_early(record.start, complete)  # it was killed before it had its result

    for step in record.remaining():
        started, computed = time.perf_counter(), stack.engine.stats.step_seconds
        found = await source.take(step, trainer.step, weigh)
        idle, sync = time.perf_counter() - started, 0.0
        metrics = found.metrics
        if step < record.total_steps and (complete := source.nothing_left(metrics)) is not None:
            record.end_early(step, complete)
        last = step == record.last_step
        evaluated = last or is_due(step, config.explorer.eval_interval)
        if evaluated or step == 1:
            record.show(step, "train", found.traces or (), replayed=found.replayed)

        if found.batch.rows:
            async with stack.training():
                with timeline.span("training", version=trainer.step + 1):
                    try:
                        changed = await aside(partial(update, trainer, found.batch, found.worth))
                    except TooFewEffective:  # the training so far is kept
                        if step > record.start + 1:
                            await aside(partial(record.save, step - 1, trainer, stack.save_weights))
                        raise
                trained = time.perf_counter()
                with timeline.span("weights", version=trainer.step):
                    await stack.publish(trainer)
            sync = time.perf_counter() - trained
            metrics |= {f"train/{name}": value for name, value in changed.items()}

        metrics |= source.advance(step)
        training = time.perf_counter() - started - idle - sync
        metrics |= found.seconds(idle, training, sync)
        if computed := stack.engine.stats.step_seconds - computed:
            metrics["time/engine"] = computed
        if stack.engine.failure is not None:
            raise TrainingError(f"step {step}: {stack.engine.failure}")

        if evaluated:
            metrics |= await measured(step)
        record.log(step, metrics | cpu() | {"time/step": time.perf_counter() - started})
        decided = stack.workers and stack.workers.settle(len(found.traces or ()), idle)
        if decided:
            record.console.say(decided)
        reason = None
        if record.ended_early is None:
            reason = source.diagnosis(without_update=last and not trainer.step)
        saves = config.mode != "explore"  # otherwise the weights are the initial ones
        kept = saves and reason is not None and record.signal.learned
        if kept or (saves and (last or is_due(step, config.trainer.save_interval))):
            with timeline.span("checkpoint", step=step):
                await aside(partial(record.save, step, trainer, stack.save_weights))
        if reason is not None:
            raise TrainingError(f"{reason}{record.how_to_resume(step) if kept else ''}")
        if last:
            return


def update(
    trainer: PolicyTrainer | RoleTrainers,
    batch: Batch | RoleBatches | RecordedBatch,
    worth: EffectiveSamples | None = None,
) -> dict[str, float]:
    """Train a batch of rollouts, those of roles, or recorded data.

    Args:
        worth: The rollouts' effective sample size, if it was computed before.
    """
    if isinstance(trainer, RoleTrainers):
        assert isinstance(batch, RoleBatches), "each role has a batch"
        return trainer.update(batch, update)
    assert not isinstance(batch, RoleBatches), "all calls have the same weights"
    if isinstance(batch, RecordedBatch):
        metrics = recorded_update(trainer, batch)
    elif isinstance(batch, OffPolicyBatch):
        metrics = off_policy_update(trainer, batch)
    else:
        scored = trainer.compute_ref_logp(trainer.compute_advantages(batch))
        if worth is not None:  # which did the forward pass that the update needs
            scored = replace(scored, proximal=worth.logp)
        metrics = trainer.ppo_update(scored)
    trainer.step_lr_scheduler()
    return metrics


async def _evaluate(
    config: RunConfig,
    record: RunRecord,
    rollouts: Rollouts | None,
    tasks: Mapping[str, Sequence[Task]],
    step: int,
) -> dict[str, float]:
    """The metrics of each evaluation set, whose rollouts are not trained; empty without sets."""
    if not tasks:
        return {}
    assert rollouts is not None, "prepare() lets no evaluation be without a workflow"
    metrics, threshold = dict[str, float](), config.tuner.pass_reward
    with record.timeline.span("evaluation", step=step):
        for name, rows in tasks.items():
            traces = await evaluate_set(config, name, rows, rollouts, record.console, step=step)
            record.show(step, name, traces)
            if step == record.last_step:
                record.console.before_and_after(rollouts.known(name, 0), traces)
            metrics |= evaluation_metrics(name, traces, pass_reward=threshold)
    return metrics


async def evaluate_set(
    config: RunConfig,
    name: str,
    tasks: Sequence[Task],
    rollouts: Rollouts,
    console: ConsoleMonitor,
    *,
    step: int,
) -> list[Trace]:
    """Every attempt at the rollouts of an evaluation set, with the set's number of rollouts per
    task.

    Args:
        config: The effective configuration, which has a set of this name.
        tasks: Its rows.
        rollouts: Runs them; rollouts of this step in its store are not run again.
        console: Gets the start and the end of rollouts.
        step: The step before the evaluation.
    """
    taskset = next(t for t in config.buffer.explorer_input.eval_tasksets if t.name == name)
    plan = StepPlan(
        split=name,
        step=step,
        tasks=tasks,
        repeat=taskset.repeat_times,
        defaults=SamplingDefaults(**config.rollout_args(taskset).model_dump()),
    )
    console.begin(f"evaluation {name}", len(plan.ids), step=step)
    return await rollouts.run(
        plan.wanted,
        plan.defaults,
        known=rollouts.known(name, step),
        on_trace=lambda trace: console.rollout_done(trace) if trace.final else None,
    )


@contextmanager
def deterministic_torch(enabled: bool) -> Iterator[None]:
    """While the block runs, torch rejects operations whose result may differ between runs."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or enabled)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
