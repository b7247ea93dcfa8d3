"""Sampled token ids, as they come, to pieces of the message they spell.

    ids ──▶ text ──▶ up to a stop string ──▶ reasoning, content, tool calls

Each stage passes on what is certain and keeps the rest: part of a character, of a stop string, of a
tag, white space that may belong to the form, a tool call that is not complete. So a piece is never
taken back, and all pieces together are the message that is parsed from the whole completion.
"""

from __future__ import annotations

from collections.abc import Sequence

from tuner.gateway.parsing import Delta, ParsedMessage, ParsedToolCall, Tools
from tuner.gateway.parsing.scanning import PlainText, Scanner, begun
from tuner.gateway.renderer import ChatRenderer
from tuner.gateway.text_stream import TextStream

__all__ = ["Delta", "MessageStream"]


class MessageStream:
    """The message of one completion, piece by piece.

    The work for each token does not grow with the completion: nothing that was said is read again.

    Args:
        renderer: The chat form of the model.
        prompt_ids: The prompt, whose end tells whether reasoning was already opened.
        tools: Tools the model was shown; without any, no tool calls are looked for.
        stop: Strings that end the completion; nothing from the first one on is said.
        plain: All text is content: a completion without a chat template.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        *,
        prompt_ids: Sequence[int],
        tools: Tools,
        stop: Sequence[str] = (),
        plain: bool = False,
    ) -> None:
        self._special = renderer.special_tokens.ids
        self._last: list[int] = []  # a special token, which is not shown if it is the last one
        self._text = TextStream(renderer.tokenizer)
        self._stop = _StopCut(stop)
        self._scanner: Scanner = PlainText()
        if not plain:
            opened = renderer.opened_reasoning(prompt_ids)
            self._scanner = renderer.scanner(tools=tools, opened=opened)
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ParsedToolCall] = []

    def push(self, ids: Sequence[int]) -> list[Delta]:
        """Take the ids sampled next, shape [T]; what has become certain with them."""
        known = [*self._last, *ids]
        self._last = known[-1:] if known and known[-1] in self._special else []
        text = self._stop.push(self._text.push(known[: len(known) - len(self._last)]))
        deltas = self._scanner.feed(text) if text else []
        # An empty piece tells the parsers something, but not the reader.
        return [self._said(delta) for delta in deltas if delta != _NO_REASONING]

    def finish(self, message: ParsedMessage) -> list[Delta]:
        """What is still missing of the whole message.

        Args:
            message: What `ChatRenderer.parse` makes of all ids, with the same prompt, tools and
                stop strings; for a plain text, the text as content.

        Raises:
            RuntimeError: The message does not begin with what was said.
        """
        reasoning = _rest("reasoning", self._reasoning, message.reasoning)
        content = _rest("content", self._content, message.content)
        if message.tool_calls[: len(self._calls)] != tuple(self._calls):
            raise RuntimeError("the completion's tool calls are not those that were streamed")
        deltas = []
        if reasoning is not None:
            deltas.append(Delta(reasoning=reasoning))
        if content is not None:
            deltas.append(Delta(content=content))
        for index in range(len(self._calls), len(message.tool_calls)):
            deltas.append(Delta(tool_call=(index, message.tool_calls[index])))
        return deltas

    def _said(self, delta: Delta) -> Delta:
        if delta.reasoning is not None:
            self._reasoning.append(delta.reasoning)
        if delta.content is not None:
            self._content.append(delta.content)
        if delta.tool_call is not None:
            self._calls.append(delta.tool_call[1])
        return delta


_NO_REASONING = Delta(reasoning="")


def _rest(kind: str, said: list[str], whole: str | None) -> str | None:
    """What of `whole` was not said; None where nothing is missing."""
    before = "".join(said)
    if whole is None or not whole.startswith(before):
        if not before and whole is None:
            return None
        raise RuntimeError(f"the completion's {kind} does not begin with what was streamed")
    rest = whole[len(before) :]
    return rest if rest or not before else None


class _StopCut:
    """Cuts a text that comes in pieces before the first stop string in it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._ended = False

    def push(self, text: str) -> str:
        if not self._stops:
            return text
        if self._ended:
            return ""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        # A longer stop string may begin before the one that is complete.
        safe = begun(self._held, self._stops)
        if found and min(found) <= safe:
            self._ended = True
            safe = min(found)
        said, self._held = self._held[:safe], self._held[safe:]
        return said
