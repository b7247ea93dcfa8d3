"""Servers that `ServedEngine` generates on: processes that hold a copy of the weights."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import shutil
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from tuner.engines.base import EngineError, EngineLostError, FinishReason, SamplingParams

if TYPE_CHECKING:
    import httpx

# httpx takes a tenth of a second to import, with its command line and rich, and is imported only
# in runs with a server.


@dataclass(frozen=True)
class Weights:
    """Weights in a form that a process can load.

    Attributes:
        folder: A model or an adapter in Hugging Face's format, or a folder for each adapter.
            None: available from the trainer's memory only.
        label: Identifies them among the weights of all runs. A request names the weights that it
            wants, and a process that has others rejects it.
    """

    folder: Path | None
    label: str


@dataclass(frozen=True)
class SampledTokens:
    """The next tokens of a completion.

    Attributes:
        ids: Token ids, shape [T], T may be 0.
        logprobs: Log-probs under the distribution that was sampled from, shape [T].
        top_logprobs: For each token the most probable (id, log-prob), empty unless asked for.
        cached_tokens: Prompt tokens that were not computed; -1 if not known yet.
        finish_reason: Why these are the last ones.
        kept: For each token the ids kept by top_k, top_p and min_p; empty for a token if there are
            more than were listed, and altogether if nothing was cut.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    cached_tokens: int = -1
    finish_reason: FinishReason | None = None
    kept: tuple[tuple[int, ...], ...] = ()


def finite_logprob(who: str, token: int, value: float) -> float:
    """Check that a sampled token's log-prob is finite; `who` is for the message."""
    if not math.isfinite(value):
        raise EngineError(
            f"{who} sampled token {token} with log-prob {value}: the model's logits are not "
            "finite, because the weights have diverged; lower the learning rate or start from a "
            "checkpoint"
        )
    return float(value)


def most_probable(pairs: Iterable[tuple[int, float]], count: int) -> tuple[tuple[int, float], ...]:
    """The `count` most probable (id, log-prob) that can be sampled, best first."""
    possible = [(int(token), float(value)) for token, value in pairs if value > -math.inf]
    return tuple(sorted(possible, key=lambda pair: -pair[1])[:count])


class TokenServer(Protocol):
    """One process, or group of processes, that generates.

    `start`, `load`, `sleep` and `stop` block and are called one at a time; `stream` is called from
    any number of event loops.
    """

    @property
    def name(self) -> str:
        """Name for messages."""

    def start(self, weights: Weights) -> None:
        """Make it serve `weights`, given as a folder, whether it never ran, died or serves others.

        Raises:
            EngineLostError: It does not start; the message ends with its log.
        """

    def sleep(self) -> None:
        """Release the device's memory. No request is in flight, and none comes before `load`.

        Raises:
            EngineLostError: It died.
            EngineError: It cannot; it serves nothing any more.
        """

    def load(self, weights: Weights) -> None:
        """Serve `weights` instead and drop every cached prefix. No request is in flight.

        Raises:
            EngineLostError: It died.
            EngineError: It cannot load them; it serves nothing any more.
        """

    def serves(self, label: str) -> bool:
        """Whether it runs and has the weights with this label. Called after a stream broke, since
        the connection alone may have failed.

        Raises:
            EngineLostError: It cannot be reached.
        """

    def stop(self) -> None:
        """Stop the process if we started it."""

    def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        label: str,
        adapter: str | None = None,
    ) -> AsyncGenerator[SampledTokens, None]:
        """Sample up to `sampling.max_tokens` tokens with the weights of this label.

        Stop strings are ignored. Closing the generator ends the completion.

        Args:
            adapter: As in `Engine.generate`.

        Raises:
            EngineLostError: It died or cannot be reached.
            EngineError: It rejects the request, or has no such adapter.
        """


