"""The seam for metric trackers, and the trackers that users already have."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tuner.errors import ConfigError, MissingDependencyError, pip_install
from tuner.run.directory import write_atomically


class Monitor(Protocol):
    """Receives the metrics of each step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlMonitor:
    """One line per step in `metrics.jsonl`: the record that a run resumes and reports from.

    Args:
        path: The file; rewritten to hold `rows` only.
        rows: What an interrupted run had logged up to the step it goes on from.
    """

    def __init__(self, path: Path, rows: list[dict[str, Any]]) -> None:
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


@dataclass(eq=False)
class Tracker:
    """A library's run. `log_step` gets a step's metrics and the step, `close` ends it."""

    log_step: Callable[[dict[str, float], int], object]
    close: Callable[[], None]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.log_step(dict(metrics), step)


def open_tracker(
    kind: str,
    *,
    project: str,
    name: str,
    folder: Path,
    first_step: int,
    config: dict[str, Any],
    args: dict[str, Any],
) -> Monitor:
    """The tracker named in `monitor.monitor_type`.

    Raises:
        MissingDependencyError: Its library is not installed; names the extra.
        ConfigError: `monitor.monitor_args` holds something that this tracker does not take.
    """
    taken = {"tensorboard": set[str](), "mlflow": {"uri", "username", "password"}}
    surplus = sorted(args.keys() - taken.get(kind, args.keys()))
    if surplus:
        raise ConfigError(
            f"monitor.monitor_args: {kind} takes no {', '.join(surplus)}"
            + (f" (it takes {', '.join(sorted(taken[kind]))})" if taken[kind] else "; remove it")
        )
    if kind == "tensorboard":
        return _tensorboard(folder / "tensorboard", first_step)
    if kind == "wandb":  # a resumed run continues the same W&B run
        run = _require("wandb").init(
            project=project,
            name=name,
            id=name,
            resume="allow",
            dir=str(folder),
            config=config,
            **args,
        )
        return Tracker(lambda metrics, step: run.log(metrics, step=step), run.finish)
    if kind == "mlflow":
        return _mlflow(project, name, config, args)
    if kind == "swanlab":
        swanlab = _require("swanlab")
        swanlab.init(project=project, experiment_name=name, config=config, **args)
        return Tracker(lambda metrics, step: swanlab.log(metrics, step=step), swanlab.finish)
    raise AssertionError(f"monitor_type {kind!r} passed the configuration's check")


def _tensorboard(folder: Path, first_step: int) -> Tracker:
    """Scalars under their metric's name. `first_step` hides what a killed run logged after it."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Tracker(log, writer.close)


def _mlflow(project: str, name: str, config: dict[str, Any], args: dict[str, Any]) -> Tracker:
    """The project is the experiment, the name is the run."""
    for key in ("username", "password"):
        if key in args:
            os.environ[f"MLFLOW_TRACKING_{key.upper()}"] = str(args[key])
    mlflow = _require("mlflow")
    if "uri" in args:
        mlflow.set_tracking_uri(args["uri"])
    mlflow.set_experiment(project)
    mlflow.start_run(run_name=name)
    mlflow.log_dict(config, "config.json")
    return Tracker(lambda metrics, step: mlflow.log_metrics(metrics, step=step), mlflow.end_run)


def _require(library: str) -> Any:
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise MissingDependencyError(
            f"monitor.monitor_type = {library!r} needs the library {library}: "
            f"{pip_install(library)}"
        ) from error
