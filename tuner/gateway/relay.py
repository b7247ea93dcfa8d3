"""A gateway before a model elsewhere: the same sessions, keys and doors, another's engine.

What goes through is recorded as people read it, with the tokens that the API bills; their ids and
log-probs nobody knows, so it can be compared and never trained.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import Any, cast

import openai
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tuner.engines.base import SamplingParams
from tuner.gateway.app import Gateway
from tuner.gateway.dialects import Exchange
from tuner.gateway.dialects.chat import DONE
from tuner.gateway.request_error import FieldError, RequestError
from tuner.gateway.service import Reply, StreamReply
from tuner.gateway.sessions import Session
from tuner.traces import Call, Usage

ELSEWHERE = "sampled by a model elsewhere: the ids of its tokens are not known"
CHAT = "POST /v1/chat/completions"


class Relay(Gateway):
    """Hands chat completions on as they are; what a request does not say is the API's to decide.

    Args:
        client: Who is asked; None where workflows bring a model of their own, so that nobody is.
        model_name: The model's name there, and what requests must give as `model`.
    """

    def __init__(self, client: openai.AsyncOpenAI | None, model_name: str) -> None:
        nobody = cast(Any, None)  # nothing is generated or rendered here
        super().__init__(nobody, nobody, model_name=model_name)
        self._client = client

    async def aclose(self) -> None:
        await super().aclose()
        if self._client is not None:
            await self._client.close()

    async def _reply(
        self,
        session: Session,
        role: str | None,
        asked: str,
        kind: type[Exchange],
        headers: Mapping[str, str],
        body: bytes,
    ) -> Reply | StreamReply:
        if self._client is None:
            raise RequestError(
                f"the workflow of this rollout ({session.id}) brings a model of its own, and there "
                "is none here",
                status=404,
            )
        if asked != CHAT:
            raise RequestError(
                f"{asked} is not handed on to {self._client.base_url}: a model elsewhere is "
                "reached by POST /v1/chat/completions",
                status=404,
            )
        request = read_body(body)
        session.check_model(request["model"])
        session.admit([()], int(request.get("n") or 1))
        call = _Asked(self._client, session, role, request)
        if request.get("stream"):
            return StreamReply(call.events())
        return await call.answer()


class _Asked:
    """One request that is handed on.

    Args:
        client: Who is asked.
        session, role: Who asks.
        request: The body.
    """

    def __init__(
        self,
        client: openai.AsyncOpenAI,
        session: Session,
        role: str | None,
        request: dict[str, Any],
    ) -> None:
        self._client = client
        self._session = session
        self._role = role
        self._request = request
        self._started, self._clock = time.time(), time.perf_counter()

    async def answer(self) -> Reply:
        """The whole answer, once it is recorded."""

        async def ask() -> bytes:
            with _told_as_it_is(self._client):
                raw = await self._client.chat.completions.with_raw_response.create(
                    **self._arguments(self._request)
                )
                return bytes(raw.http_response.content)

        body = await self._session.run(ask)
        try:
            completion = ChatCompletion.model_validate_json(body)
        except ValueError as error:
            raise _unreadable(self._client, error) from None
        self._session.commit(self._calls(completion))
        return Reply(200, body)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer's chunks as they come; it is recorded before the last."""
        wants_usage = (self._request.get("stream_options") or {}).get("include_usage", False)
        options = {**(self._request.get("stream_options") or {}), "include_usage": True}
        state: Any = ChatCompletionStreamState()

        def abandoned() -> list[Call]:
            with contextlib.suppress(Exception):  # nothing came yet
                return self._calls(state.current_completion_snapshot, undelivered=True)
            return []

        with self._session.recording.carrying(abandoned):
            try:
                async for chunk in self._chunks({**self._request, "stream_options": options}):
                    state.handle_chunk(chunk)
                    if chunk.choices or wants_usage:
                        yield f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n".encode()
            except RequestError as error:
                yield b"data: " + error.body() + b"\n\n"
                return
            calls = self._calls(state.current_completion_snapshot)
            # What was abandoned until here is what is committed now.
            self._session.recording.carried.remove(abandoned)
            self._session.commit(calls)
        yield DONE

    async def _chunks(self, request: dict[str, Any]) -> AsyncIterator[ChatCompletionChunk]:
        async def ask() -> Any:
            with _told_as_it_is(self._client):
                return await self._client.chat.completions.create(**self._arguments(request))

        stream = await self._session.run(ask)
        try:
            while (chunk := await self._session.run(lambda: _next(stream))) is not None:
                yield chunk
        except openai.OpenAIError as error:
            raise _unreadable(self._client, error) from None
        finally:
            await stream.close()

    def _arguments(self, request: dict[str, Any]) -> dict[str, Any]:
        """The body for the library, which checks nothing that it is to add as it is."""
        own = {"model", "messages", "stream"}
        return {
            **{name: request[name] for name in own if name in request},
            "extra_body": {name: value for name, value in request.items() if name not in own},
        }

    def _calls(self, completion: ChatCompletion, *, undelivered: bool = False) -> list[Call]:
        """What is recorded: a call for each choice, of which the first has what was billed."""
        said = completion.usage
        billed = Usage() if said is None else Usage(said.prompt_tokens, said.completion_tokens)
        return [
            call_elsewhere(
                self._request,
                choice.message.model_dump(mode="json", exclude_none=True),
                id=f"{completion.id}-{choice.index}",
                finish_reason="abandoned" if undelivered else choice.finish_reason or "stop",
                started=self._started,
                seconds=time.perf_counter() - self._clock,
                role=self._role,
                undelivered=undelivered,
                billed=Usage() if number else billed,
            )
            for number, choice in enumerate(completion.choices)
        ]


