"""What a request asks for, in every dialect; and a chat completion request, read field by field.

`CHAT_FIELDS` is the whole table: a field is honoured, without effect, or refused by name. One that
is not in it is unknown and refused too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tuner.engines.base import EngineCapabilities
from tuner.gateway.constraints import (
    AUTO,
    AnswerSchema,
    Constraints,
    ToolChoice,
    read_response_format,
    read_tool_choice,
)
from tuner.gateway.errors import RequestError
from tuner.gateway.fields import (
    Reader,
    boolean,
    integer,
    number,
    object_field,
    only,
    read_fields,
    stop_strings,
    string,
    without_effect,
)
from tuner.gateway.messages import check_messages, check_tools

MAX_CHOICES = 128  # OpenAI's limit on n


@dataclass(frozen=True)
class CompletionRequest:
    """What a request asks for; None where it does not say.

    Attributes:
        messages: In the form of chat completions, well formed; as sent, where that is the dialect.
        prompts: Texts or token ids to complete as they are, instead of messages.
        tools: As sent, and well formed.
        shown_tools: Those the model is shown: none with `tool_choice: "none"`.
        response_format: The JSON that an answer must be; None for any text.
        constraints: What all of this demands of a completion's form.
        stream: Whether the answer is a stream of server-sent events.
        include_usage: Whether a stream of chunks ends with the token counts.
    """

    model: str
    messages: list[dict[str, Any]]
    prompts: tuple[str | tuple[int, ...], ...] | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: ToolChoice = AUTO
    parallel_tool_calls: bool = True
    response_format: AnswerSchema | None = None
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
    stream: bool = False
    include_usage: bool = False

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice.mode == "none" else self.tools

    @property
    def constraints(self) -> Constraints:
        return Constraints(
            self.shown_tools, self.tool_choice, self.parallel_tool_calls, self.response_format
        )


def parse_chat_request(body: bytes, capabilities: EngineCapabilities) -> CompletionRequest:
    """The chat completion request in `body`.

    Raises:
        RequestError: 400 that names the field, its value and what to do.
    """
    values = read_fields(
        body, CHAT_FIELDS, required=("model", "messages"), what="a chat completion request"
    )
    limits = [values.pop(name, None) for name in ("max_tokens", "max_completion_tokens")]
    if None not in limits and limits[0] != limits[1]:
        raise RequestError(
            f"max_tokens is {limits[0]} and max_completion_tokens is {limits[1]}: send one",
            param="max_completion_tokens",
        )
    values["max_tokens"] = limits[0] if limits[1] is None else limits[1]
    values["include_usage"] = with_usage(values)
    request = CompletionRequest(**values)
    if request.top_logprobs and not request.logprobs:
        raise RequestError(
            f"top_logprobs is {request.top_logprobs} without logprobs: send logprobs: true too",
            param="top_logprobs",
        )
    check_top_logprobs("top_logprobs", request.top_logprobs, capabilities)
    request.constraints.check(capabilities)
    return request


def with_usage(values: dict[str, Any]) -> bool:
    """Take `stream_options` out of a request's values: whether a stream ends with the counts.

    Raises:
        RequestError: 400: they are given without a stream.
    """
    include_usage = values.pop("stream_options", None)
    if include_usage is not None and not values.get("stream"):
        raise RequestError(
            "stream_options is given without stream: leave it out or send stream: true",
            param="stream_options",
        )
    return bool(include_usage)


def check_top_logprobs(name: str, value: int, capabilities: EngineCapabilities) -> None:
    """Refuse more alternatives than the engine reports.

    Raises:
        RequestError: 400.
    """
    if value > capabilities.max_top_logprobs:
        raise RequestError(
            f"{name} is {value}, but this engine reports at most {capabilities.max_top_logprobs}",
            param=name,
        )


def top_k(name: str, value: Any) -> int:
    """How many of the most probable tokens are kept; -1 keeps all."""
    result: int = integer(-1, 2**31 - 1)(name, value)
    return result if result > 0 else -1  # vLLM writes "every token" as 0 or -1


def stream_options(name: str, value: Any) -> bool:
    """Whether the stream is to end with the token counts."""
    options = object_field(name, value)
    for key in options:
        if key not in ("include_usage", "include_obfuscation"):
            raise RequestError(f"{name}.{key} is not known: leave it out", param=f"{name}.{key}")
    if options.get("include_obfuscation"):
        raise RequestError(
            f"{name}.include_obfuscation is true: streams are not padded here; send false",
            param=f"{name}.include_obfuscation",
        )
    return boolean(f"{name}.include_usage", options.get("include_usage") or False)


_NO_PENALTY = (
    "a penalty changes the distribution in a way that training cannot recompute from the trace"
)
_USE_TOOLS = "functions became tools: use tools and tool_choice"
_TEXT_ONLY = "the model writes text only"
_IN_TEMPLATE = "what the chat template reads goes into chat_template_kwargs (extra_body)"

CHAT_FIELDS: dict[str, Reader] = {
    # Honoured.
    "model": string,
    "messages": lambda name, value: check_messages(value),
    "tools": lambda name, value: check_tools(value),
    "tool_choice": read_tool_choice,
    "parallel_tool_calls": boolean,
    "response_format": read_response_format,
    "temperature": number(0, 2),
    "top_p": number(0, 1, above=True),
    "top_k": top_k,
    "n": integer(1, MAX_CHOICES),
    "seed": integer(-(2**63), 2**63 - 1),
    "stop": stop_strings,
    "max_tokens": integer(1),
    "max_completion_tokens": integer(1),
    "logprobs": boolean,
    "top_logprobs": integer(0, 20),
    "chat_template_kwargs": object_field,
    "return_token_ids": boolean,
    "stream": boolean,
    "stream_options": stream_options,
    # Accepted: bookkeeping of OpenAI's service, which changes nothing about the completion.
    "user": without_effect(string),
    "metadata": without_effect(object_field),
    "safety_identifier": without_effect(string),
    "prompt_cache_key": without_effect(string),
    "prompt_cache_options": without_effect(object_field),
    "prompt_cache_retention": without_effect(string),
    "service_tier": without_effect(string),
    # Accepted at the values that change nothing.
    "store": only(False, because="answers are kept in the rollout's trace only"),
    "logit_bias": only({}, because="single tokens cannot be biased here"),
    "presence_penalty": only(0, because=_NO_PENALTY),
    "frequency_penalty": only(0, because=_NO_PENALTY),
    "repetition_penalty": only(1, because=_NO_PENALTY),
    "min_p": only(0, because="use top_p or top_k"),
    "min_tokens": only(0, because="the end of a turn cannot be put off here"),
    "ignore_eos": only(False, because="the end of a turn cannot be put off here"),
    "modalities": only(["text"], because=_TEXT_ONLY),
    # Refused.
    "audio": only(because=_TEXT_ONLY),
    "prediction": only(because="predicted outputs are not used here"),
    "moderation": only(because="there is no moderation here"),
    "web_search_options": only(because="there is no search here; give the model a tool"),
    "functions": only(because=_USE_TOOLS),
    "function_call": only(because=_USE_TOOLS),
    "reasoning_effort": only(because=_IN_TEMPLATE),
    "enable_thinking": only(because=_IN_TEMPLATE),
    "verbosity": only(because=_IN_TEMPLATE),
}
