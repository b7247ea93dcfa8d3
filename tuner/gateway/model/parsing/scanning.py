"""What all scanners share: they take text as it comes, and say what is certain.

The parsers are scanners that are given the whole text at once, so a streamed message is the
message that is parsed in the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tuner.gateway.model.parsing.message import Delta

Tools = Sequence[Mapping[str, Any]]


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
