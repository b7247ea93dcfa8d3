"""What the workers write into the run's folder: traces, and why the run has to stop."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tuner.run.directory import RunDirectory, write_atomically
from tuner.traces import Trace, TraceStore


class Journal:
    """The folder of one run as its workers and its driver see it.

    Several workers append to the traces of one step, so each takes the folder's lock while it does.
    """

    def __init__(self, run_dir: Path) -> None:
        self._directory = RunDirectory(run_dir)
        self.folder = run_dir / "tuner"

    def write(self, traces: Sequence[Trace]) -> None:
        """Append every attempt of a rollout."""
        with self._lock():
            store = TraceStore(self._directory.traces)
            for trace in traces:
                store.append(trace)

    def stop(self, error: BaseException) -> None:
        """Say that the run must not go on; the driver ends it. The first reason stays."""
        with self._lock():
            if self.reason() is None:
                reason = {"error": type(error).__name__, "message": str(error)}
                write_atomically(self.folder / "stop.json", json.dumps(reason))

    def reason(self) -> dict[str, Any] | None:
        """Why the run must not go on: its error's class and message, or None."""
        path = self.folder / "stop.json"
        if not path.exists():
            return None
        reason: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return reason

    def traces(self, step: int) -> Path:
        """The file with the traces of a training step."""
        return TraceStore(self._directory.traces).path("train", step)

    def replay(self, files: Sequence[Path]) -> None:
        """Say which files of traces a run that goes on has from before, and trains again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        names = sorted(file.name for file in files)
        write_atomically(self.folder / "replay.json", json.dumps(names))

    def recorded(self, split: str, step: int) -> list[Trace]:
        """What a run that goes on has of a step from before; empty for a new step."""
        path = self.folder / "replay.json"
        store = TraceStore(self._directory.traces)
        if not path.exists() or store.path(split, step).name not in json.loads(path.read_text()):
            return []
        return store.read(split, step)

    def forget_reason(self) -> None:
        """A run that is started again begins without it."""
        (self.folder / "stop.json").unlink(missing_ok=True)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def report_file(run_dir: Path, role: str) -> Path:
    """Where the Trinity-RFT process with this name writes its metrics, a line per report."""
    return run_dir / "tuner" / f"{role}.jsonl"
