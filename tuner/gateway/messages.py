"""Messages and tools of a request: checked, and brought into the form chat templates expect."""

from __future__ import annotations

import json
from typing import Any

from tuner.gateway.errors import RequestError, kind, shown

Message = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_COMMON = ("role", "content", "name")
_BY_ROLE = {
    "assistant": ("tool_calls", "reasoning_content", "reasoning", "refusal"),
    "tool": ("tool_call_id",),
}


def check_messages(value: Any) -> list[Message]:
    """The request's messages, known to be well formed.

    Raises:
        RequestError: 400 that names the message and the field.
    """
    if not isinstance(value, list):
        raise RequestError(f"messages must be an array, not {kind(value)}", param="messages")
    if not value:
        raise RequestError("messages is empty: send at least one message", param="messages")
    for index, message in enumerate(value):
        _check_message(message, f"messages[{index}]")
    return value


def _check_message(message: Any, at: str) -> None:
    if not isinstance(message, dict):
        raise RequestError(f"{at} must be an object, not {kind(message)}", param=at)
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(
            f"{at}.role is {shown(role)}: use one of {', '.join(_ROLES)}", param=f"{at}.role"
        )
    known = _COMMON + _BY_ROLE.get(role, ())
    for key, value in message.items():
        # Clients echo a message with every field of their own type; empty ones say nothing.
        if key not in known and value is not None and value != []:
            raise RequestError(
                f"{at}.{key} is not a field of a message with role {role!r} that this gateway "
                f"knows ({', '.join(known)}): leave it out",
                param=f"{at}.{key}",
            )
    for key in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if not isinstance(message.get(key), str | None):
            raise RequestError(
                f"{at}.{key} must be a string, not {kind(message[key])}", param=f"{at}.{key}"
            )
    if message.get("refusal"):
        raise RequestError(
            f"{at}.refusal cannot be shown to the model: put the text in content",
            param=f"{at}.refusal",
        )
    content = message.get("content")
    if content is None and role != "assistant":
        raise RequestError(
            f"{at}.content is missing: only an assistant message may have none",
            param=f"{at}.content",
        )
    _text(content, f"{at}.content")
    if role == "tool" and message.get("tool_call_id") is None:
        raise RequestError(
            f"{at}.tool_call_id is missing: name the call that this is the result of",
            param=f"{at}.tool_call_id",
        )
    if message.get("tool_calls") is not None:
        _check_tool_calls(message["tool_calls"], f"{at}.tool_calls")


def _check_tool_calls(calls: Any, at: str) -> None:
    if not isinstance(calls, list):
        raise RequestError(f"{at} must be an array, not {kind(calls)}", param=at)
    for index, call in enumerate(calls):
        here = f"{at}[{index}]"
        if not isinstance(call, dict) or call.get("type", "function") != "function":
            raise RequestError(
                f'{here} must be {{"id", "type": "function", "function": {{"name", "arguments"}}}}',
                param=here,
            )
        function = call.get("function")
        if not isinstance(function, dict):
            raise RequestError(
                f"{here}.function must be an object, not {kind(function)}",
                param=f"{here}.function",
            )
        for key in ("name", "arguments"):
            if not isinstance(function.get(key), str):
                raise RequestError(
                    f"{here}.function.{key} must be a string, not {kind(function.get(key))}",
                    param=f"{here}.function.{key}",
                )


def _text(content: Any, at: str) -> str | None:
    """A message's text; parts are joined with a newline, as vLLM joins them for such templates."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"{at} must be a string or an array of text parts, not {kind(content)}", param=at
        )
    texts = []
    for index, part in enumerate(content):
        here = f"{at}[{index}]"
        if not isinstance(part, dict):
            raise RequestError(f"{here} must be an object, not {kind(part)}", param=here)
        if part.get("type") != "text":
            raise RequestError(
                f"{here}.type is {shown(part.get('type'))}: this model reads text parts only",
                param=f"{here}.type",
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(
                f"{here}.text must be a string, not {kind(part.get('text'))}", param=f"{here}.text"
            )
        texts.append(part["text"])
    return "\n".join(texts)


def said(message: Message) -> tuple[str | None, str]:
    """The reasoning that a checked message holds in a field of its own, and its text."""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return reasoning, _text(message.get("content"), "content") or ""


def check_tools(value: Any) -> list[dict[str, Any]]:
    """The request's tools, known to be well formed.

    Raises:
        RequestError: 400 that names the tool and the field.
    """
    if not isinstance(value, list):
        raise RequestError(f"tools must be an array, not {kind(value)}", param="tools")
    for index, tool in enumerate(value):
        at = f"tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise RequestError(
                f'{at} must be {{"type": "function", "function": {{...}}}}: only functions can '
                "be called",
                param=at,
            )
        function = tool.get("function")
        if not isinstance(function, dict):
            raise RequestError(
                f"{at}.function must be an object, not {kind(function)}", param=f"{at}.function"
            )
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError(
                f"{at}.function.name must be a string that is not empty",
                param=f"{at}.function.name",
            )
        for key, type_, name in (
            ("description", str, "a string"),
            ("parameters", dict, "an object"),
            ("strict", bool, "true or false"),
        ):
            if not isinstance(function.get(key), type_ | None):
                raise RequestError(
                    f"{at}.function.{key} must be {name}, not {kind(function[key])}",
                    param=f"{at}.function.{key}",
                )
    return value


def for_template(
    messages: list[Message],
    *,
    developer_role: bool,
    arguments_as_text: bool = False,
    content_always: bool = False,
) -> list[Message]:
    """Checked messages as chat templates expect them.

    Text parts become one string and fields without a value go. Arguments of earlier tool calls
    become the object they spell, because templates write them with `tojson`; text that is not a
    JSON object stays as it is. "developer" becomes "system" unless the template knows it.

    Args:
        messages: As `check_messages` gave them.
        developer_role: The template knows the role "developer".
        arguments_as_text: The template writes arguments as they are, so they stay text.
        content_always: The template reads content that is not there; it becomes "".
    """
    shaped = []
    for message in messages:
        copy = {key: value for key, value in message.items() if value is not None and value != []}
        if "content" in copy:
            copy["content"] = _text(copy["content"], "content")
        elif message.get("content") == [] or content_always:
            copy["content"] = ""
        if copy["role"] == "developer" and not developer_role:
            copy["role"] = "system"
        if "tool_calls" in copy and not arguments_as_text:
            copy["tool_calls"] = [_call_for_template(call) for call in copy["tool_calls"]]
        shaped.append(copy)
    return shaped


def _call_for_template(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _decoded(function["arguments"])}}


def _decoded(arguments: str) -> Any:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
