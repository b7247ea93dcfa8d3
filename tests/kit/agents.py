"""Small agents and a judge, in a module that a worker imports in no time: nothing here is heavy."""

import random
from typing import Any

from tuner.tasks.functions import JudgeOutput, WorkflowOutput


async def answer(model: Any, said: Any, **fields: Any) -> str:
    """The text that a model answers to a text, or to messages."""
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    completion = await model.client.chat.completions.create(
        model=model.model_name, messages=messages, **fields
    )
    return completion.choices[0].message.content or ""


async def workflow(task, model):
    text = await answer(model, task["question"])
    if random.random() < 0.3:  # some rollouts make a second call
        text += await answer(model, text)
    return WorkflowOutput(response=text)


async def judge(task, response):
    return JudgeOutput(reward=sum(map(ord, response)) % 17 / 17)


async def talk(task, model):
    """Two to four turns, as chance has it."""
    messages = [{"role": "user", "content": task["question"]}]
    text = ""
    for _ in range(random.randint(2, 4)):
        text = await answer(model, messages)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "More."}]
    return WorkflowOutput(response=text)
