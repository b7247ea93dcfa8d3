"""The command line: each command checks its options and calls the function that implements it."""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer
import yaml
from typer.core import TyperCommand, TyperGroup

from tuner.encoding import NotText, model_json, read_text_file, show_all
from tuner.errors import (
    ConfigError,
    MissingDependencyError,
    TrainingError,
    TunerError,
    debugging,
    pip_install,
    system_faults,
)
from tuner.templates import Template, create, missing

if TYPE_CHECKING:
    from tuner.config import RunConfig
    from tuner.environments import Environment
    from tuner.runs.result import Verdict
    from tuner.serving.hosting import Server
    from tuner.tasks.settings import TuneArguments


# Arguments shared by several commands, and the functions that a configuration file names.


FAILED = 1
"""Exit status of a command that found a problem."""

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file with Trinity-RFT's keys.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that override the file's."),
]
RunDirectoryPath = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Run directory <checkpoint_root_dir>/<project>/<name>."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON.")]


class NamedFunctions(NamedTuple):
    """The functions and the backend that a configuration file names.

    Attributes:
        workflow, judge: None if the file does not name them, or an environment provides them.
        backend: "local" or "trinity".
        environment: The `tuner.environment`, except for a queue agent.
    """

    workflow: Callable[..., Any] | None
    judge: Callable[..., Any] | None
    backend: str
    environment: Environment | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `tune()` and `evaluate()`."""
        return {
            "workflow_func": self.workflow,
            "judge_func": self.judge,
            "environment": self.environment,
        }


def functions_of(path: Path, overrides: list[str]) -> NamedFunctions:
    """Load the workflow and the judge that the file names, or its environment.

    Recorded data needs neither; raises ConfigError if rollouts do and the file names no workflow.
    """
    from tuner.config.load import checked, read_layers
    from tuner.runs.environment import named_in
    from tuner.tasks.loading import load_function

    load: Callable[..., Any] = load_function
    layers = read_layers(path, overrides=overrides)
    if layers.backend == "trinity":
        from tuner.tasks.loading import load as load_sent
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
        return NamedFunctions(None, None, layers.backend, environment)
    elif names.workflow is not None:
        workflow = load(names.workflow, setting="tuner.workflow")
    elif rolls_out:
        raise ConfigError(
            f"{path}: tuner.workflow is not set: name the workflow as package.module:function or "
            "path/file.py:function, or set tuner.environment"
        )
    judge = None if names.judge is None else load(names.judge, setting="tuner.judge")
    return NamedFunctions(workflow, judge, layers.backend)


# The command `tuner check`; heavy imports only after the options are checked.


def check(
    config: ConfigFile,
    overrides: Overrides = None,
    of_judge: Annotated[
        bool, typer.Option("--judge", help="Check the judge, with rollouts and edge cases.")
    ] = False,
    labelled: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="For --judge: JSON lines with task, response and the right reward."
        ),
    ] = None,
    tasks: Annotated[
        int, typer.Option(min=1, help="For --judge: number of tasks that get rollouts.")
    ] = 4,
) -> None:
    """Validate a configuration, run two rollouts (or read recorded data) and say if it can train.

    With the backend trinity, run Trinity-RFT's checks, without a GPU, a cluster or rollouts.
    """
    from tuner.runs.directory import outside_event_loop
    from tuner.tune import prepare

    if labelled is not None and not of_judge:
        raise ConfigError("--labelled needs --judge: add it")
    named = functions_of(config, overrides or [])
    if of_judge and named.backend == "trinity":
        raise ConfigError("--judge needs rollouts of the local backend: add tuner.backend=local")
    if named.backend == "trinity":
        verdict = _check_trinity(config, overrides or [], named)
    else:
        run = prepare(**named.arguments, config_path=config, overrides=overrides or [])
        # These import PyTorch: only once the rest is in order.
        if of_judge:
            from tuner.tools.judge_check import check_judge

            verdict = outside_event_loop(lambda: check_judge(run, tasks=tasks, labelled=labelled))
        elif run.history is not None:
            from tuner.tools.check import check_history

            verdict = outside_event_loop(lambda: check_history(run))
        else:
            from tuner.tools.check import check_run

            verdict = outside_event_loop(lambda: check_run(run))
    typer.echo(verdict.text)
    if not verdict.ready:
        raise typer.Exit(FAILED)


def _check_trinity(path: Path, overrides: list[str], named: NamedFunctions) -> Verdict:
    from tuner.runs.environment import parts_of
    from tuner.trinity.preparation import check_trinity

    given: TuneArguments = {
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


# The command `tuner rebase`.


def rebase(
    run: RunDirectoryPath,
    judge: Annotated[
        str, typer.Option(help="The fixed judge: package.module:function or path/file.py:function.")
    ],
    overrides: Overrides = None,
    workflow: Annotated[
        str | None, typer.Option(help="The workflow (default: the one in the run's config.yaml).")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the new run (default: RUN's name with -rebased).")
    ] = None,
    min_effective_samples: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="Reuse a step's recorded tokens while their effective sample size, as a share of "
            "the tokens, is at least this.",
        ),
    ] = 0.9,
    max_reused: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="Share of the steps from the first changed one that may be trained on recorded "
            "rollouts.",
        ),
    ] = 0.5,
) -> None:
    """Score a run's rollouts with a fixed judge, and train a new run from the first change.

    RUN is not changed. Recorded rollouts are used while they are informative for the new weights;
    later steps sample new rollouts. After an interruption, the same command resumes it.

    For each step, prints how many rewards changed and whether its recorded samples were used; the
    new run's rebase.json has the same.
    """
    from tuner.tools.rebase import rebase

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


# The command `tuner train`.


def train(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE... [KEY=VALUE...]",
            help="Runs, trace files or folders of them, a server's serving.sqlite, or chat logs; "
            "then settings that override the file's.",
        ),
    ],
    config: Annotated[
        Path, typer.Option(metavar="FILE", help="YAML file with Trinity-RFT's keys.")
    ],
) -> None:
    """Train on recorded rollouts; only evaluations sample new ones.

    The same as `tuner run` with `tuner.history.sources`. The file's algorithm decides how it
    learns: sft imitates the best rollouts of each task, dpo compares two rollouts of a task, all
    others learn off-policy. Give the run a new name.
    """
    from tuner.tune import tune

    sources, overrides = split_arguments(arguments)
    history = [f"tuner.history.sources={json.dumps(sources)}"] if sources else []
    settings = ["mode=train", *history, *overrides]
    named = functions_of(config, settings)
    if named.backend == "trinity":
        raise ConfigError(
            "tuner train is for the local backend: add tuner.backend=local. Trinity-RFT trains on "
            "its recorded rollouts with `tuner run FILE mode=train`"
        )
    with _interruption_said():
        typer.echo(tune(**named.arguments, config_path=config, overrides=settings))


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split into sources, as absolute paths, and settings: with `=` and not an existing path."""
    sources, overrides = list[str](), list[str]()
    for text in arguments:
        if "=" in text and not Path(text).exists():
            overrides.append(text)
        else:
            sources.append(str(Path(text).expanduser().resolve()))
    return sources, overrides


