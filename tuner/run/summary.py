"""What tells runs apart: their settings and their curves."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.errors import TunerError
from tuner.run.continuation import leaves
from tuner.run.directory import RunDirectory, read_json, read_metrics

# They name a run, and so differ without telling anything.
NAMES = ("name", "project", "checkpoint_root_dir", "continue_from_checkpoint")


@dataclass(frozen=True)
class RunSummary:
    """A run as it is compared with others.

    Attributes:
        name: The name of its folder.
        settings: Its effective configuration, without secrets, by dotted key; with them what tells
            the rows of its datasets from others.
        metrics: A row for each step, as in `metrics.jsonl`.
    """

    name: str
    settings: dict[str, Any]
    metrics: list[dict[str, Any]]


def is_run(path: Path) -> bool:
    """Whether a folder is one that a run was recorded in."""
    directory = RunDirectory(path)
    return directory.metrics.is_file() or directory.traces.is_dir()


def check_is_run(path: Path) -> None:
    """
    Raises:
        TunerError: It is not.
    """
    if not is_run(path):
        raise TunerError(
            f"{path} is not a run: it holds neither metrics.jsonl nor traces/. Give the "
            "folder <checkpoint_root_dir>/<project>/<name>"
        )


def find_runs(folder: Path, *, depth: int = 2) -> Iterator[Path]:
    """The runs in a folder, which may be that of a project or of all projects, by name.

    Args:
        folder: Where to look; what cannot be looked into is passed over.
        depth: How many folders deep. Inside a run none is looked for.
    """
    try:
        inside = sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return
    for path in inside:
        if is_run(path):
            yield path
        elif depth > 1 and not path.name.startswith("."):
            yield from find_runs(path, depth=depth - 1)


def read_run(path: Path) -> RunSummary:
    """Read what a run is compared by; it may still be going on.

    Raises:
        TunerError: `path` is not a run directory, or its files are damaged.
    """
    check_is_run(path)
    directory = RunDirectory(path)
    config, data = directory.stored_config(), path / "data.json"
    rows = read_json(data, "delete it: it only tells rows from others") if data.exists() else {}
    settings = dict(leaves(config, lists=True)) if config else {}
    return RunSummary(
        name=path.resolve().name,
        settings=settings | {f"rows of {name}": digest[:8] for name, digest in rows.items()},
        metrics=read_metrics(directory.metrics, up_to=sys.maxsize),
    )


def differing_settings(runs: Sequence[RunSummary]) -> dict[str, list[Any]]:
    """The settings that are not the same in all runs, by dotted key: a value for each run.

    None where a run has it not. What only names a run is left out.
    """
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in NAMES)
    found = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: values for key, values in found.items() if any(one != values[0] for one in values)}
