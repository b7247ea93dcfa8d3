"""The command `tuner train`: learn from rollouts that were recorded before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tuner.commands.arguments import functions_of
from tuner.errors import ConfigError


def train(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE... [KEY=VALUE...]",
            help="Runs, files of traces or folders of them, a server's serving.sqlite, or logs; "
            "and settings that win over the file's.",
        ),
    ],
    config: Annotated[Path, typer.Option(metavar="FILE", help="YAML file in Trinity-RFT's form.")],
) -> None:
    """Train on recorded rollouts, without a new one; a workflow is only for evaluations.

    The same as `tuner run` with `tuner.history.sources`. What is learned is the file's algorithm:
    sft imitates the best of each task, dpo compares two of a task, all others learn off-policy.
    """
    from tuner.tune import tune

    sources, overrides = split_arguments(arguments)
    history = [f"tuner.history.sources={json.dumps(sources)}"] if sources else []
    settings = ["mode=train", *history, *overrides]
    named = functions_of(config, settings)
    if named.backend == "trinity":
        raise ConfigError(
            "tuner train is for the local backend: add tuner.backend=local. Trinity-RFT trains on "
            "what it explored with `tuner run FILE mode=train`"
        )
    typer.echo(tune(**named.arguments, config_path=config, overrides=settings))


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Sources, as absolute paths, and settings, which have a `=` and are no path."""
    sources, overrides = list[str](), list[str]()
    for text in arguments:
        if "=" in text and not Path(text).exists():
            overrides.append(text)
        else:
            sources.append(str(Path(text).expanduser().resolve()))
    return sources, overrides
