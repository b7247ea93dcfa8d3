"""Clients for Python agents that reach the gateway without a socket."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import AsyncIterator, Iterable
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import openai
import pydantic
from openai.resources.chat import AsyncChat, AsyncCompletions
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tuner.errors import MissingDependencyError
from tuner.gateway.service import EVENT_STREAM, Door, Events, Reply, StreamReply

if TYPE_CHECKING:
    import anthropic

_BASE_URL = "http://gateway.in-process/v1"


def http_library(client_class: type) -> Any:
    """The library that an HTTP client class is built on: httpx, or httpx2 in newer packages."""
    client = next(base for base in client_class.__mro__ if base.__name__ == "AsyncClient")
    return importlib.import_module(client.__module__.partition(".")[0])


def in_process_http_client(gateway: Door, client_class: type) -> Any:
    """A client of the library that `client_class` is built on, whose requests go to `gateway`."""
    library = http_library(client_class)
    transport = _transport_class(library)(gateway)
    return library.AsyncClient(transport=transport, trust_env=False, timeout=None)


@cache
def _transport_class(library: Any) -> type[Any]:
    """The transport, as a class of `library`: its clients accept no other."""

    class InProcessTransport(library.AsyncBaseTransport):  # type: ignore[misc]  # httpx or httpx2
        """Passes each request to the gateway in the caller's own task."""

        def __init__(self, gateway: Door) -> None:
            self._gateway = gateway

        async def handle_async_request(self, request: Any) -> Any:
            body = await request.aread()
            answer = self._gateway.handle(request.method, request.url.path, request.headers, body)
            seconds = request.extensions.get("timeout", {}).get("read")
            try:
                async with asyncio.timeout(seconds):
                    reply = await answer
            except TimeoutError:
                raise library.ReadTimeout(
                    f"no answer within the client's timeout of {seconds} s", request=request
                ) from None
            if isinstance(reply, StreamReply):
                return streamed(library, reply.events, seconds, request)
            return response(library, reply, request)

    return InProcessTransport


@cache
def _stream_class(library: Any) -> type[Any]:
    class EventStream(library.AsyncByteStream):  # type: ignore[misc]  # likewise
        """The body of a streamed response."""

        def __init__(self, events: Events, seconds: float | None, request: Any) -> None:
            self._events = events
            self._seconds = seconds
            self._request = request

        async def __aiter__(self) -> AsyncIterator[bytes]:
            while True:
                try:
                    async with asyncio.timeout(self._seconds):
                        event = await anext(self._events, None)
                except TimeoutError:
                    raise library.ReadTimeout(
                        f"no event within the client's timeout of {self._seconds} s",
                        request=self._request,
                    ) from None
                if event is None:
                    return
                yield event

        async def aclose(self) -> None:
            await self._events.aclose()

    return EventStream


def streamed(library: Any, events: Events, seconds: float | None, request: Any) -> Any:
    """A streaming reply as a response of `library`; `seconds` limits the time of each event."""
    return library.Response(
        200,
        headers={"content-type": EVENT_STREAM},
        stream=_stream_class(library)(events, seconds, request),
        request=request,
    )


def response(library: Any, reply: Reply, request: Any) -> Any:
    """A reply that is not a stream, as a response of `library`."""
    return library.Response(
        reply.status,
        headers={"content-type": reply.content_type},
        content=reply.body,
        request=request,
    )


_http = http_library(openai.DefaultAsyncHttpxClient)


def in_process_client(gateway: Door, key: str) -> InProcessOpenAI:
    """A client of the session with `key`: no retries, and no time limit by default."""
    return InProcessOpenAI(
        gateway=gateway,
        api_key=key,
        base_url=_BASE_URL,
        http_client=in_process_http_client(gateway, openai.DefaultAsyncHttpxClient),
        max_retries=0,
        timeout=None,
    )


def in_process_anthropic(gateway: Door, key: str) -> anthropic.AsyncAnthropic:
    """Anthropic's client of the session with `key`: no retries, and no time limit of its own.

    Raises:
        MissingDependencyError: The anthropic package is not installed.
    """
    try:
        import anthropic
    except ImportError as error:
        raise MissingDependencyError(
            f"Anthropic's client does not import ({error}): pip install anthropic"
        ) from error
    return anthropic.AsyncAnthropic(
        api_key=key,
        base_url=_BASE_URL.removesuffix("/v1"),  # the client adds it itself
        http_client=in_process_http_client(gateway, anthropic.DefaultAsyncHttpxClient),
        max_retries=0,
        timeout=None,
    )


class InProcessOpenAI(openai.AsyncOpenAI):
    """`openai.AsyncOpenAI` with a shorter path through `chat.completions.create`."""

    def __init__(self, *, gateway: Door | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.gateway = gateway

    @cached_property
    def chat(self) -> AsyncChat:
        return _Chat(self)


class _Chat(AsyncChat):
    @cached_property
    def completions(self) -> AsyncCompletions:
        return _Completions(self._client)


class _Completions(AsyncCompletions):
    async def create(self, **params: Any) -> Any:
        """The same request and answer, without building an HTTP message in between.

        The library converts every message by its type annotations, parses URLs, merges headers
        and builds the answer field by field: four times what the gateway itself needs. A call
        that uses one of the options that this is good for takes the library's way.
        """
        client = self._client
        gateway = getattr(client, "gateway", None)
        params = {name: value for name, value in params.items() if not isinstance(value, _OMITTED)}
        if (
            gateway is None
            or client.timeout is not None
            or client.max_retries
            or not _LIBRARY_ONLY.isdisjoint(params)
            or not isinstance(params.get("messages"), list)
        ):
            return await super().create(**params)
        params.update(params.pop("extra_body", None) or {})
        reply = await gateway.handle(
            "POST",
            "/v1/chat/completions",
            {"authorization": f"Bearer {client.api_key}"},
            json.dumps(params, default=_jsonable).encode(),
        )
        if isinstance(reply, StreamReply):
            return _Stream(client, reply.events)
        if reply.status == 200:
            return ChatCompletion.model_validate_json(reply.body)
        raise client._make_status_error_from_response(response(_http, reply, _request()))


class _Stream(openai.AsyncStream[ChatCompletionChunk]):
    """The library's stream, which takes each event as the gateway writes it: the library looks for
    the ends of lines in what it gets, and builds a chunk field by field."""

    def __init__(self, client: openai.AsyncOpenAI, events: Events) -> None:
        self._events = events
        super().__init__(
            cast_to=ChatCompletionChunk,
            response=streamed(_http, events, None, _request()),
            client=client,
        )

    async def __stream__(self) -> AsyncIterator[ChatCompletionChunk]:
        try:
            async for event in self._events:
                data = event.removeprefix(b"data: ")
                if data.startswith(b"[DONE]"):
                    continue
                if data.startswith(b'{"error"'):
                    error = json.loads(data)["error"]
                    raise openai.APIError(error["message"], _request(), body=error)
                yield ChatCompletionChunk.model_validate_json(data)
        finally:
            await self.response.aclose()


def _request() -> Any:
    return _http.Request("POST", f"{_BASE_URL}/chat/completions")


_LIBRARY_ONLY = {"extra_headers", "extra_query", "timeout", "response_format"}
_OMITTED = (openai.NotGiven, openai.Omit)


def _jsonable(value: Any) -> Any:
    """A client's own object inside a request, such as an earlier answer's message, as JSON."""
    if isinstance(value, pydantic.BaseModel):
        return value.model_dump(exclude_unset=True, mode="json", by_alias=True)
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent as JSON")
