"""What `ServedEngine` generates on: a process that has a copy of the weights."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import httpx

from tuner.engines.base import EngineError, EngineLostError, FinishReason, SamplingParams


@dataclass(frozen=True)
class Weights:
    """Weights as a process can load them.

    Attributes:
        folder: A model, or an adapter, in Hugging Face's form. None: they are to be had from the
            trainer's memory alone.
        label: Names them among all weights of all runs. A request says which weights it wants,
            and a process that has others refuses it.
    """

    folder: Path | None
    label: str


@dataclass(frozen=True)
class Sampled:
    """The next tokens of a completion.

    Attributes:
        ids: Token ids, shape [T], T may be 0.
        logprobs: Their log-probs under the distribution that was sampled from, shape [T].
        top_logprobs: For each the most probable (id, log-prob), empty unless asked for.
        cached_tokens: Prompt tokens that were not computed; -1 where it is not said yet.
        finish_reason: Why these are the last ones.
        kept: For each the ids that top_k, top_p and min_p left, none where they are more than were
            listed; empty where nothing was cut.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    cached_tokens: int = -1
    finish_reason: FinishReason | None = None
    kept: tuple[tuple[int, ...], ...] = ()


def finite_logprob(who: str, token: int, value: float) -> float:
    """A sampled token's log-prob, which must be a number.

    Args:
        who: What sampled it, for the message.

    Raises:
        EngineError: It is not finite.
    """
    if not math.isfinite(value):
        raise EngineError(
            f"{who} sampled token {token} with log-prob {value}: the model's logits are not "
            "finite, because the weights have diverged; lower the learning rate or start from a "
            "checkpoint"
        )
    return float(value)


def most_probable(pairs: Iterable[tuple[int, float]], count: int) -> tuple[tuple[int, float], ...]:
    """The `count` most probable (id, log-prob) of those that can be sampled, best first."""
    possible = [(int(token), float(value)) for token, value in pairs if value > -math.inf]
    return tuple(sorted(possible, key=lambda pair: -pair[1])[:count])


class TokenServer(Protocol):
    """One process, or group of processes, that generates.

    `start`, `load`, `sleep` and `stop` block, and are called one at a time; `stream` is called
    from any number of event loops.
    """

    @property
    def name(self) -> str:
        """What messages call it."""

    def start(self, weights: Weights) -> None:
        """Make it serve `weights`, which are in a folder, whether it never ran, has died or runs
        with others.

        Raises:
            EngineLostError: It does not come up; the message ends with its log.
        """

    def sleep(self) -> None:
        """Give back the device's memory. No request is in flight, and none comes before `load`.

        Raises:
            EngineLostError: It died.
            EngineError: It cannot; it serves nothing any more.
        """

    def load(self, weights: Weights) -> None:
        """Serve `weights` instead, and forget every cached prefix. No request is in flight.

        Raises:
            EngineLostError: It died.
            EngineError: It cannot load them; it serves nothing any more.
        """

    def serves(self, label: str) -> bool:
        """Whether it runs and has the weights of this label, whatever became of a stream: it may
        have been the connection alone that broke.

        Raises:
            EngineLostError: It cannot be reached.
        """

    def stop(self) -> None:
        """End it, or leave it alone where somebody else started it."""

    def stream(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, label: str
    ) -> AsyncGenerator[Sampled, None]:
        """Sample up to `sampling.max_tokens` tokens with the weights of this label.

        Stop strings are not looked at. Closing the generator ends the completion.

        Raises:
            EngineLostError: It died, or cannot be reached.
            EngineError: It refuses the request.
        """


_LOADING_SECONDS = 3600.0
"""How long starting an engine and loading weights may take."""
_CONNECT_SECONDS = 300.0
"""How long a server elsewhere may be away."""
_POLL_SECONDS = 1.0
_NOTICED = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), seconds)
        for name, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
        if hasattr(socket, name)  # not on every system
    ),
]
"""A machine that is gone says nothing: a connection to it would stay open for ever. With these it
breaks after half a minute."""


def patient_client(url: str, headers: Mapping[str, str]) -> httpx.AsyncClient:
    """A client for completions, of any number at once."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(
        base_url=url,
        headers=headers,
        # A completion may wait in line and take as long as its rollout may; connecting may not.
        timeout=httpx.Timeout(None, connect=60),
        transport=httpx.AsyncHTTPTransport(limits=limits, socket_options=_NOTICED),
        trust_env=False,
    )


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
        """Not asked of a server elsewhere: it has GPUs that nobody trains on.

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
            with httpx.Client(
                transport=httpx.HTTPTransport(socket_options=_NOTICED),
                timeout=httpx.Timeout(_LOADING_SECONDS, connect=60),
                trust_env=False,
            ) as client:
                answer = client.request(
                    "GET" if body is None else "POST",
                    f"{self._url}{path}",
                    json=body,
                    headers=self._headers,
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
            client = self._clients[loop] = patient_client(self._url, self._headers)
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
        if status == 401:
            text = (
                f"{text[:300]}; it wants the key that the variable tuner.engine.api_key_env holds"
            )
        return EngineError(f"{self.name} refused a request with {status}: {text[:600]}")

    def _lost(self, what: str, error: Exception) -> EngineLostError:
        return EngineLostError(f"{self.name} {what}: {type(error).__name__}: {error}")
