"""The loop without rollouts: a step is a batch of recorded conversations or pairs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from tuner.algorithms.table import ALGORITHMS
from tuner.assembly.models import load_settings, load_tokenizer
from tuner.assembly.stack import Stack, chat_renderer, context_length
from tuner.backends.loop import Loop
from tuner.config import RunConfig
from tuner.data.order import batch_indices, planned_steps
from tuner.data.recorded import Examples, examples_of
from tuner.errors import DatasetError
from tuner.result import TuneResult
from tuner.run.directory import RunDirectory
from tuner.run.metrics import tree_metrics
from tuner.run.record import Task
from tuner.training import PolicyTrainer, RecordedBatch, recorded_update


class RecordedLoop(Loop):
    """Trains on the rows of a dataset, in the order that `data_selector` says."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        examples: Examples,
        eval_tasks: Mapping[str, list[Task]],
    ) -> None:
        super().__init__(config, directory, planned_steps(config, len(examples.used)), eval_tasks)
        self._examples = examples

    async def step(self, step: int, stack: Stack, trainer: PolicyTrainer) -> dict[str, float]:
        started = time.perf_counter()
        size = self.config.buffer.batch_size
        self.record.console.begin(f"step {step}", size, step=step, of="rows")
        batch = batch_of(self.config, self._examples, step=step)
        async with stack.engine.pause():
            update = recorded_update(trainer, batch)
            trainer.step_lr_scheduler()
            await trainer.update_weights(stack.engine)
        seconds = time.perf_counter() - started
        return {
            "rows/trained": size,
            # Nothing is sampled and nothing of a row that is used is left out.
            "tokens/sampled": batch.trained_tokens,
            **tree_metrics(batch.rows),
            **{f"train/{name}": value for name, value in update.items()},
            "time/training": seconds,
            "tokens_per_second": batch.trained_tokens / seconds,
        }

    async def run(
        self, workflow: Callable[..., Any] | None, judge: Callable[..., Any] | None
    ) -> TuneResult:
        left_out = self._examples.left_out
        if left_out:
            reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
            used = len(self._examples.used)
            self.record.console.say(
                f"{used} of {used + sum(left_out.values())} rows are trained; left out: {reasons} "
                "(docs/offline.md)"
            )
        return await super().run(workflow, judge)

    def result(self, trainer: PolicyTrainer) -> TuneResult:
        return self.record.finish(trainer, rows=self._examples.rows)


def batch_of(config: RunConfig, examples: Examples, *, step: int) -> RecordedBatch:
    """What step `step` trains on."""
    indices = batch_indices(
        step,
        size=config.buffer.batch_size,
        rows=len(examples.used),
        selector=config.buffer.trainer_input.experience_buffer.data_selector,
    )
    return RecordedBatch.of([turns for index in indices for turns in examples.used[index]])


def read_examples(config: RunConfig, rows: list[Task]) -> Examples:
    """The rows of the recorded data as token ids of the model that is trained.

    Raises:
        ModelLoadError: The model has no tokenizer.
        DatasetError: A row is not of the form that the configuration says, or fewer rows than one
            step takes can be trained.
        ConfigError: `max_model_len` is more than the model has positions.
    """
    recorded = ALGORITHMS[config.algorithm.algorithm_type].recorded
    assert recorded is not None, "recorded_conflicts lets nothing else into mode: train"
    path = config.model.model_path
    tokenizer = load_tokenizer(path)
    examples = examples_of(
        rows,
        chat_renderer(config, tokenizer),
        config.buffer.trainer_input.experience_buffer.format,
        recorded=recorded,
        longest=context_length(
            config.model.max_model_len, load_settings(path), "model.max_model_len"
        ),
    )
    size = config.buffer.batch_size
    if len(examples.used) < size:
        raise DatasetError(
            f"train_dataset: {len(examples.used)} of {len(rows)} rows can be trained but "
            f"batch_size is {size}: no step can run; lower buffer.batch_size "
            "(AlgorithmConfig.batch_size)"
        )
    return examples
