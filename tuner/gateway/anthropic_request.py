"""Anthropic's Messages requests, read field by field into the form of chat completions.

`MESSAGES_FIELDS` is the whole table: a field is honoured, without effect, or refused by name. What
an Anthropic request means in chat completions is decided there (`request.py`): forced tools and
schemas are honoured here exactly where they are honoured there.

    system                           a system message
    user: text, tool_result          tool messages and user messages, in their order
    assistant: thinking, text,       one assistant message: reasoning_content, content, tool_calls
               tool_use
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tuner.gateway.anthropic_blocks import chat_messages, system_content
from tuner.gateway.errors import RequestError, kind, shown
from tuner.gateway.fields import (
    Reader,
    boolean,
    integer,
    number,
    object_field,
    only,
    read_fields,
    string,
    without_effect,
)
from tuner.gateway.request import CompletionRequest, parse_chat_request, top_k

if TYPE_CHECKING:
    from tuner.gateway.gateway import Gateway
    from tuner.gateway.renderer import ChatRenderer

_MAX_STOP_SEQUENCES = 64


def read_messages_request(body: bytes, gateway: Gateway) -> CompletionRequest:
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
        raise RequestError(
            "messages ends with an assistant message: an answer cannot be continued from given "
            "words here, since the chat template begins a turn of its own; end with a user message",
            param="messages",
        )
    return _chat_request(values, gateway)


def read_count_request(body: bytes, gateway: Gateway) -> CompletionRequest:
    """The request to count tokens in `body`.

    Raises:
        RequestError: 400 that names the field, its value and what to do.
    """
    values = read_fields(
        body, COUNT_FIELDS, required=("model", "messages"), what="a request to count tokens"
    )
    return _chat_request(values, gateway)


def _chat_request(values: dict[str, Any], gateway: Gateway) -> CompletionRequest:
    """What `values` ask for, as the chat completion request that asks for the same."""
    stop = values.pop("stop_sequences", ())
    output = {**values.pop("output_config", {})}
    if "output_format" in values:
        if "format" in output:
            raise RequestError(
                "output_format and output_config.format are both given: send the latter",
                param="output_format",
            )
        output["format"] = values.pop("output_format")
    form = {**values, **values.pop("tool_choice", {})}
    if "system" in values:
        form["messages"] = [
            {"role": "system", "content": form.pop("system")},
            *values["messages"],
        ]
    if "format" in output:
        schema = {"name": "answer", "schema": output["format"], "strict": True}
        form["response_format"] = {"type": "json_schema", "json_schema": schema}
    form["chat_template_kwargs"] = _template_kwargs(
        form.pop("thinking", None),
        output.get("effort"),
        values.get("chat_template_kwargs", {}),
        gateway.renderer,
    )
    try:
        encoded = json.dumps(form).encode()
    except RecursionError:
        raise RequestError("the body is nested too deeply to be read") from None
    try:
        request = parse_chat_request(encoded, gateway.engine.capabilities)
    except RequestError as error:
        raise _renamed(error) from error
    return replace(request, stop=stop)


def _renamed(error: RequestError) -> RequestError:
    """An error of the chat form under the name that the field has here."""
    param = error.param or ""
    name = _CHAT_NAMES.get(param)
    if param.endswith(".function.strict"):
        name = param.replace(".function", "")
    if name is None:
        return error
    return RequestError(
        f"{name}, in the words of chat completions: {error.message}", param=name, code=error.code
    )


_CHAT_NAMES = {
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "tool_choice": "tool_choice",
}


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
        raise RequestError(
            'thinking.type is "enabled", but the model\'s chat template has no switch for it: '
            'leave it out, or send "adaptive" to let the model decide',
            param="thinking.type",
        )
    if effort is not None:
        if not renderer.reads("reasoning_effort"):
            raise RequestError(
                f"output_config.effort is {shown(effort)}, but the model's chat template reads no "
                "reasoning_effort: leave it out",
                param="output_config.effort",
            )
        kwargs["reasoning_effort"] = effort
    for key, value in kwargs.items():
        if key in given and given[key] != value:
            raise RequestError(
                f"chat_template_kwargs.{key} is {shown(given[key])}, but thinking or output_config "
                f"asks for {shown(value)}: send one of them",
                param=f"chat_template_kwargs.{key}",
            )
    return {**given, **kwargs}


def _stop_sequences(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RequestError(f"{name} must be an array of strings", param=name)
    if len(value) > _MAX_STOP_SEQUENCES:
        raise RequestError(
            f"{name} has {len(value)} strings: send at most {_MAX_STOP_SEQUENCES}", param=name
        )
    if "" in value:
        raise RequestError(f"{name} holds an empty string, which would end at once", param=name)
    return tuple(value)


def _thinking(name: str, value: Any) -> str:
    """The type of a thinking configuration.

    `budget_tokens` is Anthropic's target for the length of the reasoning, not a limit; what limits
    it, there and here, is `max_tokens`. It is checked and has no effect.
    """
    config = object_field(name, value)
    type_ = config.get("type")
    if type_ not in ("enabled", "disabled", "adaptive"):
        raise RequestError(
            f"{name}.type is {shown(type_)}: use enabled, disabled or adaptive",
            param=f"{name}.type",
        )
    for key, item in config.items():
        if key == "budget_tokens" and type_ == "enabled":
            integer(1)(f"{name}.budget_tokens", item)
        elif key == "display" and type_ != "disabled":
            if item not in (None, "summarized"):
                raise RequestError(
                    f"{name}.display is {shown(item)}: the reasoning is always shown here, so that "
                    "it can come back with the next request; leave it out",
                    param=f"{name}.display",
                )
        elif key != "type" and item is not None:
            raise RequestError(
                f"{name}.{key} is not a field of thinking of type {shown(type_)}: leave it out",
                param=f"{name}.{key}",
            )
    return str(type_)


def _tools(name: str, value: Any) -> list[dict[str, Any]]:
    """Custom tools as the functions of chat completions."""
    if not isinstance(value, list):
        raise RequestError(f"{name} must be an array, not {kind(value)}", param=name)
    return [_tool(f"{name}[{index}]", tool) for index, tool in enumerate(value)]


def _tool(at: str, value: Any) -> dict[str, Any]:
    tool = object_field(at, value)
    if tool.get("type") not in (None, "custom"):
        raise RequestError(
            f"{at}.type is {shown(tool['type'])}: tools that Anthropic runs or describes are not "
            "known here; send a custom tool with its own input_schema",
            param=f"{at}.type",
        )
    for key, item in tool.items():
        read = _TOOL_FIELDS.get(key)
        if read is None:
            raise RequestError(f"{at}.{key} is not a field of a tool: leave it out", param=at)
        if item is not None:
            read(f"{at}.{key}", item)
    for key in ("name", "input_schema"):
        if not tool.get(key) and tool.get(key) != {}:
            raise RequestError(
                f"{at}.{key} is missing or empty: it is required", param=f"{at}.{key}"
            )
    function = {"name": tool["name"]}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    function["parameters"] = tool["input_schema"]
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def _tool_choice(name: str, value: Any) -> dict[str, Any]:
    """The fields of chat completions that say the same."""
    choice = object_field(name, value)
    type_ = choice.get("type")
    if not isinstance(type_, str) or type_ not in _TOOL_CHOICES:
        raise RequestError(
            f"{name}.type is {shown(type_)}: use {', '.join(_TOOL_CHOICES)}", param=f"{name}.type"
        )
    known = _TOOL_CHOICES[type_]
    for key in choice:
        if key != "type" and key not in known:
            raise RequestError(
                f"{name}.{key} is not a field of a tool_choice of type {shown(type_)}: leave it "
                "out",
                param=f"{name}.{key}",
            )
    fields: dict[str, Any] = {"tool_choice": "required" if type_ == "any" else type_}
    if type_ == "tool":
        tool = string(f"{name}.name", choice.get("name"))
        fields["tool_choice"] = {"type": "function", "function": {"name": tool}}
    if boolean(f"{name}.disable_parallel_tool_use", choice.get("disable_parallel_tool_use", False)):
        fields["parallel_tool_calls"] = False
    return fields


_TOOL_CHOICES: dict[str, tuple[str, ...]] = {
    "auto": ("disable_parallel_tool_use",),
    "any": ("disable_parallel_tool_use",),
    "tool": ("name", "disable_parallel_tool_use"),
    "none": (),
}


def _output_config(name: str, value: Any) -> dict[str, Any]:
    """The effort and the JSON schema that are asked for, where they are."""
    config = object_field(name, value)
    result: dict[str, Any] = {}
    for key, item in config.items():
        if key not in ("effort", "format"):
            raise RequestError(f"{name}.{key} is not known: leave it out", param=f"{name}.{key}")
        if item is not None:
            read = string if key == "effort" else _format
            result[key] = read(f"{name}.{key}", item)
    return result


def _format(name: str, value: Any) -> dict[str, Any]:
    """The schema of an output format."""
    format_ = object_field(name, value)
    if format_.get("type") != "json_schema" or set(format_) != {"type", "schema"}:
        raise RequestError(
            f'{name} must be {{"type": "json_schema", "schema": {{...}}}}, not {shown(format_)}',
            param=name,
        )
    return object_field(f"{name}.schema", format_["schema"])


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

MESSAGES_FIELDS: dict[str, Reader] = {
    # Honoured.
    "model": string,
    "max_tokens": integer(1),
    "messages": chat_messages,
    "system": system_content,
    "temperature": number(0, 1),
    "top_p": number(0, 1, above=True),
    "top_k": top_k,
    "stop_sequences": _stop_sequences,
    "stream": boolean,
    "tools": _tools,
    "tool_choice": _tool_choice,
    "thinking": _thinking,
    "output_config": _output_config,
    "output_format": _format,
    # Honoured, and not Anthropic's: the same as in chat completions.
    "chat_template_kwargs": object_field,
    "seed": integer(-(2**63), 2**63 - 1),
    # Accepted: bookkeeping of Anthropic's service, which changes nothing about the answer.
    "metadata": without_effect(object_field),
    "service_tier": without_effect(string),
    "cache_control": without_effect(object_field),
    "inference_geo": without_effect(string),
    "user_profile_id": without_effect(string),
    "workspace_id": without_effect(string),
    # Accepted at the values that change nothing.
    "speed": only("standard", because=_ONE_MACHINE),
    "diagnostics": only({}, {"previous_message_id": None}, because=_ONE_MACHINE),
    "mcp_servers": only([], because="the gateway calls no tools; give the agent the tools"),
    "context_management": only({}, {"edits": []}, because=_NO_EDITS),
    # Refused.
    "container": only(because="no code is run here"),
    "compaction": only(because=_NO_EDITS),
    "thread": only(because=_NO_EDITS),
    "betas": only(because="these names belong in the anthropic-beta header"),
    "billing_policy": only(because=_ONE_MACHINE),
    "fallbacks": only(because="this key has one model"),
    "fallback_credit_token": only(because=_ONE_MACHINE),
}

COUNT_FIELDS: dict[str, Reader] = {
    name: MESSAGES_FIELDS[name]
    for name in (
        "model",
        "messages",
        "system",
        "tools",
        "tool_choice",
        "thinking",
        "output_config",
        "output_format",
        "chat_template_kwargs",
        "cache_control",
        "user_profile_id",
        "workspace_id",
        "speed",
        "mcp_servers",
        "context_management",
        "betas",
    )
}
