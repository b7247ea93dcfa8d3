"""What `ServedEngine` generates on: a process that has a copy of the weights."""

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
NOTICED = [
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
        transport=httpx.AsyncHTTPTransport(limits=limits, socket_options=NOTICED),
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


# The servers of an engine, and the weights they have.


_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Seat:
    """One server.

    Attributes:
        up: Whether it serves the fleet's weights, as far as is known.
        load: Requests that it is sampling for.
        sessions: Sessions whose turns go to it.
        lost: Why it is not up any more.
        doubtful: Whether that was a stream that broke off, and it may be as it was.
    """

    server: TokenServer
    up: bool = False
    load: int = 0
    sessions: int = 0
    starts: int = 0
    lost: EngineLostError | None = None
    doubtful: bool = False

    def lose(self, error: EngineLostError, *, doubtful: bool = False) -> None:
        """It died, or its connection did."""
        self.up, self.lost, self.doubtful = False, error, doubtful


class Fleet:
    """Starts servers, gives them weights, and starts those again that died.

    Its methods block, and are called one at a time.

    Args:
        servers: None of them runs yet, or with whatever weights.
        save: Writes the weights as they are now into a folder.
        folder: Where weights are handed over.
        direct: Whether servers that run take new weights from the trainer's memory. A folder is
            then written only for those that are started.
        max_restarts: How often servers that died are started again, in all.

    Attributes:
        weights: What is served; None before the first start.
        restarts: How often one was started again.
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
        """Start a server that is not up, with the weights that are served.

        Raises:
            EngineLostError: It does not come up; the next call tries again.
            EngineError: It died too often, or cannot have the weights; so will every later call.
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
        """Take a server for up that still has what is served. To start it anew would end what
        others are sampling on it, and a few cut connections would be the end of the run."""
        if seat.up or not seat.doubtful or self.weights is None:
            return
        try:
            seat.up = seat.server.serves(self.weights.label)
        except EngineLostError as error:
            seat.lose(error)
        if seat.up:
            _log.warning("%s is as it was: %s", seat.server.name, seat.lost)
        seat.doubtful = False

    def _count_restart(self, seat: Seat) -> None:
        if self.restarts >= self._max_restarts:
            self.failure = EngineError(
                f"{seat.server.name} died after {self.restarts} restarts of the run's servers, and "
                f"tuner.engine.max_restarts is {self._max_restarts}: nothing can be generated any "
                f"more. {seat.lost}"
            )
            raise self.failure from seat.lost
        self.restarts += 1
        _log.warning("starting %s again: %s", seat.server.name, seat.lost)

    def change_weights(self, version: int) -> None:
        """Serve the weights as they are now, everywhere, with nothing computed by others.

        Raises:
            EngineError: A server cannot have them, or died too often.
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
        """Let every server that runs give back its memory until the weights change.

        Raises:
            EngineError: One cannot.
        """
        for seat in self.seats:
            if seat.up:
                self._tell(seat, seat.server.sleep)

    def _tell(self, seat: Seat, work: Callable[[], None]) -> None:
        """Have a server do something; one that dies of it is not up any more."""
        try:
            work()
        except EngineLostError as error:
            seat.lose(error)
        except EngineError as error:
            seat.up, self.failure = False, error
            raise

    def stop(self) -> None:
        """End every server, and remove the weights that were handed over."""
        for seat in self.seats:
            seat.up = False
            seat.server.stop()
        if self.weights is not None:
            self._remove(self.weights)
            with suppress(OSError):
                self._folder.rmdir()

    @property
    def can_start(self) -> bool:
        """Whether the weights that are served are there as a folder."""
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
