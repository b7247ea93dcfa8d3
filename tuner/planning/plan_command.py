"""The command `tuner plan`: its options, checked before anything is imported for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tuner.commands.arguments import AsJson, ConfigFile, Overrides
from tuner.errors import ConfigError


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="A run of this machine that it is fitted to, or a folder of runs; several times. "
            "The file's own, if none is given. The last one of the file's agent says what a "
            "rollout comes to.",
        ),
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="NxGPU", help="Of each node, as 8xH100; none.")
    ] = None,
    cores: Annotated[
        int | None, typer.Option(min=1, help="Of each node; as many as this machine has.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    assume: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER",
            help="A number that is known otherwise, as calls=8 or agent=0.02 (seconds); several "
            "times.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Seconds of a step by part on hardware that you describe, what limits it, what to change.

    Nothing is loaded or run. Each number says whether it was measured, fitted or assumed.
    """
    from tuner.planning.plan import plan_file

    found = plan_file(
        config,
        overrides or [],
        runs=runs or [],
        gpus=gpus,
        cores=cores,
        nodes=nodes,
        assumed=dict(map(_number, assume or [])),
    )
    typer.echo(json.dumps(found.to_json(), indent=2) if as_json else found)


def _number(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ConfigError(f"--assume {text!r}: say NAME=NUMBER, of at least 0, as calls=8")
    return name.strip(), number
