"""The run directory: what is where, atomic writes, checkpoints, and whether a run goes on.

<checkpoint_root_dir>/<project>/<name>/
    config.yaml  metrics.jsonl  result.json  timeline.json  batches.jsonl (of asynchronous runs)
    tensorboard/  traces/step_000001.jsonl  checkpoints/step_000020/
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tuner.errors import TunerError

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
