"""OpenAI's Responses API: requests, and answers whole or as events."""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.gateway.completion import Completion
from tuner.gateway.dialects.chat import (
    CHAT_FIELDS,
    RARE_FIELDS,
    chat_logprobs,
    check_mode,
    read_response_format,
    read_schema,
    read_tool_choice,
    some_tools,
)
from tuner.gateway.families.grammars import AUTO, AnswerSchema, ToolChoice
from tuner.gateway.families.parsing import Delta
from tuner.gateway.families.template import Message, content_of
from tuner.gateway.request_error import FieldError, Path, RequestError, dotted, kind, shown, wrong
from tuner.gateway.requests import (
    Answer,
    Choice,
    CompletionRequest,
    Reader,
    arguments,
    array,
    boolean,
    check_detail,
    check_top_logprobs,
    image_part,
    integer,
    name,
    object_field,
    only,
    only_keys,
    read_fields,
    string,
    with_effort,
    with_usage,
    without_effect,
)
from tuner.gateway.service import Service, sse
from tuner.gateway.sessions import KeptResponse, Session

# Items of the Responses API, converted to the messages of chat completions.
#
# One assistant message of chat completions is several items of the Responses API:
#
#     {"role": "assistant",                         {"type": "reasoning", "id": "rs_R"}
#      "reasoning_content": ..., "content": ...,    {"type": "message", "id": "msg_R"}
#      "tool_calls": [...]}                         {"type": "function_call", "id": "fc_R_0"}, ...
#
# The items of response `resp_R` have ids that end with R, so they are joined again, in any order.
# Items without such ids (clients may omit them) are joined into one message as far as possible.


Item = dict[str, Any]

RESPONSE_PREFIX = "resp_"
_ITEM_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{24})(?:_\d+)?")  # OpenAI's own are longer
_ROLES = ("user", "assistant", "system", "developer")


def read_items(
    items: list[Any], kept: Mapping[str, KeptResponse], *, images: bool = False
) -> list[Message]:
    """The chat messages of `input`.

    Args:
        items: As sent.
        images: Whether the model reads images.
        kept: The session's responses by id, which items may refer to.

    Raises:
        RequestError: 400 that names the item and the field; 404: an unknown reference.
    """
    reader = _ItemReader(kept, ("input_image",) if images else ())
    for index, item in enumerate(items):
        reader.add(item, ("input", index))
    return reader.messages


