"""What carries a Python client's requests to the gateway without a socket."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator
from functools import cache
from typing import TYPE_CHECKING, Any

from tuner.gateway.gateway import EVENT_STREAM, Events, StreamReply

if TYPE_CHECKING:
    from tuner.gateway.gateway import Gateway, Reply


def http_library(client_class: type) -> Any:
    """The library that an HTTP client class is built on: httpx, or httpx2 in newer packages."""
    client = next(base for base in client_class.__mro__ if base.__name__ == "AsyncClient")
    return importlib.import_module(client.__module__.partition(".")[0])


def in_process_http_client(gateway: Gateway, client_class: type) -> Any:
    """A client of the library that `client_class` is built on, whose requests go to `gateway`."""
    library = http_library(client_class)
    transport = _transport_class(library)(gateway)
    return library.AsyncClient(transport=transport, trust_env=False, timeout=None)


@cache
def _transport_class(library: Any) -> type[Any]:
    """The transport, as a class of `library`: its clients take no other."""

    class InProcessTransport(library.AsyncBaseTransport):  # type: ignore[misc]  # httpx or httpx2
        """Hands each request to `Gateway.handle` in the caller's own task."""

        def __init__(self, gateway: Gateway) -> None:
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
                return library.Response(
                    200,
                    headers={"content-type": EVENT_STREAM},
                    stream=EventStream(reply.events, seconds, request),
                    request=request,
                )
            return response(library, reply, request)

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

    return InProcessTransport


def response(library: Any, reply: Reply, request: Any) -> Any:
    """A reply that is not a stream, as a response of `library`."""
    return library.Response(
        reply.status,
        headers={"content-type": reply.content_type},
        content=reply.body,
        request=request,
    )