# The command `tuner rerun`; heavy imports only after the options are checked.


def rerun(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run directory, or a file in its traces/.")
    ],
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="split-step-task-rollout, such as train-3-0-2.")
    ],
    until: Annotated[
        int | None,
        typer.Option(metavar="CALL", help="Call (from 1) at which to stop or start sampling."),
    ] = None,
    workflow: Annotated[
        str | None,
        typer.Option(
            help="Workflow, package.module:function or path/file.py:function (default: the run's)."
        ),
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="Judge, in the same form (default: the run's).")
    ] = None,
    sample: Annotated[
        bool, typer.Option("--sample", help="Continue with the model where the recording ends.")
    ] = False,
    candidate: Annotated[
        str | None,
        typer.Option(
            "--candidate", "-c", metavar="PATH", help="Model to sample with (default: the newest)."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Add the rollout to a file for tuner.testing."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Its name in that file (default: TRACE).")
    ] = None,
) -> None:
    """Run the workflow again on a recorded rollout, in this process, for debugging.

    Recorded answers take the model's place, up to a call or to the end, so no model is loaded.
    The first request that differs from the recorded one is shown as a diff.
    """
    from rich.console import Console

    from tuner.tools.recorded_run import save_rollouts
    from tuner.tools.rerun import run_again, say

    if not sample and (candidate is not None or seed):
        raise ConfigError("--candidate and --seed apply to sampling: add --sample")
    if save is not None and (sample or until is not None):
        raise ConfigError("--save is for whole rollouts as recorded: omit --sample and --until")
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


