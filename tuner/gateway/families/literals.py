"""JSON that a model wrote, and its notations of values that are not JSON: Python's and Gemma's."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any


def is_object(text: str) -> bool:
    """Whether `text` is one JSON object."""
    try:
        return isinstance(DECODER.decode(text), dict)
    except (ValueError, RecursionError):
        return False


def json_value(text: str) -> Any:
    """The value of a JSON text that the model wrote.

    Numbers beyond the range of floats, which a model can write, become the largest float: as
    infinity they would be written back as text that is not JSON.
    """
    return json.loads(text, parse_float=_finite, parse_constant=refuse_constant)


def _finite(number: str) -> float:
    return max(-sys.float_info.max, min(sys.float_info.max, float(number)))


def value_end(text: str, start: int) -> int | None:
    """End of the JSON value that begins at `start`; None if there is none."""
    try:
        return DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def skip_space(text: str, position: int) -> int:
    """The first position from `position` on that is not JSON white space."""
    match = _SPACE.match(text, position)
    return match.end() if match else position


def expect(text: str, position: int, character: str) -> int:
    position = skip_space(text, position)
    if text[position : position + 1] != character:
        raise ValueError(f"expected {character!r}")
    return skip_space(text, position + 1)


def refuse_constant(name: str) -> Any:
    """Reject NaN, Infinity and -Infinity, which Python's decoder accepts."""
    raise ValueError(f"{name} is not a JSON number")


DECODER = json.JSONDecoder(parse_constant=refuse_constant)
_SPACE = re.compile(r"[ \t\n\r]*")
_WORDS_OF_PYTHON = {"True": True, "False": False, "None": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\n": "", "\\": "\\", "'": "'", '"': '"'}


class Literals:
    """Reads values in a text that are not JSON: Python's, and Gemma's.

    Args:
        text: The text.
        quote: What stands before and after a string.
        python: Strings are Python's, names have quotes, and a tuple is an array.
        words: Words without quotes are strings.

    Attributes:
        at: The position of the end, after `items`.
    """

    _STRING = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)
    _ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
    _BARE = re.compile(r"[^,:()\[\]{}\n=]*")
    _KEY = re.compile(r"\s*([^,:()\[\]{}\n]+?)\s*:")
    _MOST = 100  # levels

    def __init__(
        self,
        text: str,
        *,
        quote: tuple[str, str] = ("", ""),
        python: bool = False,
        words: bool = True,
    ) -> None:
        self._text = text
        self._quote, self._closing = quote
        self._python, self._words = python, words
        self.at = 0

    def value(self, at: int, depth: int = 0) -> tuple[Any, int]:
        """The value that begins at a position, and its end.

        Raises:
            ValueError: There is none.
        """
        at = skip_space(self._text, at)
        start = self._text[at : at + 1]
        if depth > self._MOST or at >= len(self._text):
            raise ValueError("nested too deeply, or cut off")
        if self._quote and self._text.startswith(self._quote, at):
            begin = at + len(self._quote)
            close = self._text.find(self._closing, begin)
            if close < 0:
                raise ValueError("a string without an end")
            return self._text[begin:close], close + len(self._closing)
        if self._python and start in ("'", '"'):
            return self.string(at)
        if start == "[" or (start == "(" and self._python):
            items: list[Any] = []
            for begin in self.items(at + 1, "]" if start == "[" else ")"):
                value, self.at = self.value(begin, depth + 1)
                items.append(value)
            return items, self.at
        if start == "{":
            members: dict[str, Any] = {}
            for begin in self.items(at + 1, "}"):
                key, after = self._key(begin)
                if key in members:
                    raise ValueError("a name that occurs twice")
                members[key], self.at = self.value(after, depth + 1)
            return members, self.at
        return self._bare(at)

    def items(self, at: int, closer: str) -> Iterator[int]:
        """Where the items begin, with commas between; each must leave its end in `at`."""
        self.at = skip_space(self._text, at)
        while self._text[self.at : self.at + 1] != closer:
            if self.at >= len(self._text):
                raise ValueError("cut off")
            yield self.at
            self.at = skip_space(self._text, self.at)
            if self._text[self.at : self.at + 1] == ",":
                self.at = skip_space(self._text, self.at + 1)
            elif self._text[self.at : self.at + 1] != closer:
                raise ValueError("expected a comma")
        self.at += 1

    def string(self, at: int) -> tuple[str, int]:
        """Python's string at a position."""
        match = self._STRING.match(self._text, at)
        if match is None:
            raise ValueError("a string without an end")
        body = match[1] if match[1] is not None else match[2]
        return self._ESCAPE.sub(self._unescaped, body), match.end()

    def _unescaped(self, match: re.Match[str]) -> str:
        escape = match[1]
        if len(escape) > 1:
            return chr(min(int(escape[1:], 16), sys.maxunicode))
        return _ESCAPES.get(escape, match[0])

    def _key(self, at: int) -> tuple[str, int]:
        if self._python:
            key, at = self.string(at)
            return key, expect(self._text, at, ":")
        match = self._KEY.match(self._text, at)
        if match is None:
            raise ValueError("expected a name")
        return match[1], match.end()

    def _bare(self, at: int) -> tuple[Any, int]:
        """A number, or a word: True, False and None have their meaning, others are strings."""
        match = self._BARE.match(self._text, at)
        word = match[0].strip() if match else ""
        if not word or match is None:
            raise ValueError("expected a value")
        try:
            if word in _WORDS_OF_PYTHON:
                return _WORDS_OF_PYTHON[word], match.end()
            return json_value(word), match.end()
        except ValueError:
            if not self._words:
                raise
            return word, match.end()
