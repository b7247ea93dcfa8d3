"""The conversation of an environment's agent with the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import openai


class Dialogue:
    """Messages to a workflow's model, and its answers, of which `turns` is the number.

    Args:
        system_prompt: The first message, or messages.
        request: Other arguments of each request.
    """

    def __init__(self, model: Any, system_prompt: Any = None, **request: Any) -> None:
        self._model, self._request = model, request
        self.messages = messages(system_prompt, role="system")
        self.turns = 0

    def tell(self, told: Any) -> None:
        """Add the user's message, if it is text, or other messages."""
        self.messages += messages(told)

    def tell_result(self, call: Any, text: Any) -> None:
        """Add the result of a tool's call."""
        self.messages.append({"role": "tool", "tool_call_id": call.id, "content": text})

    async def answer(
        self, *, state: str | None = None, until_full: bool = False, **request: Any
    ) -> Any:
        """The model's next message.

        Args:
            state: What it answers, for `gigpo`.
            until_full: Return None if the context has no room for another answer.
            request: Other arguments of this request.
        """
        try:
            reply = await self._model.client.chat.completions.create(
                model=self._model.model_name, messages=self.messages, **self._request, **request
            )
        except openai.BadRequestError as error:
            if error.code != "context_length_exceeded" or not (until_full and self.turns):
                raise
            return None
        for call in self._model.calls[-1:] if state is not None else ():  # if it is recorded
            call.state = state
        self.turns += 1
        message = reply.choices[0].message
        self.messages.append(message.model_dump(exclude_none=True))
        return message


def messages(told: Any, role: str = "user") -> list[dict[str, Any]]:
    """A message from text; a list of messages is returned unchanged; an empty list for nothing."""
    if isinstance(told, str) or not told:
        return [{"role": role, "content": told}] if told else []
    return [dict(told)] if isinstance(told, Mapping) else list(told)


def function_tool(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}
