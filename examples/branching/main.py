"""Train an agent whose beginning is long and whose end decides.

python examples/branching/main.py [--branches] [key=value ...]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import agent
from rich.console import Console
from rich.table import Table

from tuner import TunerError, TuneResult, tune

SETTINGS = (
    "buffer.batch_size=4",
    "buffer.total_steps=6",
    "algorithm.repeat_times=16",
    "algorithm.optimizer.lr=5e-4",
    "explorer.eval_interval=1",
    "model.max_response_tokens=64",
)
FLAT = ("algorithm.algorithm_type=rloo",)
BRANCHES = (
    "algorithm.algorithm_type=tree",
    "tuner.branching.ends=8",
    f"tuner.branching.where={Path(agent.__file__)}:before_the_answers",
)


def main(arguments: Sequence[str] | None = None) -> TuneResult:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--branches", action="store_true")
    options, overrides = parser.parse_known_args(arguments)
    result = tune(
        agent.answer,
        train_dataset=agent.tasks("train"),
        # The answers do not read the notes.
        eval_dataset={"held-out": agent.tasks("test", notes=0)[:100]},
        overrides=[*SETTINGS, *(BRANCHES if options.branches else FLAT), *overrides],
    )
    table = Table("step", "held-out reward", "sampled tokens until then")
    tokens = 0.0
    for row in result.history:
        tokens += row.get("tokens/sampled", 0)
        if (reward := row.get("eval/held-out/reward")) is not None:
            table.add_row(f"{row['step']:.0f}", f"{reward:.3f}", f"{tokens:,.0f}")
    Console().print(table)
    return result


if __name__ == "__main__":
    try:
        main()
    except TunerError as error:
        sys.exit(f"error: {error}")
