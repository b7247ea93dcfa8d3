"""A chat completion request: every field honoured, without effect, or refused by name.

`_FIELDS` is the whole table. A field that is not in it is unknown and refused too. For every
optional field null means the same as leaving it out.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tuner.engines.base import EngineCapabilities
from tuner.gateway.errors import RequestError, kind, shown
from tuner.gateway.messages import check_messages, check_tools

MAX_CHOICES = 128  # OpenAI's limit on n
MAX_STOP_STRINGS = 4  # and on stop


@dataclass(frozen=True)
class ChatRequest:
    """What a request asks for; None where it does not say.

    Attributes:
        messages: As sent, and well formed.
        tools: As sent, and well formed.
        shown_tools: Those the model is shown: none with `tool_choice: "none"`.
    """

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str = "auto"
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    return_token_ids: bool = False

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else self.tools


def parse_chat_request(body: bytes, capabilities: EngineCapabilities) -> ChatRequest:
    """The request in `body`.

    Raises:
        RequestError: 400 that names the field, its value and what to do.
    """
    fields = _json_object(body)
    for name in ("model", "messages"):
        if fields.get(name) is None:
            raise RequestError(f"{name} is missing: it is required", param=name)
    values: dict[str, Any] = {}
    for name, value in fields.items():
        read = _FIELDS.get(name)
        if read is None:
            raise RequestError(_unknown(name), param=name)
        if value is None:
            continue
        result = read(name, value)
        if result is not _NO_EFFECT:
            values[name] = result
    limits = [values.pop(name, None) for name in ("max_tokens", "max_completion_tokens")]
    if None not in limits and limits[0] != limits[1]:
        raise RequestError(
            f"max_tokens is {limits[0]} and max_completion_tokens is {limits[1]}: send one",
            param="max_completion_tokens",
        )
    values["max_tokens"] = limits[0] if limits[1] is None else limits[1]
    request = ChatRequest(**values)
    if request.top_logprobs and not request.logprobs:
        raise RequestError(
            f"top_logprobs is {request.top_logprobs} without logprobs: send logprobs: true too",
            param="top_logprobs",
        )
    if request.top_logprobs > capabilities.max_top_logprobs:
        raise RequestError(
            f"top_logprobs is {request.top_logprobs}, but this engine reports at most "
            f"{capabilities.max_top_logprobs}",
            param="top_logprobs",
        )
    return request


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body, parse_constant=_refuse_constant)
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


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, _FIELDS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "leave it out"
    return f"{shown(name)} is not a field of a chat completion request: {hint}"


_NO_EFFECT = object()
_Reader = Callable[[str, Any], Any]


def _number(low: float, high: float, *, above: bool = False) -> _Reader:
    """A number in [low, high], or in (low, high] with `above`."""

    def read(name: str, value: Any) -> float:
        wanted = f"a number {f'above {low:g}' if above else f'from {low:g}'}"
        wanted += "" if high == math.inf else f" to {high:g}"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise RequestError(f"{name} must be {wanted}, not {kind(value)}", param=name)
        if not low <= value <= high or (above and value == low) or value == math.inf:
            raise RequestError(f"{name} is {shown(value)}: it must be {wanted}", param=name)
        return float(value)

    return read


def _integer(low: int, high: int | None = None) -> _Reader:
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


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, not {kind(value)}", param=name)
    return value


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a string, not {kind(value)}", param=name)
    return value


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be an object, not {kind(value)}", param=name)
    return value


def _stop(name: str, value: Any) -> tuple[str, ...]:
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


def _top_k(name: str, value: Any) -> int:
    result: int = _integer(-1, 2**31 - 1)(name, value)
    return result if result > 0 else -1  # vLLM writes "every token" as 0 or -1


def _tool_choice(name: str, value: Any) -> str:
    if value in ("auto", "none"):
        return str(value)
    raise RequestError(
        f"{name} is {shown(value)}: a call cannot be forced here; send 'auto', or 'none' to hide "
        "the tools from the model",
        param=name,
    )


def _without_effect(read: _Reader) -> _Reader:
    """A field of the right type whose value changes nothing about the completion."""

    def check(name: str, value: Any) -> Any:
        read(name, value)
        return _NO_EFFECT

    return check


def _only(*allowed: Any, because: str) -> _Reader:
    """A field that is accepted at the values that change nothing and refused at every other."""

    def check(name: str, value: Any) -> Any:
        for item in allowed:
            if value == item and isinstance(value, bool) == isinstance(item, bool):
                return _NO_EFFECT
        instead = f" or send {json.dumps(allowed[0])}" if allowed else ""
        raise RequestError(
            f"{name} is {shown(value)}: {because}; leave it out{instead}", param=name
        )

    return check


_NO_PENALTY = (
    "a penalty changes the distribution in a way that training cannot recompute from the trace"
)
_NO_GRAMMAR = "the completion cannot be constrained to a form here"
_USE_TOOLS = "functions became tools: use tools and tool_choice"
_TEXT_ONLY = "the model writes text only"
_IN_TEMPLATE = "what the chat template reads goes into chat_template_kwargs (extra_body)"

_FIELDS: dict[str, _Reader] = {
    # Honoured.
    "model": _string,
    "messages": lambda name, value: check_messages(value),
    "tools": lambda name, value: check_tools(value),
    "tool_choice": _tool_choice,
    "temperature": _number(0, 2),
    "top_p": _number(0, 1, above=True),
    "top_k": _top_k,
    "n": _integer(1, MAX_CHOICES),
    "seed": _integer(-(2**63), 2**63 - 1),
    "stop": _stop,
    "max_tokens": _integer(1),
    "max_completion_tokens": _integer(1),
    "logprobs": _boolean,
    "top_logprobs": _integer(0, 20),
    "chat_template_kwargs": _object,
    "return_token_ids": _boolean,
    # Accepted: bookkeeping of OpenAI's service, which changes nothing about the completion.
    "user": _without_effect(_string),
    "metadata": _without_effect(_object),
    "safety_identifier": _without_effect(_string),
    "prompt_cache_key": _without_effect(_string),
    "prompt_cache_options": _without_effect(_object),
    "prompt_cache_retention": _without_effect(_string),
    "service_tier": _without_effect(_string),
    # Accepted at the values that change nothing.
    "stream": _only(False, because="answers are not streamed here"),
    "stream_options": _only(because="answers are not streamed here"),
    "store": _only(False, because="answers are kept in the rollout's trace only"),
    "parallel_tool_calls": _only(True, because="the number of tool calls cannot be limited here"),
    "response_format": _only({"type": "text"}, because=_NO_GRAMMAR),
    "logit_bias": _only({}, because="single tokens cannot be biased here"),
    "presence_penalty": _only(0, because=_NO_PENALTY),
    "frequency_penalty": _only(0, because=_NO_PENALTY),
    "repetition_penalty": _only(1, because=_NO_PENALTY),
    "min_p": _only(0, because="use top_p or top_k"),
    "min_tokens": _only(0, because="the end of a turn cannot be put off here"),
    "ignore_eos": _only(False, because="the end of a turn cannot be put off here"),
    "modalities": _only(["text"], because=_TEXT_ONLY),
    # Refused.
    "audio": _only(because=_TEXT_ONLY),
    "prediction": _only(because="predicted outputs are not used here"),
    "moderation": _only(because="there is no moderation here"),
    "web_search_options": _only(because="there is no search here; give the model a tool"),
    "functions": _only(because=_USE_TOOLS),
    "function_call": _only(because=_USE_TOOLS),
    "reasoning_effort": _only(because=_IN_TEMPLATE),
    "enable_thinking": _only(because=_IN_TEMPLATE),
    "verbosity": _only(because=_IN_TEMPLATE),
}
