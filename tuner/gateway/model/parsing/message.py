"""A completion taken apart: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ParsedToolCall:
    """A call as the model wrote it.

    Where the form holds JSON, `arguments` is the model's own text, byte for byte.
    """

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


@dataclass(frozen=True)
class Delta:
    """The next piece of a message; exactly one field is set.

    Attributes:
        reasoning, content: Text that goes on where the last piece of its kind ended.
        tool_call: Index of a call in the message, and the whole call.
    """

    reasoning: str | None = None
    content: str | None = None
    tool_call: tuple[int, ParsedToolCall] | None = None


def joined(deltas: Iterable[Delta], malformed: int) -> ParsedMessage:
    """The message that all its pieces make; an empty piece of reasoning says there was some."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ParsedToolCall] = []
    for delta in deltas:
        if delta.reasoning is not None:
            reasoning.append(delta.reasoning)
        if delta.content is not None:
            content.append(delta.content)
        if delta.tool_call is not None:
            calls.append(delta.tool_call[1])
    text = "".join(content)
    return ParsedMessage(
        content=text if text or not (calls or reasoning) else None,
        reasoning="".join(reasoning) if reasoning else None,
        tool_calls=tuple(calls),
        malformed_tool_calls=malformed,
    )
