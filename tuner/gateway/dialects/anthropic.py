"""Anthropic's Messages API: requests, and answers whole or as events.

Reasoning is a thinking block, the content a text block, each tool call a tool_use block, in this
order. The ids of tool calls are those of chat completions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tuner.encoding import displayable, json_text
from tuner.gateway.completion import Completion, chat_prompt
from tuner.gateway.families.grammars import AnswerSchema, ToolChoice
from tuner.gateway.families.literals import json_value
from tuner.gateway.families.parsing import Delta
from tuner.gateway.families.renderer import ChatRenderer
from tuner.gateway.families.template import Message, content_of
from tuner.gateway.request_error import FieldError, Path, RequestError, dotted, kind, shown, wrong
from tuner.gateway.requests import (
    Answer,
    Choice,
    CompletionRequest,
    Reader,
    array,
    boolean,
    image_part,
    integer,
    number,
    object_field,
    only,
    only_keys,
    read_fields,
    string,
    strings_that_end,
    temperature,
    top_k,
    with_effort,
    without_effect,
)
from tuner.gateway.service import Service, in_turn, sse
from tuner.gateway.sessions import Session

# Anthropic's content blocks, converted to messages of chat completions.


Content = str | list[dict[str, Any]]


def read_messages(at: Path, value: Any, *, images: bool = False) -> list[Message]:
    """The request's messages in the form of chat completions.

    Raises:
        RequestError: 400 that names the message, the block and the field.
    """
    if not array(at, value):
        raise wrong(at, "is empty: send at least one message")
    messages: list[Message] = []
    for index, message in enumerate(value):
        here = (*at, index)
        role = object_field(here, message).get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise wrong((*here, "role"), f"is {shown(role)}: use {' or '.join(_ROLES)}")
        only_keys(message, ("role", "content"), here, f"a message with role {role!r}")
        more = {"images": images} if role == "user" else {}
        messages += _ROLES[role](message.get("content"), (*here, "content"), **more)
    return messages


def system_content(at: Path, value: Any) -> Content:
    """The content of the system message: text, or text parts."""
    return content_of([_text(*block) for block in _blocks(value, at, ("text",))])


def _system(content: Any, at: Path) -> list[Message]:
    return [{"role": "system", "content": system_content(at, content)}]


def _user(content: Any, at: Path, *, images: bool) -> list[Message]:
    """Adjacent texts and images become a user message, each tool result a tool message."""
    messages: list[Message] = []
    texts: list[str | dict[str, Any]] = []
    seen = ("text", "image") if images else ("text",)

    def say() -> None:
        if texts:
            messages.append({"role": "user", "content": content_of(texts)})
            texts.clear()

    for block, here in _blocks(content, at, (*seen, "tool_result")):
        if block["type"] in seen:
            texts.append(_shown(block, here))
        else:
            say()
            messages.append(_tool_result(block, here, seen))
    say()
    return messages or [{"role": "user", "content": ""}]


def _assistant(content: Any, at: Path) -> list[Message]:
    """One message, whatever the order of its blocks.

    Blocks of one kind are joined without a separator: an answer that was one text can come back in
    several blocks.
    """
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    types = ("text", "thinking", "redacted_thinking", "tool_use")
    for block, here in _blocks(content, at, types):
        if block["type"] == "text":
            texts.append(_text(block, here))
        elif block["type"] == "redacted_thinking":
            continue  # encrypted: only the model that wrote it can read it
        elif block["type"] == "thinking":
            only_keys(block, ("type", "thinking", "signature"), here, "a thinking block")
            reasoning.append(string((*here, "thinking"), block.get("thinking")))
        else:
            calls.append(_tool_call(block, here))
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if (calls or reasoning) and not texts:
        message["content"] = None
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return [message]


_ROLES: dict[str, Callable[..., list[Message]]] = {
    "user": _user,
    "assistant": _assistant,
    "system": _system,
}


def _blocks(content: Any, at: Path, types: tuple[str, ...]) -> list[tuple[dict[str, Any], Path]]:
    """The content's blocks, each with its place; a string is one text block."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, at)]
    if not isinstance(content, list):
        raise wrong(at, f"must be a string or an array of content blocks, not {kind(content)}")
    blocks = []
    for index, block in enumerate(content):
        here = (*at, index)
        type_ = object_field(here, block).get("type")
        if type_ not in types:
            raise wrong((*here, "type"), f"is {shown(type_)}: supported are {', '.join(types)}")
        blocks.append((block, here))
    return blocks


def _text(block: dict[str, Any], at: Path) -> str:
    only_keys(block, ("type", "text", "cache_control"), at, "a text block")
    return string((*at, "text"), block.get("text"))


