"""The run directory: what is where, atomic writes, checkpoints, and whether a run goes on.

<checkpoint_root_dir>/<project>/<name>/
    config.yaml  metrics.jsonl  result.json  timeline.json  batches.jsonl (of asynchronous runs)
    tensorboard/  traces/step_000001.jsonl  checkpoints/step_000020/
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.config import RunConfig, load_config
from tuner.errors import ConfigError, TunerError

TRAINER_STATE = "trainer_state.pt"


class RunDirectory:
    """Paths of one run, and its checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.timeline = path / "timeline.json"
        self.batches = path / "batches.jsonl"
        self.result = path / "result.json"
        self.traces = path / "traces"
        self.tensorboard = path / "tensorboard"
        self.checkpoints = path / "checkpoints"

    def has_begun(self) -> bool:
        """Whether anything was recorded here; a start that failed before that leaves nothing."""
        return self.metrics.exists() or any(self.traces.glob("*.jsonl"))

    def create(self) -> None:
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        for leftover in self.checkpoints.glob(".*"):
            shutil.rmtree(leftover)

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def checkpoint_steps(self) -> list[int]:
        """Steps of the complete checkpoints, rising."""
        return sorted(int(path.name.removeprefix("step_")) for path in self._complete())

    def _complete(self) -> list[Path]:
        return list(self.checkpoints.glob("step_*"))

    def save_checkpoint(self, step: int, write: Callable[[Path], None], *, keep: int) -> Path:
        """Let `write` fill a folder that gets its name only when it is complete.

        Args:
            step: Update after which this is.
            write: Writes the model and the trainer's state into the folder it is given.
            keep: How many checkpoints to keep, the newest; 0 keeps all.
        """
        final = self.checkpoint(step)
        if final.exists():
            return final
        temporary = self.checkpoints / f".{final.name}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        write(temporary)
        os.replace(temporary, final)
        if keep:
            for old in self.checkpoint_steps()[:-keep]:
                shutil.rmtree(self.checkpoint(old))
        return final


def write_atomically(path: Path, text: str) -> None:
    """Write under a temporary name, then rename: a reader sees the old text or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def read_metrics(path: Path, *, up_to: int) -> list[dict[str, Any]]:
    """Metrics of the steps up to `up_to`; a torn last line and later steps are left out."""
    if not path.exists():
        return []
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
            except ValueError as error:
                raise TunerError(f"{path}, line {number} is not JSON: {error}") from error
            if row["step"] <= up_to:
                rows.append(row)
    return rows


def free_name(path: Path) -> Path:
    """`path`, or the first of `path-2`, `path-3`, ... that does not exist."""
    number, candidate = 2, path
    while candidate.exists():
        candidate = path.with_name(f"{path.name}-{number}")
        number += 1
    return candidate


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
