"""Train a solver and a checker, each with an adapter of a shared model.

python examples/two_roles/main.py [--shared] [key=value ...]
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tuner import JudgeOutput, TrinityChatModel, TunerError, TuneResult, WorkflowOutput, tune
from tuner.rewards import final_answer, math_equal

DATA = Path(__file__).parents[1] / "gsm8k" / "data"
ROLES = ("solver", "checker")
SETTINGS = (
    "buffer.batch_size=8",
    "buffer.total_steps=8",
    "algorithm.repeat_times=8",
    "algorithm.optimizer.lr=5e-3",
    "explorer.runner_per_model=64",
    "explorer.eval_interval=4",
    "model.max_response_tokens=64",
)
OWN = "model.adapters={solver: {lora_rank: 16}, checker: {lora_rank: 16}}"
SHARED = "model.lora_configs=[{lora_rank: 16}]"


def tasks(split: str) -> list[dict[str, Any]]:
    """GSM8K's rows, with the number that an answer ends with."""
    lines = (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [{**row, "answer": final_answer(row["answer"])} for row in rows]


async def ask(agent: TrinityChatModel, task: dict[str, Any]) -> str:
    """An agent's answer. Its call is rewarded by itself, and compared with the calls of the same
    role in the other rollouts of the task."""
    reply = await agent.client.chat.completions.create(
        model=agent.model_name,
        messages=[
            {"role": "system", "content": "You are a helpful math problem solving agent."},
            {"role": "user", "content": task["question"]},
        ],
    )
    answer = final_answer(reply.choices[0].message.content or "")
    agent.calls[-1].reward = math_equal(answer, task["answer"])
    return answer


async def work(task: dict[str, Any], model: TrinityChatModel) -> WorkflowOutput:
    """A solver and a checker who solves for himself; who disagrees solves again."""
    solver, checker = map(model.role, ROLES)
    answer, check = await asyncio.gather(ask(solver, task), ask(checker, task))
    agreed = answer == check
    if not agreed:
        answer = await ask(solver, task)
    return WorkflowOutput(response=answer, metrics={"agreed": float(agreed)})


async def judge(task: dict[str, Any], response: str) -> JudgeOutput:
    return JudgeOutput(reward=math_equal(response, task["answer"]))


def main(arguments: Sequence[str] | None = None) -> TuneResult:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shared", action="store_true", help="one adapter for both")
    options, overrides = parser.parse_known_args(arguments)
    result = tune(
        work,
        judge,
        tasks("train"),
        eval_dataset={"held-out": tasks("test")[:100]},
        overrides=[*SETTINGS, SHARED if options.shared else OWN, *overrides],
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
