"""Agents of one call."""

from typing import Any


async def answer(model: Any, said: Any, **fields: Any) -> str:
    """The text that a model answers to a text, or to messages."""
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    completion = await model.client.chat.completions.create(
        model=model.model_name, messages=messages, **fields
    )
    return completion.choices[0].message.content or ""