class _ItemReader:
    """Joins items to messages."""

    def __init__(self, kept: Mapping[str, KeptResponse], images: tuple[str, ...]) -> None:
        self._images = images
        self.messages: list[Message] = []
        self._kept = kept
        self._last: Message | None = None  # the assistant message that the next item may belong to
        self._of_response: dict[str, Message] = {}

    def add(self, item: Any, at: Path) -> None:
        type_ = object_field(at, item).get("type")
        if type_ is None:  # OpenAI's types omit it for these two
            type_ = "message" if "role" in item else "item_reference" if "id" in item else None
        readers: dict[Any, tuple[Callable[[Item, Path], None], tuple[str, ...]]] = {
            "message": (self._message, ("role", "content", "status")),
            "reasoning": (self._reasoning, ("summary", "content", "encrypted_content", "status")),
            "function_call": (self._call, ("call_id", "name", "arguments", "status")),
            "function_call_output": (self._output, ("call_id", "output", "status")),
            "item_reference": (self._reference, ()),
        }
        if not isinstance(type_, str) or type_ not in readers:
            raise wrong(
                (*at, "type"),
                f"is {shown(type_)}: this gateway supports items of type {', '.join(readers)}",
            )
        read, known = readers[type_]
        only_keys(item, ("type", "id", *known), at, f"an item of type {type_!r}", ignored=_IGNORED)
        if item.get("id") is not None:
            string((*at, "id"), item["id"])
        read(item, at)

    def _message(self, item: Item, at: Path) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise wrong((*at, "role"), f"is {shown(role)}: use one of {', '.join(_ROLES)}")
        at = (*at, "content")
        if role == "assistant":
            content = _text_parts(item.get("content"), at, ("refusal",))
            self._turn(item, "content")["content"] = content
        else:
            self._last = None
            content = _text_parts(item.get("content"), at, self._images if role == "user" else ())
            self.messages.append({"role": role, "content": content})

    def _reasoning(self, item: Item, at: Path) -> None:
        content, summary = (
            _texts(item.get(name) or [], (*at, name), (type_,))
            for name, type_ in (("content", "reasoning_text"), ("summary", "summary_text"))
        )
        own = self._item(item.get("id"))
        if not content and own is not None and own["type"] == "reasoning":
            content = [part["text"] for part in own["content"]]
        texts = content or summary
        if texts:
            self._turn(item, "reasoning_content")["reasoning_content"] = "\n".join(texts)
        # Without text it is encrypted: only the model that wrote it can read it.

    def _call(self, item: Item, at: Path) -> None:
        id_, name = (string((*at, key), item.get(key)) for key in ("call_id", "name"))
        given = arguments((*at, "arguments"), item.get("arguments"))
        function = {"name": name, "arguments": given}
        calls = self._turn(item, "tool_calls").setdefault("tool_calls", [])
        calls.append({"id": id_, "type": "function", "function": function})

    def _output(self, item: Item, at: Path) -> None:
        call_id = string((*at, "call_id"), item.get("call_id"))
        output = _text_parts(item.get("output"), (*at, "output"), self._images)
        self._last = None
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": output})

    def _reference(self, item: Item, at: Path) -> None:
        known = self._item(item.get("id"))
        if known is None:
            raise FieldError(
                f" is {shown(item.get('id'))}: no stored response of this rollout has such an "
                "item; send the item itself",
                path=(*at, "id"),
                begins=True,
                status=404,
            )
        self.add(known, at)

    def _item(self, id_: Any) -> Item | None:
        """An item of a kept response."""
        response = self._kept.get(RESPONSE_PREFIX + (_response_of(id_) or ""))
        return None if response is None else response.items.get(id_)

    def _turn(self, item: Item, key: str) -> Message:
        """The assistant message that an item belongs to, which gets `key`."""
        response = _response_of(item.get("id"))
        if response in self._of_response:
            turn: Message | None = self._of_response[response]
        else:
            turn = self._last
            said = {"reasoning_content": _SAID, "content": ("content",)}.get(key, ())
            owned = any(turn is other for other in self._of_response.values())
            if turn is not None and ((response and owned) or _says(turn, said)):
                turn = None
        if turn is None or (key != "tool_calls" and _says(turn, (key,))):
            turn = {"role": "assistant", "content": None}
            self.messages.append(turn)
        if response:
            self._of_response[response] = turn
        self._last = turn
        return turn


_SAID = ("reasoning_content", "content", "tool_calls")


def _says(message: Message, keys: tuple[str, ...]) -> bool:
    return any(message.get(key) is not None for key in keys)


def _response_of(item_id: Any) -> str | None:
    """The common part of an item's id and its response's id."""
    match = _ITEM_ID.fullmatch(item_id) if isinstance(item_id, str) else None
    return match[1] if match else None


# Fields that clients send back with an item or a part, and that say nothing more.
_IGNORED = ("phase", "parsed", "parsed_arguments", "provider_specific_fields")


def _text_parts(content: Any, at: Path, types: tuple[str, ...] = ()) -> str | list[dict[str, Any]]:
    """Text and images in the form of a chat message: one string, or several parts."""
    if isinstance(content, str):
        return content
    return content_of(_shown_parts(content, at, ("input_text", "output_text", *types)))


def _texts(parts: Any, at: Path, types: tuple[str, ...]) -> list[str]:
    return [part for part in _shown_parts(parts, at, types) if isinstance(part, str)]


def _shown_parts(parts: Any, at: Path, types: tuple[str, ...]) -> list[str | dict[str, Any]]:
    """Texts, and images as parts of a chat message."""
    if not isinstance(parts, list):
        raise wrong(at, f"must be a string or an array of parts, not {kind(parts)}")
    texts: list[str | dict[str, Any]] = []
    for index, part in enumerate(parts):
        here = (*at, index)
        type_ = object_field(here, part).get("type")
        if type_ not in types:
            raise wrong(
                (*here, "type"),
                f"is {shown(type_)}: this model reads text only; use {' or '.join(types)}",
            )
        if type_ == "input_image":
            only_keys(part, ("type", "image_url", "detail"), here, "an image")
            check_detail((*here, "detail"), part.get("detail"))
            texts.append(image_part((*here, "image_url"), part.get("image_url")))
            continue
        key = "refusal" if type_ == "refusal" else "text"
        known = ("type", key, "annotations", "logprobs")
        only_keys(part, known, here, "a text part", ignored=_IGNORED)
        texts.append(string((*here, key), part.get(key)))
    return texts


# Requests of the Responses API.
#
# `RESPONSES_FIELDS` is the complete table: a field is supported, has no effect, or is rejected by
# name. Fields with the same meaning as in chat completions use the readers of `CHAT_FIELDS`.


