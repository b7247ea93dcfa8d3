"""OpenAI's chat completions: the answer, whole or as chunks. `request.py` reads the request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuner.engines.base import Generation
from tuner.gateway.answer import Answer, Choice, assistant_message
from tuner.gateway.dialect import Exchange, sse
from tuner.gateway.message_stream import Delta
from tuner.gateway.renderer import ChatRenderer
from tuner.gateway.request import parse_chat_request

if TYPE_CHECKING:
    from tuner.gateway.gateway import Gateway
    from tuner.gateway.session import Session

LOWEST_LOGPROB = -9999.0  # what OpenAI's API reports for "almost impossible"; JSON has no -inf
DONE = b"data: [DONE]\n\n"


class ChatExchange(Exchange):
    """`POST /v1/chat/completions`.

    A stream's chunks carry text as it is certain and each tool call whole. Log-probs and token ids,
    if asked for, come with the last chunk of their choice: a token is not always a piece of text.
    """

    dialect = "chat"
    prefix = "chatcmpl-"

    @classmethod
    def read(cls, gateway: Gateway, session: Session, body: bytes) -> ChatExchange:
        return cls(gateway, parse_chat_request(body, gateway.engine.capabilities))

    def answer(self, answer: Answer) -> dict[str, Any]:
        choices = [
            {
                "index": choice.index,
                "message": assistant_message(choice),
                "finish_reason": choice.finish_reason,
                **self._details(choice),
            }
            for choice in answer.choices
        ]
        body: dict[str, Any] = {
            "id": self.completion.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model_name,
            "choices": choices,
            "usage": usage(answer),
        }
        if self.request.return_token_ids:
            body["prompt_token_ids"] = answer.choices[0].prompt_ids
        return body

    def opening(self) -> Sequence[bytes]:
        start = {"role": "assistant", "content": ""}
        return [self._chunk(index, start) for index in range(self.request.n)]

    def delta(self, index: int, delta: Delta) -> Sequence[bytes]:
        if delta.tool_call is not None:
            place, call = delta.tool_call
            tool_call = {
                "index": place,
                "id": self.completion.tool_call_id(index, place),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            return [self._chunk(index, {"tool_calls": [tool_call]})]
        if delta.reasoning is not None:
            return [self._chunk(index, {"reasoning_content": delta.reasoning})]
        return [self._chunk(index, {"content": delta.content})]

    def closing(self, answer: Answer) -> Sequence[bytes]:
        events = [
            self._chunk(choice.index, {}, choice.finish_reason, **self._details(choice))
            for choice in answer.choices
        ]
        if self.request.include_usage:
            events.append(sse({**self._frame(), "choices": [], "usage": usage(answer)}))
        return [*events, DONE]

    def _details(self, choice: Choice) -> dict[str, Any]:
        details: dict[str, Any] = {"logprobs": None}
        if self.request.logprobs:
            details["logprobs"] = chat_logprobs(self.renderer, choice.generation)
        if self.request.return_token_ids:
            details["token_ids"] = choice.generation.completion_ids
        return details

    def _chunk(
        self, index: int, delta: dict[str, Any], finish_reason: str | None = None, **details: Any
    ) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, **details}
        return sse({**self._frame(), "choices": [choice]})

    def _frame(self) -> dict[str, Any]:
        return {
            "id": self.completion.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model_name,
        }


def chat_logprobs(renderer: ChatRenderer, generation: Generation) -> dict[str, Any]:
    """The log-probs of a completion as chat completions report them."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": renderer.token_text(token_id),
            "logprob": reported(logprob),
            "bytes": renderer.token_bytes(token_id),
        }

    tops = generation.top_logprobs or ((),) * len(generation.completion_ids)
    return {
        "content": [
            {**entry(token_id, logprob), "top_logprobs": [entry(*pair) for pair in top]}
            for token_id, logprob, top in zip(
                generation.completion_ids, generation.logprobs, tops, strict=True
            )
        ],
        "refusal": None,
    }


def reported(logprob: float) -> float:
    """A log-prob as JSON can hold it."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


def usage(answer: Answer) -> dict[str, Any]:
    """Token counts in the form of chat completions."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }
