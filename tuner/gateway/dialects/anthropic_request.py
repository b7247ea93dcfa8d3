"""Anthropic's Messages requests, read field by field.

`MESSAGES_FIELDS` is the whole table: a field is honoured, without effect, or refused by name.
Forced tools and schemas are honoured exactly where they are honoured in chat completions.

    system                           a system message
    user: text, tool_result          tool messages and user messages, in their order
    assistant: thinking, text,       one assistant message: reasoning_content, content, tool_calls
               tool_use
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tuner.gateway.completion_request import CompletionRequest, read_fields
from tuner.gateway.dialects.anthropic_blocks import read_messages, system_content
from tuner.gateway.fields import (
    Reader,
    array,
    boolean,
    integer,
    number,
    object_field,
    only,
    string,
    strings_that_end,
    top_k,
    without_effect,
)
from tuner.gateway.model.grammars import AnswerSchema, ToolChoice
from tuner.gateway.model.renderer import ChatRenderer
from tuner.gateway.request_error import FieldError, Path, RequestError, dotted, shown, wrong
from tuner.gateway.service import Service

_MAX_STOP_SEQUENCES = 64


def read_messages_request(body: bytes, service: Service) -> CompletionRequest:
    """The Messages request in `body`.

    Raises:
        RequestError: 400 that names the field, its value and what to do.
    """
    values = read_fields(
        body,
        MESSAGES_FIELDS,
        required=("model", "max_tokens", "messages"),
        what="a Messages request",
    )
    if values["messages"][-1]["role"] == "assistant":
        raise wrong(
            ("messages",),
            "ends with an assistant message: an answer cannot be continued from given words here, "
            "since the chat template begins a turn of its own; end with a user message",
        )
    return _request(values, service)


def read_count_request(body: bytes, service: Service) -> CompletionRequest:
    """The request to count tokens in `body`.

    Raises:
        RequestError: 400 that names the field, its value and what to do.
    """
    values = read_fields(
        body, COUNT_FIELDS, required=("model", "messages"), what="a request to count tokens"
    )
    return _request(values, service)


def _request(values: dict[str, Any], service: Service) -> CompletionRequest:
    """What `values` ask for."""
    values["stop"] = values.pop("stop_sequences", ())
    output = values.pop("output_config", {})
    schema = output.get("format")
    if "output_format" in values:
        if schema is not None:
            raise FieldError(
                "output_format and output_config.format are both given: send the latter",
                path=("output_format",),
            )
        schema = values.pop("output_format")
    if schema is not None:
        # Where chat completions have it, in whose words a schema that does not compile is refused.
        at = ("response_format", "json_schema", "schema")
        values["response_format"] = AnswerSchema(schema, at)
    if "system" in values:
        system = {"role": "system", "content": values.pop("system")}
        values["messages"] = [system, *values["messages"]]
    values["chat_template_kwargs"] = _template_kwargs(
        values.pop("thinking", None),
        output.get("effort"),
        values.get("chat_template_kwargs", {}),
        service.renderer,
    )
    demands = values.pop("tool_choice", {})
    request = CompletionRequest(**values, **demands)
    try:
        request.constraints.check(service.engine.capabilities)
    except RequestError as error:
        name = _as_sent(error.path or ())
        raise FieldError(
            f"{dotted(name)}, in the words of chat completions: {error.message}", path=name
        ) from error
    return request


def _as_sent(path: Path) -> Path:
    """Where a demand on the form of the answer stands in a Messages request."""
    match path:
        case ("response_format",):
            return ("output_config", "format")
        case ("parallel_tool_calls",):
            return ("tool_choice", "disable_parallel_tool_use")
        case ("tools", int(index), "function", "strict"):
            return ("tools", index, "strict")
    return path


def _template_kwargs(
    thinking: str | None, effort: str | None, given: dict[str, Any], renderer: ChatRenderer
) -> dict[str, Any]:
    """What `thinking` and `effort` say in the words of the chat template."""
    kwargs: dict[str, Any] = {}
    if thinking == "disabled":
        kwargs["enable_thinking"] = False
    elif thinking is not None and renderer.reads("enable_thinking"):
        kwargs["enable_thinking"] = True
    elif thinking == "enabled":
        raise wrong(
            ("thinking", "type"),
            'is "enabled", but the model\'s chat template has no switch for it: leave it out, or '
            'send "adaptive" to let the model decide',
        )
    if effort is not None:
        if not renderer.reads("reasoning_effort"):
            raise wrong(
                ("output_config", "effort"),
                f"is {shown(effort)}, but the model's chat template reads no reasoning_effort: "
                "leave it out",
            )
        kwargs["reasoning_effort"] = effort
    for key, value in kwargs.items():
        if key in given and given[key] != value:
            raise wrong(
                ("chat_template_kwargs", key),
                f"is {shown(given[key])}, but thinking or output_config asks for {shown(value)}: "
                "send one of them",
            )
    return {**given, **kwargs}


def _thinking(at: Path, value: Any) -> str:
    """The type of a thinking configuration.

    `budget_tokens` is Anthropic's target for the length of the reasoning, not a limit; what limits
    it, there and here, is `max_tokens`. It is checked and has no effect.
    """
    config = object_field(at, value)
    type_ = config.get("type")
    if type_ not in ("enabled", "disabled", "adaptive"):
        raise wrong((*at, "type"), f"is {shown(type_)}: use enabled, disabled or adaptive")
    for key, item in config.items():
        if key == "budget_tokens" and type_ == "enabled":
            integer(1)((*at, key), item)
        elif key == "display" and type_ != "disabled":
            if item not in (None, "summarized"):
                raise wrong(
                    (*at, key),
                    f"is {shown(item)}: the reasoning is always shown here, so that it can come "
                    "back with the next request; leave it out",
                )
        elif key != "type" and item is not None:
            raise wrong(
                (*at, key), f"is not a field of thinking of type {shown(type_)}: leave it out"
            )
    return str(type_)


def _tools(at: Path, value: Any) -> list[dict[str, Any]]:
    """Custom tools in the form that chat templates read."""
    return [_tool((*at, index), tool) for index, tool in enumerate(array(at, value))]


def _tool(at: Path, value: Any) -> dict[str, Any]:
    tool = object_field(at, value)
    if tool.get("type") not in (None, "custom"):
        raise wrong(
            (*at, "type"),
            f"is {shown(tool['type'])}: tools that Anthropic runs or describes are not known here; "
            "send a custom tool with its own input_schema",
        )
    for key, item in tool.items():
        read = _TOOL_FIELDS.get(key)
        if read is None:
            raise wrong((*at, key), "is not a field of a tool: leave it out")
        if item is not None:
            read((*at, key), item)
    for key in ("name", "input_schema"):
        if not tool.get(key) and tool.get(key) != {}:
            raise wrong((*at, key), "is missing or empty: it is required")
    function = {"name": tool["name"]}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    function["parameters"] = tool["input_schema"]
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def _tool_choice(at: Path, value: Any) -> dict[str, Any]:
    """The fields of a `CompletionRequest` that say the same."""
    choice = object_field(at, value)
    type_ = choice.get("type")
    if not isinstance(type_, str) or type_ not in _TOOL_CHOICES:
        raise wrong((*at, "type"), f"is {shown(type_)}: use {', '.join(_TOOL_CHOICES)}")
    known = _TOOL_CHOICES[type_]
    for key in choice:
        if key != "type" and key not in known:
            raise wrong(
                (*at, key),
                f"is not a field of a tool_choice of type {shown(type_)}: leave it out",
            )
    if type_ == "tool":
        name = string((*at, "name"), choice.get("name"))
        asked = ToolChoice("required", (name,), once=True)
    else:
        asked = ToolChoice("auto" if type_ == "auto" else "none" if type_ == "none" else "required")
    fields: dict[str, Any] = {"tool_choice": asked}
    alone = choice.get("disable_parallel_tool_use", False)
    if boolean((*at, "disable_parallel_tool_use"), alone):
        fields["parallel_tool_calls"] = False
    return fields


_TOOL_CHOICES: dict[str, tuple[str, ...]] = {
    "auto": ("disable_parallel_tool_use",),
    "any": ("disable_parallel_tool_use",),
    "tool": ("name", "disable_parallel_tool_use"),
    "none": (),
}


def _output_config(at: Path, value: Any) -> dict[str, Any]:
    """The effort and the JSON schema that are asked for, where they are."""
    config = object_field(at, value)
    result: dict[str, Any] = {}
    for key, item in config.items():
        if key not in ("effort", "format"):
            raise wrong((*at, key), "is not known: leave it out")
        if item is not None:
            result[key] = (string if key == "effort" else _format)((*at, key), item)
    return result


def _format(at: Path, value: Any) -> dict[str, Any]:
    """The schema of an output format."""
    format_ = object_field(at, value)
    if format_.get("type") != "json_schema" or set(format_) != {"type", "schema"}:
        raise wrong(
            at, f'must be {{"type": "json_schema", "schema": {{...}}}}, not {shown(format_)}'
        )
    return object_field((*at, "schema"), format_["schema"])


_ONE_MACHINE = "there is nothing of Anthropic's service behind this gateway"
_NO_EDITS = "the conversation is taken as it is sent"

_TOOL_FIELDS: dict[str, Reader] = {
    "type": string,
    "name": string,
    "description": string,
    "input_schema": object_field,
    "strict": boolean,
    "cache_control": object_field,
    "eager_input_streaming": boolean,
    "allowed_callers": only(["direct"], because="the agent is the only caller of its tools"),
    "defer_loading": only(False, because="every tool is shown to the model"),
    "input_examples": only([], because="chat templates have no place for examples"),
}

# What the prompt hangs on, and what a request to count its tokens may have besides.
COUNT_FIELDS: dict[str, Reader] = {
    # Honoured.
    "model": string,
    "messages": read_messages,
    "system": system_content,
    "tools": _tools,
    "tool_choice": _tool_choice,
    "thinking": _thinking,
    "output_config": _output_config,
    "output_format": _format,
    # Honoured, and not Anthropic's: the same as in chat completions.
    "chat_template_kwargs": object_field,
    # Accepted: bookkeeping of Anthropic's service, which changes nothing about the answer.
    "cache_control": without_effect(object_field),
    "user_profile_id": without_effect(string),
    "workspace_id": without_effect(string),
    # Accepted at the values that change nothing.
    "speed": only("standard", because=_ONE_MACHINE),
    "mcp_servers": only([], because="the gateway calls no tools; give the agent the tools"),
    "context_management": only({}, {"edits": []}, because=_NO_EDITS),
    # Refused.
    "betas": only(because="these names belong in the anthropic-beta header"),
}

MESSAGES_FIELDS: dict[str, Reader] = {
    **COUNT_FIELDS,
    # Honoured.
    "max_tokens": integer(1),
    "temperature": number(0, 1),
    "top_p": number(0, 1, above=True),
    "top_k": top_k,
    "stop_sequences": partial(strings_that_end, most=_MAX_STOP_SEQUENCES),
    "stream": boolean,
    # Honoured, and not Anthropic's: the same as in chat completions.
    "seed": integer(-(2**63), 2**63 - 1),
    # Accepted: bookkeeping of Anthropic's service, which changes nothing about the answer.
    "metadata": without_effect(object_field),
    "service_tier": without_effect(string),
    "inference_geo": without_effect(string),
    # Accepted at the values that change nothing.
    "diagnostics": only({}, {"previous_message_id": None}, because=_ONE_MACHINE),
    # Refused.
    "container": only(because="no code is run here"),
    "compaction": only(because=_NO_EDITS),
    "thread": only(because=_NO_EDITS),
    "billing_policy": only(because=_ONE_MACHINE),
    "fallbacks": only(because="this key has one model"),
    "fallback_credit_token": only(because=_ONE_MACHINE),
}
