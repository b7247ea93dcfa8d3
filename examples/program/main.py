"""Train a program that is an agent, in a folder of its own and within limits.

    python examples/program/main.py [key=value ...]

Each rollout runs `node agent.mjs` in a fresh copy of the folder `agent`; the judge reads the file
that it leaves. Overrides take the keys of config.yaml beside this file.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuner import JudgeOutput, TunerError, TuneResult, tune
from tuner.environments import Program, ProgramOutput
from tuner.rewards import final_answer, math_equal

HERE = Path(__file__).resolve().parent


async def judge(task: dict[str, Any], response: ProgramOutput) -> JudgeOutput:
    """1 if answer.txt ends in the right number, else 0."""
    answer = response.text("answer.txt")
    if answer is None:
        return JudgeOutput(reward=0.0, feedback="there is no answer.txt")
    truth = final_answer(task["answer"])
    right = math_equal(final_answer(answer), truth)
    return JudgeOutput(reward=right, feedback=None if right else f"it is {truth}")


def environment() -> Program:
    """The program with its folder, its limits and its judge."""
    return Program(
        ["node", "agent.mjs"],
        prompt="file:PROMPT.md",
        template=HERE / "agent",
        judge=judge,
        limits={"seconds": 60, "memory_mb": 512, "disk_mb": 8, "processes": 4},
    )


def main(argv: Sequence[str]) -> TuneResult:
    """Train the program."""
    return tune(environment=environment(), config_path=HERE / "config.yaml", overrides=[*argv])


if __name__ == "__main__":
    try:
        print(main(sys.argv[1:]))
    except TunerError as error:
        sys.exit(f"{type(error).__name__}: {error}")