def _shown(block: dict[str, Any], at: Path) -> str | dict[str, Any]:
    """A text, or an image as a part of a chat message."""
    if block["type"] == "text":
        return _text(block, at)
    only_keys(block, ("type", "source", "cache_control"), at, "an image block")
    at = (*at, "source")
    source = object_field(at, block.get("source"))
    if source.get("type") == "url":
        only_keys(source, ("type", "url"), at, "a source")
        return image_part((*at, "url"), source.get("url"))
    if source.get("type") != "base64":
        raise wrong((*at, "type"), f"is {shown(source.get('type'))}: use base64 or url")
    only_keys(source, ("type", "media_type", "data"), at, "a source")
    media_type = string((*at, "media_type"), source.get("media_type"))
    data = string((*at, "data"), source.get("data"))
    return image_part(at, f"data:{media_type};base64,{data}")


def _tool_call(block: dict[str, Any], at: Path) -> dict[str, Any]:
    """A tool_use block; its input becomes JSON text, which may differ from the model's own."""
    if block.get("caller") == {"type": "direct"}:
        block = {key: value for key, value in block.items() if key != "caller"}
    only_keys(block, ("type", "id", "name", "input", "cache_control"), at, "a tool_use block")
    given = object_field((*at, "input"), block.get("input"))
    try:
        arguments = json.dumps(given, ensure_ascii=False)
    except RecursionError:
        raise wrong((*at, "input"), "is nested too deeply") from None
    function = {"name": string((*at, "name"), block.get("name")), "arguments": arguments}
    return {"id": string((*at, "id"), block.get("id")), "type": "function", "function": function}


def _tool_result(block: dict[str, Any], at: Path, seen: tuple[str, ...]) -> Message:
    """A tool message. Chat templates have no `is_error`: the text says it instead."""
    known = ("type", "tool_use_id", "content", "is_error", "cache_control")
    only_keys(block, known, at, "a tool_result block")
    failed = boolean((*at, "is_error"), block.get("is_error") or False)
    content = block.get("content")
    blocks = _blocks([] if content is None else content, (*at, "content"), seen)
    texts = [_shown(*item) for item in blocks]
    if failed and texts and isinstance(texts[0], str):
        texts = [f"Error: {texts[0]}", *texts[1:]]
    elif failed:
        texts = ["Error", *texts]
    return {
        "role": "tool",
        "tool_call_id": string((*at, "tool_use_id"), block.get("tool_use_id")),
        "content": content_of(texts),
    }


# Anthropic's Messages requests.
#
# `MESSAGES_FIELDS` is the complete table: a field is supported, has no effect, or is rejected by
# name. Forced tools and schemas have the same support as in chat completions.
#
#     system                           a system message
#     user: text, tool_result          tool messages and user messages, in their order
#     assistant: thinking, text,       one assistant message: reasoning_content, content, tool_calls
#                tool_use


_MAX_STOP_SEQUENCES = 64


def read_messages_request(body: bytes, service: Service) -> CompletionRequest:
    """Parse the Messages request in `body`.

    Raises:
        RequestError: 400 that names the field, its value and what to do.
    """
    values = read_fields(
        body,
        _table(MESSAGES_FIELDS, service),
        required=("model", "max_tokens", "messages"),
        what="a Messages request",
    )
    if values["messages"][-1]["role"] == "assistant":
        raise wrong(
            ("messages",),
            "ends with an assistant message: this gateway cannot continue a given answer, since "
            "the chat template starts a new turn; end with a user message",
        )
    return _request(values, service)


def read_count_request(body: bytes, service: Service) -> CompletionRequest:
    """Parse the request to count tokens in `body`.

    Raises:
        RequestError: 400 that names the field, its value and what to do.
    """
    values = read_fields(
        body,
        _table(COUNT_FIELDS, service),
        required=("model", "messages"),
        what="a request to count tokens",
    )
    return _request(values, service)


def _table(fields: Mapping[str, Reader], service: Service) -> dict[str, Reader]:
    """The fields' readers; that of messages reads images if the model does."""
    images = service.renderer.vision is not None
    return {**fields, "messages": partial(read_messages, images=images)}


def _request(values: dict[str, Any], service: Service) -> CompletionRequest:
    values["stop"] = values.pop("stop_sequences", ())
    output = values.pop("output_config", {})
    schema = output.get("format")
    if "output_format" in values:
        if schema is not None:
            raise FieldError(
                "output_format and output_config.format are both set: send the latter",
                path=("output_format",),
            )
        schema = values.pop("output_format")
    if schema is not None:
        # Where chat completions have it, whose message is used for a schema that does not compile.
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
            f"{dotted(name)}, in terms of chat completions: {error.message}", path=name
        ) from error
    return request


