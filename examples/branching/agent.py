"""An agent whose beginning is long and whose end decides: it takes notes, and then answers.

It works out some other problems first, and then those that it is asked, each in a conversation of
its own; the reward is for these alone. So the tokens of the notes cost, and teach nothing. With
several problems that must all be right a first success is rare.
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


def tasks(split: str, *, notes: int = NOTES, asked: int = 1) -> list[dict[str, Any]]:
    """Tasks of so many problems each, with others that are worked out before them."""
    lines = (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    problems = [json.loads(line) for line in lines]
    dice = random.Random(0)
    return [
        {
            "notes": [one["question"] for one in dice.sample(problems, notes)],
            "problems": [problem, *dice.sample(problems, asked - 1)],
        }
        for problem in problems
    ]


async def answer(task: dict[str, Any], model: TrinityChatModel) -> WorkflowOutput:
    """The notes, and then the answers; 1 if all of them are right."""
    for question in task["notes"]:
        await ask(model, question)
    texts = [await ask(model, problem["question"]) for problem in task["problems"]]
    right = [
        math_equal(final_answer(text), final_answer(problem["answer"])) == 1.0
        for text, problem in zip(texts, task["problems"], strict=True)
    ]
    return WorkflowOutput(response="\n".join(texts), reward=float(all(right)))


async def ask(model: TrinityChatModel, question: str) -> str:
    """What the model answers, without its reasoning."""
    completion = await model.client.chat.completions.create(
        model=model.model_name,
        messages=[
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": question},
        ],
    )
    return (completion.choices[0].message.content or "").rpartition("</think>")[2]


def before_the_answers(calls: Sequence[Call]) -> float:
    """For `tuner.branching.where`: begin when the notes are there."""
    return float(len(calls) == NOTES)
