"""Tool calls written as JSON, read without losing the text that the model wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tuner.gateway.model.parsing.message import ParsedToolCall


def json_call(text: str, keys: Sequence[str] = ("arguments",)) -> ParsedToolCall | None:
    """The call that `text`, one JSON object, spells: its "name", and its arguments under a key.

    Arguments may also be written as a string that holds JSON.
    """
    try:
        spans = _object_spans(text)
        name = json.loads(text[slice(*spans["name"])])
        (key,) = (key for key in keys if key in spans)
        arguments = text[slice(*spans[key])]
        if arguments.startswith('"'):
            arguments = json.loads(arguments)
    except (ValueError, KeyError, RecursionError):
        return None
    if not isinstance(name, str) or not name or not is_object(arguments):
        return None
    return ParsedToolCall(name, arguments)


def is_object(text: str) -> bool:
    """Whether `text` is one JSON object."""
    if not text.lstrip().startswith("{"):
        return False
    try:
        DECODER.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def value_end(text: str, start: int) -> int | None:
    """Where the JSON value that begins at `start` ends; None where there is none."""
    try:
        return DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def skip_space(text: str, position: int) -> int:
    """The first position from `position` on that is not JSON's white space."""
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
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
        key, position = DECODER.raw_decode(text, position)
        if not isinstance(key, str) or key in spans:
            raise ValueError("a member's name must be a string that occurs once")
        start = _expect(text, position, ":")
        _, position = DECODER.raw_decode(text, start)
        spans[key] = (start, position)
        position = skip_space(text, position)
    if skip_space(text, position + 1) != len(text):
        raise ValueError("text after the object")
    return spans


def _expect(text: str, position: int, character: str) -> int:
    position = skip_space(text, position)
    if text[position : position + 1] != character:
        raise ValueError(f"expected {character!r}")
    return skip_space(text, position + 1)
