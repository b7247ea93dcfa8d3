"""A worker's end of the line to its run: from any thread and event loop, as functions need it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import pickle
import signal
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import httpx

from tuner.config import RemoteModel
from tuner.engines.base import Generation
from tuner.engines.servers import patient_client
from tuner.gateway import RecordedCall, Session
from tuner.gateway.families.template import Message
from tuner.gateway.service import Door, Reply, StreamReply
from tuner.gateway.sessions import Access, Credit, Credits, InFlight, Results
from tuner.rollouts.chat_models import ChatModelKind
from tuner.rollouts.limits import QUIET
from tuner.traces import FunctionResult, Outcome

# What a worker may ask a session of the run's gateway, or tell it.


_pickled: WeakKeyDictionary[Any, bytes] = WeakKeyDictionary()


def _tokenizer(session: Session) -> bytes:
    """Pickled once for all workers, and read where somebody waits for it and hears of an error."""
    tokenizer = session.tokenizer
    if tokenizer not in _pickled:
        _pickled[tokenizer] = pickle.dumps(tokenizer, pickle.HIGHEST_PROTOCOL)
    return _pickled[tokenizer]


async def _complete_tokens(
    session: Session, prompt_ids: list[int], settings: dict[str, Any]
) -> tuple[Generation, ...]:
    return await session.complete_tokens(prompt_ids, **settings)


ASKED: Mapping[str, Callable[..., Any]] = {
    "base_url": lambda session: session.base_url,
    "quiet": lambda session: time.perf_counter() - session.in_flight.moved,
    "other_names": lambda session: session.other_names,
    "call_also": lambda session, names: setattr(session, "other_names", names),
    "calls": lambda session: [one.call for one in session.calls_so_far()],
    "credit": lambda session, *said: session.recording.credit(*said),
    "text_of": lambda session, ids: session.text_of(ids),
    "encode": lambda session, prompt: session.encode(prompt),
    "tokenizer": _tokenizer,
    "end_ids": lambda session: session.end_ids,
    "version": lambda session: session.version,
    "complete_tokens": _complete_tokens,
    "warn": lambda session, *said: session.warn_once(*said),
    "given": lambda session, *of: session.results.given(*of),
    "keep": lambda session, *of: session.results.keep(*of),
}
"""By its name; what an async function gives is awaited for the worker."""


# What a run and its workers say to each other, over one private pair of sockets for each worker.
#
#     the run                                   a worker
#     Setup, once          ------------------>  loads the functions
#                          <------------------  Ready, or Refused
#     Open                 ------------------>  the sessions of an attempt
#     Run                  ------------------>  calls a function
#                          <------------------  Request: of the gateway; Ask: of a session
#     Reply, Event, Given  ------------------>
#                          <------------------  Done, or Failed
#     Close                ------------------>  the attempt has ended
#
# Each is a pickle behind its length. Both ends are processes of one user and one version of this
# package, and nobody else has the sockets.


_LENGTH = struct.Struct(">Q")


class Setup(NamedTuple):
    """What a worker is for.

    Attributes:
        workflow, judge: As `ship_together` names them.
        kind: The framework of the chat models.
        path: `sys.path` of the run; None on another machine, which has its own.
        levels: Of its loggers, by name.
        timeout: Seconds that code may keep the event loop.
    """

    workflow: str
    judge: str | None
    kind: ChatModelKind
    path: list[str] | None
    levels: dict[str, int]
    timeout: float


class Ready(NamedTuple):
    """The functions are loaded."""


class Refused(NamedTuple):
    """The functions cannot be loaded; says why."""

    why: str


class Opened(NamedTuple):
    """A session of the run's gateway.

    Attributes:
        number: Of the session, for what is asked of it.
        door: Of the gateway that it is open at.
        scripted: Whether recorded functions may be given their results.
        base_url: Where the worker asks that gateway, unless by the line.
    """

    number: int
    door: int
    id: str
    key: str
    model_name: str
    max_model_len: int
    keeps_calls: bool
    scripted: bool
    base_url: str | None = None


class Remote(NamedTuple):
    """An auxiliary model behind a URL."""

    model: RemoteModel
    key: str
    max_concurrent: int | None


class Open(NamedTuple):
    """An attempt at a rollout, or a group that is judged.

    Attributes:
        session: Its own.
        auxiliary: Its auxiliary models by name.
        seed: For the global random states, or None.
    """

    attempt: int
    session: Opened
    auxiliary: dict[str, Opened | Remote]
    seed: int | None


class Close(NamedTuple):
    """The attempt has ended."""

    attempt: int


class Run(NamedTuple):
    """Call a function.

    Attributes:
        call: Its number.
        role: "workflow", "judge" or "group_judge".
        feedback: For the workflow.
        responses: Numbers of the responses that are judged; None is a response that is None.
    """

    call: int
    attempt: int
    role: str
    task: dict[str, Any]
    feedback: str | None = None
    responses: tuple[int | None, ...] = ()


class Cancel(NamedTuple):
    """End a call."""

    call: int


class Forget(NamedTuple):
    """Nobody asks for this response any more."""

    response: int


class Stop(NamedTuple):
    """End."""


class Returned(NamedTuple):
    """What a workflow returned; its response stays where it is, under a number."""

    reward: float | None
    metrics: dict[str, float] | None
    response: int | None
    text: str


class Done(NamedTuple):
    """A function returned: `Returned`, or what `JudgeOutput`s are made of.

    Attributes:
        cpu: Seconds of CPU that the worker and its children have used since it was ready.
    """

    call: int
    value: Any
    cpu: float


class Failed(NamedTuple):
    """A function did not return.

    Attributes:
        mistake: A `FunctionError`, which ends the run; else None.
        cancelled: Whether it was cancelled, or cancelled itself.
        outcome, described, place: As `Elsewhere` has them.
    """

    call: int
    cpu: float
    mistake: Exception | None = None
    cancelled: bool = False
    outcome: Outcome = Outcome.WORKFLOW_ERROR
    described: str = ""
    place: str | None = None


class Request(NamedTuple):
    """A request of the gateway."""

    request: int
    door: int
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class Next(NamedTuple):
    """Ask for the next event of a stream."""

    request: int


class Abandon(NamedTuple):
    """Nobody waits for the answer, or for the rest of the stream."""

    request: int


class Answered(NamedTuple):
    """The gateway's answer; `streams` says that events can be asked for."""

    request: int
    status: int
    body: bytes
    content_type: str
    headers: tuple[tuple[str, str], ...]
    streams: bool = False


