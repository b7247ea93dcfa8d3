"""Reading a request's JSON fields, each with a sentence for the person whose field is wrong."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tuner.gateway.errors import RequestError, kind, shown

MAX_STOP_STRINGS = 4  # OpenAI's limit

Reader = Callable[[str, Any], Any]


def read_fields(
    body: bytes, table: Mapping[str, Reader], *, required: Iterable[str], what: str
) -> dict[str, Any]:
    """The fields of a JSON body that say something, checked by `table`.

    For every optional field null means the same as leaving it out.

    Args:
        table: A reader for each field that is known.
        required: Fields that must be there.
        what: What the body is, for messages: "a chat completion request".

    Raises:
        RequestError: 400 that names the field, its value and what to do.
    """
    fields = json_object(body)
    for name in required:
        if fields.get(name) is None:
            raise RequestError(f"{name} is missing: it is required", param=name)
    values: dict[str, Any] = {}
    for name, value in fields.items():
        read = table.get(name)
        if read is None:
            near = difflib.get_close_matches(name, table, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out"
            raise RequestError(f"{shown(name)} is not a field of {what}: {hint}", param=name)
        if value is None:
            continue
        result = read(name, value)
        if result is not NO_EFFECT:
            values[name] = result
    return values


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`.

    Raises:
        RequestError: 400: it is something else.
    """
    try:
        # Decoded here, because `json.loads` lets half of a surrogate pair through in bytes.
        fields = json.loads(
            body.decode(), parse_constant=_refuse_constant, parse_float=_finite_number
        )
        if b"\\u" in body:  # half of a surrogate pair is JSON, but no text
            json.dumps(fields, ensure_ascii=False).encode()
    except RecursionError:
        raise RequestError("the body is nested too deeply to be read") from None
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError(f"the body must be a JSON object, not {kind(fields)}")
    return fields


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite_number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{shown(text)} is too large for a number")
    return value


NO_EFFECT = object()
"""What a reader gives for a field that changes nothing."""


def number(low: float, high: float, *, above: bool = False) -> Reader:
    """A number in [low, high], or in (low, high] with `above`."""

    def read(name: str, value: Any) -> float:
        wanted = f"a number {f'above {low:g}' if above else f'from {low:g}'}"
        wanted += "" if high == math.inf else f" to {high:g}"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise RequestError(f"{name} must be {wanted}, not {kind(value)}", param=name)
        if not low <= value <= high or (above and value == low):
            raise RequestError(f"{name} is {shown(value)}: it must be {wanted}", param=name)
        return float(value)

    return read


def integer(low: int, high: int | None = None) -> Reader:
    """An integer in [low, high]."""

    def read(name: str, value: Any) -> int:
        wanted = f"an integer of at least {low}" if high is None else f"an integer {low} to {high}"
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestError(f"{name} must be {wanted}, not {_but(value)}", param=name)
        if value < low or (high is not None and value > high):
            raise RequestError(f"{name} is {shown(value)}: it must be {wanted}", param=name)
        return value

    return read


def _but(value: Any) -> str:
    return shown(value) if isinstance(value, float) else kind(value)


def boolean(name: str, value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, not {kind(value)}", param=name)
    return value


def string(name: str, value: Any) -> str:
    """Text."""
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a string, not {kind(value)}", param=name)
    return value


def object_field(name: str, value: Any) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be an object, not {kind(value)}", param=name)
    return value


def without_effect(read: Reader) -> Reader:
    """A field of the right type whose value changes nothing about the completion."""

    def check(name: str, value: Any) -> Any:
        read(name, value)
        return NO_EFFECT

    return check


def only(*allowed: Any, because: str) -> Reader:
    """A field that is accepted at the values that change nothing and refused at every other."""

    def check(name: str, value: Any) -> Any:
        for item in allowed:
            if value == item and isinstance(value, bool) == isinstance(item, bool):
                return NO_EFFECT
        instead = f" or send {json.dumps(allowed[0])}" if allowed else ""
        raise RequestError(
            f"{name} is {shown(value)}: {because}; leave it out{instead}", param=name
        )

    return check


def stop_strings(name: str, value: Any) -> tuple[str, ...]:
    """One string or a few, none of them empty."""
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        raise RequestError(f"{name} must be a string or an array of strings", param=name)
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(
            f"{name} has {len(strings)} strings: send at most {MAX_STOP_STRINGS}", param=name
        )
    if "" in strings:
        raise RequestError(f"{name} holds an empty string, which would end at once", param=name)
    return tuple(strings)
