"""The commands `tuner serve` and `tuner compare`: options, checked before anything is imported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuner.commands.arguments import AsJson, ConfigFile, Overrides
from tuner.errors import ConfigError, MissingDependencyError, pip_install

if TYPE_CHECKING:
    from tuner.config import RunConfig
    from tuner.serving.hosting import Server


def serve(
    config: ConfigFile,
    overrides: Overrides = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at; other than loopback needs an admin key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8700,
    train: Annotated[
        bool,
        typer.Option(
            "--train", help="Learn from judged sessions, and promote what is proven to be better."
        ),
    ] = False,
) -> None:
    """Serve the model to agents that run elsewhere, and record every call of theirs.

    The model is the file's, the newest checkpoint of its run, or what a server promoted last.
    Calls, rewards and keys are in serving.sqlite in the run directory; a server that is started
    again goes on with them.
    """
    from tuner.config.load import checked, read_layers
    from tuner.config.model_paths import require_model_libraries
    from tuner.tune import with_default_model

    require_libraries()
    layers = read_layers(config, overrides=overrides or [])
    if layers.backend == "trinity":
        raise ConfigError("tuner serve is for the local backend: add tuner.backend=local")
    settings, more = with_default_model(checked(layers)), dict[str, Any]()
    require_model_libraries(settings)
    if train:
        settings, more = learns(settings, config, overrides or [])

    from tuner.serving.hosting import serve as serve_model

    serve_model(
        settings, host=host, port=port, announce=lambda server: typer.echo(said(server)), **more
    )


def learns(config: RunConfig, path: Path, overrides: list[str]) -> tuple[RunConfig, dict[str, Any]]:
    """The configuration of a server that learns, and what `serve` is given besides.

    Raises:
        ConfigError: A server cannot learn with it.
        FunctionError, DatasetError: As `tune()`, of the held-out tasks.
    """
    from tuner.commands.arguments import functions_of
    from tuner.serving.learning.beside import check_can_learn, learning, learning_config
    from tuner.tune import prepare_evaluation

    check_can_learn(config)
    if config.tuner.serving.promotion.by not in ("held_out", "both"):
        return learning_config(config), {"beside": learning({})}
    named = functions_of(path, overrides).arguments
    run = prepare_evaluation(**named, config_path=path, overrides=overrides)
    functions = {"workflow": run.workflow, "judge": run.judge}
    return learning_config(config), {**functions, "beside": learning(run.eval_tasks)}


def require_libraries() -> None:
    """
    Raises:
        MissingDependencyError: What the control API is built on is not installed.
    """
    try:
        import fastapi
        import prometheus_client
    except ImportError as error:
        raise MissingDependencyError(
            f"tuner serve needs fastapi and prometheus_client ({error}): {pip_install('serve')}"
        ) from error
    del fastapi, prometheus_client


def said(server: Server) -> str:
    """What is printed when the door is open: where, what, and a key that nobody could know."""
    door, stack = server.door, server.stack
    assert door is not None, "it is told when the door is open"
    name = stack.gateway.service.model_name
    root = door.base_url.removesuffix("/v1")
    lines = [
        f"{name}, version {stack.engine.version}, at {door.base_url}",
        f"sessions, rewards: {root}/tuner/v1 (described by /tuner/v1/openapi.json)",
        f"kept in {server.store.path}",
    ]
    variable = server.config.tuner.serving.admin_key_env
    if not os.environ.get(variable):
        lines.append(f"admin key of this start: {server.admin_key} (set {variable} to keep one)")
    return "\n".join([*lines, "Ctrl-C ends it."])


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Two or more; with --proof two.")
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
    effect: Annotated[
        float | None,
        typer.Option(help="With --proof: the difference in reward that is worth finding."),
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
    as_json: AsJson = False,
) -> None:
    """Runs side by side: settings that differ, curves, and the rewards of the same tasks.

    With --proof: estimate, interval, and promote, keep or not yet.
    """
    if not proof:
        if effect is not None:
            raise ConfigError("--effect is for --proof: add it")
        from tuner.commands.comparison import compare

        found = compare(runs, split=split)
        typer.echo(found.model_dump_json(indent=2) if as_json else found.text(tasks))
        return
    if effect is None:
        raise ConfigError(
            "--effect is not given: say which difference in reward is worth finding, as 0.05"
        )
    from tuner.commands.comparison import prove
    from tuner.run.proof import Plan

    low, high = rewards
    plan = Plan(effect=effect, low=low, high=high, alpha=alpha, power=power, margin=margin)
    proven = prove(runs, plan, split=split)
    typer.echo(proven.model_dump_json(indent=2) if as_json else proven.text())
