"""Chat models of AgentScope made by the user, with their calls recorded."""

from __future__ import annotations

import copy
import inspect
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from functools import cache, wraps
from typing import Any, cast

from tuner.gateway import Session
from tuner.gateway.relay import call_elsewhere
from tuner.rollouts.agentscope1 import ReadsStreams
from tuner.rollouts.without_framework import SessionHandle
from tuner.traces import Call, Usage

_SESSION = "_tuner_session"
_WATCHED = ("__call__", "generate_structured_output")  # the second only in AgentScope 2.x


def is_chat_model(value: Any) -> bool:
    """Whether it is a chat model of AgentScope, 1.x or 2.x; imports neither."""
    return any(
        base.__name__ == "ChatModelBase" and base.__module__.split(".")[0] == "agentscope"
        for base in type(value).__mro__
    )


def name_of(model: Any) -> str:
    """The model name of an AgentScope chat model: `model_name` in 1.x, `model` in 2.x."""
    return str(getattr(model, "model_name", None) or model.model)


def observed(model: Any, session: Session) -> Any:
    """A copy of the chat model for one rollout, whose session records its calls.

    It is a shallow copy, so clients and settings are shared, and its class is a subclass of the
    model's. A call fails if the session has ended or has reached its limits.
    """
    watched = copy.copy(model)
    watched.__class__ = _watched_class(model.__class__)
    setattr(watched, _SESSION, session)
    return watched


def session_of(model: Any) -> Session:
    """The session of the model that a workflow was given."""
    found = model.session if isinstance(model, SessionHandle) else getattr(model, _SESSION)
    return cast("Session", found)


@cache
def _watched_class(base: type) -> type:
    methods = {name: _watched(getattr(base, name)) for name in _WATCHED if hasattr(base, name)}
    reads = (ReadsStreams,) if hasattr(base, "_parse_openai_stream_response") else ()
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (*reads, base), {**names, **methods})


def _watched(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        session = session_of(self)
        asked = _ObservedCall(self, session, inspect.signature(method).bind(self, *args, **kwargs))
        with session.in_flight.here():
            answer = await method(self, *args, **kwargs)
        if isinstance(answer, AsyncGenerator):
            return asked.handed_on(answer)
        session.commit([asked.call(answer, answer.usage)])
        return answer

    return call


class _ObservedCall:
    """One call of a chat model.

    Args:
        model: The model.
        session: Records the call.
        given: Its arguments.
    """

    def __init__(self, model: Any, session: Session, given: inspect.BoundArguments) -> None:
        arguments = {**given.arguments, **given.arguments.get("kwargs", {})}
        self._session = session
        self._id = session.admit([()], 1)[0]
        self._request: dict[str, Any] = {
            **_settings(model),
            **{name: arguments[name] for name in _SAMPLING if name in arguments},
            "messages": [_plain(message) for message in arguments.get("messages", ())],
            "tools": arguments.get("tools"),
        }
        self._started, self._clock = time.time(), time.perf_counter()

    def call(self, answer: Any, usage: Any, *, undelivered: bool = False) -> Call:
        """The record of an answer, complete or partial."""
        message = _message(answer.content)
        ended = "tool_calls" if "tool_calls" in message else "stop"
        return call_elsewhere(
            self._request,
            message,
            id=self._id,
            finish_reason="abandoned" if undelivered else ended,
            started=self._started,
            seconds=time.perf_counter() - self._clock,
            undelivered=undelivered,
            billed=Usage(usage.input_tokens, usage.output_tokens) if usage else Usage(),
        )

    async def handed_on(self, answers: AsyncGenerator[Any, None]) -> AsyncIterator[Any]:
        """A stream, passed through; it is recorded before its end is seen."""
        recording, latest, usage = self._session.recording, None, None
        self._request["stream"] = True

        def abandoned() -> list[Call]:
            return [] if latest is None else [self.call(latest, usage, undelivered=True)]

        with recording.carrying(abandoned):
            try:
                while True:
                    with self._session.in_flight.here():
                        answer = await anext(answers, None)
                    if answer is None:
                        break
                    latest, usage = answer, answer.usage or usage
                    yield answer
            finally:
                await answers.aclose()
            if latest is not None and abandoned in recording.carried:
                # Everything recorded as abandoned so far is now committed.
                recording.carried.remove(abandoned)
                self._session.commit([self.call(latest, usage)])


_SAMPLING = ("max_completion_tokens", "max_tokens", "temperature", "top_p")


def _settings(model: Any) -> Mapping[str, Any]:
    """Its sampling settings, as far as set: a dict in 1.x, an object in 2.x."""
    said = getattr(model, "generate_kwargs", None) or getattr(model, "parameters", None) or {}
    values = said if isinstance(said, Mapping) else vars(said)
    return {name: values[name] for name in _SAMPLING if values.get(name) is not None}


def _plain(value: Any) -> Any:
    """A message or block as plain values: a dict in 1.x, an object in 2.x."""
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def _message(content: Any) -> dict[str, Any]:
    """An answer's content, blocks or a structured output, in the form of chat completions."""
    if isinstance(content, str | Mapping):
        text = content if isinstance(content, str) else json.dumps(content, default=str)
        return {"role": "assistant", "content": text}
    blocks = [_plain(block) for block in content]
    said = {
        kind: "".join(block[kind] for block in blocks if block["type"] == kind)
        for kind in ("text", "thinking")
    }
    message: dict[str, Any] = {"role": "assistant", "content": said["text"]}
    if said["thinking"]:
        message["reasoning_content"] = said["thinking"]
    if tools := [block for block in blocks if block["type"] in ("tool_use", "tool_call")]:
        message["tool_calls"] = [_tool_call(block) for block in tools]
    return message


def _tool_call(block: Mapping[str, Any]) -> dict[str, Any]:
    given = block.get("raw_input") or block["input"]
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    function = {"name": block["name"], "arguments": text}
    return {"id": block["id"], "type": "function", "function": function}
