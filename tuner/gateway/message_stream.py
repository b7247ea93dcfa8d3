"""A message as it grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.gateway.parsing import ParsedMessage, ParsedToolCall
from tuner.gateway.renderer import ChatRenderer


@dataclass(frozen=True)
class Delta:
    """What a message has grown by; exactly one is set.

    Attributes:
        tool_call: Its index in the message, and the whole call.
    """

    reasoning: str | None = None
    content: str | None = None
    tool_call: tuple[int, ParsedToolCall] | None = None


class MessageStream:
    """Turns sampled ids, as they come, into deltas of the message."""

    def __init__(
        self,
        renderer: ChatRenderer,
        *,
        prompt_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]],
        stop: Sequence[str] = (),
    ) -> None: ...

    def push(self, ids: Sequence[int]) -> list[Delta]:
        """Take sampled ids."""
        return []

    def finish(self, message: ParsedMessage) -> list[Delta]:
        """What is still missing of the whole `message`."""
        deltas = []
        if message.reasoning is not None:
            deltas.append(Delta(reasoning=message.reasoning))
        if message.content is not None:
            deltas.append(Delta(content=message.content))
        deltas += [Delta(tool_call=(i, call)) for i, call in enumerate(message.tool_calls)]
        return deltas
