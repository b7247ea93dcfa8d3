"""The command `tuner check`: its options, checked before anything is imported for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.commands.arguments import FAILED, ConfigFile, Named, Overrides, functions_of
from tuner.errors import ConfigError

if TYPE_CHECKING:
    from tuner.result import Verdict
    from tuner.settings import Given


def check(
    config: ConfigFile,
    overrides: Overrides = None,
    of_judge: Annotated[
        bool, typer.Option("--judge", help="Is the judge any good? It judges rollouts and more.")
    ] = False,
    labelled: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="For --judge: JSON lines of task, response, reward."),
    ] = None,
    tasks: Annotated[int, typer.Option(min=1, help="For --judge: tasks with rollouts.")] = 4,
) -> None:
    """Validate everything, look at two rollouts or at recorded data, and say what would happen.

    For Trinity-RFT: its own check, without a GPU or a cluster; no rollouts.
    """
    from tuner.run.interrupts import outside_event_loop
    from tuner.tune import prepare

    if labelled is not None and not of_judge:
        raise ConfigError("--labelled is for the judge: add --judge")
    named = functions_of(config, overrides or [])
    if of_judge and named.backend == "trinity":
        raise ConfigError("--judge needs rollouts, which are run here: add tuner.backend=local")
    if named.backend == "trinity":
        verdict = _check_trinity(config, overrides or [], named)
    else:
        run = prepare(**named.arguments, config_path=config, overrides=overrides or [])
        # These import PyTorch: only once the rest is in order.
        if of_judge:
            from tuner.commands.judge_check import check_judge

            verdict = outside_event_loop(lambda: check_judge(run, tasks=tasks, labelled=labelled))
        elif run.history is not None:
            from tuner.commands.history_check import check_history

            verdict = outside_event_loop(lambda: check_history(run))
        else:
            from tuner.check import check_run

            verdict = outside_event_loop(lambda: check_run(run))
    typer.echo(verdict.text)
    if not verdict.ready:
        raise typer.Exit(FAILED)


def _check_trinity(path: Path, overrides: list[str], named: Named) -> Verdict:
    from tuner.environments.seam import parts_of
    from tuner.trinity.preparation import check_trinity

    given: Given = {
        "environment": named.environment,
        "config_path": path,
        "overrides": overrides,
    }
    parts = parts_of(named.workflow, named.judge, None, given)
    return check_trinity(
        path,
        parts.given["overrides"],
        workflow=parts.workflow,
        judge=parts.judge,
        train_dataset=parts.train_dataset,
        eval_dataset=parts.given.get("eval_dataset"),
    )
