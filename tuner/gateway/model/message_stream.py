"""Sampled token ids, as they come, to pieces of the message they spell.

    ids ──▶ text ──▶ up to a stop string ──▶ reasoning, content, tool calls

Each stage passes on what is certain and keeps the rest: part of a character, of a stop string, of a
tag, white space that may belong to the form, a tool call that is not complete. So a piece is never
taken back, and all pieces together are the message that is parsed from the whole completion.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from tuner.gateway.model.parsing import Delta, ParsedMessage, Tools, joined
from tuner.gateway.model.parsing.message import PlainText, Scanner, begun
from tuner.gateway.model.renderer import ChatRenderer, decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        self._said: list[Delta] = []

    def push(self, ids: Sequence[int]) -> list[Delta]:
        """Take the ids sampled next, shape [T]; what has become certain with them."""
        known = [*self._last, *ids]
        self._last = known[-1:] if known and known[-1] in self._special else []
        text = self._stop.push(self._text.push(known[: len(known) - len(self._last)]))
        deltas = self._scanner.feed(text) if text else []
        # An empty piece tells the parsers something, but not the reader.
        new = [delta for delta in deltas if delta != Delta(reasoning="")]
        self._said += new
        return new

    def finish(self, message: ParsedMessage) -> list[Delta]:
        """What is still missing of the whole message.

        Args:
            message: What `ChatRenderer.parse` makes of all ids, with the same prompt, tools and
                stop strings; for a plain text, the text as content.

        Raises:
            RuntimeError: The message does not begin with what was said.
        """
        said = joined(self._said, 0)
        reasoning = _rest("reasoning", said.reasoning or "", message.reasoning)
        content = _rest("content", said.content or "", message.content)
        calls = len(said.tool_calls)
        if message.tool_calls[:calls] != said.tool_calls:
            raise RuntimeError("the completion's tool calls are not those that were streamed")
        deltas = []
        if reasoning is not None:
            deltas.append(Delta(reasoning=reasoning))
        if content is not None:
            deltas.append(Delta(content=content))
        new_calls = enumerate(message.tool_calls[calls:], calls)
        return deltas + [Delta(tool_call=call) for call in new_calls]


def _rest(kind: str, before: str, whole: str | None) -> str | None:
    """What of `whole` was not said; None where nothing is missing."""
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


_REPLACEMENT = "\ufffd"
# A byte that is a token of its own (SentencePiece). Such a run decodes as a whole: one byte more
# can turn all of it into replacement characters.
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# No character of UTF-8 is longer in bytes, and no token here is shorter than one.
_LONGEST_CHARACTER = 4
# Tokens without the end of a character after which an earlier end is looked for.
_LONG_WINDOW = 32


class TextStream:
    """Decodes one completion.

    Only the last few tokens are decoded: those since the last complete character, after the ones
    before it (a tokenizer may write a token differently at the start of a text).

        ids      ...  a  b | c  d        text of (a b c d) minus what was said of it
                      ^
                 _window

    The pieces make the text that all ids decode to, except a part of a character at the end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._decode = partial(decode, tokenizer)
        self._window: list[int] = []
        self._read = 0  # how many of the window's ids are all said
        self._said = 0  # how many characters of the window's text are
        self._bytes: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids, shape [T]; the text that is certain with them."""
        ids = [*self._bytes, *ids]
        whole = len(ids)
        while whole and self._is_byte(ids[whole - 1]):
            whole -= 1
        self._bytes = ids[whole:]
        return self._decoded(ids[:whole]) if whole else ""

    def _decoded(self, ids: list[int]) -> str:
        self._window += ids
        text = self._decode(self._window)
        # The last replacement character may be the part of a character that goes on.
        whole = len(text) - text.endswith(_REPLACEMENT)
        new = text[self._said : whole]
        if whole == len(text):
            self._window = self._window[self._read :]
            self._read = len(self._window)
            self._said = len(self._decode(self._window))
        else:
            self._said = max(self._said, whole)
            if len(self._window) - self._read > _LONG_WINDOW:
                self._shorten(text)
        return new

    def _shorten(self, text: str) -> None:
        """Let go of the window's beginning where no character is cut by that."""
        last = len(self._window) - _LONGEST_CHARACTER
        for end in range(last, last - _LONGEST_CHARACTER, -1):
            before = self._decode(self._window[:end])
            whole = before + self._decode(self._window[end:]) == text
            if whole and len(before) <= self._said:
                self._window = self._window[end:]
                self._read = 0
                self._said -= len(before)
                return

    def _is_byte(self, token_id: int) -> bool:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return isinstance(token, str) and _BYTE_TOKEN.fullmatch(token) is not None