def call_elsewhere(request: Mapping[str, Any], response: dict[str, Any], **known: Any) -> Call:
    """A call that a model elsewhere answered.

    Args:
        request: As chat completions have it.
        response: The assistant message.
        known: The other fields of the call.
    """
    return Call(
        prompt_ids=(),
        completion_ids=(),
        logprobs=(),
        versions=(),
        sampling=sampling_said(request),
        messages=request["messages"],
        tools=request.get("tools") or [],
        response=response,
        streamed=bool(request.get("stream")),
        invalid=ELSEWHERE,
        **known,
    )


def read_body(body: bytes) -> dict[str, Any]:
    """The body of a chat completion, of which we read little and hand on all."""
    try:
        request = json.loads(body)
    except ValueError as error:
        raise FieldError(f"the body is no JSON: {error}", path=()) from None
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
        raise FieldError("the body has no messages: send a chat completion", path=("messages",))
    if not isinstance(request.get("model"), str):
        raise FieldError("the body has no model: send its name", path=("model",))
    return request


def sampling_said(request: Mapping[str, Any]) -> SamplingParams:
    """What a request says; the rest is as the API has it."""
    limit = request.get("max_completion_tokens") or request.get("max_tokens") or 0
    said = {name: request.get(name) for name in ("temperature", "top_p")}
    own = {name: value for name, value in said.items() if value is not None}
    return SamplingParams(max_tokens=limit, **own)


async def _next(stream: Any) -> ChatCompletionChunk | None:
    return await anext(aiter(stream), None)


@contextlib.contextmanager
def _told_as_it_is(client: openai.AsyncOpenAI) -> Iterator[None]:
    """While the block runs an error of the API becomes a `RequestError` with its own words."""
    try:
        yield
    except openai.APIStatusError as error:
        raise RequestError(
            f"{client.base_url} answered {error.status_code}: {error.message}",
            status=error.status_code,
        ) from None
    except openai.OpenAIError as error:
        raise _unreadable(client, error) from None


def _unreadable(client: openai.AsyncOpenAI, error: Exception) -> RequestError:
    return RequestError(
        f"{client.base_url} gave no answer: {type(error).__name__}: {error}", status=502
    )
