"""Train an agent that is not Python: a program that reaches the model over HTTP.

    python examples/any_language/main.py [--agent node|curl] [key=value ...]

The program finds the model by OPENAI_BASE_URL and OPENAI_API_KEY in its environment, as the OpenAI
clients of most languages do. Overrides take the keys of config.yaml beside this file.
"""

import argparse
import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuner import JudgeOutput, TrinityChatModel, TunerError, TuneResult, WorkflowOutput, tune
from tuner.rewards import final_answer, math_equal

HERE = Path(__file__).resolve().parent


async def node(task: dict[str, Any], model: TrinityChatModel) -> WorkflowOutput:
    """The agent in JavaScript."""
    return await answered(["node", str(HERE / "agent.mjs")], task, model)


async def curl(task: dict[str, Any], model: TrinityChatModel) -> WorkflowOutput:
    """The agent as a shell script."""
    return await answered(["sh", str(HERE / "agent.sh")], task, model)


async def answered(
    command: Sequence[str], task: dict[str, Any], model: TrinityChatModel
) -> WorkflowOutput:
    """What a program prints when it is given the question, in a process of its own.

    Raises:
        RuntimeError: It failed; the message is what it complained of.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env={
            **os.environ,
            "OPENAI_BASE_URL": model.base_url,
            "OPENAI_API_KEY": model.api_key,  # it is the rollout: calls made with it are its trace
            "OPENAI_MODEL": model.model_name,
        },
    )
    try:
        printed, complaint = await process.communicate(task["question"].encode())
    finally:
        if process.returncode is None:  # the rollout ran out of time
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}: {complaint.decode()}")
    return WorkflowOutput(response=printed.decode().strip())


async def judge(task: dict[str, Any], response: str) -> JudgeOutput:
    """1 if the answer ends in the right number, else 0."""
    return JudgeOutput(reward=math_equal(final_answer(response), final_answer(task["answer"])))


AGENTS = {"node": node, "curl": curl}


def main(argv: Sequence[str]) -> TuneResult:
    """Train one of the agents."""
    parser = argparse.ArgumentParser(description="Train an agent that is not Python.")
    parser.add_argument("--agent", choices=AGENTS, default="node")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args(argv)
    return tune(
        AGENTS[options.agent],
        judge,
        config_path=HERE / "config.yaml",
        overrides=[f"name={options.agent}", *options.overrides],
    )


if __name__ == "__main__":
    try:
        print(main(sys.argv[1:]))
    except TunerError as error:
        sys.exit(f"{type(error).__name__}: {error}")
