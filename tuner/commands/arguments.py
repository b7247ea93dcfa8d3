"""What several commands are given, and what it names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tuner.errors import ConfigError

if TYPE_CHECKING:
    from tuner.environments import Environment

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


class Named(NamedTuple):
    """What a file names, and its backend.

    Attributes:
        workflow, judge: None where they are not named, or an environment brings them.
        backend: "local" or "trinity".
        environment: That of `tuner.environment`, but for a queue agent's.
    """

    workflow: Callable[..., Any] | None
    judge: Callable[..., Any] | None
    backend: str
    environment: Environment | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """As `tune()` and `evaluate()` take them."""
        return {
            "workflow_func": self.workflow,
            "judge_func": self.judge,
            "environment": self.environment,
        }


def functions_of(path: Path, overrides: list[str]) -> Named:
    """The workflow and the judge that the file names, or its environment; recorded data needs none.

    Raises:
        ConfigError: The file cannot be read, what it names cannot be loaded, or it names nothing.
        FunctionError: What it names as its environment is none.
    """
    from tuner.config.load import checked, read_layers
    from tuner.environments.seam import named_in
    from tuner.functions.loading import load_function

    load: Callable[..., Any] = load_function
    layers = read_layers(path, overrides=overrides)
    if layers.backend == "trinity":
        from tuner.functions.shipping import load as load_sent
        from tuner.trinity.handover import resolve
        from tuner.trinity.stage import ROLLS_OUT

        load, settings = load_sent, resolve(layers)
        names, rolls_out = settings.tuner, settings.mode in ROLLS_OUT
    else:
        config = checked(layers)
        names, rolls_out = config.tuner, config.mode != "train"
    workflow: Callable[..., Any] | None = None
    if names.agent is not None:
        from tuner.areal import configured_agent

        workflow = configured_agent(names)
    elif (environment := named_in(names)) is not None:
        return Named(None, None, layers.backend, environment)
    elif names.workflow is not None:
        workflow = load(names.workflow, setting="tuner.workflow")
    elif rolls_out:
        raise ConfigError(
            f"{path}: tuner.workflow is not set: name the workflow as package.module:function or "
            "path/file.py:function, or set tuner.environment"
        )
    judge = None if names.judge is None else load(names.judge, setting="tuner.judge")
    return Named(workflow, judge, layers.backend)
