"""Readable differences of a recorded and a new request."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tuner.gateway.script import Divergence

_WIDTH = 96
"""Characters of a line, which is broken at white space if possible."""


def readable(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> list[str]:
    """A request as lines: each message under its role, then the tools."""
    lines = [line for message in messages for line in _message(message)]
    for tool in tools:
        function = tool.get("function", {}) if isinstance(tool, Mapping) else {}
        lines.append(f"[tool {function.get('name', '')}]".replace(" ]", "]"))
        lines += _indented(json.dumps(function or tool, indent=2, ensure_ascii=False))
    return lines


def difference_of(divergence: Divergence) -> list[str]:
    """A unified diff of the recorded and the new request, without line ends.

    If the agent ended, or asked for more than was recorded, only one request is shown; empty if
    they differ only in their settings.
    """
    expected = divergence.expected
    number = 1 + (divergence.call if divergence.number is None else divergence.number)
    old = [] if expected is None else readable(expected.messages, expected.tools)
    new = [] if divergence.asked is None else readable(divergence.asked, divergence.tools or ())
    was = f"call {number} as recorded" if expected is not None else "nothing more was recorded"
    now = "asked for now" if divergence.asked is not None else "the agent has ended"
    return list(difflib.unified_diff(old, new, was, now, lineterm=""))


def difference_of_texts(recorded: str, now: str) -> list[str]:
    """A unified diff of two answers, without line ends; empty if they are equal."""
    old, new = ([*_wrapped(text)] for text in (recorded, now))
    return list(difflib.unified_diff(old, new, "answer as recorded", "answer now", lineterm=""))


def _message(message: Mapping[str, Any]) -> Iterator[str]:
    known = {"role", "content", "reasoning_content", "reasoning", "tool_calls", "name"}
    about = [str(message[key]) for key in ("name", "tool_call_id") if message.get(key)]
    yield f"[{' '.join([str(message.get('role')), *about])}]"
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        yield from _indented(f"(reasoning) {reasoning}")
    content = message.get("content")
    if isinstance(content, str):
        yield from _indented(content)
    else:
        for part in content or ():
            text = part.get("text") if isinstance(part, Mapping) else None
            yield from _indented(text if isinstance(text, str) else _json(part))
    for call in message.get("tool_calls") or ():
        function = call.get("function") or call
        name, arguments = function.get("name"), function.get("arguments")
        yield from _indented(f"-> {name}({arguments})  {call.get('id', '')}".rstrip())
    for key in sorted(message.keys() - known - {"tool_call_id"}):
        if message[key] is not None and message[key] != []:
            yield from _indented(f"{key}: {_json(message[key])}")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=repr)


def _indented(text: str) -> Iterable[str]:
    return (f"  {line}" for line in _wrapped(text))


def _wrapped(text: str) -> Iterator[str]:
    """Break long lines of a text after white space."""
    for line in text.split("\n"):
        yield from (
            re.findall(rf".{{1,{_WIDTH}}}(?<=\s)|.{{1,{_WIDTH}}}", line)
            if len(line) > _WIDTH
            else [line]
        )
