"""The door for Python agents: an OpenAI client that reaches the gateway without a socket."""

from __future__ import annotations

import asyncio
import importlib
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.gateway.gateway import Gateway

_BASE_URL = "http://gateway.in-process/v1"


def client_options(gateway: Gateway, key: str) -> dict[str, Any]:
    """Keyword arguments for `openai.AsyncOpenAI`: no retries, no time limit unless asked for."""
    transport = _transport_class()(gateway)
    http_client = _http_library().AsyncClient(transport=transport, trust_env=False, timeout=None)
    return {
        "api_key": key,
        "base_url": _BASE_URL,
        "http_client": http_client,
        "max_retries": 0,
        "timeout": None,
    }


@cache
def _http_library() -> ModuleType:
    """The library that the installed `openai` is built on: httpx2 from openai 3, httpx before."""
    import openai

    client = next(
        base for base in openai.DefaultAsyncHttpxClient.__mro__ if base.__name__ == "AsyncClient"
    )
    return importlib.import_module(client.__module__.partition(".")[0])


@cache
def _transport_class() -> Any:
    http = _http_library()

    class InProcessTransport(http.AsyncBaseTransport):  # type: ignore[misc, name-defined]
        """Hands each request to `Gateway.handle` in the caller's own task."""

        def __init__(self, gateway: Gateway) -> None:
            self._gateway = gateway

        async def handle_async_request(self, request: Any) -> Any:
            headers = {name.lower(): value for name, value in request.headers.items()}
            body = await request.aread()
            answer = self._gateway.handle(request.method, request.url.path, headers, body)
            seconds = request.extensions.get("timeout", {}).get("read")
            try:
                async with asyncio.timeout(seconds):
                    reply = await answer
            except TimeoutError:
                raise http.ReadTimeout(
                    f"no answer within the client's timeout of {seconds} s", request=request
                ) from None
            return http.Response(
                reply.status,
                headers={"content-type": "application/json"},
                content=reply.body,
                request=request,
            )

    return InProcessTransport