_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (
    _LOGPROBS,
    # Reasoning is in the answer as text; the others belong to rejected tools.
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
        completion: The parsed request.
        history: Its messages without the instructions.
        store: Whether the response can be continued by its id.
        fields: The fields that the answer repeats, as sent; tools as they are used.
    """

    completion: CompletionRequest
    history: list[Message]
    store: bool
    fields: dict[str, Any]


def read_responses_request(
    body: bytes, kept: Mapping[str, KeptResponse], service: Service
) -> ResponsesRequest:
    """Parse the request in `body`.

    Args:
        body: JSON.
        kept: The responses that can be continued, by id.
        service: Engine and renderer.

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
        history += read_items(asked, kept, images=service.renderer.vision is not None)
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
    capabilities = service.engine.capabilities
    check_top_logprobs(at, top_logprobs, capabilities)
    values["chat_template_kwargs"] = with_effort(
        values.get("chat_template_kwargs", {}),
        values.get("reasoning", {}).get("effort"),
        ("reasoning", "effort"),
        service.renderer,
    )
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
    """The name of a `CompletionRequest`'s field in the Responses API."""
    match path:
        case ("messages", *_):
            return "input"
        case ("response_format", *inside):
            return dotted(("text", "format", *inside))
        case ("tools", int(index), "function", *inside):
            return dotted(("tools", index, *inside))
    return dotted(path)


def _earlier(response_id: str | None, kept: Mapping[str, KeptResponse]) -> list[Message]:
    """The conversation of `previous_response_id`."""
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
    """Tools, and required form of the completion."""
    form: dict[str, Any] = {
        "tools": [_function(tool) for tool in values.get("tools", ())],
        "tool_choice": _choice(values.get("tool_choice")),
    }
    if values.get("parallel_tool_calls") is not None:
        form["parallel_tool_calls"] = values["parallel_tool_calls"]
    text = values.get("text", {})
    form["response_format"] = _answer_schema(text.get("format"))
    if text.get("verbosity") is not None:
        CHAT_FIELDS["verbosity"](("text", "verbosity"), text["verbosity"])
    return form


def _is_constrained(tool: Mapping[str, Any]) -> bool:
    """Whether a tool's arguments are constrained to its schema; the answer's `tools` say so.

    OpenAI's default for `strict` is true. Here it is false, because not every engine and model
    family supports schemas, and a request that did not ask for it need not fail. Only this function
    decides it.
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
    """Function tools, with the effective value of `strict`."""
    return [_tool((*at, index), tool) for index, tool in enumerate(array(at, value))]


def _tool(at: Path, tool: Any) -> dict[str, Any]:
    tool = object_field(at, tool)
    if tool.get("type") != "function":
        raise wrong(
            (*at, "type"),
            f"is {shown(tool.get('type'))}: this gateway runs no tools itself; give the model a "
            "function",
        )
    given = _TOOL(at, tool)
    name((*at, "name"), given.get("name"))
    read = {
        key: given[key] for key in ("type", "name", "description", "parameters") if key in given
    }
    return {"parameters": None, **read, "strict": _is_constrained(given)}


def _tool_choice(at: Path, value: Any) -> str | dict[str, Any]:
    """As sent; a named function has a name."""
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
    """A reader of an object whose non-empty fields are read."""

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


# Extensions of this gateway, with the same meaning as in chat completions.
_EXTENSIONS = ("top_k", "seed", "chat_template_kwargs", *RARE_FIELDS)
_NO_SUMMARY = "this gateway writes no summaries; the reasoning itself is in the answer"
_NO_STATE = "a conversation is continued by previous_response_id or by its items"

RESPONSES_FIELDS: dict[str, Reader] = {
    # Supported.
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
    # Accepted: bookkeeping of OpenAI's service, without effect on the completion.
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
    # Accepted at neutral values.
    "reasoning": _object_of(
        effort=string,
        summary=only(because=_NO_SUMMARY),
        generate_summary=only(because=_NO_SUMMARY),
        context=only("auto", because="what of earlier reasoning is shown is up to the template"),
        mode=only("standard", because="there is one mode here"),
    ),
    "background": only(False, because="a response is answered while its caller waits"),
    "truncation": only("disabled", because="a conversation that is too long is refused, not cut"),
    "context_management": only([], because="a conversation that is too long is refused, not cut"),
    # Rejected.
    "background_options": only(because="a response is answered while its caller waits"),
    "conversation": only(because=_NO_STATE),
    "prompt": only(because="there are no stored prompts here; send instructions and input"),
    "moderation": only(because="there is no moderation here"),
    "access_programs": only(because="there are none here"),
    "image": only(because="the model reads text only"),
}


class ResponsesExchange:
    """`POST /v1/responses`.

    A stream sends reasoning and message when they are certain, and each call whole, at the end.
    Completed items are also announced at the end, because some models continue their reasoning
    after a message. Log-probs, if requested, come with the message's end: a token is not always a
    piece of text.
    """

    def __init__(self, session: Session, role: str | None, body: bytes) -> None:
        self._asked = read_responses_request(body, session.responses, session.service)
        self._kept = session.responses
        self.completion = Completion(
            session, role, self._asked.completion, dialect="responses", prefix=RESPONSE_PREFIX
        )
        self._events = 0
        self._open: list[str] = []  # types of the items that a stream has begun, in order

    def answer(self, answer: Answer) -> dict[str, Any]:
        (choice,) = answer.choices
        items = output_items(choice, self.completion.id, self._logprobs(choice))
        items.sort(key=lambda item: [*self._open, item["type"]].index(item["type"]))
        if self._asked.store:
            self._kept[self.completion.id] = KeptResponse(
                [*self._asked.history, choice.message],
                {item["id"]: item for item in items},
            )
        cut = choice.finish_reason == "length"
        return {
            **self._frame("incomplete" if cut else "completed"),
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": items,
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": answer.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": answer.completion_tokens,
                # Those before the end of the reasoning, including its tags.
                "output_tokens_details": {
                    "reasoning_tokens": self._tokens_of(choice, _reasoning_end(choice))
                },
                "total_tokens": answer.prompt_tokens + answer.completion_tokens,
            },
        }

    def opening(self) -> Sequence[bytes]:
        return [
            self._event(f"response.{status}", response=self._frame("in_progress"))
            for status in ("created", "in_progress")
        ]

    def delta(self, index: int, delta: Delta) -> Sequence[bytes]:
        if delta.reasoning is not None:
            return self._grow("reasoning", delta.reasoning)
        if delta.content is not None:
            return self._grow("message", delta.content)
        return []

    def closing(self, answer: Answer) -> Sequence[bytes]:
        response = self.answer(answer)
        events = [
            event
            for index, item in enumerate(response["output"])
            for event in (
                self._call(index, item)
                if item["type"] == "function_call"
                else self._done(index, item)
            )
        ]
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def failure(self, error: RequestError) -> bytes:
        too_long = error.code == "context_length_exceeded"
        code = "invalid_prompt" if too_long else "server_error"
        frame = {**self._frame("failed"), "error": {"code": code, "message": error.message}}
        return self._event("response.failed", response=frame)

    @staticmethod
    def error(error: RequestError) -> bytes:
        return error.body(as_sent)

    def _grow(self, type_: str, text: str) -> list[bytes]:
        """Events for new text of a message or the reasoning, including its beginning."""
        events = []
        item = new_item(type_, self.completion.id.removeprefix(RESPONSE_PREFIX))
        part, details = _EMPTY_PARTS[type_], _TEXT_DETAILS[type_]
        if type_ not in self._open:
            self._open.append(type_)
            at = self._open.index(type_)
            events.append(self._event("response.output_item.added", output_index=at, item=item))
            events.append(self._part_event("response.content_part.added", at, item, part=part))
        at = self._open.index(type_)
        kind = f"response.{part['type']}.delta"
        events.append(self._part_event(kind, at, item, delta=text, **details))
        return events

    def _done(self, at: int, item: Item) -> list[bytes]:
        """Events for a complete message or reasoning."""
        (part,) = item["content"]
        details = {"text": part["text"]}
        if item["type"] == "message":
            details["logprobs"] = part["logprobs"]
        return [
            self._part_event(f"response.{part['type']}.done", at, item, **details),
            self._part_event("response.content_part.done", at, item, part=part),
            self._event("response.output_item.done", output_index=at, item=item),
        ]

    def _call(self, at: int, item: Item) -> list[bytes]:
        """Events for a complete call."""
        begun = {**item, "arguments": "", "status": "in_progress"}
        where = {"output_index": at, "item_id": item["id"]}
        kind, arguments = "response.function_call_arguments", item["arguments"]
        return [
            self._event("response.output_item.added", output_index=at, item=begun),
            self._event(f"{kind}.delta", **where, delta=arguments),
            self._event(f"{kind}.done", **where, arguments=arguments),
            self._event("response.output_item.done", output_index=at, item=item),
        ]

    def _part_event(self, type_: str, at: int, item: Item, **details: Any) -> bytes:
        where = {"output_index": at, "item_id": item["id"], "content_index": 0}
        return self._event(type_, **where, **details)

    def _event(self, type_: str, **details: Any) -> bytes:
        number, self._events = self._events, self._events + 1
        return sse({"type": type_, "sequence_number": number, **details}, event=type_)

    def _logprobs(self, choice: Choice) -> list[dict[str, Any]]:
        """The log-probs of the tokens of the message."""
        content = choice.parsed.content
        if not self.completion.request.logprobs or content is None:
            return []
        text = choice.text
        after = _reasoning_end(choice)
        start = text.find(content, after)
        # A message in several pieces, around calls, is everything after the reasoning.
        spans = (after, len(text)) if start < 0 else (start, start + len(content))
        first, last = (self._tokens_of(choice, end) for end in spans)
        entries = chat_logprobs(self.completion.service.renderer, choice.generation)["content"][
            first:last
        ]
        for entry in entries:
            for token in (entry, *entry["top_logprobs"]):
                token["bytes"] = token["bytes"] or []  # must not be null here if unknown
        return list(entries)

    def _tokens_of(self, choice: Choice, end: int) -> int:
        """Number of leading tokens needed for a choice's text up to `end`."""
        ids, decode = choice.generation.completion_ids, self.completion.service.renderer.decode
        text = choice.text[:end]
        return bisect_left(
            range(len(ids)), True, key=lambda count: decode(ids[:count]).startswith(text)
        )

    def _frame(self, status: str) -> dict[str, Any]:
        """The response without the model's output."""
        fields, defaults = self._asked.fields, self.completion.session.defaults
        return {
            "id": self.completion.id,
            "object": "response",
            "created_at": int(self.completion.started),
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "max_tool_calls": None,
            "model": self.completion.service.model_name,
            "output": [],
            "service_tier": None,
            "truncation": "disabled",
            "usage": None,
            **_REPEATED,
            "temperature": defaults.temperature,
            "top_p": defaults.top_p,
            **fields,
            "text": {**_REPEATED["text"], **fields.get("text", {})},
        }


_REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "user": None,
}
"""Values that the answer repeats for fields that the request does not set."""


