"""A request of the Responses API, read field by field.

`RESPONSES_FIELDS` is the whole table: a field is honoured, without effect, or refused by name. What
means the same in chat completions is read by the readers of `CHAT_FIELDS`, under its name here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.engines.base import EngineCapabilities
from tuner.gateway.completion_request import CompletionRequest, read_fields, with_usage
from tuner.gateway.dialects.chat import (
    CHAT_FIELDS,
    RARE_FIELDS,
    check_mode,
    read_response_format,
    read_schema,
    read_tool_choice,
    some_tools,
)
from tuner.gateway.dialects.responses_items import read_items
from tuner.gateway.fields import (
    Reader,
    array,
    boolean,
    check_top_logprobs,
    integer,
    name,
    object_field,
    only,
    string,
    without_effect,
)
from tuner.gateway.model.grammars import AUTO, AnswerSchema, ToolChoice
from tuner.gateway.model.template import Message
from tuner.gateway.request_error import FieldError, Path, dotted, kind, shown, wrong
from tuner.gateway.sessions import KeptResponse

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


def read_responses_request(
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
        raise wrong(("input",), "is empty: send at least one item")
    with_usage(values)  # a stream's last event has the counts anyway
    stream = values.pop("stream", False)
    logprobs = _LOGPROBS in values.pop("include", ())
    at, top_logprobs = ("top_logprobs",), values.get("top_logprobs", 0)
    if top_logprobs and not logprobs:
        raise wrong(
            at,
            f'is {top_logprobs}, but no log-probs are asked for: send include: ["{_LOGPROBS}"] too',
        )
    check_top_logprobs(at, top_logprobs, capabilities)
    request = CompletionRequest(
        model=values.pop("model"),
        messages=messages,
        stream=stream,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        max_tokens=values.get("max_output_tokens"),
        **{name: values.pop(name) for name in _EXTENSIONS if name in values},
        **{name: values[name] for name in ("temperature", "top_p") if name in values},
        **_form(values),
    )
    request.constraints.check(capabilities)
    return ResponsesRequest(request, history, values.pop("store", True), values)


def as_sent(path: Path) -> str:
    """What a field of a `CompletionRequest` is called in the Responses API."""
    match path:
        case ("messages", *_):
            return "input"
        case ("response_format", *inside):
            return dotted(("text", "format", *inside))
        case ("tools", int(index), "function", *inside):
            return dotted(("tools", index, *inside))
    return dotted(path)


def _earlier(response_id: str | None, kept: Mapping[str, KeptResponse]) -> list[Message]:
    """The conversation that `previous_response_id` stands for."""
    if response_id is None:
        return []
    if response_id not in kept:
        raise FieldError(
            f" is {shown(response_id)}: this rollout has no stored response of that id; send the "
            "conversation as input, or store: true with every response",
            path=("previous_response_id",),
            begins=True,
            code="previous_response_not_found",
        )
    return list(kept[response_id].messages)


def _form(values: Mapping[str, Any]) -> dict[str, Any]:
    """Tools, and what is demanded of a completion's form."""
    form: dict[str, Any] = {
        "tools": [_function(tool) for tool in values.get("tools", ())],
        "tool_choice": _choice(values.get("tool_choice")),
    }
    if values.get("parallel_tool_calls") is not None:
        form["parallel_tool_calls"] = values["parallel_tool_calls"]
    text = values.get("text", {})
    form["response_format"] = _answer_schema(text.get("format"))
    for at, value in (
        (("text", "verbosity"), text.get("verbosity")),
        (("reasoning", "effort"), values.get("reasoning", {}).get("effort")),
    ):
        if value is not None:
            CHAT_FIELDS["verbosity" if at[0] == "text" else "reasoning_effort"](at, value)
    return form


