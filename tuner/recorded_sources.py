"""What a step trains on of what was recorded before: rows of conversations, or whole rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tuner.algorithms.spec import ADVANTAGES
from tuner.algorithms.table import ALGORITHMS
from tuner.assembly.history_batches import (
    Comparable,
    check_same_tokenizer,
    comparable,
    held_out_batch,
    off_policy_batch,
    without_late,
)
from tuner.assembly.models import load_settings, load_tokenizer
from tuner.assembly.stack import chat_renderer, context_length
from tuner.config import RunConfig
from tuner.data.history_examples import examples_of_history
from tuner.data.order import batch_indices
from tuner.data.recorded import Examples, examples_of
from tuner.data.recorded_traces import History
from tuner.errors import DatasetError
from tuner.run.metrics import batch_metrics, tree_metrics
from tuner.run.record import RunRecord
from tuner.sources import Found, Source, Weigh
from tuner.training import PolicyTrainer, RecordedBatch, TeacherPrompt
from tuner.training.history_update import held_out_loss, held_out_rewards

Task = dict[str, Any]


class RowSource(Source):
    """Rows of recorded conversations or pairs, in the order that `data_selector` says."""

    def __init__(self, config: RunConfig, record: RunRecord, examples: Examples) -> None:
        self._config = config
        self._record = record
        self._examples = examples
        self.rows = examples.rows
        of_rollouts = config.tuner.history is not None
        if examples.left_out:
            reasons = ", ".join(f"{count} {why}" for why, count in examples.left_out.items())
            used, page = len(examples.used), "history" if of_rollouts else "offline"
            every = "" if of_rollouts else f" of {used + sum(examples.left_out.values())}"
            record.console.say(
                f"{used}{every} rows are trained; left out: {reasons} (docs/{page}.md)"
            )

    async def take(self, step: int, version: int, weigh: Weigh) -> Found:
        size = self._config.buffer.batch_size
        self._record.console.begin(f"step {step}", size, step=step, of="rows")
        batch = batch_of(self._config, self._examples, step=step)
        # Nothing is sampled and nothing of a row that is used is left out.
        sampled = {"rows/trained": size, "tokens/sampled": batch.trained_tokens}
        metrics = {**sampled, **tree_metrics(batch.rows)}
        left_out = self._examples.tokens_left_out if step == 1 else {}
        return Found(batch, _with_left_out(metrics, left_out))

    def held_out(self, trainer: PolicyTrainer) -> dict[str, float]:
        talks = [turns for example in self._examples.held_out for turns in example]
        return _named(held_out_loss(trainer, RecordedBatch.of(talks)))

    async def close(self) -> None:
        pass


class TraceSource(Source):
    """Groups of rollouts that were recorded before, in the order that `data_selector` says.

    Tokens of a step are those of the rollouts that it takes, so those of a second epoch count
    again. What no step takes is counted with the first: the filters' before, and groups that come
    to nothing (`comparable`).
    """

    def __init__(
        self,
        config: RunConfig,
        record: RunRecord,
        data: Comparable,
        teacher_prompt: TeacherPrompt,
    ) -> None:
        self._config = config
        self._record = record
        self._teacher_prompt = teacher_prompt
        self._groups, left_out = data.groups, data.left_out
        self._aside = data.held_out
        self._tokens = dict(left_out.tokens)
        rollouts = data.used
        self.rows = {"used": rollouts, **dict(sorted(left_out.rollouts.items()))}
        reasons = ", ".join(f"{n} {why}" for why, n in sorted(left_out.rollouts.items()))
        record.console.say(
            f"{rollouts} recorded rollouts of {len(self._groups)} tasks are trained"
            + (f"; left out: {reasons} (docs/history.md)" if reasons else "")
        )

    async def take(self, step: int, version: int, weigh: Weigh) -> Found:
        config = self._config
        self._record.console.begin(f"step {step}", config.buffer.batch_size, step=step, of="groups")
        batch = off_policy_batch(config, self._groups, self._teacher_prompt, step=step)
        compared = ADVANTAGES[config.algorithm.advantage_fn].needs_group
        metrics = batch_metrics(batch, compared=compared)
        metrics["history/reward"] = float(batch.rewards_R.mean()) if batch.ids else 0.0
        return Found(batch, _with_left_out(metrics, self._tokens if step == 1 else {}))

    def held_out(self, trainer: PolicyTrainer) -> dict[str, float]:
        batch = held_out_batch(self._config, self._aside)
        return _named(held_out_rewards(trainer, batch))

    def diagnosis(self, *, without_update: bool) -> str | None:
        if not without_update:
            return None
        return (
            "No step gave anything to learn from: no call of the recorded rollouts could be "
            "trained; tokens/dropped in metrics.jsonl says why"
        )

    async def close(self) -> None:
        pass


def _with_left_out(metrics: dict[str, float], tokens: Mapping[str, int]) -> dict[str, float]:
    """The numbers of a step, with sampled tokens that no step takes."""
    found = dict(metrics)
    for reason, count in tokens.items():
        name = f"tokens/dropped/{reason}"
        found[name] = found.get(name, 0) + count
        found["tokens/sampled"] += count
    return found


def _named(metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"held_out/{name}": value for name, value in metrics.items()}


def batch_of(config: RunConfig, examples: Examples, *, step: int) -> RecordedBatch:
    """What step `step` trains on of recorded data."""
    indices = batch_indices(
        step,
        size=config.buffer.batch_size,
        rows=len(examples.used),
        selector=config.buffer.trainer_input.experience_buffer.data_selector,
    )
    return RecordedBatch.of([turns for index in indices for turns in examples.used[index]])


# What a run trains on: tasks, rows or pairs as token ids, or groups of recorded rollouts.
Data = Sequence[Task] | Examples | Comparable


def training_data(config: RunConfig, rows: Sequence[Task], history: History | None) -> Data:
    """What a run trains on, read and checked.

    Raises:
        ModelLoadError, DatasetError, ConfigError: As `read_examples` and `comparable`.
    """
    if config.mode != "train":
        return rows
    if history is not None and ALGORITHMS[config.algorithm.algorithm_type].recorded is None:
        return comparable(config, history)
    return read_examples(config, rows, history)


def units(data: Data) -> int:
    """How many tasks, rows or groups there are, of which a step takes `buffer.batch_size`."""
    if isinstance(data, Examples):
        return len(data.used)
    return len(data.groups if isinstance(data, Comparable) else data)


def read_examples(
    config: RunConfig, rows: Sequence[Task], history: History | None = None
) -> Examples:
    """The rows of the recorded data as token ids of the model that is trained.

    Args:
        config: The effective configuration.
        rows: A dataset.
        history: Rollouts that were recorded before, in its place.

    Raises:
        ModelLoadError: The model has no tokenizer.
        DatasetError: A row is not of the form that the configuration says, or fewer rows than one
            step takes can be trained; or rollouts were recorded with another model.
        ConfigError: `max_model_len` is more than the model has positions.
    """
    recorded = ALGORITHMS[config.algorithm.algorithm_type].recorded
    assert recorded is not None, "other algorithms learn from rewards"
    path = config.model.model_path
    renderer, settings = chat_renderer(config, load_tokenizer(path)), load_settings(path)
    longest = context_length(config.model.max_model_len, settings, "model.max_model_len")
    if history is None:
        form = config.buffer.trainer_input.experience_buffer.format
        examples = examples_of(rows, renderer, form, recorded=recorded, longest=longest)
    else:
        check_same_tokenizer(config, history)
        section = config.tuner.history
        assert section is not None, "read_history() was given it"
        found = examples_of_history(history, section, renderer, recorded=recorded, longest=longest)
        examples = without_late(config, found)
    size, many = config.buffer.batch_size, sum(examples.rows.values())
    if len(examples.used) < size:
        what = "train_dataset" if history is None else "tuner.history"
        raise DatasetError(
            f"{what}: {len(examples.used)} of {many} rows can be trained but "
            f"batch_size is {size}: no step can run; lower buffer.batch_size "
            "(AlgorithmConfig.batch_size)"
        )
    return examples
