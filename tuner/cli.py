"""The command line: each command checks what it was given and calls what does it."""

from __future__ import annotations

import math
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import yaml

from tuner.commands.arguments import (
    FAILED,
    AsJson,
    ConfigFile,
    Overrides,
    RunDirectoryPath,
    functions_of,
)
from tuner.commands.check_command import check
from tuner.commands.rebase_command import rebase
from tuner.commands.train_command import train
from tuner.errors import ConfigError, TrainingError, TunerError
from tuner.rerun.command import rerun
from tuner.serving.serving_commands import compare, serve
from tuner.templates import Template, create, missing

try:
    __version__ = version("agentscope-tuner")
except PackageNotFoundError:  # a checkout that is only on the path
    __version__ = "unknown"

BAD_INPUT = 2
INTERRUPTED = 130
_PROOF = "evaluate both with `tuner eval --output`, and compare these with `tuner compare --proof`"
# Commands and options (`command --option`) that went, each with its replacement.
REMOVED = {
    "plan": "`tuner check` measures the seconds and the memory of a step on this machine",
    "check --branching": "set tuner.branching.where to best, which learns during the run whether "
    "branches pay",
    "compare --candidate": _PROOF,
    "compare --steps": _PROOF,
    "compare --least-effective": _PROOF,
}

UsageError: Any = typer.BadParameter.__mro__[1]
"""What is raised for a command line that cannot be read."""
app = typer.Typer(pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def _of_all(
    context: typer.Context,
    say_version: Annotated[
        bool, typer.Option("--version", help="Say the version, and end.")
    ] = False,
) -> None:
    """Train the model inside an agent."""
    if say_version:
        typer.echo(f"agentscope-tuner {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(BAD_INPUT)


@app.command(epilog="Example: tuner init my-agent --template react")
def init(
    folder: Annotated[Path, typer.Argument(help="Where it begins; made if need be.")] = Path(),
    template: Annotated[
        Template, typer.Option(help="What the agent is written with.")
    ] = Template.OPENAI,
) -> None:
    """Begin a folder with an agent, data and settings that train on a CPU within minutes.

    openai: the OpenAI client; needs nothing else

    react: a ReAct agent of AgentScope 1.x, the extra agentscope1

    langgraph: a LangGraph agent, the packages langchain and langchain-openai

    queue: an agent and its environment with queues, as AReaL's users know them

    multi-agent: two agents that share the model, each call with its own reward

    real: a ReAct agent with SmolLM2-135M, which learns to use a tool in five minutes
    """
    for file in create(template, folder):
        typer.echo(file)
    for requirement in missing(template):
        typer.echo(f"It needs: pip install {requirement}")
    typer.echo(f"Begin with: python {folder / 'main.py'}")


@app.command(epilog="Example: tuner run config.yaml buffer.total_steps=10 name=first-try")
def run(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train with the functions that the file names under `tuner:`, or on recorded data."""
    from tuner.tune import tune

    named = functions_of(config, overrides or [])
    try:
        result = tune(**named.arguments, config_path=config, overrides=overrides or [])
    except KeyboardInterrupt as interruption:
        _say_notes(interruption)
        raise
    typer.echo(result)


@app.command("distill-prompt", epilog="Example: tuner distill-prompt config.yaml --prompt long.txt")
def distill_prompt(
    config: ConfigFile,
    prompt: Annotated[
        str, typer.Option(metavar="TEXT|FILE", help="The system prompt, or a file that holds it.")
    ],
    overrides: Overrides = None,
) -> None:
    """Teach the model to do without a system prompt what it does with it; a judge is not needed."""
    try:
        text = Path(prompt).read_text(encoding="utf-8") if os.path.isfile(prompt) else prompt
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt {prompt} is a file that cannot be read: {error}") from error
    # In quotes and on one line it is text whatever it looks like, a reference included.
    quoted = yaml.safe_dump(text.replace("${", "\\${"), default_style='"', width=math.inf)
    settings = ["algorithm.algorithm_type=prompt_distill", f"tuner.algorithm.prompt={quoted}"]
    run(config, [*settings, *(overrides or [])])


@app.command(
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
            help="A run (its newest checkpoint), a checkpoint, a model or an adapter; several are "
            "compared with the first. None: the file's model, and its run's newest checkpoint.",
        ),
    ] = None,
    k: Annotated[
        int | None, typer.Option("-k", min=1, help="Rollouts of each task; as the sets say.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0, help="As the sets say; with k above 1, model.temperature where they say 0."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Take only the first tasks of each set.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="New folder for traces, evaluation.json and .html.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Try models, checkpoints and runs on the evaluation sets: means, pass@k, differences."""
    from tuner.commands.evaluation import evaluate

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
    typer.echo(result.model_dump_json(indent=2) if as_json else result)
    if not any(one.reward for scores in result.candidates for one in scores.sets.values()):
        raise typer.Exit(FAILED)


@app.command(epilog="Example: tuner doctor")
def doctor(as_json: AsJson = False) -> None:
    """Python, GPU, libraries and extras: what works here, why not, and what would mend it."""
    from tuner.commands.doctor import examine

    found = examine()
    typer.echo(found.model_dump_json(indent=2) if as_json else found)
    if not found.well:
        raise typer.Exit(FAILED)


@app.command(epilog="Example: tuner export checkpoints/AgentScope/GSM8K-tiny my-model --merge")
def export(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|CHECKPOINT", help="A run is its newest checkpoint.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder.")],
    merge: Annotated[
        bool, typer.Option("--merge", help="Add an adapter to its model; a LoRA run's alone.")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; as it is, if not given.")
    ] = None,
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload to this repository of the Hub.")
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="A repository that is made is not private.")
    ] = False,
) -> None:
    """Write a checkpoint as a folder that vLLM, SGLang and transformers load, with a model card."""
    from tuner.commands.export import export

    where, address = export(source, folder, merge=merge, dtype=dtype, push=push, public=public)
    typer.echo(f"{where} is ready: its README.md says how it is loaded")
    if address is not None:
        typer.echo(address)


@app.command(epilog="Example: tuner view checkpoints/AgentScope/GSM8K-tiny")
def view(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Run directory: <checkpoint_root_dir>/<project>/<name>; or a folder of runs.",
        ),
    ],
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.")] = 0,
    report: Annotated[
        bool, typer.Option("--report", help="Write report.html into the run and serve nothing.")
    ] = False,
) -> None:
    """Look at a run and its traces in a browser; follows a run that is going on."""
    if report:
        from tuner.prompts.search_page import is_search, write_page
        from tuner.viewer import write_report

        typer.echo(write_report(run))
        if is_search(run):
            typer.echo(write_page(run))
        return
    from tuner.viewer.web import serve

    serve(run, port=port, announce=lambda link: typer.echo(f"{link}\nCtrl-C ends it."))


