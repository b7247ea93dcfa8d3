"""A completion taken apart: reasoning, content and tool calls; and what takes it apart.

All scanners take text as it comes, and say what is certain. A whole message is read by a scanner
that is given all of its text at once, so a streamed message is the message that is read in the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Tools = Sequence[Mapping[str, Any]]


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


class Scanner(Protocol):
    """Reads one text; what it says never depends on where the text was cut.

    Attributes:
        malformed: Calls that could not be read so far.
    """

    @property
    def malformed(self) -> int: ...

    def feed(self, text: str) -> list[Delta]:
        """Take the text that comes next; what has become certain with it."""
        ...

    def close(self) -> list[Delta]:
        """What is left when the text has ended."""
        ...


def read(scanner: Scanner, text: str) -> ParsedMessage:
    """The message that the whole `text` spells."""
    deltas = [*scanner.feed(text), *scanner.close()]
    return joined(deltas, scanner.malformed)


def begun(text: str, tags: Sequence[str]) -> int:
    """Where the first of the tags begins that `text` may end in the middle of; else its length."""
    longest = max(map(len, tags), default=0)
    for position in range(max(0, len(text) - longest + 1), len(text)):
        if any(tag.startswith(text[position:]) for tag in tags):
            return position
    return len(text)


class PlainText:
    """All is content."""

    malformed = 0

    def feed(self, text: str) -> list[Delta]:
        return [Delta(content=text)] if text else []

    def close(self) -> list[Delta]:
        return []
