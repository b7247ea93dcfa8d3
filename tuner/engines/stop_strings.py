"""Detection of stop strings in a completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from transformers import PreTrainedTokenizerBase

_UNFINISHED = "\ufffd"
_LONGEST_CHARACTER = 8
"""Tokens after which an undecodable tail is kept as it is: no character has more bytes."""


class StopStrings:
    """Watches one completion; a stop string may begin and end inside tokens.

    Only the last few tokens are decoded: those since the last complete character, and the ones
    before it (a tokenizer may write a token differently at the start of a text).

        ids      ...  a  b | c  d        text of (a b c d) minus text of (a b) = text added by c d
                      ^    ^
                 _start    _read

    Special tokens count as text, so a stop string may name one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._longest = max(map(len, stops))
        self._ids: list[int] = []
        self._start = 0
        self._read = 0
        self._tail = ""

    def push(self, token_id: int) -> bool:
        """Take the next token; True if the text now contains a stop string."""
        self._ids.append(token_id)
        known = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])[len(known) :]
        finished = text.rstrip(_UNFINISHED)
        seen = self._tail + finished
        if any(stop in seen for stop in self._stops):
            return True
        if finished == text or len(self._ids) - self._read >= _LONGEST_CHARACTER:
            self._tail = (self._tail + text)[-self._longest :]
            self._start, self._read = self._read, len(self._ids)
        return False

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        text = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return cast(str, text)