_LOADING_SECONDS = 3600.0
"""Time limit for starting an engine and loading weights."""
_CONNECT_SECONDS = 300.0
"""How long a remote server may be unreachable."""
_POLL_SECONDS = 1.0
NOTICED = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), seconds)
        for name, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
        if hasattr(socket, name)  # not on every system
    ),
]
"""Without these a connection to a machine that disappeared would stay open forever; with them it
breaks after half a minute."""


def patient_client(url: str, headers: Mapping[str, str]) -> httpx.AsyncClient:
    """A client for any number of concurrent completions."""
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(
        base_url=url,
        headers=headers,
        # A completion may be queued and take as long as its rollout may; connecting may not.
        timeout=httpx.Timeout(None, connect=60),
        transport=httpx.AsyncHTTPTransport(limits=limits, socket_options=NOTICED),
        trust_env=False,
    )


class RemoteServer:
    """A server that somebody else runs at an address.

    Args:
        kind: The engine that it runs, for messages.
        url: For example `http://10.0.0.2:8100`.
        key: Sent with every request; empty for none.
    """

    def __init__(self, kind: str, url: str, key: str) -> None:
        self._kind = kind
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient]
        self._clients = WeakKeyDictionary()

    @property
    def name(self) -> str:
        return f"the {self._kind} server at {self._url}"

    def stop(self) -> None:
        """Leave the server running."""

    def sleep(self) -> None:
        """Raise EngineError: a remote server shares no GPU with the trainer."""
        raise EngineError(f"{self.name} shares no GPU with the trainer, so it does not sleep")

    def _wait_for(self, path: str) -> None:
        """Wait until the server answers at all; raises EngineLostError after five minutes."""
        import httpx

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
        """Send a GET, or a POST of `body`, and return the JSON answer."""
        import httpx

        try:
            with httpx.Client(
                transport=httpx.HTTPTransport(socket_options=NOTICED),
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
        """Lines of the answer to a POST; closing the generator disconnects."""
        import httpx

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
        """The error for an answer that is not 200."""
        text = body.decode(errors="replace")
        try:
            found = json.loads(text)
            text = found.get("message") or found["error"]
            text = text["message"] if isinstance(text, dict) else text
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
        if status == 401:
            text = f"{text[:300]}; it expects the key in the variable tuner.engine.api_key_env"
        return EngineError(f"{self.name} refused a request with {status}: {text[:600]}")

    def _lost(self, what: str, error: Exception) -> EngineLostError:
        return EngineLostError(f"{self.name} {what}: {type(error).__name__}: {error}")


# The servers of an engine, and the weights they have.


_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Seat:
    """A server and its state.

    Attributes:
        up: Whether it serves the fleet's weights, as far as is known.
        load: Number of requests that it is sampling.
        sessions: Number of sessions assigned to it.
        lost: Why it is not up any more.
        doubtful: Whether only a stream broke, so that the server may still be up.
    """

    server: TokenServer
    up: bool = False
    load: int = 0
    sessions: int = 0
    starts: int = 0
    lost: EngineLostError | None = None
    doubtful: bool = False

    def lose(self, error: EngineLostError, *, doubtful: bool = False) -> None:
        """Mark the server, or its connection, as dead."""
        self.up, self.lost, self.doubtful = False, error, doubtful


class Fleet:
    """Starts servers, hands weights to them, and restarts those that died.

    Its methods block and are called one at a time.

    Args:
        servers: Not running, or running with any weights.
        save: Writes the current weights into a folder.
        folder: Where weights are handed over.
        direct: Whether running servers take new weights from the trainer's memory. A folder is
            then written only for servers that are started.
        max_restarts: Maximum number of restarts, in total.

    Attributes:
        weights: The weights being served; None before the first start.
        restarts: Number of restarts so far.
        failure: Why nothing can be served any more.
    """

    def __init__(
        self,
        servers: Sequence[TokenServer],
        *,
        save: Callable[[Path], None],
        folder: Path,
        direct: bool,
        max_restarts: int,
    ) -> None:
        self.seats = [Seat(server) for server in servers]
        self.weights: Weights | None = None
        self.restarts = 0
        self.failure: EngineError | None = None
        self._save = save
        self._folder = folder
        self._direct = direct
        self._max_restarts = max_restarts
        self._run = uuid.uuid4().hex[:12]

    def bring_up(self, seat: Seat, version: int) -> None:
        """Start a server that is not up, with the weights being served.

        Raises:
            EngineLostError: It does not start; the next call tries again.
            EngineError: It died too often or cannot load the weights; every later call fails too.
        """
        if self.failure is not None:
            raise EngineError(str(self.failure)) from self.failure
        self._look_again(seat)
        if seat.up:
            return
        if not self.can_start:
            label = self._label(version) if self.weights is None else self.weights.label
            self.weights = self._written(label)
        assert self.weights is not None
        if seat.starts:
            self._count_restart(seat)
        seat.starts += 1
        try:
            seat.server.start(self.weights)
        except EngineLostError as error:
            seat.lose(error)
            if seat.starts == 1:
                self.failure = error
            raise
        except EngineError as error:
            self.failure = error
            raise
        seat.up = True

    def _look_again(self, seat: Seat) -> None:
        """Mark a server as up if it still serves the weights. Restarting it would end other
        requests on it, and a few broken connections would end the run."""
        if seat.up or not seat.doubtful or self.weights is None:
            return
        try:
            seat.up = seat.server.serves(self.weights.label)
        except EngineLostError as error:
            seat.lose(error)
        if seat.up:
            _log.warning("%s is still running: %s", seat.server.name, seat.lost)
        seat.doubtful = False

    def _count_restart(self, seat: Seat) -> None:
        if self.restarts >= self._max_restarts:
            self.failure = EngineError(
                f"{seat.server.name} died after {self.restarts} restarts of the run's servers, and "
                f"tuner.engine.max_restarts is {self._max_restarts}: nothing more can be "
                f"generated. {seat.lost}"
            )
            raise self.failure from seat.lost
        self.restarts += 1
        _log.warning("starting %s again: %s", seat.server.name, seat.lost)

    def change_weights(self, version: int) -> None:
        """Serve the current weights on every server, without anything cached for older ones.

        Raises:
            EngineError: A server cannot load them, or died too often.
        """
        for seat in self.seats:
            self._look_again(seat)
        before, label = self.weights, self._label(version)
        self.weights = Weights(None, label) if self._direct else self._written(label)
        for seat in self.seats:
            if seat.up:
                self._tell(seat, partial(seat.server.load, self.weights))
            if not seat.up:
                self.bring_up(seat, version)
        if before is not None:
            self._remove(before)

    def sleep(self) -> None:
        """Let every running server release its memory until the weights change.

        Raises:
            EngineError: One cannot.
        """
        for seat in self.seats:
            if seat.up:
                self._tell(seat, seat.server.sleep)

    def _tell(self, seat: Seat, work: Callable[[], None]) -> None:
        """Run `work` on a server; if the server dies, mark it as down."""
        try:
            work()
        except EngineLostError as error:
            seat.lose(error)
        except EngineError as error:
            seat.up, self.failure = False, error
            raise

    def stop(self) -> None:
        """Stop every server and remove the weights that were handed over."""
        for seat in self.seats:
            seat.up = False
            seat.server.stop()
        if self.weights is not None:
            self._remove(self.weights)
            with suppress(OSError):
                self._folder.rmdir()

    @property
    def can_start(self) -> bool:
        """Whether the weights being served exist as a folder."""
        return self.weights is not None and self.weights.folder is not None

    def _label(self, version: int) -> str:
        return f"{self._run}-{version}-{uuid.uuid4().hex[:8]}"

    def _remove(self, weights: Weights) -> None:
        if weights.folder is not None:
            shutil.rmtree(weights.folder, ignore_errors=True)

    def _written(self, label: str) -> Weights:
        folder = self._folder / label
        folder.mkdir(parents=True)
        self._save(folder)
        return Weights(folder, label)
