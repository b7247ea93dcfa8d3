"""Experiment trackers: send metrics, and a table of some traces, to each of them."""

from __future__ import annotations

import html
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tuner.config.source import concealed, parse_override
from tuner.encoding import displayable
from tuner.errors import ConfigError, MissingDependencyError, TunerError, pip_install
from tuner.runs.directory import write_atomically
from tuner.traces import Trace

Row: TypeAlias = dict[str, Any]


@dataclass(eq=False)
class Tracker:
    """A run in a tracker's library.

    Attributes:
        log_step: Takes a step's metrics and the step.
        log_table: Takes a table's name, its rows, all with the same keys, and the step.
        end: Ends it; takes whether the run completed.
        samples: Number of traces in a table; 0 for no tables.
    """

    log_step: Callable[[dict[str, float], int], object]
    log_table: Callable[[str, Sequence[Row], int], object]
    end: Callable[[bool], object]
    samples: int = 8

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send a step's metrics; halves of UTF-16 pairs in their names as U+FFFD."""
        self.log_step(displayable(dict(metrics)), step)

    def show(self, step: int, name: str, traces: Sequence[Trace]) -> None:
        """Send a table of the first traces, ordered by task and rollout."""
        first = sorted((t for t in traces if t.final), key=lambda t: t.id)[: self.samples]
        if first:
            rows = [displayable(_row(trace)) for trace in first]
            self.log_table(f"samples/{name}", rows, step)


LONGEST = 4000
"""Maximum number of characters of a cell; longer texts lose their middle."""


def _row(trace: Trace) -> Row:
    """A trace in readable form: the prompt, the answer, the reward."""
    last = trace.calls[-1] if trace.calls else None
    said = [] if last is None else [*last.messages, last.response or {}]
    return {
        "step": trace.id.step,
        "rollout": str(trace.id),
        "reward": trace.reward,
        "outcome": trace.outcome.value,
        "calls": len(trace.calls),
        "tokens": trace.sampled_tokens,
        "task": _shortened(_json(trace.task)),
        "response": _shortened(trace.response),
        "last_call": _shortened("\n\n".join(_said(message) for message in said if message)),
    }


def _said(message: Mapping[str, Any]) -> str:
    said = {key: value for key, value in message.items() if value and key not in ("role", "name")}
    content = said.get("content", "")
    alone = isinstance(content, str) and said.keys() <= {"content"}
    return f"{message.get('role', '')}: {content if alone else _json(said)}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _shortened(text: str) -> str:
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} [...] {text[-half:]}"


# Arguments in `monitor_args` that a library reads only from the environment.
_VARIABLES = {
    "tensorboard": {},
    "wandb": {"api_key": "WANDB_API_KEY", "base_url": "WANDB_BASE_URL"},
    "mlflow": {
        "username": "MLFLOW_TRACKING_USERNAME",
        "password": "MLFLOW_TRACKING_PASSWORD",
    },
    "swanlab": {"api_key": "SWANLAB_API_KEY"},
}
# Further arguments; other libraries take those of their `init`.
_TAKEN: dict[str, set[str]] = {"tensorboard": set(), "mlflow": {"uri"}}


def open_trackers(
    kinds: Sequence[str],
    *,
    project: str,
    folder: Path,
    first_step: int,
    config: dict[str, Any],
    args: Mapping[str, Any],
) -> list[Tracker]:
    """Open the trackers named in `monitor.monitor_type`; all of them, or none.

    Args:
        kinds: The trackers.
        project: The tracker's group of related runs.
        folder: The run directory; its name is the run's. A resumed run continues the same run of a
            tracker, whose id is stored here.
        first_step: TensorBoard hides what a killed run logged from here on.
        config: The settings of the run, without secrets.
        args: `monitor.monitor_args`; arguments below a tracker's name are for that tracker only.
    """
    opened: list[Tracker] = []
    try:
        for kind, own in _arguments(kinds, args).items():
            samples = own.pop("samples", Tracker.samples)
            if isinstance(samples, bool) or not isinstance(samples, int) or samples < 0:
                raise ConfigError(
                    f"monitor.monitor_args.samples is {samples!r}: it must be a whole number from "
                    f"0, the number of traces that {kind} gets as a table"
                )
            try:
                tracker = _OPEN[kind](project, folder, first_step, config, own)
            except TunerError:
                raise
            except Exception as error:
                raise ConfigError(
                    f"monitor.monitor_type: {kind} could not be started: "
                    f"{type(error).__name__}: {' '.join(str(error).split())}; see "
                    "monitor.monitor_args (docs/looking.md)"
                ) from error
            tracker.samples = samples
            opened.append(tracker)
    except BaseException:
        for tracker in opened:
            tracker.end(False)
        raise
    return opened


def _arguments(kinds: Sequence[str], args: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The arguments of each tracker; puts those for its environment there."""
    for kind in args.keys() & _VARIABLES.keys():
        if kind not in kinds or not isinstance(args[kind], Mapping):
            raise ConfigError(
                f"monitor.monitor_args.{kind}: "
                + (
                    f"{args[kind]!r} is not a set of arguments"
                    if kind in kinds
                    else f"monitor.monitor_type has no {kind}; add it there, or remove this"
                )
            )
    shared = {key: value for key, value in args.items() if key not in _VARIABLES}
    found = {kind: {**shared, **args.get(kind, {})} for kind in kinds}
    for kind, own in found.items():
        for key in own.keys() & _VARIABLES[kind].keys():
            if value := own.pop(key):
                os.environ[_VARIABLES[kind][key]] = str(value)
        taken = _TAKEN.get(kind, set(own)) | {"samples"}
        if surplus := sorted(own.keys() - taken):
            known = ", ".join(sorted(taken | _VARIABLES[kind].keys()))
            raise ConfigError(
                f"monitor.monitor_args: {kind} takes no {', '.join(surplus)} (it takes {known})"
                + ("; put it below the tracker it is for" if len(kinds) > 1 else "")
            )
    return found


def _tensorboard(
    project: str, folder: Path, first_step: int, config: dict[str, Any], args: dict[str, Any]
) -> Tracker:
    """Scalars under their metric's name, tables as text."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def log(metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def log_table(name: str, rows: Sequence[Row], step: int) -> None:
        writer.add_text(name, _markdown(rows), step)

    return Tracker(log, log_table, lambda completed: writer.close())


def _markdown(rows: Sequence[Row]) -> str:
    def line(cells: Sequence[Any]) -> str:
        texts = (html.escape(str(cell)) for cell in cells)
        return " | ".join(text.replace("|", "&#124;").replace("\n", "<br>") for text in texts)

    return "\n".join(
        [line(list(rows[0])), " | ".join("---" for _ in rows[0])]
        + [line(list(row.values())) for row in rows]
    )


def _wandb(
    project: str, folder: Path, first_step: int, config: dict[str, Any], args: dict[str, Any]
) -> Tracker:
    wandb = _require("wandb")
    known = _RunId(folder / "wandb_run")
    about_machine = {"x_disable_meta": _secret_in_command()}  # includes the command
    settings = {**(args.pop("settings", None) or {}), **about_machine}
    ours = {"project": project, "name": folder.name, "dir": str(folder), "id": known.id}
    run = wandb.init(**{**ours, "resume": "allow", "config": config, "settings": settings, **args})
    known.keep(run.id)

    def log_table(name: str, rows: Sequence[Row], step: int) -> None:
        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        run.log({name: table}, step=step)

    return Tracker(
        lambda metrics, step: run.log(metrics, step=step),
        log_table,
        lambda completed: run.finish(exit_code=0 if completed else 1),
    )


def _mlflow(
    project: str, folder: Path, first_step: int, config: dict[str, Any], args: dict[str, Any]
) -> Tracker:
    """The project is the experiment."""
    mlflow = _require("mlflow")
    known = _RunId(folder / "mlflow_run")
    if "uri" in args:
        mlflow.set_tracking_uri(args["uri"])
    mlflow.set_experiment(project)
    known.keep(mlflow.start_run(run_id=known.id, run_name=folder.name).info.run_id)
    mlflow.log_dict(config, "config.json")

    def log(metrics: dict[str, float], step: int) -> None:
        # Names of a user's metrics may contain characters that MLflow rejects.
        allowed = {re.sub(r"[^\w\-. :/]", "_", name): metrics[name] for name in metrics}
        mlflow.log_metrics(allowed, step=step)

    def log_table(name: str, rows: Sequence[Row], step: int) -> None:
        columns = {key: [row[key] for row in rows] for key in rows[0]}
        mlflow.log_table(columns, f"{name}.json")  # continues the existing rows

    return Tracker(
        log, log_table, lambda completed: mlflow.end_run("FINISHED" if completed else "FAILED")
    )


def _swanlab(
    project: str, folder: Path, first_step: int, config: dict[str, Any], args: dict[str, Any]
) -> Tracker:
    swanlab = _require("swanlab")
    known = _RunId(folder / "swanlab_run")
    settings = swanlab.Settings(probe={"runtime": not _secret_in_command()})  # has the command
    # Under the names that lose to `name` and `log_dir`, which may be in `args`.
    ours = {"project": project, "experiment_name": folder.name, "logdir": str(folder / "swanlog")}
    going_on = {"id": known.id, "resume": "allow"}
    run = swanlab.init(**{**ours, **going_on, "config": config, "settings": settings, **args})
    known.keep(run.id)

    def log_table(name: str, rows: Sequence[Row], step: int) -> None:
        table = swanlab.echarts.Table()
        table.add(list(rows[0]), [list(row.values()) for row in rows])
        run.log({name: table}, step=step)

    return Tracker(
        lambda metrics, step: run.log(metrics, step=step),
        log_table,
        lambda completed: run.finish(**({} if completed else _CRASHED)),
    )


_CRASHED = {"state": "crashed", "error": "the run stopped before its end"}
_OPEN: dict[str, Callable[..., Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "swanlab": _swanlab,
}


class _RunId:
    """The id of a tracker's run, in a file of the run directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.id = path.read_text(encoding="utf-8") if path.exists() else None

    def keep(self, id: str) -> None:
        if id != self.id:
            write_atomically(self._path, id)


def _secret_in_command() -> bool:
    """Whether an override on the command line is a secret: trackers send the command, too."""
    for argument in sys.argv[1:]:
        try:
            override = parse_override(argument.lstrip("-"))
        except ConfigError:
            continue
        if concealed(override.value, {}, override.key) != override.value:
            return True
    return False


def _require(library: str) -> Any:
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise MissingDependencyError(
            f"monitor.monitor_type = {library!r} needs the library {library}: "
            f"{pip_install(library)}"
        ) from error
