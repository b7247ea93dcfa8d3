"""Train the solver and the checker of the template `multi_agent`, each with its own adapter.

python examples/two_roles/main.py [--shared] [key=value ...]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tuner import TunerError, TuneResult, tune
from tuner.rewards import final_answer
from tuner.templates.multi_agent.main import judge, workflow

DATA = Path(__file__).parents[1] / "gsm8k" / "data"
ROLES = ("solver", "checker")
SETTINGS = (
    "buffer.batch_size=8",
    "buffer.total_steps=8",
    "algorithm.repeat_times=8",
    "algorithm.optimizer.lr=5e-3",
    "explorer.eval_interval=4",
    "model.max_response_tokens=64",
)
ADAPTERS = "model.adapters={solver: {lora_rank: 16}, checker: {lora_rank: 16}}"
SHARED = "model.lora_configs=[{lora_rank: 16}]"


def tasks(split: str) -> list[dict[str, Any]]:
    """GSM8K's rows, with the number that an answer ends with."""
    lines = (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [{**row, "answer": final_answer(row["answer"])} for row in rows]


def main(arguments: Sequence[str] | None = None) -> TuneResult:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shared", action="store_true", help="one adapter for both")
    options, overrides = parser.parse_known_args(arguments)
    result = tune(
        workflow,
        judge,
        tasks("train"),
        eval_dataset={"held-out": tasks("test")[:100]},
        overrides=[*SETTINGS, SHARED if options.shared else ADAPTERS, *overrides],
    )
    table = Table("step", "held-out reward", *(f"reward of the {role}" for role in ROLES))
    for row in result.history:
        of_roles = [row.get(f"role/{role}/reward") for role in ROLES]
        found = (row.get("eval/held-out/reward"), *of_roles)
        table.add_row(f"{row['step']:.0f}", *("" if one is None else f"{one:.3f}" for one in found))
    Console().print(table)
    return result


if __name__ == "__main__":
    try:
        main()
    except TunerError as error:
        sys.exit(f"error: {error}")