# The commands `tuner serve` and `tuner compare`; heavy imports only after the options are checked.


def serve(
    config: ConfigFile,
    overrides: Overrides = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but loopback needs an admin key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8700,
    train: Annotated[
        bool,
        typer.Option(
            "--train",
            help="Learn from judged sessions, and promote weights that are proven better.",
        ),
    ] = False,
) -> None:
    """Serve the model to external agents, and record their calls.

    Serves the last promoted weights, else the newest checkpoint of the run, else the file's model.
    Calls, rewards and keys are in serving.sqlite in the run directory; a restarted server
    continues with them.
    """
    from tuner.config.keys import require_model_libraries
    from tuner.config.load import checked, read_layers
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
    typer.echo(kept(settings.run_dir))


def learns(config: RunConfig, path: Path, overrides: list[str]) -> tuple[RunConfig, dict[str, Any]]:
    """The configuration of a server that learns, and further arguments of `serve`."""
    pass
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
    """Raise MissingDependencyError if a library of the control API is not installed."""
    try:
        import fastapi
        import prometheus_client
    except ImportError as error:
        raise MissingDependencyError(
            f"tuner serve needs fastapi and prometheus_client ({error}): {pip_install('serve')}"
        ) from error
    del fastapi, prometheus_client


def said(server: Server) -> str:
    """Lines to print once it listens: model, URLs, and the admin key if it was generated."""
    door, stack = server.door, server.stack
    assert door is not None, "announced once the door is open"
    name = stack.gateway.service.model_name
    root = door.base_url.removesuffix("/v1")
    lines = [
        f"{name}, version {stack.engine.version}, at {door.base_url}",
        f"sessions, rewards: {root}/tuner/v1 (described by /tuner/v1/openapi.json)",
        f"recorded in {server.store.path}",
    ]
    variable = server.config.tuner.serving.admin_key_env
    if not os.environ.get(variable):
        lines.append(
            f"admin key until it stops: {server.admin_key} (set {variable} for a permanent one)"
        )
    return "\n".join([*lines, "Ctrl-C stops it."])


