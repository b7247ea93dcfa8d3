"""What the clients of servers in other processes have in common: HTTP with a key."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from tuner.engines.base import EngineError, EngineLostError

_LOADING_SECONDS = 3600.0
"""How long starting an engine and loading weights may take."""
_CONNECT_SECONDS = 300.0
"""How long a server elsewhere may be away."""
_POLL_SECONDS = 1.0


class RemoteServer:
    """A server at an address, that somebody else runs.

    Args:
        kind: What it runs, for messages.
        url: As in `http://10.0.0.2:8100`.
        key: What every request must bring; empty for none.
    """

    def __init__(self, kind: str, url: str, key: str) -> None:
        self._kind = kind
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient]
        self._clients = WeakKeyDictionary()

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"the {self._kind} server at {self._url}"

    def stop(self) -> None:
        """Leave it alone."""

    def sleep(self) -> None:
        """Not asked of a server: it has GPUs that nobody trains on.

        Raises:
            EngineError: It was.
        """
        raise EngineError(f"{self.name} shares no GPU with the trainer, so it does not sleep")

    def _wait_for(self, path: str) -> None:
        """Wait until it answers anything.

        Raises:
            EngineLostError: It does not for five minutes.
        """
        deadline = time.monotonic() + _CONNECT_SECONDS
        while True:
            try:
                url = f"{self._url}{path}"
                httpx.get(url, headers=self._headers, trust_env=False, timeout=60)
                return
            except httpx.HTTPError as error:
                if time.monotonic() > deadline:
                    raise self._lost("cannot be reached", error) from error
            time.sleep(_POLL_SECONDS)

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """What it answers to a GET, or to a POST of `body`, as JSON.

        Raises:
            EngineLostError: It breaks off.
            EngineError: It refuses.
        """
        try:
            answer = httpx.request(
                "GET" if body is None else "POST",
                f"{self._url}{path}",
                json=body,
                headers=self._headers,
                timeout=_LOADING_SECONDS,
                trust_env=False,
            )
        except httpx.HTTPError as error:
            raise self._lost(f"broke off {path}", error) from error
        if answer.status_code != 200:
            raise self._refusal(answer.status_code, answer.content)
        return answer.json()

    async def _lines(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[str, None]:
        """The lines that it answers to a POST; closing the generator hangs up.

        Raises:
            EngineLostError: It breaks off.
            EngineError: It refuses.
        """
        try:
            async with self._client().stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    raise self._refusal(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    yield line
        except httpx.HTTPError as error:
            failure = await asyncio.to_thread(self._lost, "broke off", error)
            raise failure from error

    def _client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            client = self._clients[loop] = httpx.AsyncClient(
                base_url=self._url,
                headers=self._headers,
                # A completion may wait in line and take as long as its rollout may.
                timeout=httpx.Timeout(None, connect=60),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
                trust_env=False,
            )
        return client

    def _refusal(self, status: int, body: bytes) -> EngineError:
        """The error of an answer that is not 200."""
        text = body.decode(errors="replace")
        try:
            found = json.loads(text)
            text = found.get("message") or found["error"]
            text = text["message"] if isinstance(text, dict) else text
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
        return EngineError(f"{self.name} refused a request with {status}: {text[:600]}")

    def _lost(self, what: str, error: Exception) -> EngineLostError:
        return EngineLostError(f"{self.name} {what}: {type(error).__name__}: {error}")
