"""OpenAI's chat completions: requests, and answers whole or as chunks.

`CHAT_FIELDS` is the complete table: a field is supported, has no effect, or is rejected by name.
Fields that are not in it are rejected as unknown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from tuner.engines.base import Generation
from tuner.gateway.completion import Completion
from tuner.gateway.families.grammars import AnswerSchema, ToolChoice
from tuner.gateway.families.parsing import Delta
from tuner.gateway.families.renderer import ChatRenderer
from tuner.gateway.request_error import FieldError, Path, RequestError, shown, wrong
from tuner.gateway.requests import (
    MAX_CHOICES,
    Answer,
    Choice,
    CompletionRequest,
    Reader,
    boolean,
    check_messages,
    check_tools,
    check_top_logprobs,
    integer,
    logit_bias,
    name,
    number,
    object_field,
    only,
    read_fields,
    stop_strings,
    stream_options,
    string,
    temperature,
    token_ids,
    top_k,
    with_effort,
    with_usage,
    without_effect,
    words,
)
from tuner.gateway.service import Service, sse
from tuner.gateway.sessions import Session

LOWEST_LOGPROB = -9999.0  # OpenAI's API reports this for "almost impossible"; JSON has no -inf
DONE = b"data: [DONE]\n\n"


def read_chat_request(body: bytes, service: Service) -> CompletionRequest:
    """Parse the chat completion request in `body`.

    Raises:
        RequestError: 400 that names the field, its value and what to do.
    """
    images = service.renderer.vision is not None
    table = {**CHAT_FIELDS, "messages": lambda at, value: check_messages(value, at, images=images)}
    values = read_fields(
        body, table, required=("model", "messages"), what="a chat completion request"
    )
    limits = [values.pop(key, None) for key in ("max_tokens", "max_completion_tokens")]
    if None not in limits and limits[0] != limits[1]:
        raise FieldError(
            f"max_tokens is {limits[0]} and max_completion_tokens is {limits[1]}: send one",
            path=("max_completion_tokens",),
        )
    values["max_tokens"] = limits[0] if limits[1] is None else limits[1]
    values["include_usage"] = with_usage(values)
    effort, kwargs = values.pop("reasoning_effort", None), values.get("chat_template_kwargs", {})
    values["chat_template_kwargs"] = with_effort(
        kwargs, effort, ("reasoning_effort",), service.renderer
    )
    capabilities = service.engine.capabilities
    request = CompletionRequest(**values, body_bytes=len(body))
    at = ("top_logprobs",)
    if request.top_logprobs and not request.logprobs:
        raise wrong(at, f"is {request.top_logprobs} without logprobs: send logprobs: true too")
    check_top_logprobs(at, request.top_logprobs, capabilities)
    request.constraints.check(capabilities)
    return request


def read_tool_choice(at: Path, value: Any) -> ToolChoice:
    """Whether tools are called."""
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    if isinstance(value, dict) and value.get("type") == "function":
        _only(value, ("type", "function"), at)
        return ToolChoice("required", (_function_name(value, at),), once=True)
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        _only(value, ("type", "allowed_tools"), at)
        at = (*at, "allowed_tools")
        form = object_field(at, value.get("allowed_tools"))
        _only(form, ("mode", "tools"), at)
        check_mode((*at, "mode"), form.get("mode"))
        names = []
        for index, tool in enumerate(some_tools((*at, "tools"), form.get("tools"))):
            here = (*at, "tools", index)
            if not isinstance(tool, dict) or tool.get("type") != "function":
                raise wrong(here, 'must be {"type": "function", "function": {"name": ...}}')
            names.append(_function_name(tool, here))
        return ToolChoice(form["mode"], tuple(dict.fromkeys(names)))
    raise wrong(
        at,
        f"is {shown(value)}: send 'auto', 'required', 'none', "
        '{"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", ...}',
    )


def check_mode(at: Path, value: Any) -> None:
    """Reject an unknown mode of allowed tools."""
    if value not in ("auto", "required"):
        raise wrong(at, f"is {shown(value)}: send 'auto' or 'required'")


def some_tools(at: Path, value: Any) -> list[Any]:
    """The allowed tools; at least one."""
    if not isinstance(value, list) or not value:
        raise wrong(at, "must be an array of at least one tool")
    return value


def _function_name(value: dict[str, Any], at: Path) -> str:
    at, function = (*at, "function"), value.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong(at, f'must be {{"name": ...}}, not {shown(function)}')
    _only(function, ("name",), at)
    return str(function["name"])


def read_response_format(at: Path, value: Any) -> AnswerSchema | None:
    """The JSON that an answer must be; None for any text."""
    type_ = object_field(at, value).get("type")
    if type_ not in ("text", "json_object", "json_schema"):
        raise wrong(
            (*at, "type"), f"is {shown(type_)}: send 'text', 'json_object' or 'json_schema'"
        )
    _only(value, ("type", "json_schema") if type_ == "json_schema" else ("type",), at)
    if type_ == "json_schema":
        return read_schema((*at, "json_schema"), value.get("json_schema"))
    return AnswerSchema({"type": "object"}, at) if type_ == "json_object" else None


def read_schema(at: Path, value: Any) -> AnswerSchema:
    """A schema with its name."""
    form = object_field(at, value)
    _only(form, ("name", "schema", "strict", "description"), at)
    name((*at, "name"), form.get("name"))
    object_field((*at, "schema"), form.get("schema"))
    for key, read in (("strict", boolean), ("description", string)):
        if form.get(key) is not None:
            read((*at, key), form[key])
    return AnswerSchema(form["schema"], (*at, "schema"))


def _only(value: dict[str, Any], known: Sequence[str], at: Path) -> None:
    for key, item in value.items():
        if key not in known and item is not None:
            raise wrong((*at, key), f"is not a field of it ({', '.join(known)}): leave it out")


_USE_TOOLS = "functions were replaced by tools: use tools and tool_choice"
_TEXT_ONLY = "the model writes text only"
_IN_TEMPLATE = "keywords of the chat template belong in chat_template_kwargs (extra_body)"

# Supported if the engine supports them.
RARE_FIELDS: dict[str, Reader] = {
    "min_p": number(0, 1),
    "repetition_penalty": number(0.01, 10),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "logit_bias": logit_bias,
    "bad_words": words,
    "stop_token_ids": token_ids,
}
# Fields shared with text completions, with the same meaning.
SHARED_FIELDS: dict[str, Reader] = {
    # Supported.
    "model": string,
    "temperature": temperature(2),
    "top_p": number(0, 1, above=True),
    "top_k": top_k,
    "n": integer(1, MAX_CHOICES),
    "seed": integer(-(2**63), 2**63 - 1),
    "stop": stop_strings,
    "max_tokens": integer(1),
    **RARE_FIELDS,
    "return_token_ids": boolean,
    "stream": boolean,
    "stream_options": stream_options,
    # Accepted: bookkeeping of OpenAI's service, without effect on the completion.
    "user": without_effect(string),
    # Accepted at neutral values.
    "min_tokens": only(0, because="the end of a turn cannot be put off here"),
    "ignore_eos": only(False, because="the end of a turn cannot be put off here"),
}

CHAT_FIELDS: dict[str, Reader] = {
    **SHARED_FIELDS,
    # Supported.
    "messages": lambda at, value: check_messages(value),
    "tools": lambda at, value: check_tools(value),
    "tool_choice": read_tool_choice,
    "parallel_tool_calls": boolean,
    "response_format": read_response_format,
    "max_completion_tokens": integer(1),
    "logprobs": boolean,
    "top_logprobs": integer(0, 20),
    "reasoning_effort": string,
    "chat_template_kwargs": object_field,
    # Accepted: bookkeeping of OpenAI's service, without effect on the completion.
    "metadata": without_effect(object_field),
    "safety_identifier": without_effect(string),
    "prompt_cache_key": without_effect(string),
    "prompt_cache_options": without_effect(object_field),
    "prompt_cache_retention": without_effect(string),
    "service_tier": without_effect(string),
    # Accepted at neutral values.
    "store": only(False, because="answers are kept in the rollout's trace only"),
    "modalities": only(["text"], because=_TEXT_ONLY),
    # Rejected.
    "audio": only(because=_TEXT_ONLY),
    "prediction": only(because="predicted outputs are not used here"),
    "moderation": only(because="there is no moderation here"),
    "web_search_options": only(because="there is no search here; give the model a tool"),
    "functions": only(because=_USE_TOOLS),
    "function_call": only(because=_USE_TOOLS),
    "enable_thinking": only(because=_IN_TEMPLATE),
    "verbosity": only(because=_IN_TEMPLATE),
}


class ChatExchange:
    """`POST /v1/chat/completions`.

    A stream's chunks carry text when it is certain, and each tool call whole. Log-probs and token
    ids, if requested, come with the last chunk of their choice: a token is not always a piece of
    text.

    Args:
        session: The session of the request.
        role: The role that its key names, or None.
        body: The request's body.

    Raises:
        RequestError: The request is invalid.
    """

    chunk = "chat.completion.chunk"
    """The object type of a stream's pieces."""

    def __init__(self, session: Session, role: str | None, body: bytes) -> None:
        request = read_chat_request(body, session.service)
        self.completion = Completion(session, role, request, dialect="chat", prefix="chatcmpl-")

    def answer(self, answer: Answer) -> dict[str, Any]:
        choices = [
            {
                "index": choice.index,
                "message": choice.message,
                "finish_reason": choice.finish_reason,
                **self._details(choice),
            }
            for choice in answer.choices
        ]
        body: dict[str, Any] = {
            **self._frame(),
            "object": "chat.completion",
            "choices": choices,
            "usage": usage(answer),
        }
        if self.completion.request.return_token_ids:
            body["prompt_token_ids"] = answer.choices[0].prompt_ids
        return body

    def opening(self) -> Sequence[bytes]:
        start = {"role": "assistant", "content": ""}
        return [self._chunk(index, start) for index in range(self.completion.request.n)]

    def delta(self, index: int, delta: Delta) -> Sequence[bytes]:
        if delta.tool_call is not None:
            place, call = delta.tool_call
            tool_call = {
                "index": place,
                "id": self.completion.tool_call_id(index, place),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            return [self._chunk(index, {"tool_calls": [tool_call]})]
        if delta.reasoning is not None:
            return [self._chunk(index, {"reasoning_content": delta.reasoning})]
        return [self._chunk(index, {"content": delta.content})]

    def closing(self, answer: Answer) -> Sequence[bytes]:
        events = [
            self._chunk(choice.index, {}, choice.finish_reason, **self._details(choice))
            for choice in answer.choices
        ]
        if self.completion.request.include_usage:
            events.append(sse({**self._frame(), "choices": [], "usage": usage(answer)}))
        return [*events, DONE]

    def failure(self, error: RequestError) -> bytes:
        return sse(json.loads(self.error(error)))

    @staticmethod
    def error(error: RequestError) -> bytes:
        return error.body()

    def _details(self, choice: Choice) -> dict[str, Any]:
        details: dict[str, Any] = {"logprobs": None}
        if self.completion.request.logprobs:
            details["logprobs"] = self._logprobs(choice)
        if self.completion.request.return_token_ids:
            details["token_ids"] = choice.generation.completion_ids
        return details

    def _logprobs(self, choice: Choice) -> dict[str, Any]:
        return chat_logprobs(self.completion.service.renderer, choice.generation)

    def _chunk(
        self, index: int, delta: dict[str, Any], finish_reason: str | None = None, **details: Any
    ) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, **details}
        return sse({**self._frame(), "choices": [choice]})

    def _frame(self) -> dict[str, Any]:
        return {
            "id": self.completion.id,
            "object": self.chunk,
            "created": int(self.completion.started),
            "model": self.completion.service.model_name,
        }


def model(name: str) -> dict[str, Any]:
    """The description of a model."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "tuner"}


def models(names: Sequence[str]) -> dict[str, Any]:
    """The body of the list of models."""
    return {"object": "list", "data": [model(name) for name in names]}


def chat_logprobs(renderer: ChatRenderer, generation: Generation) -> dict[str, Any]:
    """The log-probs of a completion as chat completions report them."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": renderer.token_text(token_id),
            "logprob": reported(logprob),
            "bytes": renderer.token_bytes(token_id),
        }

    tops = generation.top_logprobs or ((),) * len(generation.completion_ids)
    return {
        "content": [
            {**entry(token_id, logprob), "top_logprobs": [entry(*pair) for pair in top]}
            for token_id, logprob, top in zip(
                generation.completion_ids, generation.logprobs, tops, strict=True
            )
        ],
        "refusal": None,
    }


def reported(logprob: float) -> float:
    """A log-prob that JSON can hold."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


def usage(answer: Answer) -> dict[str, Any]:
    """Token counts in the form of chat completions."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }
