"""A gateway in front of a remote model: the same sessions and keys, with another engine.

Messages are recorded as text, with the token counts that the API bills. Ids and log-probs are
unknown, so these calls can be compared but never trained.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import Any, cast

import openai
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tuner.encoding import displayable
from tuner.engines.base import SamplingParams
from tuner.gateway.app import Gateway
from tuner.gateway.dialects import Exchange
from tuner.gateway.dialects.chat import DONE
from tuner.gateway.request_error import FieldError, RequestError
from tuner.gateway.service import Reply, StreamReply, sse
from tuner.gateway.sessions import Session
from tuner.traces import Call, Usage
from tuner.traces.reading import JsonReader

ELSEWHERE = "sampled by a remote model: its token ids are not known"
CHAT = "POST /v1/chat/completions"
_COMPLETIONS = JsonReader[ChatCompletion](ChatCompletion, "a chat completion")


class Relay(Gateway):
    """Forwards chat completions unchanged; the API decides what a request does not set.

    Args:
        client: Client of the API; None if workflows bring their own models.
        model_name: The model's name there, and the `model` that requests must name.
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
                f"the workflow of this rollout ({session.id}) brings its own model, and there is "
                "none here",
                status=404,
            )
        if asked != CHAT:
            raise RequestError(
                f"{asked} is not forwarded to {self._client.base_url}: remote models support only "
                "POST /v1/chat/completions",
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
    """One forwarded request.

    Args:
        client: Client of the API.
        session, role: Session and role of the caller.
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
            completion = _COMPLETIONS.parse(body)
        except ValueError as error:
            raise _unreadable(self._client, error) from None
        self._session.commit(self._calls(completion))
        return Reply(200, body)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer's chunks as they arrive; it is recorded before the last."""
        wants_usage = (self._request.get("stream_options") or {}).get("include_usage", False)
        options = {**(self._request.get("stream_options") or {}), "include_usage": True}
        state: Any = ChatCompletionStreamState()

        def abandoned() -> list[Call]:
            with contextlib.suppress(Exception):  # nothing has arrived yet
                return self._calls(state.current_completion_snapshot, undelivered=True)
            return []

        with self._session.recording.carrying(abandoned):
            try:
                async for chunk in self._chunks({**self._request, "stream_options": options}):
                    state.handle_chunk(chunk)
                    if chunk.choices or wants_usage:
                        yield sse(chunk.model_dump(exclude_unset=True))
            except RequestError as error:
                yield b"data: " + error.body() + b"\n\n"
                return
            calls = self._calls(state.current_completion_snapshot)
            # Everything recorded as abandoned so far is now committed.
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
        """Arguments for the library, which passes unknown fields through unchecked."""
        own = {"model", "messages", "stream"}
        return {
            **{name: displayable(request[name]) for name in own if name in request},
            "extra_body": displayable({k: value for k, value in request.items() if k not in own}),
        }

    def _calls(self, completion: ChatCompletion, *, undelivered: bool = False) -> list[Call]:
        """A call for each choice; the first has the billed tokens."""
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
    """A call that a remote model answered.

    Args:
        request: A chat completions request.
        response: The assistant message.
        known: The other fields of the call.
    """
    return Call(
        prompt_ids=(),
        completion_ids=(),
        logprobs=(),
        versions=(),
        sampling=sampling_said(request),
        messages=[_without_secrets(message) for message in request["messages"]],
        tools=request.get("tools") or [],
        response=response,
        streamed=bool(request.get("stream")),
        invalid=ELSEWHERE,
        **known,
    )


def _without_secrets(message: Any) -> Any:
    """A message as it is recorded: without what may sign the URLs of images on the web."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    return message | {"content": [_without_signature(part) for part in message["content"]]}


def _without_signature(part: Any) -> Any:
    image = part.get("image_url") if isinstance(part, dict) else None
    if not isinstance(image, dict):
        return part
    url = image.get("url")
    if not isinstance(url, str) or not url.lower().startswith(("http://", "https://")):
        return part
    shown = re.sub(r"(?<=//)[^/?#]*@", "", url)
    shown = re.sub(r"[?#].*", "?<redacted>", shown, flags=re.DOTALL)
    return part | {"image_url": image | {"url": shown}}


def read_body(body: bytes) -> dict[str, Any]:
    """Parse the body of a chat completion; most of it is forwarded unread."""
    try:
        request = json.loads(body)
    except ValueError as error:
        raise FieldError(f"the body is not valid JSON: {error}", path=()) from None
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
        raise FieldError("the body has no messages: send a chat completion", path=("messages",))
    if not isinstance(request.get("model"), str):
        raise FieldError("the body has no model: send its name", path=("model",))
    return request


def sampling_said(request: Mapping[str, Any]) -> SamplingParams:
    """The sampling settings of a request; others are left to the API."""
    limit = request.get("max_completion_tokens") or request.get("max_tokens") or 0
    said = {name: request.get(name) for name in ("temperature", "top_p")}
    own = {name: value for name, value in said.items() if value is not None}
    return SamplingParams(max_tokens=limit, **own)


async def _next(stream: Any) -> ChatCompletionChunk | None:
    return await anext(aiter(stream), None)


@contextlib.contextmanager
def _told_as_it_is(client: openai.AsyncOpenAI) -> Iterator[None]:
    """Turn errors of the API in the block into `RequestError`s with the API's message."""
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
