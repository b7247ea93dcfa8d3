"""Anthropic's content blocks, to the messages of chat completions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tuner.gateway.fields import array, boolean, object_field, only_keys, string
from tuner.gateway.model.template import Message, content_of
from tuner.gateway.request_error import Path, kind, shown, wrong

Content = str | list[dict[str, Any]]


def read_messages(at: Path, value: Any) -> list[Message]:
    """The request's messages in the form of chat completions.

    Raises:
        RequestError: 400 that names the message, the block and the field.
    """
    if not array(at, value):
        raise wrong(at, "is empty: send at least one message")
    messages: list[Message] = []
    for index, message in enumerate(value):
        here = (*at, index)
        role = object_field(here, message).get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise wrong((*here, "role"), f"is {shown(role)}: use {' or '.join(_ROLES)}")
        only_keys(message, ("role", "content"), here, f"a message with role {role!r}")
        messages += _ROLES[role](message.get("content"), (*here, "content"))
    return messages


def system_content(at: Path, value: Any) -> Content:
    """The content of the system message: text, or text parts.

    Raises:
        RequestError: 400 that names the block and the field.
    """
    return content_of([_text(*block) for block in _blocks(value, at, ("text",))])


def _system(content: Any, at: Path) -> list[Message]:
    return [{"role": "system", "content": system_content(at, content)}]


def _user(content: Any, at: Path) -> list[Message]:
    """Texts that follow one another make a user message, each tool result a tool message."""
    messages: list[Message] = []
    texts: list[str] = []

    def say() -> None:
        if texts:
            messages.append({"role": "user", "content": content_of(texts)})
            texts.clear()

    for block, here in _blocks(content, at, ("text", "tool_result")):
        if block["type"] == "text":
            texts.append(_text(block, here))
        else:
            say()
            messages.append(_tool_result(block, here))
    say()
    return messages or [{"role": "user", "content": ""}]


def _assistant(content: Any, at: Path) -> list[Message]:
    """One message, whatever the order of its blocks.

    Blocks of one kind are joined with nothing in between: an answer that was one text can come in
    several blocks.
    """
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, here in _blocks(content, at, ("text", "thinking", "tool_use")):
        if block["type"] == "text":
            texts.append(_text(block, here))
        elif block["type"] == "thinking":
            only_keys(block, ("type", "thinking", "signature"), here, "a thinking block")
            reasoning.append(string((*here, "thinking"), block.get("thinking")))
        else:
            calls.append(_tool_call(block, here))
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if (calls or reasoning) and not texts:
        message["content"] = None
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return [message]


_ROLES: dict[str, Callable[[Any, Path], list[Message]]] = {
    "user": _user,
    "assistant": _assistant,
    "system": _system,
}


def _blocks(content: Any, at: Path, types: tuple[str, ...]) -> list[tuple[dict[str, Any], Path]]:
    """The content's blocks, each with its place; a string is one text block."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, at)]
    if not isinstance(content, list):
        raise wrong(at, f"must be a string or an array of content blocks, not {kind(content)}")
    blocks = []
    for index, block in enumerate(content):
        here = (*at, index)
        type_ = object_field(here, block).get("type")
        if type_ == "redacted_thinking":
            raise wrong(
                (*here, "type"),
                "is redacted_thinking: encrypted reasoning cannot be shown to this model; leave "
                "the block out",
            )
        if type_ not in types:
            raise wrong(
                (*here, "type"), f"is {shown(type_)}: what can be read here is {', '.join(types)}"
            )
        blocks.append((block, here))
    return blocks


def _text(block: dict[str, Any], at: Path) -> str:
    only_keys(block, ("type", "text", "cache_control"), at, "a text block")
    return string((*at, "text"), block.get("text"))


def _tool_call(block: dict[str, Any], at: Path) -> dict[str, Any]:
    """A tool_use block; its input goes on as JSON text, which the model's own may differ from."""
    if block.get("caller") == {"type": "direct"}:
        block = {key: value for key, value in block.items() if key != "caller"}
    only_keys(block, ("type", "id", "name", "input", "cache_control"), at, "a tool_use block")
    given = object_field((*at, "input"), block.get("input"))
    try:
        arguments = json.dumps(given, ensure_ascii=False)
    except RecursionError:
        raise wrong((*at, "input"), "is nested too deeply") from None
    function = {"name": string((*at, "name"), block.get("name")), "arguments": arguments}
    return {"id": string((*at, "id"), block.get("id")), "type": "function", "function": function}


def _tool_result(block: dict[str, Any], at: Path) -> Message:
    """A tool message. Chat templates know no `is_error`: the text says it instead."""
    known = ("type", "tool_use_id", "content", "is_error", "cache_control")
    only_keys(block, known, at, "a tool_result block")
    failed = boolean((*at, "is_error"), block.get("is_error") or False)
    content = block.get("content")
    blocks = _blocks([] if content is None else content, (*at, "content"), ("text",))
    texts = [_text(*item) for item in blocks]
    if failed:
        texts = [f"Error: {texts[0]}", *texts[1:]] if texts else ["Error"]
    return {
        "role": "tool",
        "tool_call_id": string((*at, "tool_use_id"), block.get("tool_use_id")),
        "content": content_of(texts),
    }