@app.command(epilog="Example: tuner replay RUN --judge judges.py:strict --steps 10-20")
def replay(
    run: RunDirectoryPath,
    judge: Annotated[str, typer.Option(help="package.module:function or path/file.py:function.")],
    split: Annotated[str, typer.Option(help="train, or the name of an evaluation set.")] = "train",
    steps: Annotated[
        str | None, typer.Option(metavar="A-B", help="First and last step; all by default.")
    ] = None,
) -> None:
    """Score stored traces again with another judge; no model runs."""
    from tuner.functions.loading import load_function
    from tuner.viewer.replay import parse_steps, replay, replay_table

    module, _, function = judge.rpartition(":")
    result = replay(
        run,
        load_function(judge, setting="--judge"),
        name=f"{Path(module.removesuffix('.py')).name}.{function}",
        split=split,
        steps=parse_steps(steps),
    )
    typer.echo(replay_table(result))


app.command(epilog="Example: tuner check config.yaml")(check)
app.command(epilog="Example: tuner train checkpoints/p/run --config sft.yaml name=best")(train)
app.command(epilog="Example: tuner compare checkpoints/p/small-lr checkpoints/p/large-lr")(compare)
app.command(epilog="Example: tuner serve config.yaml --port 8700")(serve)
app.command(epilog="Example: tuner rebase RUN --judge judges.py:mended")(rebase)
app.command(epilog="Example: tuner rerun RUN train-3-0-2 --until 4")(rerun)


def main() -> None:
    """Entry point; errors that are the user's to mend are printed without a traceback."""
    try:
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
    """Names the removed command or option among the arguments, and its replacement, if any."""
    for gone, instead in REMOVED.items():
        command, _, option = gone.partition(" ")
        given = [one.partition("=")[0] for one in arguments]
        if given[:1] == [command] and (not option or option in given):
            return f"tuner {gone} was removed: {instead}"
    return None


def _fail(error: TunerError, code: int) -> NoReturn:
    typer.echo(f"{type(error).__name__}: {error}", err=True)
    _say_notes(error)
    sys.exit(code)


def _say_notes(error: BaseException) -> None:
    for note in getattr(error, "__notes__", ()):
        typer.echo(note, err=True)


if __name__ == "__main__":
    main()
