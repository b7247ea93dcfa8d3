"""Items of the Responses API: read into chat messages, and written from a choice.

What chat completions say in one assistant message, the Responses API says in several items:

    {"role": "assistant",                         {"type": "reasoning", "id": "rs_R"}
     "reasoning_content": ..., "content": ...,    {"type": "message", "id": "msg_R"}
     "tool_calls": [...]}                         {"type": "function_call", "id": "fc_R_0"}, ...

The items of response `resp_R` have ids that end with its own, so they find together again, in any
order. Items without such ids (clients may leave them out) are one message as far as they can be.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tuner.gateway.answer import Choice
from tuner.gateway.errors import RequestError, kind, shown
from tuner.gateway.fields import string
from tuner.gateway.messages import Message

Item = dict[str, Any]

RESPONSE_PREFIX = "resp_"
_ITEM_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{24})(?:_\d+)?")  # OpenAI's own are longer
_ROLES = ("user", "assistant", "system", "developer")


@dataclass(frozen=True)
class KeptResponse:
    """A response that a session can go on from.

    Attributes:
        messages: The conversation with the answer, without instructions, which are not carried on.
        items: The answer's items by id.
    """

    messages: list[Message]
    items: dict[str, Item]


def read_items(items: list[Any], kept: Mapping[str, KeptResponse]) -> list[Message]:
    """The chat messages that `input` says.

    Args:
        items: As sent.
        kept: The session's responses by id, which items may refer to.

    Raises:
        RequestError: 400 that names the item and the field; 404: a reference leads nowhere.
    """
    reader = _ItemReader(kept)
    for index, item in enumerate(items):
        reader.add(item, f"input[{index}]")
    return reader.messages


class _ItemReader:
    """Puts items together to messages."""

    def __init__(self, kept: Mapping[str, KeptResponse]) -> None:
        self.messages: list[Message] = []
        self._kept = kept
        self._last: Message | None = None  # the assistant message that the next item may belong to
        self._of_response: dict[str, Message] = {}

    def add(self, item: Any, at: str) -> None:
        if not isinstance(item, dict):
            raise RequestError(f"{at} must be an object, not {kind(item)}", param=at)
        type_ = item.get("type")
        if type_ is None:  # OpenAI's types leave it out for these two
            type_ = "message" if "role" in item else "item_reference" if "id" in item else None
        readers: dict[Any, tuple[Callable[[Item, str], None], tuple[str, ...]]] = {
            "message": (self._message, ("role", "content", "status")),
            "reasoning": (self._reasoning, ("summary", "content", "encrypted_content", "status")),
            "function_call": (self._call, ("call_id", "name", "arguments", "status")),
            "function_call_output": (self._output, ("call_id", "output", "status")),
            "item_reference": (self._reference, ()),
        }
        if not isinstance(type_, str) or type_ not in readers:
            raise RequestError(
                f"{at}.type is {shown(type_)}: this gateway knows items of type "
                f"{', '.join(readers)}",
                param=f"{at}.type",
            )
        read, known = readers[type_]
        _only_known(item, at, ("type", "id", *known), f"an item of type {type_!r}")
        if item.get("id") is not None:
            string(f"{at}.id", item["id"])
        read(item, at)

    def _message(self, item: Item, at: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise RequestError(
                f"{at}.role is {shown(role)}: use one of {', '.join(_ROLES)}", param=f"{at}.role"
            )
        content = _text_parts(item.get("content"), f"{at}.content")
        if role == "assistant":
            self._turn(item, "content")["content"] = content
        else:
            self._last = None
            self.messages.append({"role": role, "content": content})

    def _reasoning(self, item: Item, at: str) -> None:
        content, summary = (
            _texts(item.get(name) or [], f"{at}.{name}", (type_,))
            for name, type_ in (("content", "reasoning_text"), ("summary", "summary_text"))
        )
        own = self._item(item.get("id"))
        if not content and own is not None and own["type"] == "reasoning":
            content = [part["text"] for part in own["content"]]
        texts = content or summary
        if texts:
            self._turn(item, "reasoning_content")["reasoning_content"] = "\n".join(texts)
        elif item.get("encrypted_content") is not None:
            raise RequestError(
                f"{at}.encrypted_content cannot be read here: send the item's content, or leave "
                "the item out",
                param=f"{at}.encrypted_content",
            )

    def _call(self, item: Item, at: str) -> None:
        id_, name, arguments = (
            string(f"{at}.{key}", item.get(key)) for key in ("call_id", "name", "arguments")
        )
        function = {"name": name, "arguments": arguments}
        calls = self._turn(item, "tool_calls").setdefault("tool_calls", [])
        calls.append({"id": id_, "type": "function", "function": function})

    def _output(self, item: Item, at: str) -> None:
        call_id = string(f"{at}.call_id", item.get("call_id"))
        output = _text_parts(item.get("output"), f"{at}.output")
        self._last = None
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": output})

    def _reference(self, item: Item, at: str) -> None:
        known = self._item(item.get("id"))
        if known is None:
            raise RequestError(
                f"{at}.id is {shown(item.get('id'))}: no stored response of this rollout has such "
                "an item; send the item itself",
                status=404,
                param=f"{at}.id",
            )
        self.add(known, at)

    def _item(self, id_: Any) -> Item | None:
        """An item of a kept response."""
        response = self._kept.get(RESPONSE_PREFIX + (_response_of(id_) or ""))
        return None if response is None else response.items.get(id_)

    def _turn(self, item: Item, key: str) -> Message:
        """The assistant message that an item belongs to, which will give it `key`."""
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
    """What the id of an item and that of its response have in common."""
    match = _ITEM_ID.fullmatch(item_id) if isinstance(item_id, str) else None
    return match[1] if match else None


def _only_known(fields: Item, at: str, known: tuple[str, ...], what: str) -> None:
    for key, value in fields.items():
        # Clients echo an item with every field of their own type; empty ones say nothing.
        if key not in known and value is not None and value != []:
            raise RequestError(
                f"{at}.{key} is not a field of {what} that this gateway knows "
                f"({', '.join(known)}): leave it out",
                param=f"{at}.{key}",
            )


def _text_parts(content: Any, at: str) -> str | list[dict[str, Any]]:
    """Text as a chat message has it: one string, or several text parts."""
    if isinstance(content, str):
        return content
    texts = _texts(content, at, ("input_text", "output_text"))
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts]


def _texts(parts: Any, at: str, types: tuple[str, ...]) -> list[str]:
    if not isinstance(parts, list):
        raise RequestError(
            f"{at} must be a string or an array of parts, not {kind(parts)}", param=at
        )
    texts = []
    for index, part in enumerate(parts):
        here = f"{at}[{index}]"
        if not isinstance(part, dict):
            raise RequestError(f"{here} must be an object, not {kind(part)}", param=here)
        if part.get("type") not in types:
            raise RequestError(
                f"{here}.type is {shown(part.get('type'))}: this model reads text only; use "
                f"{' or '.join(types)}",
                param=f"{here}.type",
            )
        _only_known(part, here, ("type", "text", "annotations", "logprobs"), "a text part")
        texts.append(string(f"{here}.text", part.get("text")))
    return texts


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
        items.append({**new_call(own, place, id_, call.name), "arguments": call.arguments})
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


def new_call(own: str, place: int, call_id: str, name: str) -> Item:
    """A call before its arguments."""
    item = {"type": "function_call", "id": f"fc_{own}_{place}", "call_id": call_id, "name": name}
    return {**item, "arguments": "", "status": "in_progress"}


def text_part(text: str) -> dict[str, Any]:
    """The text of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
