"""Train an agent that may try again, written as a workflow function and as a queue agent.

    python examples/multi_turn_math/main.py [--way workflow|queue] [key=value ...]

Overrides take the keys of config.yaml beside this file, as in `buffer.total_steps=10`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from math_agents import (
    MathEnvironment,
    MathMultiTurnAgent,
    messages_of,
    solve,
    solve_greedily,
)
from rich.console import Console
from rich.table import Table

from tuner import TunerError, tune
from tuner.areal import (
    GenerationHyperparameters,
    GRPOConfig,
    QueueWorkflow,
    RolloutEngine,
)
from tuner.config import load_config

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "gsm8k" / "data"
WAYS = ("workflow", "queue")
DISCOUNT = 0.5


@dataclass(frozen=True)
class Measured:
    """Greedy held-out answers: how many are right at once, and within three tries."""

    first: float
    within_three: float
    tries: float


def rows(split: str) -> list[dict[str, Any]]:
    """Problems, with the prompt of a queue agent and an id for its environment."""
    lines = (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [
        {"query_id": f"{split}-{i}", "messages": messages_of(row["question"]), **row}
        for i, row in enumerate(found)
    ]


def measure(model_path: str, problems: list[dict[str, Any]]) -> Measured:
    """Ask a model the held-out problems."""
    config = GRPOConfig(tuner={"tuner": {"reasoning": "keep"}})
    config.actor.path = model_path
    config.rollout.max_concurrent_rollouts = 64
    config.gconfig = GenerationHyperparameters(max_new_tokens=64)
    rollout = RolloutEngine(config.rollout)
    rollout.initialize()
    traces = rollout.rollout_batch(problems, solve_greedily).traces
    config.rollout.run.close()
    tries = [trace.metrics["tries"] for trace in traces]
    return Measured(
        sum(n == 1 for n in tries) / len(problems),
        sum(n <= 3 for n in tries) / len(problems),
        sum(min(n, 3) for n in tries) / len(problems),
    )


def train(way: str, overrides: Sequence[str]) -> str:
    """Train in one of the two ways; returns the folder of the trained model."""
    train_rows = rows("train")
    settings = [f"name={way}", *overrides]
    workflow: Any = solve
    if way == "queue":
        config = load_config(HERE / "config.yaml", overrides=overrides)
        agent = MathMultiTurnAgent(
            GenerationHyperparameters(max_new_tokens=config.model.max_response_tokens or 64),
            config.model.model_path,
            turn_level_discount=DISCOUNT,
        )
        solutions = {row["query_id"]: row["answer"] for row in train_rows}
        workflow = QueueWorkflow(agent, MathEnvironment(solutions))
    else:
        settings.append(f"tuner.algorithm.turn_discount={DISCOUNT}")
    result = tune(
        workflow,
        train_dataset=train_rows,
        config_path=HERE / "config.yaml",
        overrides=settings,
    )
    return str(result.checkpoint)


def main(argv: Sequence[str]) -> dict[str, Measured]:
    """Train in each way and print what the held-out problems say."""
    parser = argparse.ArgumentParser(description="Train an agent that may try again.")
    parser.add_argument("--way", choices=WAYS, help="only one of the two")
    parser.add_argument("--problems", type=int, default=200, help="held-out problems to ask")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args(argv)
    problems = rows("test")[: options.problems]
    start = load_config(HERE / "config.yaml", overrides=options.overrides).model.model_path
    found = {"before": measure(start, problems)}
    for way in [options.way] if options.way else WAYS:
        found[way] = measure(train(way, options.overrides), problems)
    table = Table("", "right at once", "within three tries", "tries", title="held-out, greedy")
    for name, one in found.items():
        table.add_row(name, f"{one.first:.3f}", f"{one.within_three:.3f}", f"{one.tries:.2f}")
    Console().print(table)
    return found


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except TunerError as error:
        sys.exit(f"{type(error).__name__}: {error}")
