"""Reasoning and tool calls read out of a completion's text, by the name of the model family's form.

Transformers' response templates (`tokenizer.parse_response`) were tried first and do not serve for
these two forms: they return decoded arguments, whose text is then no longer what the model wrote,
and they raise on a malformed call or drop a truncated one. Here nothing is invented and nothing
lost: what is not a well-formed call stays in the content, and is counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ParsedToolCall:
    """A call as the model wrote it; `arguments` is its own JSON text, byte for byte."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedMessage:
    """A completion, taken apart.

    Attributes:
        content: Text outside reasoning and well-formed tool calls; None where there is none
            beside them.
        reasoning: Text of the reasoning, or None where the model did not reason.
        tool_calls: Well-formed calls in the order written.
        malformed_tool_calls: How many calls could not be read; their text is in `content`.
    """

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ParsedToolCall, ...] = ()
    malformed_tool_calls: int = 0


# text, whether the prompt has already opened the reasoning -> (reasoning or None, rest)
ReasoningParser = Callable[[str, bool], tuple[str | None, str]]
# text -> (rest, calls, how many were malformed)
ToolCallParser = Callable[[str], tuple[str, tuple[ParsedToolCall, ...], int]]


def parse_deepseek_r1(text: str, opened: bool) -> tuple[str | None, str]:
    """`<think>reasoning</think>content`; newlines around the two tags belong to the form.

    Text that ends inside the tags is all reasoning. A closing tag without an opening one ends
    reasoning that began with the completion, as models trained on R1's template write it.
    """
    body = text.lstrip()
    if body.startswith("<think>"):
        reasoning, closed, rest = body.removeprefix("<think>").partition("</think>")
    elif opened or "<think>" not in text.partition("</think>")[0]:
        reasoning, closed, rest = text.partition("</think>")
        if not closed and not opened:
            return None, text
    else:
        return None, text
    return reasoning.strip("\n"), rest.lstrip("\n") if closed else ""


_HERMES_CALL = re.compile(r"\n?<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


def parse_hermes(text: str) -> tuple[str, tuple[ParsedToolCall, ...], int]:
    r"""`<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`, any number of them.

    The newline before a call and white space after one belong to the form.
    """
    calls: list[ParsedToolCall] = []
    malformed = 0
    rest: list[str] = []
    end = 0
    for match in _HERMES_CALL.finditer(text):
        call = _hermes_call(match[1]) if match[0].endswith("</tool_call>") else None
        if call is None:
            malformed += 1
            continue
        rest.append(_between(text[end : match.start()], first=not calls))
        end = match.end()
        calls.append(call)
    rest.append(_between(text[end:], first=not calls))
    return "".join(rest), tuple(calls), malformed


def _between(text: str, *, first: bool) -> str:
    return text if first or text.strip() else ""


def _hermes_call(body: str) -> ParsedToolCall | None:
    body = body.strip()
    try:
        spans = _object_spans(body)
        name = json.loads(body[slice(*spans["name"])])
        arguments = body[slice(*spans["arguments"])]
        if arguments.startswith('"'):  # arguments written as a string that holds JSON
            arguments = json.loads(arguments)
            _DECODER.decode(arguments)
    except (ValueError, KeyError, RecursionError):
        return None
    if not isinstance(name, str) or not name or not arguments.lstrip().startswith("{"):
        return None
    return ParsedToolCall(name, arguments)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_SPACE = re.compile(r"[ \t\n\r]*")


def _object_spans(text: str) -> dict[str, tuple[int, int]]:
    """Where each member's value of the JSON object `text` begins and ends.

    Raises:
        ValueError: `text` is not one JSON object, or names a member twice.
    """
    spans: dict[str, tuple[int, int]] = {}
    position = _expect(text, 0, "{")
    while text[position : position + 1] != "}":
        if spans:
            position = _expect(text, position, ",")
        key, position = _DECODER.raw_decode(text, position)
        if not isinstance(key, str) or key in spans:
            raise ValueError("a member's name must be a string that occurs once")
        start = _expect(text, position, ":")
        _, position = _DECODER.raw_decode(text, start)
        spans[key] = (start, position)
        position = _skip(text, position)
    if _skip(text, position + 1) != len(text):
        raise ValueError("text after the object")
    return spans


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _expect(text: str, position: int, character: str) -> int:
    position = _skip(text, position)
    if text[position : position + 1] != character:
        raise ValueError(f"expected {character!r}")
    return _skip(text, position + 1)


def _no_reasoning(text: str, opened: bool) -> tuple[str | None, str]:
    return None, text


def _no_tool_calls(text: str) -> tuple[str, tuple[ParsedToolCall, ...], int]:
    return text, (), 0


REASONING_PARSERS: dict[str, ReasoningParser] = {
    "deepseek_r1": parse_deepseek_r1,
    "none": _no_reasoning,
}
TOOL_CALL_PARSERS: dict[str, ToolCallParser] = {"hermes": parse_hermes, "none": _no_tool_calls}
