"""What several commands are given, and what it names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tuner.errors import ConfigError

FAILED = 1
"""The status of a command that found something wrong."""

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file in Trinity-RFT's form.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that win over the file's."),
]
RunDirectoryPath = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Run directory: <checkpoint_root_dir>/<project>/<name>."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def functions_of(
    path: Path, overrides: list[str]
) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None, str]:
    """The workflow and the judge that the file names, and its backend; recorded data needs none."""
    from tuner.config.load import checked, read_layers
    from tuner.functions.loading import load_function

    load = load_function
    layers = read_layers(path, overrides=overrides)
    if layers.backend == "trinity":
        from tuner.functions.shipping import load  # type: ignore[assignment]  # its own parameters
        from tuner.trinity.handover import resolve
        from tuner.trinity.stage import ROLLS_OUT

        settings = resolve(layers)
        names, rolls_out = settings.tuner, settings.mode in ROLLS_OUT
    else:
        config = checked(layers)
        names, rolls_out = config.tuner, config.mode != "train"
    workflow: Callable[..., Any] | None = None
    if names.agent is not None:
        from tuner.areal import configured_agent

        workflow = configured_agent(names)
    elif names.workflow is not None:
        workflow = load(names.workflow, setting="tuner.workflow")
    elif rolls_out:
        raise ConfigError(
            f"{path}: tuner.workflow is not set: name the workflow as package.module:function or "
            "path/file.py:function"
        )
    judge = None if names.judge is None else load(names.judge, setting="tuner.judge")
    return workflow, judge, layers.backend
