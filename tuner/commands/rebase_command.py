"""The command `tuner rebase`: its options, checked before anything is imported for it."""

from __future__ import annotations

from typing import Annotated

import typer

from tuner.commands.arguments import Overrides, RunDirectoryPath


def rebase(
    run: RunDirectoryPath,
    judge: Annotated[
        str, typer.Option(help="The mended one: package.module:function or path/file.py:function.")
    ],
    overrides: Overrides = None,
    workflow: Annotated[
        str | None, typer.Option(help="Likewise; as the run's configuration names it.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the new run, beside RUN; RUN's with -rebased.")
    ] = None,
    min_effective_samples: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="What the tokens recorded for a step must be worth to the weights that it trains.",
        ),
    ] = 0.9,
    max_reused: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="Of the steps from the first changed one on how many may be trained again.",
        ),
    ] = 0.5,
) -> None:
    """The judge was wrong: score a run's rollouts again, and train on from what this changes.

    RUN stays as it is. What was recorded is trained again as long as it is worth it to the weights;
    from then on rollouts are made anew. Interrupted, the same command goes on.
    """
    from tuner.commands.rebasing import rebase

    result = rebase(
        run,
        judge,
        workflow=workflow,
        name=name,
        min_effective_samples=min_effective_samples,
        max_reused=max_reused,
        overrides=overrides or [],
    )
    typer.echo(result)
