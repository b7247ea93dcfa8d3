"""Readers of JSON fields: each has a sentence for the person whose field is wrong.

A reader takes the place of a field in the body and its value, and gives what the value means.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from tuner.engines.base import EngineCapabilities, SamplingParams
from tuner.gateway.request_error import Path, kind, shown, wrong

T = TypeVar("T")

MAX_STOP_STRINGS = 4  # OpenAI's limit
# vLLM's model runner has room for no more, and dies of them.
MAX_NAMED = {"logit_bias": 1024, "bad_words": 128, "stop_token_ids": 64}

Reader = Callable[[Path, Any], Any]

NO_EFFECT = object()
"""What a reader gives for a field that changes nothing."""


def number(low: float, high: float, *, above: bool = False) -> Reader:
    """A number in [low, high], or in (low, high] with `above`."""

    def read(at: Path, value: Any) -> float:
        wanted = f"a number {f'above {low:g}' if above else f'from {low:g}'} to {high:g}"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong(at, f"must be {wanted}, not {kind(value)}")
        if not low <= value <= high or (above and value == low):
            raise wrong(at, f"is {shown(value)}: it must be {wanted}")
        return float(value)

    return read


def integer(low: int, high: int | None = None) -> Reader:
    """An integer in [low, high]."""

    def read(at: Path, value: Any) -> int:
        wanted = f"an integer of at least {low}" if high is None else f"an integer {low} to {high}"
        if isinstance(value, bool) or not isinstance(value, int):
            found = shown(value) if isinstance(value, float) else kind(value)
            raise wrong(at, f"must be {wanted}, not {found}")
        if value < low or (high is not None and value > high):
            raise wrong(at, f"is {shown(value)}: it must be {wanted}")
        return value

    return read


def _typed(type_: type[T], what: str) -> Callable[[Path, Any], T]:
    """A value of this type, which people call `what`."""

    def read(at: Path, value: Any) -> T:
        if not isinstance(value, type_):
            raise wrong(at, f"must be {what}, not {kind(value)}")
        return value

    return read


boolean = _typed(bool, "true or false")
string = _typed(str, "a string")
object_field: Callable[[Path, Any], dict[str, Any]] = _typed(dict, "an object")
array: Callable[[Path, Any], list[Any]] = _typed(list, "an array")


def name(at: Path, value: Any) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value:
        raise wrong(at, "must be a string that is not empty")
    return value


def without_effect(read: Reader) -> Reader:
    """A field of the right type whose value changes nothing about the completion."""

    def check(at: Path, value: Any) -> Any:
        read(at, value)
        return NO_EFFECT

    return check


def only(*allowed: Any, because: str) -> Reader:
    """A field that is accepted at the values that change nothing and refused at every other."""

    def check(at: Path, value: Any) -> Any:
        for item in allowed:
            if value == item and isinstance(value, bool) == isinstance(item, bool):
                return NO_EFFECT
        instead = f" or send {json.dumps(allowed[0])}" if allowed else ""
        raise wrong(at, f"is {shown(value)}: {because}; leave it out{instead}")

    return check


def only_keys(fields: Mapping[str, Any], known: Iterable[str], at: Path, what: str) -> None:
    """Refuse a field of an object that says something and is not known.

    Clients echo a message with every field of their own type; empty ones say nothing.
    """
    for key, value in fields.items():
        if key not in known and value is not None and value != []:
            raise wrong(
                (*at, key),
                f"is not a field of {what} that this gateway knows ({', '.join(known)}): leave it "
                "out",
            )


def stop_strings(at: Path, value: Any) -> tuple[str, ...]:
    """One string or a few, none of them empty."""
    strings = [value] if isinstance(value, str) else value
    return strings_that_end(at, strings, most=MAX_STOP_STRINGS, what="a string or an array")


def strings_that_end(
    at: Path, strings: Any, *, most: int, what: str = "an array"
) -> tuple[str, ...]:
    """A few strings, none of them empty."""
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        raise wrong(at, f"must be {what} of strings")
    if len(strings) > most:
        raise wrong(at, f"has {len(strings)} strings: send at most {most}")
    if "" in strings:
        raise wrong(at, "holds an empty string, which would end at once")
    return tuple(strings)


def top_k(at: Path, value: Any) -> int:
    """How many of the most probable tokens are kept; -1 keeps all."""
    result: int = integer(-1, 2**31 - 1)(at, value)
    return result if result > 0 else -1  # vLLM writes "every token" as 0 or -1


def logit_bias(at: Path, value: Any) -> dict[int, float]:
    """What is added to the logits of single tokens, by their ids."""
    read = number(-100, 100)
    bias = {}
    for key, one in object_field(at, value).items():
        if not (key.isascii() and key.isdigit()):
            raise wrong((*at, key), "is not a token id: name tokens by their ids")
        bias[int(key)] = read((*at, key), one)
    return bias


def token_ids(at: Path, value: Any) -> tuple[int, ...]:
    """A list of token ids."""
    read = integer(0)
    return tuple(read((*at, index), one) for index, one in enumerate(array(at, value)))


def words(at: Path, value: Any) -> tuple[str, ...]:
    """A list of texts, none of them empty."""
    return tuple(name((*at, index), one) for index, one in enumerate(array(at, value)))


def check_settings(sampling: SamplingParams, capabilities: EngineCapabilities, ids: int) -> None:
    """Refuse settings that the engine does not honour, or that name tokens it has not.

    Args:
        ids: Token ids are below this.

    Raises:
        RequestError: 400.
    """
    if not sampling.rare:
        return
    if not capabilities.every_setting:
        raise wrong((sampling.rare[0],), "is not honoured by this engine: leave it out")
    sizes = {
        "logit_bias": len(sampling.logit_bias),
        "bad_words": sum(map(len, sampling.bad_words)),
        "stop_token_ids": len(sampling.stop_token_ids),
    }
    for field, size in sizes.items():
        if size > MAX_NAMED[field]:
            raise wrong((field,), f"names {size} tokens: send at most {MAX_NAMED[field]}")
    named = {
        "logit_bias": [token for token, _ in sampling.logit_bias],
        "stop_token_ids": sampling.stop_token_ids,
    }
    for field, tokens in named.items():
        for token in tokens:
            if token >= ids:
                raise wrong((field,), f"names token {token}: the model has ids from 0 to {ids - 1}")


def check_top_logprobs(at: Path, value: int, capabilities: EngineCapabilities) -> None:
    """Refuse more alternatives than the engine reports.

    Raises:
        RequestError: 400.
    """
    most = capabilities.max_top_logprobs
    if value > most:
        raise wrong(at, f"is {value}, but this engine reports at most {most}")
