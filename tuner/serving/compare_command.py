"""The command `tuner compare`: runs side by side, or the proof that one is better."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tuner.commands.arguments import AsJson
from tuner.errors import ConfigError


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Two or more; with --candidate one.")
    ],
    split: Annotated[
        str | None,
        typer.Option(
            help="Whose tasks: train, or an evaluation set. None: all sets they have in common."
        ),
    ] = None,
    tasks: Annotated[int, typer.Option(min=0, help="How many tasks of a split are shown.")] = 10,
    proof: Annotated[
        bool,
        typer.Option("--proof", help="Is the second run better than the first, on the same tasks?"),
    ] = False,
    candidate: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Is this run, checkpoint or model better than what sampled RUN's sessions? From "
            "their log-probs; nothing is sampled. RUN may be a server's directory.",
        ),
    ] = None,
    effect: Annotated[
        float | None,
        typer.Option(help="For both: the difference in reward that is worth finding."),
    ] = None,
    rewards: Annotated[
        tuple[float, float],
        typer.Option(metavar="LOW HIGH", help="Between these lies every reward."),
    ] = (0.0, 1.0),
    alpha: Annotated[
        float, typer.Option(help="Chance of a wrong promotion, however often one looks.")
    ] = 0.05,
    power: Annotated[
        float, typer.Option(help="Chance to promote a candidate that is better by the effect.")
    ] = 0.8,
    margin: Annotated[float, typer.Option(help="A promotion needs more than this.")] = 0.0,
    steps: Annotated[
        str | None, typer.Option(metavar="A-B", help="With --candidate: first and last step.")
    ] = None,
    least_effective: Annotated[
        float | None,
        typer.Option(metavar="N", help="With --candidate: effective sessions to say anything; 20."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Runs side by side: settings that differ, curves, and the rewards of the same tasks.

    With --proof or --candidate: estimate, interval, and promote, keep or not yet.
    """
    if not proof and candidate is None:
        for name, given in (("--effect", effect), ("--steps", steps)):
            if given is not None:
                raise ConfigError(f"{name} is for --proof or --candidate: add one of them")
        from tuner.commands.comparison import compare

        found = compare(runs, split=split)
        typer.echo(found.model_dump_json(indent=2) if as_json else found.text(tasks))
        return
    if effect is None:
        raise ConfigError(
            "--effect is not given: say which difference in reward is worth finding, as 0.05"
        )
    from tuner.run.proof import Plan

    low, high = rewards
    plan = Plan(effect=effect, low=low, high=high, alpha=alpha, power=power, margin=margin)
    if candidate is None:
        if steps is not None or least_effective is not None:
            raise ConfigError("--steps and --least-effective are for --candidate")
        from tuner.commands.comparison import prove

        proven = prove(runs, plan, split=split)
        typer.echo(proven.model_dump_json(indent=2) if as_json else proven.text())
        return
    if proof or len(runs) != 1:
        raise ConfigError("--candidate compares with one run's traffic: name one run, no --proof")
    from tuner.run.offpolicy import LEAST_EFFECTIVE
    from tuner.serving.logged import compare_logged
    from tuner.viewer.replay import parse_steps

    logged = compare_logged(
        runs[0],
        candidate,
        plan,
        split=split or "train",
        steps=parse_steps(steps),
        least_effective=LEAST_EFFECTIVE if least_effective is None else least_effective,
    )
    typer.echo(logged.model_dump_json(indent=2) if as_json else logged.text())
