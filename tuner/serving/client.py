"""Clients of the control API of `tuner serve`: sessions, their rewards, the serving weights.

`tuner/serving/asking.py` defines the requests, their answers and the retries; the two clients only
send, one blocking and one async.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, Unpack

import httpx

from tuner.serving import asking
from tuner.serving.asking import (
    ApiRequest,
    ApplicationKey,
    CallInfo,
    HttpOutcome,
    RetrySchedule,
    ServedModels,
    SessionCredentials,
    SessionFilters,
    SessionInfo,
    SessionOptions,
    keyed,
)

if TYPE_CHECKING:
    from anthropic import Anthropic, AsyncAnthropic
    from openai import AsyncOpenAI, OpenAI

T = TypeVar("T")
Http = TypeVar("Http", httpx.Client, httpx.AsyncClient)

DEFAULT_URL = "http://127.0.0.1:8700"


@dataclass(frozen=True)
class ServedSession(SessionCredentials):
    """One conversation, task or user at a server, as returned by `Client.open`.

    Attributes:
        id: Its id.
        key: The API key for the agent in it; None if this client does not know it.
        base_url: The model's URL for the agent, ending in "/v1".
    """

    _client: Client = field(repr=False)

    def openai(self, role: str | None = None, **options: Any) -> OpenAI:
        """A client of the openai library for this session.

        It retries for as long as a server takes to restart, and marks its retries, so that none is
        sampled twice.

        Args:
            role: The agent that calls, if there are several: letters, digits, "_" and "-".
            options: Options of the library, such as `max_retries` and `timeout`.

        Raises:
            ServingError: The session's key is not known here.
        """
        made: OpenAI = keyed("openai", "OpenAI")(**self.client_options(role, options, "/v1"))
        return made

    def anthropic(self, role: str | None = None, **options: Any) -> Anthropic:
        """Like `openai`, for Anthropic's library.

        Raises:
            ServingError: The session's key is not known here.
            MissingDependencyError: The anthropic package is not installed.
        """
        made: Anthropic
        made = keyed("anthropic", "Anthropic")(**self.client_options(role, options, ""))
        return made

    def reward(
        self, value: float | None = None, *, feedback: str | None = None, call: str | None = None
    ) -> SessionInfo:
        """Give a reward or feedback: now or days later, in any order. The last one counts.

        Args:
            value: Finite; None if there is only feedback.
            feedback: The reason.
            call: The call that it is for; None is the whole session.

        Raises:
            ServingError: It was rejected, or the server cannot be reached.
        """
        return self._client._send(asking.reward(self.id, value, feedback, call))

    def end(self) -> SessionInfo:
        """Accept no more calls; rewards may still follow. Repeating it is fine."""
        return self._client._send(asking.end(self.id))

    def info(self) -> SessionInfo:
        """The session's current state."""
        return self._client._send(asking.session(self.id))

    def calls(self) -> list[CallInfo]:
        """The session's calls."""
        return self._client._send(asking.calls(self.id))

    def export(self) -> dict[str, Any]:
        """Its trace as stored, with token ids and log-probs; not allowed with the session's own
        key."""
        return self._client._send(asking.export(self.id))

    def delete(self) -> None:
        """Delete it with calls and rewards; not allowed with the session's own key."""
        self._client._send(asking.deletion(self.id))


@dataclass(frozen=True)
class AsyncServedSession(SessionCredentials):
    """Like `ServedSession`, for an `AsyncClient`."""

    _client: AsyncClient = field(repr=False)

    def openai(self, role: str | None = None, **options: Any) -> AsyncOpenAI:
        """See `ServedSession.openai`."""
        made: AsyncOpenAI
        made = keyed("openai", "AsyncOpenAI")(**self.client_options(role, options, "/v1"))
        return made

    def anthropic(self, role: str | None = None, **options: Any) -> AsyncAnthropic:
        """See `ServedSession.anthropic`."""
        made: AsyncAnthropic
        made = keyed("anthropic", "AsyncAnthropic")(**self.client_options(role, options, ""))
        return made

    async def reward(
        self, value: float | None = None, *, feedback: str | None = None, call: str | None = None
    ) -> SessionInfo:
        """See `ServedSession.reward`."""
        return await self._client._send(asking.reward(self.id, value, feedback, call))

    async def end(self) -> SessionInfo:
        """See `ServedSession.end`."""
        return await self._client._send(asking.end(self.id))

    async def info(self) -> SessionInfo:
        """See `ServedSession.info`."""
        return await self._client._send(asking.session(self.id))

    async def calls(self) -> list[CallInfo]:
        """See `ServedSession.calls`."""
        return await self._client._send(asking.calls(self.id))

    async def export(self) -> dict[str, Any]:
        """See `ServedSession.export`."""
        return await self._client._send(asking.export(self.id))

    async def delete(self) -> None:
        """See `ServedSession.delete`."""
        await self._client._send(asking.deletion(self.id))


