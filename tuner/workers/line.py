"""A worker's end of the line to its run: from any thread and event loop, as functions need it."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from tuner.engines.token_server import patient_client
from tuner.gateway.in_flight import InFlight
from tuner.gateway.service import Reply, StreamReply
from tuner.workers.messages import (
    Abandon,
    Answered,
    Ask,
    Event,
    Frames,
    Given,
    Next,
    Opened,
    Request,
    framed,
)

_CHUNK = 1 << 18


class Line:
    """Sends messages, and gives what comes to whom it is for.

    Reading is a thread's, so that code which keeps the event loop may still ask something.

    Args:
        connection: The socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._frames = Frames()
        self._arrived: list[Any] = []
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[tuple[type, int], Future[Any]] = {}
        self._known: dict[tuple[int, str], Any] = {}

    def first(self) -> Any:
        """Wait for the first message."""
        while not self._arrived:
            self._arrived = list(self._frames.added(self._received()))
        return self._arrived.pop(0)

    def listen(self, hear: Callable[[Any], None]) -> None:
        """From now on `hear` gets, in a thread, what is no answer."""
        threading.Thread(target=self._listen, args=(hear,), name="tuner-line", daemon=True).start()

    def send(self, message: Any) -> None:
        """In any thread; it has left this process when this returns."""
        data = framed(message)
        with self._sending:
            self._socket.sendall(data)

    def ask(self, session: int, what: str, *arguments: Any) -> Any:
        """What a session of the run's gateway says; waits for it.

        Raises:
            Exception: What it raised.
        """
        number = next(self._numbers)
        future = self._expected(Given, number)
        self.send(Ask(number, session, what, arguments))
        return _value_of(future.result())

    def ask_once(self, session: Opened, what: str, read: Callable[[Any], Any] | None = None) -> Any:
        """What a session says, and all of its gateway would; as `read` reads it."""
        known = session.door, what
        if known not in self._known:
            found = self.ask(session.number, what)
            self._known[known] = found if read is None else read(found)
        return self._known[known]

    async def ask_async(self, session: int, what: str, *arguments: Any) -> Any:
        """As `ask`, for what takes its time; in any event loop. Cancelled with the caller.

        Raises:
            Exception: What it raised.
        """
        number = next(self._numbers)
        return _value_of(await self.answer(Given, number, Ask(number, session, what, arguments)))

    def tell(self, session: int, what: str, *arguments: Any) -> None:
        """Tell a session of the run's gateway, which says nothing."""
        self.send(Ask(None, session, what, arguments))

    async def request(
        self, door: int, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Reply | StreamReply:
        """The gateway's answer; in any event loop."""
        number = next(self._numbers)
        plain = {name.lower(): value for name, value in headers.items()}
        sent = Request(number, door, method, path, plain, body)
        answer: Answered = await self.answer(Answered, number, sent)
        if answer.streams:
            return StreamReply(_Events(self, number), answer.headers)
        return Reply(answer.status, answer.body, answer.content_type, answer.headers)

    async def answer(self, kind: type, number: int, sent: Any) -> Any:
        """What comes back under a number, after `sent`; abandoned where this is cancelled."""
        future = self._expected(kind, number)
        try:
            self.send(sent)
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self.abandon(number)
            raise
        finally:
            self._waiting.pop((kind, number), None)

    def abandon(self, number: int) -> None:
        """Nobody waits for a request any more."""
        self.send(Abandon(number))

    def _expected(self, kind: type, number: int) -> Future[Any]:
        future = self._waiting[kind, number] = Future()
        return future

    def _listen(self, hear: Callable[[Any], None]) -> None:
        while True:
            for message in self._arrived:
                self._take(message, hear)
            self._arrived = list(self._frames.added(self._received()))

    def _take(self, message: Any, hear: Callable[[Any], None]) -> None:
        if not isinstance(message, Answered | Event | Given):
            hear(message)
            return
        number = message.ask if isinstance(message, Given) else message.request
        future = self._waiting.pop((type(message), number), None)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(message)

    def _received(self) -> bytes:
        try:
            data = self._socket.recv(_CHUNK)
        except OSError:
            data = b""
        if not data:  # the run is gone, whatever became of it; and so is all that was begun here
            os.killpg(os.getpgrp(), signal.SIGKILL)
        return data


def _value_of(given: Given) -> Any:
    if given.error is not None:
        raise given.error
    return given.value


class _Events:
    """The events of a stream, each asked for when it is wanted.

    Args:
        line: Where from.
        number: Of the request.
    """

    def __init__(self, line: Line, number: int) -> None:
        self._line = line
        self._number = number
        self._ended = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._ended:
            raise StopAsyncIteration
        try:
            event = await self._line.answer(Event, self._number, Next(self._number))
        except asyncio.CancelledError:
            self._ended = True
            raise
        if event.data is None:
            self._ended = True
            raise StopAsyncIteration
        data: bytes = event.data
        return data

    async def aclose(self) -> None:
        if not self._ended:
            self._ended = True
            self._line.abandon(self._number)


class LineDoor:
    """The gateway's door at the other end of the line, for one session.

    Args:
        line: The line.
        number: Of the gateway.
        in_flight: Of the session.
    """

    def __init__(self, line: Line, number: int, in_flight: InFlight) -> None:
        self._line = line
        self._number = number
        self._in_flight = in_flight

    async def handle(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Reply | StreamReply:
        with self._in_flight.here():
            return await self._line.request(self._number, method, path, headers, body)

    def refusing(self, keys: Iterable[str], why: Callable[[], str]) -> AbstractContextManager[None]:
        """None: whoever keeps this event loop, the gateway's goes on."""
        return nullcontext()


class HttpClientDoor:
    """The gateway's door on another machine, for one session.

    Args:
        base_url: Where it is, with "/v1".
        in_flight: Of the session.
    """

    def __init__(self, base_url: str, in_flight: InFlight) -> None:
        self._at = base_url.removesuffix("/v1")
        self._in_flight = in_flight

    async def handle(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Reply | StreamReply:
        with self._in_flight.here():
            kept = {key: value for key, value in headers.items() if key.lower() not in _OF_THE_WAY}
            client = _client()
            request = client.build_request(method, self._at + path, headers=kept, content=body)
            try:
                response = await client.send(request, stream=True)
                kind = response.headers.get("content-type", "application/json")
                rest = [(k, v) for k, v in response.headers.items() if k not in _OF_THE_WAY]
                if kind.startswith("text/event-stream"):
                    return StreamReply(_HttpEvents(response), tuple(rest))
                return Reply(response.status_code, await response.aread(), kind, tuple(rest))
            except httpx.TransportError as error:
                raise _no_answer(self._at, error) from error

    def refusing(self, keys: Iterable[str], why: Callable[[], str]) -> AbstractContextManager[None]:
        """None: whoever keeps this event loop, the gateway's goes on."""
        return nullcontext()


# Headers that are of a connection, or said by its ends.
_OF_THE_WAY = frozenset(
    {"host", "connection", "content-length", "content-type", "transfer-encoding", "accept-encoding"}
)
_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()


def _client() -> httpx.AsyncClient:
    """That of this event loop; a rollout's own limits end what takes too long."""
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients[loop] = patient_client("", {})
    return _clients[loop]


def _no_answer(where: str, error: Exception) -> ConnectionError:
    return ConnectionError(
        f"the gateway at {where} gave no answer: {type(error).__name__}: {error}"
    )


class _HttpEvents:
    """The events of a stream, whole, as they come over HTTP."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._chunks = response.aiter_raw()
        self._held = b""

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while b"\n\n" not in self._held:
            try:
                self._held += await anext(self._chunks)
            except httpx.TransportError as error:
                raise _no_answer(str(self._response.url), error) from error
        event, _, self._held = self._held.partition(b"\n\n")
        return event + b"\n\n"

    async def aclose(self) -> None:
        await self._response.aclose()