class Event(NamedTuple):
    """The next event of a stream; None is its end."""

    request: int
    data: bytes | None


class Ask(NamedTuple):
    """Ask a session for something, or tell it.

    Attributes:
        ask: Number of the question; None is no question.
        session: Whom.
    """

    ask: int | None
    session: int
    what: str
    arguments: tuple[Any, ...]


class Given(NamedTuple):
    """What a session says; `error` is what it raised instead."""

    ask: int
    value: Any
    error: Exception | None = None


class Log(NamedTuple):
    """A record of the worker's log."""

    fields: dict[str, Any]


def framed(message: Any) -> bytes:
    """A message as it is sent."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class Frames:
    """What has arrived, as messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def added(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete with this."""
        self._data += data
        start, held = 0, len(self._data)
        view = memoryview(self._data)
        found = []
        while held - start >= _LENGTH.size:
            end = start + _LENGTH.size + _LENGTH.unpack_from(view, start)[0]
            if end > held:
                break
            found.append(pickle.loads(view[start + _LENGTH.size : end]))
            start = end
        view.release()
        del self._data[:start]
        return iter(found)


def portable(error: Exception) -> Exception:
    """An error as another process can read it: its own class where that is Python's or ours."""
    kind, text = type(error), str(error)
    if kind.__module__.partition(".")[0] in ("builtins", "tuner"):
        with contextlib.suppress(Exception):  # with all that it knows
            if type(pickle.loads(pickle.dumps(error))) is kind:
                return error
        with contextlib.suppress(Exception):  # or with its words, unless its constructor wants more
            made = kind(text)
            pickle.dumps(made)
            return made
    return RuntimeError(f"{kind.__name__}: {text}")


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


# A session of the run's gateway, as a worker has it.


class RemoteSession(Access):
    """What a session is asked and told goes through the line, to the session itself.

    Args:
        line: The line.
        opened: Which session.
    """

    def __init__(self, line: Line, opened: Opened) -> None:
        self._line = line
        self._opened = opened
        self._base_url: str | None = None
        self._credits = _Told(line, opened)
        self.in_flight = _InFlight(self._quiet)
        self.host: Door = LineDoor(line, opened.door, self.in_flight)
        if opened.base_url is not None:
            self.host = HttpClientDoor(opened.base_url, self.in_flight)
        self.id, self.key = opened.id, opened.key
        self.errors: list[Exception] = []
        self.results: Results = _RemoteResults(line, opened)

    def _quiet(self) -> float:
        """Seconds since a call of any client began or ended; only with a port are there others."""
        if self._base_url is None:
            return math.inf
        return float(self._line.ask(self._opened.number, "quiet"))

    @property
    def model_name(self) -> str:
        return self._opened.model_name

    @property
    def max_model_len(self) -> int:
        return self._opened.max_model_len

    @property
    def keeps_calls(self) -> bool:
        return self._opened.keeps_calls

    @property
    def base_url(self) -> str:
        """On the run's machine a port of loopback, which the first use opens."""
        if self._base_url is None:
            known = self._opened.base_url
            self._base_url = known or str(self._line.ask(self._opened.number, "base_url"))
        return self._base_url

    @property
    def other_names(self) -> Sequence[str]:
        """What requests may give as `model` besides its name."""
        found: Sequence[str] = self._line.ask(self._opened.number, "other_names")
        return found

    @other_names.setter
    def other_names(self, names: Sequence[str]) -> None:
        self._line.ask(self._opened.number, "call_also", tuple(names))

    def calls_so_far(self) -> list[RecordedCall]:
        """As the session has them now; waits for that."""
        calls = self._line.ask(self._opened.number, "calls")
        return [RecordedCall(self._credits, call) for call in calls]

    def text_of(self, ids: Sequence[int]) -> str:
        """As the session has it; waits for that."""
        return str(self._line.ask(self._opened.number, "text_of", tuple(ids)))

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """As the session has it; waits for that."""
        found: list[int] = self._line.ask(self._opened.number, "encode", prompt)
        return found

    @property
    def tokenizer(self) -> Any:
        """A copy of the model's."""
        return self._line.ask_once(self._opened, "tokenizer", pickle.loads)

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a completion."""
        found: frozenset[int] = self._line.ask_once(self._opened, "end_ids")
        return found

    @property
    def version(self) -> int:
        """As the session has it; waits for that."""
        return int(self._line.ask(self._opened.number, "version"))

    async def complete_tokens(
        self, prompt_ids: Sequence[int], **settings: Any
    ) -> tuple[Generation, ...]:
        """As the session does it; in any event loop."""
        with self.in_flight.here():
            found: tuple[Generation, ...] = await self._line.ask_async(
                self._opened.number, "complete_tokens", [*prompt_ids], settings
            )
        return found

    def warn_once(self, setting: str, sentence: str) -> None:
        self._line.tell(self._opened.number, "warn", setting, sentence)

    def seal(self) -> None:
        """Nothing more is said of its calls; the session itself refuses what is asked of it."""
        self._credits.sealed = True


class _InFlight(InFlight):
    """What is being generated, of clients that come by a port as well."""

    def __init__(self, quiet: Callable[[], float]) -> None:
        self._moved = 0.0
        self._quiet = quiet
        super().__init__()

    @property
    def moved(self) -> float:
        """When a call last began or ended; asks the session where that seems to be long ago."""
        now = time.perf_counter()
        if now - self._moved > QUIET / 2:
            self._moved = max(self._moved, now - self._quiet())
        return self._moved

    @moved.setter
    def moved(self, value: float) -> None:
        self._moved = value


class _Told(Credits):
    """What is said of calls here is said to the session as well."""

    def __init__(self, line: Line, opened: Opened) -> None:
        super().__init__(opened.id)
        self._line = line
        self._number = opened.number

    def of(self, call_id: str) -> Credit:
        if call_id not in self._by_call:
            self._by_call[call_id] = _Telling(self._line, self._number, call_id)
        return self._by_call[call_id]


class _Telling(Credit):
    """The credit of one call, of which every change is told."""

    def __init__(self, line: Line, number: int, call_id: str) -> None:
        self.__dict__["_tells"] = line, number, call_id
        self.__dict__.update(vars(Credit()))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        line, number, call_id = self.__dict__["_tells"]
        line.tell(number, "credit", call_id, name, value)


class _RemoteResults(Results):
    """Results of recorded functions, which the session keeps and gives."""

    def __init__(self, line: Line, opened: Opened) -> None:
        super().__init__(None, lambda: 0)
        self._line = line
        self._opened = opened

    def given(
        self, function: str, arguments: dict[str, Any], occurrence: int
    ) -> FunctionResult | None:
        if not self._opened.scripted:
            return None
        found: FunctionResult | None = self._line.ask(
            self._opened.number, "given", function, arguments, occurrence
        )
        return found

    def keep(self, function: str, arguments: dict[str, Any], occurrence: int, value: Any) -> None:
        # Waits, so that it is known how many calls were committed before.
        self._line.ask(self._opened.number, "keep", function, arguments, occurrence, value)
