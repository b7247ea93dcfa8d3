"""Whether a run that was interrupted goes on: with the same settings, rows and weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from tuner.config import RunConfig
from tuner.errors import ConfigError, TunerError
from tuner.run.directory import RunDirectory, read_json

# Settings that name weights which a run begins with, or is compared with.
WEIGHTS = ("model.model_path", "model.critic_model_path", "model.lora_configs.0.path")

# What may change between the parts of a run on every backend: where it lies, what it reports and
# how it is spread over machines, nothing that changes what is learned. `*` is any part of a key.
MAY_CHANGE = (
    "checkpoint_root_dir",
    "continue_from_checkpoint",
    "explorer.eval_interval",
    "explorer.eval_on_startup",
    "explorer.max_timeout",
    "explorer.rollout_model.engine_num",
    "explorer.rollout_model.gpu_memory_utilization",
    "explorer.rollout_model.tensor_parallel_size",
    "explorer.runner_per_model",
    "monitor",
    "name",
    "project",
    "trainer.max_checkpoints_to_keep",
    "trainer.max_token_len_per_gpu",
    "trainer.save_interval",
)
MAY_CHANGE_HERE = (  # on the local backend
    *MAY_CHANGE,
    "cluster.ray_address",
    "explorer.max_retry_times",
    "explorer.over_rollout",
    "explorer.rollout_model.enforce_eager",
    "explorer.rollout_model.engine_type",
    "explorer.rollout_model.extra_engine_args",
    "trainer.optimizer_offload",
    "tuner.activation_checkpointing",
    "tuner.auxiliary_models.*.input_price",
    "tuner.auxiliary_models.*.max_concurrent",
    "tuner.auxiliary_models.*.output_price",
    "tuner.backend",
    "tuner.compile",
    "tuner.device",
    "tuner.engine",
    "tuner.history.min_effective_samples",
    "tuner.history.sources",
    "tuner.layout",
    "tuner.max_slots",
    "tuner.max_tool_seconds",
    "tuner.pass_reward",
    "tuner.placement",
    "tuner.serving",
    "tuner.signal_patience",
    "tuner.trinity",
    "tuner.ray",
    "tuner.workers",
)
# What ends a rollout or draws tasks decides what is learned; else it only says how good it is.
_PASSED = "tuner.pass_reward"
# How long a run is. A schedule that ends at the last step would bend for the steps already taken.
_LENGTH = ("buffer.total_epochs", "buffer.total_steps", "trainer.total_steps")
_SCHEDULE = "algorithm.optimizer.lr_scheduler_type"


def may_change_here(config: RunConfig) -> list[str]:
    """What may change between the parts of a run of such a configuration, on the local backend."""
    decides = config.tuner.feedback_attempts or config.tuner.tasks.selector is not None
    return [key for key in MAY_CHANGE_HERE if not (decides and key == _PASSED)]


def check_same_run(
    directory: RunDirectory,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    fingerprint: Mapping[str, str],
    *,
    may_change: Sequence[str],
    lists: bool = False,
) -> None:
    """Compare with what the directory's run was started with.

    Args:
        directory: A run that has begun; the rows it was started with are in its `data.json`.
        before, now: The settings that it was started with, and those it is to go on with.
        fingerprint: What tells the rows of each dataset from others, by its name, and the weights
            that the run begins with, by their setting, one of `WEIGHTS`.
        may_change: Keys that may differ, with all below them.
        lists: Whether the items of lists are settings of their own.

    Raises:
        ConfigError: A setting or dataset that decides what is learned has changed; names them.
    """
    old, new = dict(leaves(before, lists)), dict(leaves(now, lists))
    if (new.get(_SCHEDULE) or "constant") == "constant":
        may_change = (*may_change, *_LENGTH)
    changes = [
        f"{key} was {old.get(key)!r} and is {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
        and not any(fnmatchcase(key, one) or fnmatchcase(key, f"{one}.*") for one in may_change)
    ]
    data_file = directory.path / "data.json"
    if data_file.exists():
        remedy = "delete it if the datasets are as they were: it is written again"
        data = read_json(data_file, remedy)
        if not isinstance(data, dict):
            raise TunerError(f"{data_file} is damaged: it holds no object; {remedy}")
        unknown = set(WEIGHTS) - (data.keys() & fingerprint.keys())  # earlier version's, Hub's
        changes += [
            f"the weights at {name} have changed"
            if name in WEIGHTS
            else f"the rows of dataset {name!r} have changed"
            for name in sorted((data.keys() | fingerprint.keys()) - unknown)
            if data.get(name) != fingerprint.get(name)
        ]
    if changes:
        raise ConfigError(
            f"{directory.path} holds a run that was started differently: {'; '.join(changes)}. "
            "Give this run another `name`, or set continue_from_checkpoint=false to start a new "
            "one beside it"
        )


def leaves(tree: Any, lists: bool, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings by dotted key; the items of lists are settings of their own with `lists`."""
    if isinstance(tree, Mapping) and tree:
        items: Iterable[tuple[Any, Any]] = tree.items()
    elif lists and isinstance(tree, list) and tree:
        items = enumerate(tree)
    else:
        yield prefix.removesuffix("."), tree
        return
    for name, value in items:
        yield from leaves(value, lists, f"{prefix}{name}.")
