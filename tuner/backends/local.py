"""The loop on one machine: collect groups, judge, train, update the engine, evaluate, save.

A step that is interrupted at any point is taken up from what is on disk: the last checkpoint, and
the traces of the steps after it. Recorded traces are trained again without generating, so no
rollout that ended is lost and `save_interval` only decides how much training is repeated.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tuner.algorithms.table import ADVANTAGES
from tuner.backends.loop import Loop
from tuner.backends.metrics import (
    RECOMPUTED,
    batch_metrics,
    diagnosis,
    has_signal,
    reasoning_notice,
    rollout_metrics,
    time_split,
)
from tuner.backends.order import batch_indices, planned_steps
from tuner.backends.record import Task, finished_result, leave_report, open_directory
from tuner.backends.recorded import RecordedLoop, read_examples
from tuner.backends.run_directory import RunDirectory
from tuner.backends.stack import Stack, selection
from tuner.config import RunConfig
from tuner.config.schema import Penalize
from tuner.result import TuneResult
from tuner.traces import Trace
from tuner.training import PolicyTrainer, build_batch

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

    async def step(self, step: int, stack: Stack, trainer: PolicyTrainer) -> dict[str, float]:
        config = self.config
        started = time.perf_counter()
        indices = batch_indices(
            step,
            size=config.buffer.batch_size,
            rows=len(self._train_tasks),
            selector=config.buffer.explorer_input.taskset.data_selector,
        )
        tasks = [self._train_tasks[index] for index in indices]
        self._latest = traces = await self.rollouts.training(step, tasks, stack)
        collecting = time.perf_counter() - started
        penalty = config.tuner.on_failure
        batch = build_batch(
            traces,
            penalty=penalty.penalize if isinstance(penalty, Penalize) else None,
            selection=selection(config),
        )
        advantage = config.algorithm.advantage_fn
        compared = ADVANTAGES[advantage].needs_group
        metrics = {**rollout_metrics(traces), **batch_metrics(batch, compared=compared)}
        discount = config.tuner.algorithm.turn_discount
        metrics["signal"] = float(has_signal(batch, advantage, discount))
        self._say_what_branching_costs(step, metrics)
        if batch.rows:
            # The reference may be the same model without its adapter: nobody samples meanwhile.
            async with stack.engine.pause():
                scored = trainer.compute_ref_logp(trainer.compute_advantages(batch))
                update = trainer.ppo_update(scored)
                trainer.step_lr_scheduler()
                await trainer.update_weights(stack.engine)
            metrics |= {f"train/{name}": value for name, value in update.items()}
        training = time.perf_counter() - started - collecting
        metrics |= time_split(traces, collecting, training)
        metrics["tokens_per_second"] = batch.sampled_tokens / (collecting + training)
        return metrics

    def diagnosis(self) -> str | None:
        patience = self.config.tuner.signal_patience
        recent = [row["signal"] for row in self.record.history[-patience:] if "signal" in row]
        stuck = len(recent) == patience and not any(recent)
        return diagnosis(self._latest, patience) if stuck else None

    def _say_what_branching_costs(self, step: int, metrics: Mapping[str, float]) -> None:
        cost = int(metrics.get(RECOMPUTED, 0))
        if cost and not any(row.get(RECOMPUTED) for row in self.record.history):
            self.record.console.say(reasoning_notice(step, cost))


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
