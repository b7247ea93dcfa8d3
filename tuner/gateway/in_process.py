"""The door for Python agents: an OpenAI client that reaches the gateway without a socket."""

from __future__ import annotations

import asyncio
import importlib
from functools import cached_property
from typing import TYPE_CHECKING, Any

import openai
from openai.resources.chat import AsyncChat, AsyncCompletions
from openai.types.chat import ChatCompletion

if TYPE_CHECKING:
    from tuner.gateway.gateway import Gateway

_BASE_URL = "http://gateway.in-process/v1"


def _http_library() -> Any:
    """The library that the installed `openai` is built on: httpx2 from openai 3, httpx before."""
    client = next(
        base for base in openai.DefaultAsyncHttpxClient.__mro__ if base.__name__ == "AsyncClient"
    )
    return importlib.import_module(client.__module__.partition(".")[0])


_http = _http_library()


def in_process_client(gateway: Gateway, key: str) -> InProcessOpenAI:
    """A client of the session behind `key`: no retries, no time limit unless asked for."""
    return InProcessOpenAI(
        api_key=key,
        base_url=_BASE_URL,
        http_client=_http.AsyncClient(
            transport=InProcessTransport(gateway), trust_env=False, timeout=None
        ),
        max_retries=0,
        timeout=None,
    )


class InProcessTransport(_http.AsyncBaseTransport):  # type: ignore[misc, name-defined]
    """Hands each request to `Gateway.handle` in the caller's own task."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def handle_async_request(self, request: Any) -> Any:
        body = await request.aread()
        answer = self._gateway.handle(request.method, request.url.path, request.headers, body)
        seconds = request.extensions.get("timeout", {}).get("read")
        if seconds is None:
            reply = await answer
        else:
            try:
                async with asyncio.timeout(seconds):
                    reply = await answer
            except TimeoutError:
                raise _http.ReadTimeout(
                    f"no answer within the client's timeout of {seconds} s", request=request
                ) from None
        return _http.Response(
            reply.status,
            headers={"content-type": "application/json"},
            content=reply.body,
            request=request,
        )


class InProcessOpenAI(openai.AsyncOpenAI):
    """`openai.AsyncOpenAI` with a short way through `chat.completions.create`."""

    @cached_property
    def chat(self) -> AsyncChat:
        return _Chat(self)


class _Chat(AsyncChat):
    @cached_property
    def completions(self) -> AsyncCompletions:
        return _Completions(self._client)


class _Completions(AsyncCompletions):
    async def create(self, **params: Any) -> Any:
        """The same request and answer; arguments that are JSON already are sent as they are.

        The library walks through every message by its type annotations to find what it has to
        convert, which costs more than everything else on the way to the engine together.
        """
        if params.get("stream") or not all(
            isinstance(params.get(name, []), list) for name in ("messages", "tools")
        ):
            return await super().create(**params)
        options: Any = {
            option: value
            for argument, option in _OPTIONS.items()
            if not _omitted(value := params.pop(argument, openai.omit))
            and (value is not None or argument == "timeout")
        }
        body = {name: value for name, value in params.items() if not _omitted(value)}
        return await self._client.post(
            "/chat/completions", cast_to=ChatCompletion, body=body, options=options
        )


_OPTIONS = {
    "extra_headers": "headers",
    "extra_query": "params",
    "extra_body": "extra_json",
    "timeout": "timeout",
}


def _omitted(value: object) -> bool:
    return isinstance(value, (openai.NotGiven, openai.Omit))
