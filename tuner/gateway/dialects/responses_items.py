"""Items of the Responses API, read into the messages of chat completions.

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
from typing import Any

from tuner.gateway.fields import object_field, only_keys, string
from tuner.gateway.model.template import Message, content_of
from tuner.gateway.request_error import FieldError, Path, kind, shown, wrong
from tuner.gateway.sessions import KeptResponse

Item = dict[str, Any]

RESPONSE_PREFIX = "resp_"
_ITEM_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{24})(?:_\d+)?")  # OpenAI's own are longer
_ROLES = ("user", "assistant", "system", "developer")


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
        reader.add(item, ("input", index))
    return reader.messages


class _ItemReader:
    """Puts items together to messages."""

    def __init__(self, kept: Mapping[str, KeptResponse]) -> None:
        self.messages: list[Message] = []
        self._kept = kept
        self._last: Message | None = None  # the assistant message that the next item may belong to
        self._of_response: dict[str, Message] = {}

    def add(self, item: Any, at: Path) -> None:
        type_ = object_field(at, item).get("type")
        if type_ is None:  # OpenAI's types leave it out for these two
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
                f"is {shown(type_)}: this gateway knows items of type {', '.join(readers)}",
            )
        read, known = readers[type_]
        only_keys(item, ("type", "id", *known), at, f"an item of type {type_!r}")
        if item.get("id") is not None:
            string((*at, "id"), item["id"])
        read(item, at)

    def _message(self, item: Item, at: Path) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise wrong((*at, "role"), f"is {shown(role)}: use one of {', '.join(_ROLES)}")
        content = _text_parts(item.get("content"), (*at, "content"))
        if role == "assistant":
            self._turn(item, "content")["content"] = content
        else:
            self._last = None
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
        elif item.get("encrypted_content") is not None:
            raise wrong(
                (*at, "encrypted_content"),
                "cannot be read here: send the item's content, or leave the item out",
            )

    def _call(self, item: Item, at: Path) -> None:
        id_, name, arguments = (
            string((*at, key), item.get(key)) for key in ("call_id", "name", "arguments")
        )
        function = {"name": name, "arguments": arguments}
        calls = self._turn(item, "tool_calls").setdefault("tool_calls", [])
        calls.append({"id": id_, "type": "function", "function": function})

    def _output(self, item: Item, at: Path) -> None:
        call_id = string((*at, "call_id"), item.get("call_id"))
        output = _text_parts(item.get("output"), (*at, "output"))
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


def _text_parts(content: Any, at: Path) -> str | list[dict[str, Any]]:
    """Text as a chat message has it: one string, or several text parts."""
    if isinstance(content, str):
        return content
    return content_of(_texts(content, at, ("input_text", "output_text")))


def _texts(parts: Any, at: Path, types: tuple[str, ...]) -> list[str]:
    if not isinstance(parts, list):
        raise wrong(at, f"must be a string or an array of parts, not {kind(parts)}")
    texts = []
    for index, part in enumerate(parts):
        here = (*at, index)
        type_ = object_field(here, part).get("type")
        if type_ not in types:
            raise wrong(
                (*here, "type"),
                f"is {shown(type_)}: this model reads text only; use {' or '.join(types)}",
            )
        only_keys(part, ("type", "text", "annotations", "logprobs"), here, "a text part")
        texts.append(string((*here, "text"), part.get("text")))
    return texts
