"""Two agents that share the model: a solver, and a checker who solves for himself.

    python main.py [key=value ...]

Overrides take the keys of config.yaml, as in `buffer.total_steps=30`.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

from tuner import JudgeOutput, TrinityChatModel, TunerError, WorkflowOutput, tune
from tuner.rewards import final_answer, math_equal

CONFIG = Path(__file__).with_name("config.yaml")


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


async def workflow(task: dict[str, Any], model: TrinityChatModel) -> WorkflowOutput:
    """Your agents on one task, a row of data/train.jsonl. Who disagrees solves again."""
    solver, checker = model.role("solver"), model.role("checker")
    answer, check = await asyncio.gather(ask(solver, task), ask(checker, task))
    agreed = answer == check
    if not agreed:
        answer = await ask(solver, task)
    return WorkflowOutput(response=answer, metrics={"agreed": float(agreed)})


async def judge(task: dict[str, Any], response: str) -> JudgeOutput:
    """What the two came to is worth: 1 if it is the right number, else 0."""
    return JudgeOutput(reward=math_equal(response, task["answer"]))


if __name__ == "__main__":
    try:
        print(tune(workflow, judge, config_path=CONFIG, overrides=sys.argv[1:]))
    except TunerError as error:
        sys.exit(f"{type(error).__name__}: {error}")