def _as_sent(path: Path) -> Path:
    """The place of a form requirement in a Messages request."""
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
    """Template keywords for `thinking` and `effort`."""
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
    for key, value in kwargs.items():
        if key in given and given[key] != value:
            raise wrong(
                ("chat_template_kwargs", key),
                f"is {shown(given[key])}, but thinking or output_config asks for {shown(value)}: "
                "send one of them",
            )
    return with_effort({**given, **kwargs}, effort, ("output_config", "effort"), renderer)


def _thinking(at: Path, value: Any) -> str:
    """The type of a thinking configuration.

    `budget_tokens` is Anthropic's target for the length of the reasoning, not a limit; `max_tokens`
    is the limit, there and here. It is checked and has no effect.
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
                    f"is {shown(item)}: the reasoning is always returned, so that it can be sent "
                    "with the next request; leave it out",
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
            f"is {shown(tool['type'])}: tools that Anthropic runs or describes are not supported; "
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
    """The corresponding fields of a `CompletionRequest`."""
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
    """The requested effort and JSON schema, if any."""
    config = object_field(at, value)
    result: dict[str, Any] = {}
    for key, item in config.items():
        if key not in ("effort", "format"):
            raise wrong((*at, key), "is unknown: leave it out")
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


_ONE_MACHINE = "Anthropic's service is not behind this gateway"
_NO_EDITS = "the conversation is used as it is sent"

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

# Fields that affect the prompt, and others that a request to count its tokens may have.
COUNT_FIELDS: dict[str, Reader] = {
    # Supported.
    "model": string,
    "messages": read_messages,
    "system": system_content,
    "tools": _tools,
    "tool_choice": _tool_choice,
    "thinking": _thinking,
    "output_config": _output_config,
    "output_format": _format,
    # Supported, and not Anthropic's: the same as in chat completions.
    "chat_template_kwargs": object_field,
    # Accepted: bookkeeping of Anthropic's service, without effect on the answer.
    "cache_control": without_effect(object_field),
    "user_profile_id": without_effect(string),
    "workspace_id": without_effect(string),
    # Accepted at neutral values.
    "speed": only("standard", because=_ONE_MACHINE),
    "mcp_servers": only([], because="the gateway calls no tools; give the agent the tools"),
    "context_management": only({}, {"edits": []}, because=_NO_EDITS),
    # Rejected.
    "betas": only(because="these names belong in the anthropic-beta header"),
}

MESSAGES_FIELDS: dict[str, Reader] = {
    **COUNT_FIELDS,
    # Supported.
    "max_tokens": integer(1),
    "temperature": temperature(1),
    "top_p": number(0, 1, above=True),
    "top_k": top_k,
    "stop_sequences": partial(strings_that_end, most=_MAX_STOP_SEQUENCES),
    "stream": boolean,
    # Supported, and not Anthropic's: the same as in chat completions.
    "seed": integer(-(2**63), 2**63 - 1),
    # Accepted: bookkeeping of Anthropic's service, without effect on the answer.
    "metadata": without_effect(object_field),
    "service_tier": without_effect(string),
    "inference_geo": without_effect(string),
    # Accepted at neutral values.
    "diagnostics": only({}, {"previous_message_id": None}, because=_ONE_MACHINE),
    # Rejected.
    "container": only(because="no code is run here"),
    "compaction": only(because=_NO_EDITS),
    "thread": only(because=_NO_EDITS),
    "billing_policy": only(because=_ONE_MACHINE),
    "fallbacks": only(because="this key has one model"),
    "fallback_credit_token": only(because=_ONE_MACHINE),
}


Block = dict[str, Any]


class MessagesExchange:
    """`POST /v1/messages`.

    A stream sends reasoning and text when they are certain, and the tool calls after them, each in
    one piece: text that follows a call belongs to the text block before it, as in the whole answer.
    """

    def __init__(self, session: Session, role: str | None, body: bytes) -> None:
        request = read_messages_request(body, session.service)
        self.completion = Completion(session, role, request, dialect="messages", prefix="msg_")
        self._blocks = 0  # begun in the stream
        self._open: str | None = None  # the type of the last one, until it is ended

    def answer(self, answer: Answer) -> dict[str, Any]:
        (choice,) = answer.choices
        parsed = choice.parsed
        blocks: list[Block] = []
        if parsed.reasoning:
            blocks.append(
                {
                    "type": "thinking",
                    "thinking": parsed.reasoning,
                    "signature": self._signature(),
                }
            )
        if parsed.content:
            blocks.append({"type": "text", "text": parsed.content})
        return {
            **self._frame(),
            "content": [*blocks, *_tool_uses(choice)],
            **_stop(choice),
            "usage": _usage(answer),
        }

    def opening(self) -> Sequence[bytes]:
        # The number of cached tokens is not known yet: the counts at the end replace these.
        usage = {
            "input_tokens": self.completion.prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        message = {
            **self._frame(),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": usage,
        }
        return [_event("message_start", message=message)]

    def delta(self, index: int, delta: Delta) -> Sequence[bytes]:
        if delta.reasoning:
            start = {"type": "thinking", "thinking": "", "signature": ""}
            events = self._within(start)
            return [*events, self._grow(type="thinking_delta", thinking=delta.reasoning)]
        if delta.content:
            events = self._within({"type": "text", "text": ""})
            return [*events, self._grow(type="text_delta", text=delta.content)]
        return []

    def closing(self, answer: Answer) -> Sequence[bytes]:
        (choice,) = answer.choices
        events = self._end()
        for block in _tool_uses(choice):
            events += self._begin({**block, "input": {}})
            events.append(
                self._grow(type="input_json_delta", partial_json=json.dumps(block["input"]))
            )
            events += self._end()
        return [
            *events,
            _event("message_delta", delta=_stop(choice), usage=_usage(answer)),
            _event("message_stop"),
        ]

    def failure(self, error: RequestError) -> bytes:
        return sse(json.loads(self.error(error)), event="error")

    @staticmethod
    def error(error: RequestError) -> bytes:
        type_ = _ERRORS.get(error.status, "invalid_request_error")
        return json_text(
            {"type": "error", "error": {"type": type_, "message": error.message}}
        ).encode()

    def _frame(self) -> dict[str, Any]:
        return {
            "id": self.completion.id,
            "type": "message",
            "role": "assistant",
            "model": self.completion.service.model_name,
        }

    def _signature(self) -> str:
        """The signature of a thinking block, which clients send back: the id of its call."""
        return self.completion.call_id(0)

    def _within(self, block: Block) -> list[bytes]:
        """The events that make a block of this type the current one."""
        return [] if self._open == block["type"] else [*self._end(), *self._begin(block)]

    def _begin(self, block: Block) -> list[bytes]:
        self._open = block["type"]
        self._blocks += 1
        return [_event("content_block_start", index=self._blocks - 1, content_block=block)]

    def _grow(self, **delta: Any) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _end(self) -> list[bytes]:
        events: list[bytes] = []
        if self._open == "thinking":
            events.append(self._grow(type="signature_delta", signature=self._signature()))
        if self._open is not None:
            events.append(_event("content_block_stop", index=self._blocks - 1))
            self._open = None
        return events


async def count_tokens(session: Session, body: bytes) -> dict[str, int]:
    """The answer to `POST /v1/messages/count_tokens`: the size of the prompt of a request.

    Raises:
        RequestError: The request is invalid.
    """
    request = read_count_request(body, session.service)
    session.check_model(request.model)
    prompt = await in_turn(
        session.turns,
        partial(chat_prompt, session, request),
        long=request.long,
        first=partial(session.service.renderer.fetch, request.messages),
    )
    return {"input_tokens": len(prompt.ids)}


def model(name: str) -> dict[str, Any]:
    """The description of a model."""
    created = "1970-01-01T00:00:00Z"
    return {"type": "model", "id": name, "display_name": name, "created_at": created}


def models(names: Sequence[str]) -> dict[str, Any]:
    """The body of the list of models."""
    data = [model(name) for name in names]
    return {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}


def _tool_uses(choice: Choice) -> list[Block]:
    return [
        {"type": "tool_use", "id": id, "name": call.name, "input": _input(call.arguments)}
        for id, call in zip(choice.tool_call_ids, choice.parsed.tool_calls, strict=True)
    ]


def _input(arguments: str) -> Any:
    """The parsed arguments of a call, in a form that clients can read.

    The model can write valid JSON that a client's parser rejects: see `json_value`; halves of
    surrogate pairs become U+FFFD.
    """
    return displayable(json_value(arguments))


def _stop(choice: Choice) -> dict[str, Any]:
    """Why the answer ended; tool calls take precedence over a stop string."""
    reason = "max_tokens" if choice.finish_reason == "length" else "end_turn"
    string = choice.stop_string
    if choice.finish_reason == "tool_calls":
        reason, string = "tool_use", None
    elif string is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": string, "stop_details": None}


def _usage(answer: Answer) -> dict[str, int]:
    """Token counts in Anthropic's sense: input_tokens excludes cached tokens."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": answer.completion_tokens,
    }


def _event(type_: str, **fields: Any) -> bytes:
    return sse({"type": type_, **fields}, event=type_)


_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
}
