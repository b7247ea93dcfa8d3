"""OpenAI's Responses API: the answer, whole or as events. `responses_request.py` reads requests."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from tuner.gateway.completion import Completion
from tuner.gateway.completion_request import Answer, Choice
from tuner.gateway.dialects.chat import chat_logprobs
from tuner.gateway.dialects.responses_items import RESPONSE_PREFIX, Item
from tuner.gateway.dialects.responses_request import as_sent, read_responses_request
from tuner.gateway.model.parsing import Delta
from tuner.gateway.request_error import RequestError
from tuner.gateway.service import sse
from tuner.gateway.sessions import KeptResponse, Session


class ResponsesExchange:
    """`POST /v1/responses`.

    A stream tells reasoning and message as they are certain, and each call whole, at the end. What
    is done is said at the end too, because some models go on with their reasoning after a message.
    Log-probs, if asked for, come with the message's end: a token is not always a piece of text.
    """

    def __init__(self, session: Session, role: str | None, body: bytes) -> None:
        capabilities = session.service.engine.capabilities
        self._asked = read_responses_request(body, session.responses, capabilities)
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
                # Those before the end of the reasoning: its tags count.
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
        """A message or the reasoning has grown by `text`; the first time it is begun."""
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
        """A message or the reasoning is complete."""
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
        """A call, whole."""
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
        """The log-probs of the tokens that spell the message."""
        content = choice.parsed.content
        if not self.completion.request.logprobs or content is None:
            return []
        text = choice.text
        after = _reasoning_end(choice)
        start = text.find(content, after)
        # A message in several pieces, around calls, is all that follows the reasoning.
        spans = (after, len(text)) if start < 0 else (start, start + len(content))
        first, last = (self._tokens_of(choice, end) for end in spans)
        entries = chat_logprobs(self.completion.service.renderer, choice.generation)["content"][
            first:last
        ]
        for entry in entries:
            for token in (entry, *entry["top_logprobs"]):
                token["bytes"] = token["bytes"] or []  # not null here, where they are not known
        return list(entries)

    def _tokens_of(self, choice: Choice, end: int) -> int:
        """How many tokens, from the first on, are needed to spell a choice's text up to `end`."""
        ids, decode = choice.generation.completion_ids, self.completion.service.renderer.decode
        text = choice.text[:end]
        return bisect_left(
            range(len(ids)), True, key=lambda count: decode(ids[:count]).startswith(text)
        )

    def _frame(self, status: str) -> dict[str, Any]:
        """The response without what the model says."""
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
"""What the answer repeats of the request, where the request does not say."""


def _reasoning_end(choice: Choice) -> int:
    """Where the reasoning ends in a choice's text; 0 without, and where it is in several pieces."""
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
