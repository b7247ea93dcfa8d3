"""Which dataset is trained and evaluated on: what was given to `tune()`, or what the file names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tuner.config import RunConfig
from tuner.config.load import source_key
from tuner.data.dataset import (
    DatasetConfig,
    Task,
    check_fills_a_batch,
    described,
    load_tasks,
)
from tuner.data.lazy_rows import StreamRows
from tuner.errors import DatasetError


def training_tasks(config: RunConfig, dataset: Any) -> Sequence[Task]:
    """The tasks of a run, or with `mode: train` its rows.

    Args:
        config: The effective configuration; where it says a path, that is where they are.
        dataset: As given to `tune()`.

    Raises:
        DatasetError: There are none, they cannot be read, or are fewer than one batch.
    """
    recorded = config.mode == "train"
    buffer = config.buffer
    source = buffer.trainer_input.experience_buffer if recorded else buffer.explorer_input.taskset
    if source.path is not None:
        dataset = DatasetConfig(path=source.path, name=source.subset_name, split=source.split)
    if dataset is None:
        raise DatasetError(
            "there is nothing to train on: pass train_dataset, or set "
            f"{source_key(config.mode)}.path"
        )
    tasks = load_tasks(dataset, role="train_dataset", endless=not recorded)
    if isinstance(tasks, StreamRows):
        _check_stream(config)
    check_fills_a_batch(tasks, config.buffer.batch_size, described(dataset))
    if config.tuner.tasks.selector is not None:
        from tuner.data.curriculum import check_selector

        check_selector(config, tasks)
    return tasks


def _check_stream(config: RunConfig) -> None:
    if config.buffer.total_steps is None:
        raise DatasetError(
            "train_dataset is a stream, whose end nobody knows: set buffer.total_steps"
        )
    selector = config.buffer.explorer_input.taskset.data_selector.selector_type
    if selector != "sequential":
        raise DatasetError(
            f"buffer.explorer_input.taskset.data_selector.selector_type is {selector!r}, but a "
            "stream has one order: set it to 'sequential', and mix with dataset.shuffle()"
        )


def evaluation_tasks(config: RunConfig, dataset: Any) -> dict[str, Sequence[Task]]:
    """The rows of each evaluation set, by its name; arguments and errors as `training_tasks`."""
    in_memory = dataset if isinstance(dataset, dict) else None
    tasks = {}
    for taskset in config.buffer.explorer_input.eval_tasksets:
        source: Any = dataset if in_memory is None else in_memory.get(taskset.name)
        if taskset.path is not None:
            source = DatasetConfig(path=taskset.path, name=taskset.subset_name, split=taskset.split)
        if source is None:
            raise DatasetError(
                f"evaluation set {taskset.name!r} has no rows: set its path in "
                "buffer.explorer_input.eval_tasksets"
            )
        tasks[taskset.name] = load_tasks(source, role=f"eval_dataset {taskset.name!r}")
    return tasks
