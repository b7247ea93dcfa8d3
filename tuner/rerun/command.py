"""The command `tuner rerun`: its options, checked before anything is imported for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tuner.errors import ConfigError


def rerun(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run directory, or a file of its traces/.")
    ],
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="split-step-task-rollout, as in train-3-0-2.")
    ],
    until: Annotated[
        int | None,
        typer.Option(metavar="CALL", help="Call, from 1, where it ends, or sampling begins."),
    ] = None,
    workflow: Annotated[
        str | None, typer.Option(help="package.module:function or path/file.py:function.")
    ] = None,
    judge: Annotated[str | None, typer.Option(help="Likewise; both as the run has them.")] = None,
    sample: Annotated[
        bool, typer.Option("--sample", help="Go on with the model where the script ends.")
    ] = False,
    candidate: Annotated[
        str | None,
        typer.Option("--candidate", "-c", metavar="PATH", help="Its weights; the run's newest."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what is sampled.")] = 0,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Add it to a file for tuner.testing.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Its name there; TRACE.")] = None,
) -> None:
    """Run the workflow against a recorded rollout, here, with its breakpoints and prints.

    What the model said is given back, so none is loaded, up to a call or to the end. Where the
    agent asks for something else than was recorded, the difference is shown.
    """
    from rich.console import Console

    from tuner.rerun.again import run_again
    from tuner.rerun.findings import say
    from tuner.rerun.recorded_run import save_rollouts

    if not sample and (candidate is not None or seed):
        raise ConfigError("--candidate and --seed are for what is sampled: add --sample")
    if save is not None and (sample or until is not None):
        raise ConfigError("--save is for whole rollouts as recorded: leave --sample, --until out")
    result = run_again(
        run,
        trace,
        until=until,
        workflow=workflow,
        judge=judge,
        sample=sample,
        candidate=candidate,
        seed=seed,
    )
    say(result, Console(highlight=False, soft_wrap=True))
    if not result.well:
        raise typer.Exit(1)
    if save is not None:
        save_rollouts(run, {name or trace: trace}, save)
        typer.echo(f"saved   {save}: {name or trace}")