def kept(run: Path) -> str:
    """Lines to print once it has stopped: the sessions in its store, and what to do with them."""
    from tuner.serving.serving_store import ServingStore
    from tuner.traces.store import SERVED

    with closing(ServingStore(run / SERVED, readonly=True)) as store:
        states = store.states()
        ((calls,),) = store.ask("SELECT COUNT(*) FROM calls")
    shares = ", ".join(f"{number:,} {state}" for state, number in states.items() if number)
    return (
        f"Stopped. {run / SERVED}: sessions {sum(states.values()):,}"
        f"{f' ({shares})' if shares else ''}, calls {calls:,}.\n"
        f"The same command continues with them; `tuner view {run}` shows them."
    )


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Two or more runs; with --proof exactly two."),
    ],
    split: Annotated[
        str | None,
        typer.Option(help="train, or an evaluation set (default: all sets that the runs share)."),
    ] = None,
    tasks: Annotated[int, typer.Option(min=0, help="Number of tasks to show for each split.")] = 10,
    proof: Annotated[
        bool,
        typer.Option("--proof", help="Test if the second run is better than the first."),
    ] = False,
    effect: Annotated[
        float | None,
        typer.Option(help="With --proof: the smallest difference in reward worth detecting."),
    ] = None,
    rewards: Annotated[
        tuple[float, float],
        typer.Option(metavar="LOW HIGH", help="Range of the rewards."),
    ] = (0.0, 1.0),
    alpha: Annotated[
        float, typer.Option(help="Chance of a wrong promotion, however often it is tested.")
    ] = 0.05,
    power: Annotated[
        float, typer.Option(help="Chance to promote a run that is better by the effect.")
    ] = 0.8,
    margin: Annotated[float, typer.Option(help="Smallest improvement to promote.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Compare runs: settings that differ, metric curves, and rewards on the same tasks.

    Tasks are compared by their mean reward in each run's last evaluation (with --split train: in
    the last step that had the task), largest differences first. Runs may still be in progress. The
    folders of `tuner eval --output` can be compared too. No model is loaded.

    With --proof, prints an estimate with its interval and a verdict: promote, keep or not yet.
    """
    if not proof:
        if effect is not None:
            raise ConfigError("--effect needs --proof: add it")
        from tuner.tools.compare import compare

        found = compare(runs, split=split)
        typer.echo(model_json(found) if as_json else found.text(tasks))
        return
    if effect is None:
        raise ConfigError(
            "--proof needs --effect: give the smallest difference in reward to detect, as 0.05"
        )
    from tuner.runs.statistics import Plan
    from tuner.tools.compare import prove

    low, high = rewards
    plan = Plan(effect=effect, low=low, high=high, alpha=alpha, power=power, margin=margin)
    proven = prove(runs, plan, split=split)
    typer.echo(model_json(proven) if as_json else proven.text())


try:
    __version__ = version("agentscope-tuner")
except PackageNotFoundError:  # a checkout that is only on the path
    __version__ = "unknown"

BAD_INPUT = 2
INTERRUPTED = 130
_PROOF = "evaluate both with `tuner eval --output`, and compare these with `tuner compare --proof`"
# Removed commands and options (`command --option`), each with its replacement.
REMOVED = {
    "plan": "`tuner check` estimates the seconds and the memory of a step on this machine",
    "check --branching": "set tuner.branching.where to best, which learns during the run if "
    "branches help",
    "compare --candidate": _PROOF,
    "compare --steps": _PROOF,
    "compare --least-effective": _PROOF,
}

UsageError: Any = typer.BadParameter.__mro__[1]
"""Raised for an invalid command line."""


class _Flags:
    """Mixin of commands: their help shows flags without `<bool>`."""

    def get_params(self, context: Any) -> list[Any]:
        # The class that this is mixed into has the method.
        params: list[Any] = super().get_params(context)  # type: ignore[misc]
        for one in params:
            if getattr(one, "is_flag", False):
                one.metavar = ""
        return params


class _Command(_Flags, TyperCommand):
    pass


class _Group(_Flags, TyperGroup):
    pass


app = typer.Typer(cls=_Group, pretty_exceptions_enable=False)
command = partial(app.command, cls=_Command)


@app.callback(invoke_without_command=True)
def _of_all(
    context: typer.Context,
    say_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.")
    ] = False,
) -> None:
    """Train the model inside an agent."""
    if say_version:
        typer.echo(f"agentscope-tuner {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(BAD_INPUT)


@command(epilog="Example: tuner init my-agent --template react")
def init(
    folder: Annotated[Path, typer.Argument(help="Folder to create or fill.")] = Path(),
    template: Annotated[Template, typer.Option(help="Kind of agent.")] = Template.OPENAI,
) -> None:
    """Create a project with an agent, data and settings that trains on a CPU in minutes.

    openai: the OpenAI client; no further packages

    react: a ReAct agent of AgentScope 1.x; needs the extra agentscope1

    langgraph: a LangGraph agent; needs langchain and langchain-openai

    queue: an agent and its environment connected by queues, in AReaL's style

    multi-agent: two agents that share the model, with a reward for each call

    real: a ReAct agent with SmolLM2-135M that learns to use a tool in five minutes
    """
    files, start = create(template, folder), f"python {folder / 'main.py'}"
    if needed := [f"pip install {requirement}" for requirement in missing(template)]:
        typer.echo(" && ".join([*needed, start]))
        return
    for file in files:
        typer.echo(file)
    typer.echo(f"Start with: {start}")


@command(epilog="Example: tuner run config.yaml buffer.total_steps=10 name=first-try")
def run(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train with the workflow and judge that the file names under `tuner:`, or on recorded data.

    With `mode=explore`, only records rollouts.
    """
    from tuner.tune import tune

    named = functions_of(config, overrides or [])
    with _interruption_said():
        typer.echo(tune(**named.arguments, config_path=config, overrides=overrides or []))


@command("distill-prompt", epilog="Example: tuner distill-prompt config.yaml --prompt long.txt")
def distill_prompt(
    config: ConfigFile,
    prompt: Annotated[
        str,
        typer.Option(metavar="TEXT|FILE", help="The system prompt, or a file that contains it."),
    ],
    overrides: Overrides = None,
) -> None:
    """Train the model to behave without a system prompt as it does with one.

    The same as `tuner run` with the algorithm prompt_distill and the prompt. Needs no judge.
    """
    try:
        text = read_text_file(Path(prompt)) if os.path.isfile(prompt) else prompt
    except (OSError, NotText) as error:
        raise ConfigError(f"--prompt {prompt}: cannot read this file: {error}") from error
    # Quoted and on one line, YAML reads it as text, even if it looks like a reference.
    quoted = yaml.safe_dump(text.replace("${", "\\${"), default_style='"', width=math.inf)
    settings = ["algorithm.algorithm_type=prompt_distill", f"tuner.algorithm.prompt={quoted}"]
    run(config, [*settings, *(overrides or [])])


@command(
    "eval",
    epilog="Example: tuner eval config.yaml -k 4 -c models/tiny_math -c checkpoints/p/run",
)
def evaluate(
    config: ConfigFile,
    overrides: Overrides = None,
    candidates: Annotated[
        list[str] | None,
        typer.Option(
            "--candidate",
            "-c",
            metavar="PATH",
            help="A run (its newest checkpoint), a checkpoint, a model or an adapter; repeatable. "
            "Default: the file's model and the newest checkpoint of its run.",
        ),
    ] = None,
    k: Annotated[
        int | None,
        typer.Option("-k", min=1, help="Rollouts of each task (default: repeat_times of the set)."),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0, help="Sampling temperature (default: the set's, or model.temperature if k > 1)."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only the first tasks of each set.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="New folder for evaluation.json, evaluation.html and traces."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate models, checkpoints and runs on the file's evaluation sets.

    All candidates get the same tasks and random numbers. The first one is the baseline: the others
    are compared with it task by task, so the interval of the difference is narrower than the
    intervals of the two rewards suggest. Evaluations are greedy unless a set or --temperature sets
    a temperature.

    reward: the mean over the tasks of each task's mean, with a 95% interval (percentile bootstrap
    over the tasks, fixed seed). With fewer than 20 tasks the interval is only indicative.

    pass@k, pass^k: the chance that one, or all, of k rollouts of a task pass, by the unbiased
    estimators. A rollout passes with a reward of at least tuner.pass_reward. Tasks with fewer than
    k rewards are skipped.

    Failed rollouts have no reward and do not count in any mean; they have a separate row. The exit
    status is 1 if no rollout has a reward.
    """
    from tuner.tools.evaluate import evaluate

    result = evaluate(
        **functions_of(config, overrides or []).arguments,
        candidates=candidates or (),
        k=k,
        temperature=temperature,
        limit=limit,
        output=output,
        config_path=config,
        overrides=overrides or [],
    )
    typer.echo(model_json(result) if as_json else result)
    if not any(one.reward for scores in result.candidates for one in scores.sets.values()):
        raise typer.Exit(FAILED)


@command(epilog="Example: tuner doctor")
def doctor(as_json: AsJson = False) -> None:
    """Report if Python, the GPU, libraries, extras, engines and backends work here.

    Prints a `pip install` command for each one that does not. `ok` works, `-` is not installed and
    not required, `!!` must be fixed; the exit status is then 1. Reads only package metadata and
    nvidia-smi, and imports no library.
    """
    from tuner.tools.doctor import examine

    found = examine()
    typer.echo(model_json(found) if as_json else found)
    if not found.well:
        raise typer.Exit(FAILED)


@command(epilog="Example: tuner export checkpoints/AgentScope/GSM8K-tiny my-model --merge")
def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CHECKPOINT", help="A checkpoint, or a run (its newest checkpoint)."
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder.")],
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge a LoRA adapter into its model, in float32.")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16 (default: the checkpoint's).")
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME", help="Upload to this repository on the Hugging Face Hub."
        ),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public.")] = False,
) -> None:
    """Export a checkpoint to a folder that vLLM, SGLang and transformers load, with a model card.

    The card, README.md, lists the training data, settings, rewards before and after, versions, and
    how to load the model. An adapter stays an adapter unless --merge is given. --push uses the
    token of `hf auth login` or HF_TOKEN; it rejects an adapter whose model is only on this machine.
    A checkpoint that does not match its manifest is rejected.

    For GGUF, run llama.cpp's convert_hf_to_gguf.py on the exported folder (merged, for an adapter).
    """
    from tuner.tools.export import export

    where, address = export(source, folder, merge=merge, dtype=dtype, push=push, public=public)
    typer.echo(f"{where} is ready: README.md there says how to load it")
    if address is not None:
        typer.echo(address)


@command(epilog="Example: tuner view checkpoints/AgentScope/GSM8K-tiny")
def view(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Folder <checkpoint_root_dir>/<project>/<name> of a run or server, or of runs.",
        ),
    ],
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.")] = 0,
    report: Annotated[
        bool, typer.Option("--report", help="Write report.html into the run instead of serving.")
    ] = False,
) -> None:
    """Show a run and its traces, or a server's sessions, in a browser; follows one in progress."""
    if report:
        from tuner.tools.prompt_page import is_search, write_page
        from tuner.tools.viewer import write_report

        typer.echo(write_report(run))
        if is_search(run):
            typer.echo(write_page(run))
        return
    from tuner.tools.viewer.web import serve

    serve(run, port=port, announce=lambda link: typer.echo(f"{link}\nCtrl-C stops it."))


@command(epilog="Example: tuner replay RUN --judge judges.py:strict --steps 10-20")
def replay(
    run: RunDirectoryPath,
    judge: Annotated[str, typer.Option(help="package.module:function or path/file.py:function.")],
    split: Annotated[str, typer.Option(help="train, or an evaluation set.")] = "train",
    steps: Annotated[
        str | None, typer.Option(metavar="A-B", help="First and last step (default: all).")
    ] = None,
) -> None:
    """Score a run's recorded rollouts with another judge; loads no model."""
    from tuner.tasks.loading import load_function
    from tuner.tools.judging import parse_steps, replay

    module, _, function = judge.rpartition(":")
    result = replay(
        run,
        load_function(judge, setting="--judge"),
        name=f"{Path(module.removesuffix('.py')).name}.{function}",
        split=split,
        steps=parse_steps(steps),
    )
    typer.echo(str(result))


command(epilog="Example: tuner check config.yaml")(check)
command(epilog="Example: tuner train checkpoints/p/run --config sft.yaml name=best")(train)
command(epilog="Example: tuner compare checkpoints/p/small-lr checkpoints/p/large-lr")(compare)
command(epilog="Example: tuner serve config.yaml --port 8700")(serve)
command(epilog="Example: tuner rebase RUN --judge judges.py:fixed")(rebase)
command(epilog="Example: tuner rerun RUN train-3-0-2 --until 4")(rerun)


def main() -> None:
    """Entry point; errors that the user can fix are printed without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        show_all(stream)
    try:
        with system_faults():
            sys.exit(
                app(prog_name="tuner", standalone_mode=False)
            )  # None, or the code of an Exit, Ctrl-C's included
    except UsageError as error:
        help_of = error.ctx.command_path if error.ctx is not None else "tuner"
        said = _removed(sys.argv[1:]) or f"{error.format_message()} (see: {help_of} --help)"
        typer.echo(said, err=True)
        sys.exit(BAD_INPUT)
    except TrainingError as error:
        _fail(error, FAILED)
    except TunerError as error:
        _fail(error, BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)


def _removed(arguments: list[str]) -> str | None:
    """A message if the arguments name a removed command or option, with its replacement."""
    for gone, instead in REMOVED.items():
        command, _, option = gone.partition(" ")
        given = [one.partition("=")[0] for one in arguments]
        if given[:1] == [command] and (not option or option in given):
            return f"tuner {gone} was removed: {instead}"
    return None


def _fail(error: TunerError, code: int) -> NoReturn:
    from tuner.config.source import without_secrets

    if debugging():
        traceback.print_exception(error)
        sys.exit(code)
    typer.echo(without_secrets(f"{type(error).__name__}: {error}"), err=True)
    _say_notes(error)
    sys.exit(code)


@contextmanager
def _interruption_said() -> Iterator[None]:
    """Print what an interrupted run leaves; Typer turns the interrupt into an exit status."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        typer.echo(str(interruption), err=True)
        _say_notes(interruption)
        raise


def _say_notes(error: BaseException) -> None:
    for note in getattr(error, "__notes__", ()):
        typer.echo(note, err=True)


if __name__ == "__main__":
    main()