def _reasoning_end(choice: Choice) -> int:
    """End of the reasoning in a choice's text; 0 without it, or if it is in several pieces."""
    reasoning = choice.parsed.reasoning
    start = choice.text.find(reasoning) if reasoning else -1
    return start + len(reasoning or "") if start >= 0 else 0


def output_items(choice: Choice, response_id: str, logprobs: list[dict[str, Any]]) -> list[Item]:
    """A choice as the output of the response with this id.

    Args:
        choice: As committed.
        response_id: "resp_R".
        logprobs: Of the message's text; empty where they were not asked for.
    """
    parsed, own = choice.parsed, response_id.removeprefix(RESPONSE_PREFIX)
    items: list[Item] = []
    if parsed.reasoning is not None:
        text = {"type": "reasoning_text", "text": parsed.reasoning}
        items.append({**new_item("reasoning", own), "content": [text]})
    if parsed.content is not None:
        part = {**text_part(parsed.content), "logprobs": logprobs}
        items.append({**new_item("message", own), "content": [part]})
    for place, (id_, call) in enumerate(zip(choice.tool_call_ids, parsed.tool_calls, strict=True)):
        item = {"type": "function_call", "id": f"fc_{own}_{place}", "call_id": id_}
        items.append({**item, "name": call.name, "arguments": call.arguments})
    for item in items:
        item["status"] = "completed"
    if choice.finish_reason == "length" and items and not parsed.tool_calls:
        items[-1]["status"] = "incomplete"
    return items


def new_item(type_: str, own: str) -> Item:
    """A message or reasoning item before its first word; its id ends with `own`."""
    if type_ == "reasoning":
        item = {"type": "reasoning", "id": f"rs_{own}", "summary": [], "content": []}
        return {**item, "encrypted_content": None, "status": "in_progress"}
    item = {"type": "message", "id": f"msg_{own}", "role": "assistant", "content": []}
    return {**item, "status": "in_progress"}


def text_part(text: str) -> dict[str, Any]:
    """The text of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


_EMPTY_PARTS = {"message": text_part(""), "reasoning": {"type": "reasoning_text", "text": ""}}
_TEXT_DETAILS: dict[str, dict[str, Any]] = {"message": {"logprobs": []}, "reasoning": {}}