def _is_constrained(tool: Mapping[str, Any]) -> bool:
    """Whether a tool's arguments are constrained to its schema; the answer's `tools` say so.

    OpenAI means `strict` unless it is told otherwise. Here it is what the request says: not every
    engine and model family can be held to a schema, and a request that did not ask for it need not
    fail. This is the one place that decides it.
    """
    return bool(tool.get("strict", False))


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in the form that chat templates read."""
    function = {key: tool[key] for key in ("name", "description", "parameters") if key in tool}
    if tool["strict"]:
        function["strict"] = True
    return {"type": "function", "function": function}


def _choice(choice: Any) -> ToolChoice:
    if choice is None:
        return AUTO
    if not isinstance(choice, dict):
        return read_tool_choice(("tool_choice",), choice)
    if choice["type"] == "function":
        return ToolChoice("required", (choice["name"],), once=True)
    at, mode = ("tool_choice", "allowed_tools"), choice.get("mode", "auto")
    check_mode((*at, "mode"), mode)
    tools = some_tools((*at, "tools"), choice["tools"])
    return ToolChoice(mode, tuple(dict.fromkeys(tool["name"] for tool in tools)))


def _answer_schema(form: Any) -> AnswerSchema | None:
    at: Path = ("text", "format")
    if form is None:
        return None
    if form.get("type") != "json_schema":
        return read_response_format(at, form)
    given = {key: value for key, value in form.items() if key != "type" and value is not None}
    return read_schema((*at, "json_schema"), given)


def _input(at: Path, value: Any) -> str | list[Any]:
    if not isinstance(value, str | list):
        raise wrong(at, f"must be a string or an array of items, not {kind(value)}")
    return value


def _tools(at: Path, value: Any) -> list[dict[str, Any]]:
    """Function tools, with the `strict` that is in force."""
    return [_tool((*at, index), tool) for index, tool in enumerate(array(at, value))]


def _tool(at: Path, tool: Any) -> dict[str, Any]:
    tool = object_field(at, tool)
    if tool.get("type") != "function":
        raise wrong(
            (*at, "type"),
            f"is {shown(tool.get('type'))}: this gateway runs no tools of its own; give the model "
            "a function",
        )
    given = _TOOL(at, tool)
    name((*at, "name"), given.get("name"))
    read = {
        key: given[key] for key in ("type", "name", "description", "parameters") if key in given
    }
    return {"parameters": None, **read, "strict": _is_constrained(given)}


def _tool_choice(at: Path, value: Any) -> str | dict[str, Any]:
    """As sent; a function that is named has a name."""
    if isinstance(value, str):
        return value
    choice = object_field(at, value)
    if choice.get("type") == "function":
        string((*at, "name"), choice.get("name"))
    elif choice.get("type") == "allowed_tools":
        for index, tool in enumerate(array((*at, "tools"), choice.get("tools"))):
            here = (*at, "tools", index)
            if object_field(here, tool).get("type") != "function":
                raise wrong((*here, "type"), "must be 'function'")
            string((*here, "name"), tool.get("name"))
    else:
        raise wrong(
            at,
            f"is {shown(value)}: only functions can be chosen here; send 'auto', 'none', or "
            '{"type": "function", "name": ...}',
        )
    return choice


def _object_of(**readers: Reader) -> Reader:
    """An object of which each field that says something is read."""

    def read(at: Path, value: Any) -> dict[str, Any]:
        given = {key: inner for key, inner in object_field(at, value).items() if inner is not None}
        for key, inner in given.items():
            if key not in readers:
                raise wrong((*at, key), f"is not known (known: {', '.join(readers)}): leave it out")
            readers[key]((*at, key), inner)
        return given

    return read


_TOOL = _object_of(
    type=string,
    name=string,
    description=string,
    parameters=object_field,
    strict=boolean,
    defer_loading=only(False, because="every tool is shown to the model"),
)


def _include(at: Path, value: Any) -> list[str]:
    for index, item in enumerate(array(at, value)):
        if item not in _INCLUDABLE:
            raise wrong((*at, index), f"is {shown(item)}: use {', '.join(_INCLUDABLE)}")
    return list(value)


def _any(at: Path, value: Any) -> Any:
    return value


# Fields of this gateway's own, which mean the same in chat completions.
_EXTENSIONS = ("top_k", "seed", "chat_template_kwargs", *RARE_FIELDS)
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
