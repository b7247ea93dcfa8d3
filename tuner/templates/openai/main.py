"""An agent that asks through the OpenAI client.

    python main.py [key=value ...]

Overrides take the keys of config.yaml, as in `buffer.total_steps=30`.
"""

import sys
from pathlib import Path
from typing import Any

from tuner import JudgeOutput, TrinityChatModel, TunerError, WorkflowOutput, tune
from tuner.rewards import final_answer, math_equal

CONFIG = Path(__file__).with_name("config.yaml")


async def workflow(task: dict[str, Any], model: TrinityChatModel) -> WorkflowOutput:
    """Your agent on one task, a row of data/train.jsonl."""
    reply = await model.client.chat.completions.create(
        model=model.model_name,
        messages=[
            {"role": "system", "content": "You are a helpful math problem solving agent."},
            {"role": "user", "content": task["question"]},
        ],
    )
    return WorkflowOutput(response=reply.choices[0].message.content or "")


async def judge(task: dict[str, Any], response: str) -> JudgeOutput:
    """What the answer is worth: 1 if it ends in the right number, else 0."""
    return JudgeOutput(reward=math_equal(final_answer(response), task["answer"]))


if __name__ == "__main__":
    try:
        print(tune(workflow, judge, config_path=CONFIG, overrides=sys.argv[1:]))
    except TunerError as error:
        sys.exit(f"{type(error).__name__}: {error}")
