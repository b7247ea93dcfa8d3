"""The seam for metric trackers, and the trackers that users already have."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tuner.errors import ConfigError, MissingDependencyError


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
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        temporary.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardMonitor:
    """Scalars under their metric's name. `first_step` hides what a killed run logged after it."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbMonitor:
    """Weights & Biases; a resumed run continues the same W&B run."""

    def __init__(
        self, project: str, name: str, folder: Path, config: dict[str, Any], args: dict[str, Any]
    ) -> None:
        self._run = _require("wandb").init(
            project=project,
            name=name,
            id=name,
            resume="allow",
            dir=str(folder),
            config=config,
            **args,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowMonitor:
    """MLflow: the project is the experiment, the name is the run."""

    def __init__(
        self, project: str, name: str, config: dict[str, Any], args: dict[str, Any]
    ) -> None:
        for name, variable in (
            ("username", "MLFLOW_TRACKING_USERNAME"),
            ("password", "MLFLOW_TRACKING_PASSWORD"),
        ):
            if name in args:
                os.environ[variable] = str(args[name])
        self._mlflow = _require("mlflow")
        if "uri" in args:
            self._mlflow.set_tracking_uri(args["uri"])
        self._mlflow.set_experiment(project)
        self._mlflow.start_run(run_name=name)
        self._mlflow.log_dict(config, "config.json")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class SwanlabMonitor:
    """SwanLab."""

    def __init__(
        self, project: str, name: str, config: dict[str, Any], args: dict[str, Any]
    ) -> None:
        self._swanlab = _require("swanlab")
        self._swanlab.init(project=project, experiment_name=name, config=config, **args)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def close(self) -> None:
        self._swanlab.finish()


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
        return TensorBoardMonitor(folder / "tensorboard", first_step)
    if kind == "wandb":
        return WandbMonitor(project, name, folder, config, args)
    if kind == "mlflow":
        return MlflowMonitor(project, name, config, args)
    if kind == "swanlab":
        return SwanlabMonitor(project, name, config, args)
    raise AssertionError(f"monitor_type {kind!r} passed the configuration's check")


def _require(library: str) -> Any:
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise MissingDependencyError(
            f"monitor.monitor_type = {library!r} needs the library {library}: "
            f"pip install 'agentscope-tuner[{library}]'"
        ) from error