class _Connection(Generic[Http]):
    """Base of both clients: the server and the key."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        key: str,
        timeout: float = 60.0,
        patience: float = 60.0,
        http_client: Http | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._key = key
        self._timeout = timeout
        self._patience = patience
        self._http: Http = http_client or self._plain_http()

    def _plain_http(self) -> Http:
        raise NotImplementedError

    def _request(self, asked: ApiRequest[Any]) -> dict[str, Any]:
        """A request as arguments for httpx, whose own JSON has no escapes for halves of pairs."""
        body = None if asked.body is None else json.dumps(asked.body, allow_nan=False)
        return {
            "method": asked.method,
            "url": f"{self.base_url}/tuner/v1{asked.path}",
            "content": body,
            "params": asked.params,
            "headers": {
                "authorization": f"Bearer {self._key}",
                **({} if body is None else {"content-type": "application/json"}),
                **asked.headers,
            },
            "timeout": self._timeout,
        }

    def _session_key(self, key: str | None) -> str | None:
        return self._key if key is None and self._key.startswith("sk-tuner-") else key


class Client(_Connection[httpx.Client]):
    """Opens sessions at a server of `tuner serve`, gives rewards, and reads their state.

    Args:
        base_url: The server's URL; a "/v1" at its end is ignored.
        key: The admin key, an application's, or a session's, within its rights.
        timeout: Seconds for one attempt.
        patience: Seconds during which a request is retried if the server cannot be reached, breaks
            off, or is busy. Opening a session has one result, however often it is sent.
        http_client: An httpx client with other settings: certificates, proxies. It is closed with
            this one.
    """

    def _plain_http(self) -> httpx.Client:
        return httpx.Client()

    def open(self, **asked: Unpack[SessionOptions]) -> ServedSession:
        """A new session with its own key.

        Args:
            task: Its task, as in a row of a dataset; JSON.
            group: Sessions with one task and one group are compared with each other in training.
            metadata: Anything to be stored with it; JSON.
            tags: Tags for filtering lists.
            limits: Its limits: `calls`, `tokens`.
            sampling: Sampling settings for requests that do not set them: `temperature`, `top_p`,
                `top_k`, `max_tokens`.

        Raises:
            ServingError: It was rejected, or the server cannot be reached.
        """
        opened = self._send(asking.opening(asked))
        return ServedSession(opened.id, opened.key, opened.base_url, self)

    def session(self, id: str, key: str | None = None) -> ServedSession:
        """A session that was opened before; sends no request.

        Args:
            id: Its id.
            key: Its key, for `openai` and `anthropic`; by default this client's, if it is a
                session's.
        """
        return ServedSession(id, self._session_key(key), f"{self.base_url}/v1", self)

    def sessions(self, **filters: Unpack[SessionFilters]) -> Iterator[SessionInfo]:
        """The matching sessions, oldest first, fetched page by page.

        Args:
            state: "open" or "ended".
            judged: Whether they have a reward.
            group: Of this group.
            application: Of this application.
            tag: With this tag.
            after: Those after this id.
        """
        while True:
            page = self._send(asking.page(filters))
            yield from page.sessions
            if page.next is None:
                return
            filters["after"] = page.next

    def application(self, name: str) -> ApplicationKey:
        """A new application and its key. Needs the admin key.

        Raises:
            ServingError: 409: there is one with this name.
        """
        return self._send(asking.application(name))

    def remove_application(self, name: str) -> None:
        """Invalidate an application's key; its sessions stay. Needs the admin key."""
        self._send(asking.removal(name))

    def models(self) -> ServedModels:
        """The serving weights, and the decisions about them. Needs the admin key."""
        return self._send(asking.models())

    def rollback(self) -> ServedModels:
        """Serve the weights before the last promotion again. Needs the admin key.

        Raises:
            ServingError: 409: nothing was promoted.
        """
        return self._send(asking.rollback())

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, asked: ApiRequest[T]) -> T:
        patience = RetrySchedule(self._patience, repeatable=asked.repeatable)
        while (pause := patience.after(outcome := self._try(asked))) is not None:
            time.sleep(pause)
        return asked.result(outcome)

    def _try(self, asked: ApiRequest[Any]) -> HttpOutcome:
        try:
            return self._http.request(**self._request(asked))
        except httpx.TransportError as error:
            return error


class AsyncClient(_Connection[httpx.AsyncClient]):
    """Like `Client`, async; `http_client` is an `httpx.AsyncClient`."""

    def _plain_http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient()

    async def open(self, **asked: Unpack[SessionOptions]) -> AsyncServedSession:
        """See `Client.open`."""
        opened = await self._send(asking.opening(asked))
        return AsyncServedSession(opened.id, opened.key, opened.base_url, self)

    def session(self, id: str, key: str | None = None) -> AsyncServedSession:
        """See `Client.session`."""
        return AsyncServedSession(id, self._session_key(key), f"{self.base_url}/v1", self)

    async def sessions(self, **filters: Unpack[SessionFilters]) -> AsyncIterator[SessionInfo]:
        """See `Client.sessions`, for `async for`."""
        while True:
            page = await self._send(asking.page(filters))
            for session in page.sessions:
                yield session
            if page.next is None:
                return
            filters["after"] = page.next

    async def application(self, name: str) -> ApplicationKey:
        """See `Client.application`."""
        return await self._send(asking.application(name))

    async def remove_application(self, name: str) -> None:
        """See `Client.remove_application`."""
        await self._send(asking.removal(name))

    async def models(self) -> ServedModels:
        """See `Client.models`."""
        return await self._send(asking.models())

    async def rollback(self) -> ServedModels:
        """See `Client.rollback`."""
        return await self._send(asking.rollback())

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _send(self, asked: ApiRequest[T]) -> T:
        patience = RetrySchedule(self._patience, repeatable=asked.repeatable)
        outcome = await self._try(asked)
        while (pause := patience.after(outcome)) is not None:  # a time, not an event
            await asyncio.sleep(pause)
            outcome = await self._try(asked)
        return asked.result(outcome)

    async def _try(self, asked: ApiRequest[Any]) -> HttpOutcome:
        try:
            return await self._http.request(**self._request(asked))
        except httpx.TransportError as error:
            return error
