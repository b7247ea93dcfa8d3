"""From a row of a dataset to the conversations in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.config.trainer_input import FormatSection
from tuner.errors import DatasetError
from tuner.gateway.errors import RequestError
from tuner.gateway.messages import Message, check_messages, check_tools

SETTING = "buffer.trainer_input.experience_buffer.format"


@dataclass(frozen=True)
class Conversation:
    """Messages and tools, known to be well formed.

    Attributes:
        messages: In order.
        tools: What the assistant could call.
        trained: Indices of the assistant messages to train, rising.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]
    trained: tuple[int, ...]


def conversation(row: Mapping[str, Any], form: FormatSection) -> Conversation:
    """The conversation that a row of SFT data holds.

    Raises:
        DatasetError: A column is missing, or what it holds is no conversation.
    """
    if _prompt_type(row, form) == "messages":
        messages = _messages(_column(row, form, "messages_key"), "assistant", text=False)
    else:
        messages = _prompt(row, form)
        messages += _messages(_column(row, form, "response_key"), "assistant", text=True)
    first = 0 if form.enable_concatenated_multi_turn else len(messages) - 1
    return _checked(messages, row, form, first)


def pair(row: Mapping[str, Any], form: FormatSection) -> tuple[Conversation, Conversation]:
    """The better and the worse conversation that a row of DPO data holds; they begin alike.

    Raises:
        DatasetError: A column is missing, what it holds is no conversation, or both are the same.
    """
    text = _prompt_type(row, form) == "plaintext"
    if text:
        prompt = _prompt(row, form)
    else:
        prompt = _messages(_column(row, form, "messages_key"), "user", text=False)
    ends = [
        _messages(_column(row, form, key), "assistant", text=text)
        for key in ("chosen_key", "rejected_key")
    ]
    if ends[0] == ends[1]:
        raise DatasetError(f"{form.chosen_key!r} and {form.rejected_key!r} are the same")
    chosen, rejected = (_checked([*prompt, *end], row, form, len(prompt)) for end in ends)
    return chosen, rejected


def _prompt_type(row: Mapping[str, Any], form: FormatSection) -> str:
    if form.prompt_type is not None:
        return form.prompt_type
    return "messages" if row.get(form.messages_key) is not None else "plaintext"


def _prompt(row: Mapping[str, Any], form: FormatSection) -> list[Message]:
    system = form.system_prompt
    if form.system_prompt_key is not None:
        system = _column(row, form, "system_prompt_key")
    said = _messages(_column(row, form, "prompt_key"), "user", text=True)
    return [*([{"role": "system", "content": system}] if system is not None else []), *said]


def _column(row: Mapping[str, Any], form: FormatSection, key: str) -> Any:
    name = getattr(form, key)
    if row.get(name) is None:
        there = ", ".join(column for column, value in row.items() if value is not None)
        raise DatasetError(f"there is no column {name!r} ({SETTING}.{key}); it has: {there}")
    return row[name]


def _messages(value: Any, role: str, *, text: bool) -> list[Message]:
    """A list of messages, given as one, as one message, or as text.

    Args:
        value: What the column holds.
        role: Whose text it is, where it is text.
        text: Whether text is what is said; else it is the list as JSON text, as Trinity-RFT has it.
    """
    if isinstance(value, str) and text:
        return [{"role": role, "content": value}]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise DatasetError(
                f"{value!r:.80} is text, but neither a list of messages nor one as JSON; set "
                f"{SETTING}.prompt_type to plaintext if the columns are text"
            ) from None
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise DatasetError(f"{value!r:.80} is neither text nor a list of messages")
    return [dict(one) if isinstance(one, Mapping) else one for one in value]


def _checked(
    messages: list[Message], row: Mapping[str, Any], form: FormatSection, first: int
) -> Conversation:
    """A conversation whose assistant messages from `first` on are trained."""
    shaped, trained = [], []
    for index, message in enumerate(messages):
        if isinstance(message, dict):
            message, weight = _without_weight(message, index)
            if message.get("role") == "assistant":
                message = _as_assistant(message)
                if weight and index >= first:
                    trained.append(index)
        shaped.append(message)
    tools = row.get(form.tools_key)
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise DatasetError(f"column {form.tools_key!r} is not JSON: {error}") from None
    try:
        return Conversation(check_messages(shaped), check_tools(tools or []), tuple(trained))
    except RequestError as error:
        raise DatasetError(str(error)) from None


def _without_weight(message: Message, index: int) -> tuple[Message, int]:
    """A message without OpenAI's `weight`, and it: 0 for an answer that is only context."""
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise DatasetError(f"messages[{index}].weight is {weight!r}; it must be 0 or 1")
    rest = {key: value for key, value in message.items() if key != "weight"}
    return rest, 1 if weight is None else int(weight)


def _as_assistant(message: Message) -> Message:
    """One name for reasoning, and arguments as text, as OpenAI has them."""
    shaped = dict(message)
    if shaped.get("reasoning_content") is None and shaped.get("reasoning") is not None:
        shaped["reasoning_content"] = shaped.pop("reasoning")
    calls = shaped.get("tool_calls")
    if isinstance(calls, list):
        shaped["tool_calls"] = [_with_text_arguments(call) for call in calls]
    return shaped


def _with_text_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return call
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
