"""A request of the Responses API, read field by field into what chat completions would ask for.

`RESPONSES_FIELDS` is the whole table: a field is honoured, without effect, or refused by name. What
means the same in chat completions is read by the readers of `CHAT_FIELDS`, under its name here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.engines.base import EngineCapabilities
from tuner.gateway.errors import RequestError, kind, shown
from tuner.gateway.fields import (
    NO_EFFECT,
    Reader,
    boolean,
    integer,
    object_field,
    only,
    read_fields,
    string,
    without_effect,
)
from tuner.gateway.messages import Message, check_tools
from tuner.gateway.request import CHAT_FIELDS, CompletionRequest, check_top_logprobs
from tuner.gateway.responses_items import KeptResponse, read_items

# Fields of chat completions, and what they are called here.
_NAMES = (
    (r"response_format\.json_schema", "text.format"),
    (r"response_format", "text.format"),
    (r"(tools\[\d+\])\.function\b", r"\1"),
)
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (
    _LOGPROBS,
    # Reasoning is in the answer as text; the others belong to tools that are refused.
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)


@dataclass(frozen=True)
class ResponsesRequest:
    """A request of the Responses API.

    Attributes:
        completion: What is asked for.
        history: Its messages without the instructions.
        store: Whether the response can be continued by its id.
        fields: The fields that the answer repeats, as sent; tools as they are used.
    """

    completion: CompletionRequest
    history: list[Message]
    store: bool
    fields: dict[str, Any]


def parse_responses_request(
    body: bytes, kept: Mapping[str, KeptResponse], capabilities: EngineCapabilities
) -> ResponsesRequest:
    """The request in `body`.

    Args:
        body: JSON.
        kept: The responses that can be continued, by id.
        capabilities: What the engine can do.

    Raises:
        RequestError: 400 or 404 that names the field, its value and what to do.
    """
    values = read_fields(
        body, RESPONSES_FIELDS, required=("model", "input"), what="a Responses request"
    )
    asked = values.pop("input")
    history = _earlier(values.get("previous_response_id"), kept)
    if isinstance(asked, str):
        history.append({"role": "user", "content": asked})
    else:
        history += read_items(asked, kept)
    instructions = values.get("instructions")
    messages = history
    if instructions is not None:
        messages = [{"role": "system", "content": instructions}, *history]
    if not messages:
        raise RequestError("input is empty: send at least one item", param="input")
    stream = values.pop("stream", False)
    if values.pop("stream_options", None) is not None and not stream:
        raise RequestError(
            "stream_options is given without stream: leave it out or send stream: true",
            param="stream_options",
        )
    logprobs = _LOGPROBS in values.pop("include", ())
    top_logprobs = values.get("top_logprobs", 0)
    if top_logprobs and not logprobs:
        raise RequestError(
            f"top_logprobs is {top_logprobs}, but no log-probs are asked for: send include: "
            f'["{_LOGPROBS}"] too',
            param="top_logprobs",
        )
    check_top_logprobs("top_logprobs", top_logprobs, capabilities)
    request = CompletionRequest(
        model=values.pop("model"),
        messages=messages,
        stream=stream,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        max_tokens=values.get("max_output_tokens"),
        **{name: values.pop(name) for name in _EXTENSIONS if name in values},
        **{name: values[name] for name in ("temperature", "top_p") if name in values},
        **_as_chat(values),
    )
    request.constraints.check(capabilities)
    return ResponsesRequest(request, history, values.pop("store", True), values)


def named_as_sent(error: RequestError) -> RequestError:
    """An error about chat completions' fields, in the names that they have in the Responses API."""
    message, param = error.message, error.param
    for chat, responses in _NAMES:
        message = re.sub(chat, responses, message)
        param = re.sub(chat, responses, param) if param else param
    if param == "messages":
        param = "input"
    return RequestError(message, status=error.status, param=param, code=error.code)


