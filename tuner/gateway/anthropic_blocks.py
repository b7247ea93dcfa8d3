"""Anthropic's content blocks, to the messages of chat completions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tuner.gateway.errors import RequestError, kind, shown
from tuner.gateway.messages import Message

Content = str | list[dict[str, Any]]


def chat_messages(name: str, value: Any) -> list[Message]:
    """The request's messages in the form of chat completions.

    Raises:
        RequestError: 400 that names the message, the block and the field.
    """
    if not isinstance(value, list):
        raise RequestError(f"{name} must be an array, not {kind(value)}", param=name)
    if not value:
        raise RequestError(f"{name} is empty: send at least one message", param=name)
    messages: list[Message] = []
    for index, message in enumerate(value):
        at = f"{name}[{index}]"
        if not isinstance(message, dict):
            raise RequestError(f"{at} must be an object, not {kind(message)}", param=at)
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise RequestError(
                f"{at}.role is {shown(role)}: use {' or '.join(_ROLES)}", param=f"{at}.role"
            )
        _check_fields(message, at, ("role", "content"), f"a message with role {role!r}")
        messages += _ROLES[role](message.get("content"), f"{at}.content")
    return messages


def system_content(name: str, value: Any) -> Content:
    """The content of the system message: text, or text parts.

    Raises:
        RequestError: 400 that names the block and the field.
    """
    return _content([_text(block, at) for block, at in _blocks(value, name, ("text",))])


def _system(content: Any, at: str) -> list[Message]:
    return [{"role": "system", "content": system_content(at, content)}]


def _user(content: Any, at: str) -> list[Message]:
    """Texts that follow one another make a user message, each tool result a tool message."""
    messages: list[Message] = []
    texts: list[str] = []

    def say() -> None:
        if texts:
            messages.append({"role": "user", "content": _content(texts)})
            texts.clear()

    for block, here in _blocks(content, at, ("text", "tool_result")):
        if block["type"] == "text":
            texts.append(_text(block, here))
        else:
            say()
            messages.append(_tool_result(block, here))
    say()
    return messages or [{"role": "user", "content": ""}]


def _assistant(content: Any, at: str) -> list[Message]:
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
            _check_fields(block, here, ("type", "thinking", "signature"), "a thinking block")
            reasoning.append(_string(block, "thinking", here))
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


_ROLES: dict[str, Callable[[Any, str], list[Message]]] = {
    "user": _user,
    "assistant": _assistant,
    "system": _system,
}


def _blocks(content: Any, at: str, types: tuple[str, ...]) -> list[tuple[dict[str, Any], str]]:
    """The content's blocks, each with its name; a string is one text block."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, at)]
    if not isinstance(content, list):
        raise RequestError(
            f"{at} must be a string or an array of content blocks, not {kind(content)}", param=at
        )
    blocks = []
    for index, block in enumerate(content):
        here = f"{at}[{index}]"
        if not isinstance(block, dict):
            raise RequestError(f"{here} must be an object, not {kind(block)}", param=here)
        type_ = block.get("type")
        if type_ == "redacted_thinking":
            raise RequestError(
                f"{here}.type is redacted_thinking: encrypted reasoning cannot be shown to this "
                "model; leave the block out",
                param=f"{here}.type",
            )
        if type_ not in types:
            raise RequestError(
                f"{here}.type is {shown(type_)}: what can be read here is {', '.join(types)}",
                param=f"{here}.type",
            )
        blocks.append((block, here))
    return blocks


def _text(block: dict[str, Any], at: str) -> str:
    _check_fields(block, at, ("type", "text", "cache_control"), "a text block")
    return _string(block, "text", at)


def _tool_call(block: dict[str, Any], at: str) -> dict[str, Any]:
    """A tool_use block; its input goes on as JSON text, which the model's own may differ from."""
    if block.get("caller") == {"type": "direct"}:
        block = {key: value for key, value in block.items() if key != "caller"}
    _check_fields(block, at, ("type", "id", "name", "input", "cache_control"), "a tool_use block")
    if not isinstance(block.get("input"), dict):
        raise RequestError(
            f"{at}.input must be an object, not {kind(block.get('input'))}", param=f"{at}.input"
        )
    try:
        arguments = json.dumps(block["input"], ensure_ascii=False)
    except RecursionError:
        raise RequestError(f"{at}.input is nested too deeply", param=f"{at}.input") from None
    function = {"name": _string(block, "name", at), "arguments": arguments}
    return {"id": _string(block, "id", at), "type": "function", "function": function}


def _tool_result(block: dict[str, Any], at: str) -> Message:
    """A tool message. Chat templates know no `is_error`: the text says it instead."""
    known = ("type", "tool_use_id", "content", "is_error", "cache_control")
    _check_fields(block, at, known, "a tool_result block")
    failed = block.get("is_error") or False
    if not isinstance(failed, bool):
        raise RequestError(
            f"{at}.is_error must be true or false, not {kind(failed)}", param=f"{at}.is_error"
        )
    content = block.get("content")
    blocks = _blocks([] if content is None else content, f"{at}.content", ("text",))
    texts = [_text(*item) for item in blocks]
    if failed:
        texts = [f"Error: {texts[0]}", *texts[1:]] if texts else ["Error"]
    return {
        "role": "tool",
        "tool_call_id": _string(block, "tool_use_id", at),
        "content": _content(texts),
    }


def _content(texts: list[str]) -> Content:
    """One text as it is, several as the text parts of chat completions."""
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts]


def _string(block: dict[str, Any], key: str, at: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise RequestError(f"{at}.{key} must be a string, not {kind(value)}", param=f"{at}.{key}")
    return value


def _check_fields(block: dict[str, Any], at: str, known: tuple[str, ...], what: str) -> None:
    for key, value in block.items():
        # Clients echo a block with every field of their own type; empty ones say nothing.
        if key not in known and value is not None and value != []:
            raise RequestError(
                f"{at}.{key} is not a field of {what} that this gateway knows "
                f"({', '.join(known)}): leave it out",
                param=f"{at}.{key}",
            )
