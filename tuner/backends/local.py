"""The loop on one machine: collect groups, judge, train, update the engine, evaluate, save.

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tuner.algorithms.table import ADVANTAGES
from tuner.assembly.parameters import selection
from tuner.assembly.stack import Stack
from tuner.backends.loop import Loop
from tuner.backends.recorded import RecordedLoop, read_examples
from tuner.config import RunConfig
from tuner.config.schema import Penalize
from tuner.data.order import planned_steps
from tuner.result import TuneResult
from tuner.rollout.groups import BatchLog, TrainingGroups
from tuner.run.directory import RunDirectory
from tuner.run.metrics import (
    RECOMPUTED,
    batch_metrics,
    diagnosis,
    has_signal,
    reasoning_notice,
    rollout_metrics,
    staleness_metrics,
    time_split,
)
from tuner.run.record import Task, finished_result, leave_report, open_directory
from tuner.traces import Trace
from tuner.training import Batch, PolicyTrainer, build_batch

logger = logging.getLogger("tuner")


def run_local(
    config: RunConfig,
    *,
    workflow: Callable[..., Any] | None,
    judge: Callable[..., Any] | None,
    train_tasks: list[Task],
    eval_tasks: Mapping[str, list[Task]],
) -> TuneResult:
    """Train until `total_steps`, or go on with a run that was interrupted.

    `report.html` is left in the run directory however the run ends; where it stops before its end,
    a note of the error says so. Must be called where no event loop is running.

    Args:
        config: The effective configuration.
        workflow, judge: The user's functions; without a workflow nothing is rolled out.
        train_tasks: Tasks, or with `mode: train` the rows of the recorded data.
        eval_tasks: Rows of each evaluation set, by its name.

    Raises:
        TrainingError: Nothing could be learned, or training failed; the message is the diagnosis.
        FunctionError: A function returned something of the wrong type.
        ConfigError: The run directory holds a run with other settings or data.
        DatasetError: A row of recorded data is not what the configuration says.
    """
    data = {"train": train_tasks, **eval_tasks}
    loop: Loop
    if config.mode == "train":
        examples = read_examples(config, train_tasks)
        directory = open_directory(config, data)
        loop = RecordedLoop(config, directory, examples, eval_tasks)
    else:
        directory = open_directory(config, data)
        loop = _RolloutLoop(config, directory, train_tasks, eval_tasks)
    finished = finished_result(directory, loop.record.total_steps)
    if finished is not None:
        logger.warning("%s is complete; returning its result", directory.path)
        return finished
    try:
        with deterministic_torch(config.tuner.deterministic):
            result = asyncio.run(loop.run(workflow, judge))
    except (Exception, KeyboardInterrupt) as error:
        if directory.has_begun() and (report := leave_report(directory, stopped=_reason(error))):
            error.add_note(f"what the run did until then: {report}")
        raise
    leave_report(directory)
    return result


class _RolloutLoop(Loop):
    """Trains on the rollouts of its own tasks."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        train_tasks: list[Task],
        eval_tasks: Mapping[str, list[Task]],
    ) -> None:
        super().__init__(config, directory, planned_steps(config, len(train_tasks)), eval_tasks)
        self._train_tasks = train_tasks
        self._latest: Sequence[Trace] = ()
        self._groups: TrainingGroups | None = None

    def begin(self, stack: Stack) -> None:
        self._groups = self.rollouts.training(
            stack,
            BatchLog(self.record.directory.batches),
            self._train_tasks,
            start=self.record.start,
            total_steps=self.record.total_steps,
        )

    async def end(self) -> None:
        if self._groups is not None:
            await self._groups.cancel()

    async def step(self, step: int, stack: Stack, trainer: PolicyTrainer) -> dict[str, float]:
        config, groups = self.config, self._groups
        assert groups is not None, "begin() was called"
        started = time.perf_counter()
        timeline, console = self.record.timeline, self.record.console
        size, repeat = config.buffer.batch_size, config.algorithm.repeat_times
        console.begin(f"step {step}", size * repeat, step=step)
        with timeline.span("waiting for rollouts", step=step):
            collected = await groups.take(step)
        idle = time.perf_counter() - started
        self._latest = traces = collected.traces
        penalty = config.tuner.on_failure
        batch = build_batch(
            traces,
            penalty=penalty.penalize if isinstance(penalty, Penalize) else None,
            selection=selection(config),
            oldest=trainer.step - _oldest(config) if groups.ahead else 0,
            unfinished=collected.unfinished,
        )
        advantage = config.algorithm.advantage_fn
        compared = ADVANTAGES[advantage].needs_group
        metrics = {**rollout_metrics(traces), **batch_metrics(batch, compared=compared)}
        discount = config.tuner.algorithm.turn_discount
        metrics["signal"] = float(has_signal(batch, advantage, discount))
        self._say_what_branching_costs(step, metrics)
        if groups.ahead:
            metrics |= staleness_metrics(batch, trainer.step)
        seconds = 0.0
        if batch.rows:
            update, seconds = await self._update(stack, trainer, batch)
            metrics |= {f"train/{name}": value for name, value in update.items()}
        if groups.ahead:
            metrics |= {"groups/waiting": groups.waiting, "rollouts/running": groups.running}
            groups.advance(step)
        training = time.perf_counter() - started - idle - seconds
        metrics |= time_split(traces, idle, training, seconds)
        metrics["tokens_per_second"] = batch.sampled_tokens / (idle + training + seconds)
        return metrics

    async def _update(
        self, stack: Stack, trainer: PolicyTrainer, batch: Batch
    ) -> tuple[dict[str, float], float]:
        """Train on a batch and let the engine go on with the new weights.

        Returns:
            The trainer's metrics, and the seconds until the engine had the weights.
        """

        def work() -> dict[str, float]:
            scored = trainer.compute_ref_logp(trainer.compute_advantages(batch))
            update = trainer.ppo_update(scored)
            trainer.step_lr_scheduler()
            return update

        async with stack.training():
            with self.record.timeline.span("training", version=trainer.step + 1):
                update = await self.off_the_loop(stack, work)
            trained = time.perf_counter()
            with self.record.timeline.span("weights", version=trainer.step):
                await stack.publish(trainer)
        return update, time.perf_counter() - trained

    def diagnosis(self) -> str | None:
        patience = self.config.tuner.signal_patience
        recent = [row["signal"] for row in self.record.history[-patience:] if "signal" in row]
        stuck = len(recent) == patience and not any(recent)
        return diagnosis(self._latest, patience) if stuck else None

    def _say_what_branching_costs(self, step: int, metrics: Mapping[str, float]) -> None:
        cost = int(metrics.get(RECOMPUTED, 0))
        if cost and not any(row.get(RECOMPUTED) for row in self.record.history):
            self.record.console.say(reasoning_notice(step, cost))


def _oldest(config: RunConfig) -> int:
    """Updates by which a token that is trained may be older than the weights it trains."""
    limit = config.algorithm.sample_strategy_args.max_staleness
    return config.synchronizer.sync_offset if limit is None else limit


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"{type(error).__name__}: {error}"


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
