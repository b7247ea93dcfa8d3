"""Anthropic's messages: the answer, whole or as events. `anthropic_request.py` reads the request.

Reasoning is a thinking block, the content a text block, each tool call a tool_use block, in this
order. The ids of tool calls are those of chat completions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from tuner.gateway.completion import Completion, chat_prompt
from tuner.gateway.completion_request import Answer, Choice
from tuner.gateway.dialects.anthropic_request import read_count_request, read_messages_request
from tuner.gateway.model.parsing import Delta
from tuner.gateway.request_error import RequestError
from tuner.gateway.service import in_turn, sse
from tuner.gateway.sessions import Session

Block = dict[str, Any]


class MessagesExchange:
    """`POST /v1/messages`.

    A stream tells reasoning and text as they are certain, and the tool calls after them, each in
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
        # What the engine has cached is not known yet: the counts at the end replace these.
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
        return json.dumps(
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
        """What a thinking block is signed with, which clients send back: the id of its call."""
        return self.completion.call_id(0)

    def _within(self, block: Block) -> list[bytes]:
        """The events that make a block of this type the open one."""
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
    """The answer to `POST /v1/messages/count_tokens`: the prompt that a request would have now.

    Raises:
        RequestError: The request cannot be honoured.
    """
    request = read_count_request(body, session.service)
    session.check_model(request.model)
    prompt = await in_turn(session.turns, lambda: chat_prompt(session, request), long=request.long)
    return {"input_tokens": len(prompt.ids)}


def models(model_name: str) -> dict[str, Any]:
    """The body of the list of models, which holds the one."""
    model = {
        "type": "model",
        "id": model_name,
        "display_name": model_name,
        "created_at": "1970-01-01T00:00:00Z",
    }
    return {"data": [model], "has_more": False, "first_id": model_name, "last_id": model_name}


def _tool_uses(choice: Choice) -> list[Block]:
    return [
        {"type": "tool_use", "id": id, "name": call.name, "input": _input(call.arguments)}
        for id, call in zip(choice.tool_call_ids, choice.parsed.tool_calls, strict=True)
    ]


def _input(arguments: str) -> Any:
    """The object that a call's arguments spell, as a client can read it.

    The model can write what JSON's grammar allows and a client's parser does not: numbers beyond
    the range of floats become the largest one, halves of surrogate pairs question marks.
    """
    value = json.loads(arguments, parse_float=_finite)
    if "\\u" in arguments:
        value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    return value


def _finite(number: str) -> float:
    return max(-_LARGEST, min(_LARGEST, float(number)))


_LARGEST = sys.float_info.max


def _stop(choice: Choice) -> dict[str, Any]:
    """Why the answer ended; tool calls count for more than the string that ended them."""
    reason = "max_tokens" if choice.finish_reason == "length" else "end_turn"
    string = choice.stop_string
    if choice.finish_reason == "tool_calls":
        reason, string = "tool_use", None
    elif string is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": string, "stop_details": None}


def _usage(answer: Answer) -> dict[str, int]:
    """Token counts in Anthropic's sense: input_tokens are those that were not cached."""
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
