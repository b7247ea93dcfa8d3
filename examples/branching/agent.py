"""An agent whose beginning is long and whose end decides: it takes notes, and then answers.

It works out some other problems first, each in a conversation of its own, and then the one that it
is asked; the reward is for that one alone. So the tokens of the notes cost, and teach nothing.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuner import TrinityChatModel, WorkflowOutput
from tuner.rewards import final_answer, math_equal
from tuner.traces import Call

DATA = Path(__file__).resolve().parent.parent / "gsm8k" / "data"
SYSTEM_PROMPT = "You are a helpful math problem solving agent."
NOTES = 4


def tasks(split: str, notes: int = NOTES) -> list[dict[str, Any]]:
    """Problems, each with the others that are worked out before it."""
    lines = (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    problems = [json.loads(line) for line in lines]
    dice = random.Random(0)
    return [
        {**problem, "notes": [one["question"] for one in dice.sample(problems, notes)]}
        for problem in problems
    ]


async def answer(task: dict[str, Any], model: TrinityChatModel) -> WorkflowOutput:
    """The notes, and then the answer; 1 if that is right."""
    text = ""
    for question in (*task["notes"], task["question"]):
        completion = await model.client.chat.completions.create(
            model=model.model_name,
            messages=[
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": question},
            ],
        )
        text = completion.choices[0].message.content or ""
    said = final_answer(text.rpartition("</think>")[2])
    return WorkflowOutput(response=text, reward=math_equal(said, final_answer(task["answer"])))


def before_the_answer(calls: Sequence[Call]) -> float:
    """For `tuner.branching.where`: begin when the notes are there."""
    return float(len(calls) == NOTES)
