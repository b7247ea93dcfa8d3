"""Token ids to text as they come, without half characters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        text = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return cast(str, text)
