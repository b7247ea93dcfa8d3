"""Whether a run directory holds the run that the configuration asks for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tuner.backends.run_directory import RunDirectory
from tuner.config import RunConfig, load_config
from tuner.errors import ConfigError

# What may change between the parts of a run: where it lies, what it reports and how long it is,
# nothing else that changes what is learned.
MAY_CHANGE = (
    "checkpoint_root_dir",
    "continue_from_checkpoint",
    "buffer.total_epochs",
    "buffer.total_steps",
    "explorer.eval_interval",
    "explorer.eval_on_startup",
    "explorer.max_retry_times",
    "explorer.max_timeout",
    "explorer.over_rollout",
    "explorer.rollout_model.enforce_eager",
    "explorer.rollout_model.engine_num",
    "explorer.rollout_model.engine_type",
    "explorer.rollout_model.extra_engine_args",
    "explorer.rollout_model.gpu_memory_utilization",
    "explorer.rollout_model.tensor_parallel_size",
    "explorer.runner_per_model",
    "monitor",
    "name",
    "project",
    "trainer.max_checkpoints_to_keep",
    "trainer.max_token_len_per_gpu",
    "trainer.optimizer_offload",
    "trainer.save_interval",
    "tuner.activation_checkpointing",
    "tuner.device",
    "tuner.engine",
    "tuner.layout",
    "tuner.max_slots",
    "tuner.max_tool_seconds",
    "tuner.placement",
    "tuner.backend",
    "tuner.signal_patience",
    "tuner.trinity",
)


def check_same_run(
    directory: RunDirectory, config: RunConfig, fingerprint: Mapping[str, str]
) -> None:
    """Compare with what the directory's run was started with.

    Raises:
        ConfigError: A setting or dataset that decides what is learned has changed; names them.
    """
    before = dict(_leaves(load_config(directory.config).model_dump(mode="json")))
    now = dict(_leaves(config.model_dump(mode="json")))
    changes = [
        f"{key} was {before.get(key)!r} and is {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not _may_change(key, now)
    ]
    refuse_changes(directory, changes, fingerprint)


def refuse_changes(
    directory: RunDirectory, changes: Sequence[str], fingerprint: Mapping[str, str]
) -> None:
    """Stop where settings have changed, or the rows of a dataset since `data.json` was written.

    Args:
        changes: One phrase for each setting.
        fingerprint: What tells the rows of each dataset from others, by its name.

    Raises:
        ConfigError: Something has; names all of it.
    """
    data_file = directory.path / "data.json"
    if data_file.exists():
        old_data = json.loads(data_file.read_text(encoding="utf-8"))
        changes = [
            *changes,
            *(
                f"the rows of dataset {name!r} have changed"
                for name in sorted(old_data.keys() | fingerprint.keys())
                if old_data.get(name) != fingerprint.get(name)
            ),
        ]
    if changes:
        raise ConfigError(
            f"{directory.path} holds a run that was started differently: {'; '.join(changes)}. "
            "Give this run another `name`, or set continue_from_checkpoint=false to start a new "
            "one beside it"
        )


def _may_change(key: str, now: Mapping[str, Any]) -> bool:
    if key in ("buffer.total_steps", "buffer.total_epochs"):
        # A schedule that ends at the last step would bend for the steps already taken.
        return bool(now["algorithm.optimizer.lr_scheduler_type"] == "constant")
    if key.startswith("tuner.auxiliary_models."):
        return key.endswith(".max_concurrent")
    return any(key == allowed or key.startswith(f"{allowed}.") for allowed in MAY_CHANGE)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