def _earlier(response_id: str | None, kept: Mapping[str, KeptResponse]) -> list[Message]:
    """The conversation that `previous_response_id` stands for."""
    if response_id is None:
        return []
    if response_id not in kept:
        raise RequestError(
            f"previous_response_id is {shown(response_id)}: this rollout has no stored response of "
            "that id; send the conversation as input, or store: true with every response",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return list(kept[response_id].messages)


def _as_chat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Tools and forms, as the readers of chat completions take them."""
    chat: dict[str, Any] = {}
    tools = values.get("tools", [])
    if tools:
        chat["tools"] = check_tools([_chat_tool(tool) for tool in tools])

    def read(field: str, value: Any, name: str) -> None:
        result = NO_EFFECT if value is None else CHAT_FIELDS[field](name, value)
        if result is not NO_EFFECT:
            chat[field] = result

    read("tool_choice", _chat_tool_choice(values.get("tool_choice")), "tool_choice")
    read("parallel_tool_calls", values.get("parallel_tool_calls"), "parallel_tool_calls")
    text = values.get("text", {})
    read("response_format", _chat_format(text.get("format")), "text.format")
    read("verbosity", text.get("verbosity"), "text.verbosity")
    read("reasoning_effort", values.get("reasoning", {}).get("effort"), "reasoning.effort")
    return chat


def _is_constrained(tool: Mapping[str, Any]) -> bool:
    """Whether a tool's arguments are constrained to its schema; the answer's `tools` say so.

    OpenAI means `strict` unless it is told otherwise. Here it is what the request says: not every
    engine and model family can be held to a schema, and a request that did not ask for it need not
    fail. This is the one place that decides it.
    """
    return bool(tool.get("strict", False))


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {key: tool[key] for key in ("name", "description", "parameters") if key in tool}
    if tool["strict"]:
        function["strict"] = True
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice["type"] == "function":
        return {"type": "function", "function": {"name": choice["name"]}}
    tools = [_chat_tool_choice(tool) for tool in choice["tools"]]
    allowed = {"mode": choice.get("mode", "auto"), "tools": tools}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _chat_format(form: Any) -> Any:
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    schema = {key: value for key, value in form.items() if key != "type" and value is not None}
    return {"type": "json_schema", "json_schema": schema}


def _input(name: str, value: Any) -> str | list[Any]:
    if not isinstance(value, str | list):
        raise RequestError(
            f"{name} must be a string or an array of items, not {kind(value)}", param=name
        )
    return value


def _tools(name: str, value: Any) -> list[dict[str, Any]]:
    """Function tools, with the `strict` that is in force."""
    if not isinstance(value, list):
        raise RequestError(f"{name} must be an array, not {kind(value)}", param=name)
    return [_tool(f"{name}[{index}]", tool) for index, tool in enumerate(value)]


def _tool(at: str, tool: Any) -> dict[str, Any]:
    tool = object_field(at, tool)
    if tool.get("type") != "function":
        raise RequestError(
            f"{at}.type is {shown(tool.get('type'))}: this gateway runs no tools of its own; give "
            "the model a function",
            param=f"{at}.type",
        )
    readers: dict[str, Reader] = {
        "type": string,
        "name": string,
        "description": string,
        "parameters": object_field,
        "strict": boolean,
        "defer_loading": only(False, because="every tool is shown to the model"),
    }
    given = _object_of(**readers)(at, tool)
    if not given.get("name"):
        raise RequestError(
            f"{at}.name must be a string that is not empty",
            param=f"{at}.name",
        )
    read = {
        key: given[key] for key in ("type", "name", "description", "parameters") if key in given
    }
    return {"parameters": None, **read, "strict": _is_constrained(given)}


def _tool_choice(name: str, value: Any) -> str | dict[str, Any]:
    """As sent; a function that is named has a name."""
    if isinstance(value, str):
        return value
    choice = object_field(name, value)
    if choice.get("type") == "function":
        string(f"{name}.name", choice.get("name"))
    elif choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        if not isinstance(tools, list):
            raise RequestError(
                f"{name}.tools must be an array, not {kind(tools)}", param=f"{name}.tools"
            )
        for index, tool in enumerate(tools):
            at = f"{name}.tools[{index}]"
            if object_field(at, tool).get("type") != "function":
                raise RequestError(f"{at}.type must be 'function'", param=f"{at}.type")
            string(f"{at}.name", tool.get("name"))
    else:
        raise RequestError(
            f"{name} is {shown(value)}: only functions can be chosen here; send 'auto', 'none', or "
            '{"type": "function", "name": ...}',
            param=name,
        )
    return choice


def _object_of(**readers: Reader) -> Reader:
    """An object of which each field that says something is read."""

    def read(name: str, value: Any) -> dict[str, Any]:
        given = {
            key: inner for key, inner in object_field(name, value).items() if inner is not None
        }
        for key, inner in given.items():
            if key not in readers:
                raise RequestError(
                    f"{name}.{key} is not known (known: {', '.join(readers)}): leave it out",
                    param=f"{name}.{key}",
                )
            readers[key](f"{name}.{key}", inner)
        return given

    return read


def _include(name: str, value: Any) -> list[str]:
    if not isinstance(value, list):
        raise RequestError(f"{name} must be an array, not {kind(value)}", param=name)
    for index, item in enumerate(value):
        if item not in _INCLUDABLE:
            raise RequestError(
                f"{name}[{index}] is {shown(item)}: use {', '.join(_INCLUDABLE)}",
                param=f"{name}[{index}]",
            )
    return value


def _any(name: str, value: Any) -> Any:
    return value


# Fields of this gateway's own, which mean the same in chat completions.
_EXTENSIONS = ("top_k", "seed", "chat_template_kwargs")
_NO_SUMMARY = "no summaries are written here; the reasoning itself is in the answer"
_NO_STATE = "a conversation is continued by previous_response_id or by its items"

RESPONSES_FIELDS: dict[str, Reader] = {
    # Honoured.
    "model": string,
    "input": _input,
    "instructions": string,
    "previous_response_id": string,
    "store": boolean,
    "tools": _tools,
    "tool_choice": _tool_choice,
    "parallel_tool_calls": boolean,
    "text": _object_of(format=object_field, verbosity=_any),
    "temperature": CHAT_FIELDS["temperature"],
    "top_p": CHAT_FIELDS["top_p"],
    "max_output_tokens": CHAT_FIELDS["max_tokens"],
    "top_logprobs": CHAT_FIELDS["top_logprobs"],
    "include": _include,
    "stream": boolean,
    "stream_options": _object_of(
        include_obfuscation=only(False, because="streams are not padded here")
    ),
    **{name: CHAT_FIELDS[name] for name in _EXTENSIONS},
    # Accepted: bookkeeping of OpenAI's service, which changes nothing about the completion.
    "metadata": object_field,
    "user": string,
    "safety_identifier": string,
    "prompt_cache_key": string,
    "prompt_cache_options": without_effect(
        _object_of(
            mode=string,
            ttl=string,
            prewarm=only(False, because="every request is answered"),
            comparison_response_id=only(because="the use of the cache is not reported"),
        )
    ),
    "prompt_cache_retention": without_effect(string),
    "service_tier": without_effect(string),
    "max_tool_calls": without_effect(integer(1)),  # of tools that OpenAI runs
    # Accepted at the values that change nothing.
    "reasoning": _object_of(
        effort=_any,
        summary=only(because=_NO_SUMMARY),
        generate_summary=only(because=_NO_SUMMARY),
        context=only("auto", because="what of earlier reasoning is shown is up to the template"),
        mode=only("standard", because="there is one mode here"),
    ),
    "background": only(False, because="a response is answered while its caller waits"),
    "truncation": only("disabled", because="a conversation that is too long is refused, not cut"),
    "context_management": only([], because="a conversation that is too long is refused, not cut"),
    # Refused.
    "background_options": only(because="a response is answered while its caller waits"),
    "conversation": only(because=_NO_STATE),
    "prompt": only(because="there are no stored prompts here; send instructions and input"),
    "moderation": only(because="there is no moderation here"),
    "access_programs": only(because="there are none here"),
    "image": only(because="the model reads text only"),
}
