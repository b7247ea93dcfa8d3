"""Train the tiny model to use a terminal, in real containers: the easiest task, with two tools.

    sh examples/terminal/make_image.sh
    python examples/terminal/main.py [key=value ...]

Overrides take the keys of config.yaml beside this file.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from tuner import TunerError, TuneResult, tune
from tuner.environments import Harbor, TerminalAgent

HERE = Path(__file__).resolve().parent
COMMANDS = ["ls", "cat greeting.txt", "echo hello > greeting.txt"]


def narrowed() -> TerminalAgent:
    """An agent for a model that cannot write: it chooses one of three commands, or submits.

    Its calls are demanded, and the engine samples only what the tools' schemas allow.
    """
    request = {"tool_choice": "required", "parallel_tool_calls": False}
    return TerminalAgent(turns=3, prompt=None, commands=COMMANDS, request=request)


def environment() -> Harbor:
    """The easiest task; a model that can write gets all three: `Harbor(HERE / "tasks")`."""
    return Harbor(HERE / "tasks" / "greeting", agent=narrowed())


def write_start(folder: Path) -> None:
    """A model like tiny_math, with random weights: it prefers none of the commands.

    tiny_math itself has never seen a tool, and is sure all the same which one to call.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    known = HERE.parents[1] / "models" / "tiny_math"
    AutoTokenizer.from_pretrained(known).save_pretrained(folder)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(known)).save_pretrained(folder)


def main(argv: Sequence[str]) -> TuneResult:
    """Train it."""
    if not (HERE / "checkpoints" / "start").exists():
        write_start(HERE / "checkpoints" / "start")
    return tune(environment=environment(), config_path=HERE / "config.yaml", overrides=argv)


if __name__ == "__main__":
    try:
        print(main(sys.argv[1:]))
    except TunerError as error:
        sys.exit(f"{type(error).__name__}: {error}")
