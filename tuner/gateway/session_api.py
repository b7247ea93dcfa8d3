"""A session over HTTP: what another process asks of it and tells it, and the client there.

Requests of a dialect go to the gateway as any client's do. What only the code around an agent may
do (read its calls, reward them, keep results of functions) is `POST /v1/session/NAME` with the
arguments as JSON, and a key that agents never see: with it they could reward themselves.
"""

from __future__ import annotations

import asyncio
import builtins
import hashlib
import importlib
import inspect
import json
import math
import os
import pickle
import secrets
import ssl
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from tuner.engines.base import Generation
from tuner.engines.servers import NOTICED
from tuner.errors import TunerError
from tuner.gateway.families.template import Message
from tuner.gateway.request_error import RequestError
from tuner.gateway.service import EVENT_STREAM, Door, Reply, StreamReply
from tuner.gateway.sessions import Access, Credits, InFlight, RecordedCall, Results, Session
from tuner.traces import Call, FunctionResult
from tuner.traces.store import from_plain, to_plain

PATH = "/v1/session/"
_PICKLE = "application/octet-stream"


class SharedSession(NamedTuple):
    """What another process needs to use a session.

    Attributes:
        key: The session's API key.
        owner_key: The key of this API, good until the session is shared no more.
        scripted: Whether recorded functions may be given their results.
        url: Where its gateway is: `http://host:port`, `https://host/path` or `unix:/path`.
        base_url: What other clients there use, with "/v1"; None: they ask the session.
        tokenizer_digest: SHA-256 of the pickled tokenizer. It comes with the functions and not
            over the network, so that nobody in between can exchange the pickle; None on a socket
            of this machine.
    """

    id: str
    key: str
    owner_key: str
    model_name: str
    max_model_len: int
    keeps_calls: bool
    scripted: bool
    url: str
    base_url: str | None = None
    tokenizer_digest: str | None = None


@contextmanager
def shared(session: Session, base_url: str | None = None) -> Iterator[SharedSession]:
    """Serve a session to another process while the block runs.

    Args:
        base_url: The gateway's URL for that process; None: a socket of this machine.
    """
    owner_key = secrets.token_urlsafe(24)
    session.host.shared[owner_key] = session
    rendered = base_url and session.service.renderer  # a remote model's tokenizer is unknown
    try:
        yield SharedSession(
            session.id,
            session.key,
            owner_key,
            session.model_name,
            session.max_model_len,
            keeps_calls=session.keeps_calls,
            scripted=session.script is not None,
            url=base_url.removesuffix("/v1") if base_url else session.host.socket_url,
            base_url=base_url,
            tokenizer_digest=_digest(_tokenizer(session)) if rendered else None,
        )
    finally:
        del session.host.shared[owner_key]


def raise_file_limit() -> None:
    """Raise this process's limit of open files, for thousands of concurrent calls."""
    import resource  # missing on Windows, which has no workers

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft < wanted:
        with suppress(ValueError, OSError):  # some systems allow less than they report
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


_FILES = 65536


# The gateway's side.


_pickled: WeakKeyDictionary[Any, bytes] = WeakKeyDictionary()


def _tokenizer(session: Session) -> bytes:
    """The pickled tokenizer, for processes that share a session; they also run functions sent from
    here."""
    tokenizer = session.tokenizer
    if tokenizer not in _pickled:
        _pickled[tokenizer] = pickle.dumps(tokenizer, pickle.HIGHEST_PROTOCOL)
    return _pickled[tokenizer]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _credit(session: Session, call: str, what: str, value: Any) -> None:
    session.recording.credit(call, what, tuple(map(tuple, value)) if what == "masked" else value)


def _given(session: Session, **of: Any) -> dict[str, Any] | None:
    found = session.results.given(**of)
    return None if found is None else to_plain(found)


async def _complete_tokens(
    session: Session, prompt_ids: list[int], settings: dict[str, Any]
) -> list[dict[str, Any]]:
    return [to_plain(one) for one in await session.complete_tokens(prompt_ids, **settings)]


_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "base_url": lambda session: session.base_url,
    "quiet": lambda session: time.perf_counter() - session.in_flight.moved,
    "other_names": lambda session: list(session.other_names),
    "set_other_names": lambda session, names: setattr(session, "other_names", names),
    "calls": lambda session, begin: [to_plain(one.call) for one in session.calls_so_far()[begin:]],
    "credit": _credit,
    "text_of": lambda session, ids: session.text_of(ids),
    "encode": lambda session, prompt: session.encode(prompt),
    "tokenizer": _tokenizer,
    "end_ids": lambda session: sorted(session.end_ids),
    "version": lambda session: session.version,
    "complete_tokens": _complete_tokens,
    "warn": lambda session, **said: session.warn_once(**said),
    "given": _given,
    "keep": lambda session, **of: session.results.keep(**of),
}


async def answer(session: Session | None, path: str, body: bytes) -> Reply:
    """The answer to a request below `PATH`; `session` is None if the key belongs to no shared
    session."""
    try:
        if session is None:
            raise TunerError("it was asked of a rollout that has ended")
        value = _OPERATIONS[path.removeprefix(PATH)](session, **json.loads(body))
        if inspect.isawaitable(value):
            value = await value
        if isinstance(value, bytes):
            return Reply(200, value, _PICKLE)
        return Reply(200, json.dumps(value).encode())
    except Exception as error:
        return Reply(401 if session is None else 500, json.dumps({"error": _told(error)}).encode())


def _told(error: Exception) -> dict[str, Any]:
    """An error in the form that `_raised` reads: with its own class if that is Python's or ours."""
    if isinstance(error, RequestError):
        found = {"status": error.status, "code": error.code, "path": error.path}
        return {"request": found, "message": error.message}
    kind = type(error)
    return {"module": kind.__module__, "class": kind.__name__, "message": str(error)}


def value_of(reply: Reply) -> Any:
    """The value in an answer; raises the error in it."""
    if reply.content_type == _PICKLE:
        return reply.body
    found = json.loads(reply.body)
    if reply.status != 200:
        raise _raised(found["error"])
    return found


def _raised(told: Mapping[str, Any]) -> Exception:
    if "request" in told:
        found = told["request"]
        path = None if found["path"] is None else tuple(found["path"])
        return RequestError(told["message"], **found | {"path": path})
    module, name, text = told["module"], told["class"], told["message"]
    if module.partition(".")[0] in (builtins.__name__, "tuner"):
        kind = getattr(importlib.import_module(module), name)
        if isinstance(kind, type) and issubclass(kind, Exception):  # not eval, for example
            return kind(text)
    return RuntimeError(f"{name}: {text}")


# The other process's side: HTTP/1.1 over keep-alive connections. httpx would cost the worker twelve
# times as much CPU per call.


_CONNECT_SECONDS = 60.0
_KEPT_SECONDS = 30.0
"""Seconds that a connection may be idle; the gateway closes one after 60."""
# Headers of the connection, or set by its ends.
_OF_THE_WAY = frozenset(
    {"host", "connection", "content-length", "content-type", "transfer-encoding", "accept-encoding"}
)


class HttpConnection:
    """A connection to a gateway, in one event loop, for one request at a time.

    Args:
        reader, writer: Its streams.
        idle: Receives it once an answer is completely read.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        idle: deque[HttpConnection],
    ) -> None:
        self._reader, self._writer, self._idle = reader, writer, idle
        self._since = 0.0

    @property
    def usable(self) -> bool:
        """Whether the gateway has not closed it, as far as known."""
        recent = time.monotonic() - self._since < _KEPT_SECONDS
        return recent and not self._reader.at_eof() and not self._writer.is_closing()

    async def ask(self, request: bytes) -> Reply | StreamReply:
        """The answer to a request; events of a stream are read on demand."""
        whole = streams = False
        try:
            self._writer.write(request)
            await self._writer.drain()
            head = await self._reader.readuntil(b"\r\n\r\n")
            first, *lines = head[:-4].decode("latin-1").split("\r\n")
            named = (line.partition(":") for line in lines)
            headers = {name.lower(): value.strip() for name, _, value in named}
            rest = tuple((k, v) for k, v in headers.items() if k not in _OF_THE_WAY)
            length, kind = headers.get("content-length"), headers.get("content-type", "")
            if length is not None:
                body = await self._reader.readexactly(int(length))
            else:
                chunked = headers.get("transfer-encoding", "").lower() == "chunked"
                parts = self._chunks() if chunked else self._to_the_end()
                if streams := kind.startswith(EVENT_STREAM):
                    return StreamReply(EventReader(self, parts), rest)
                body = b"".join([part async for part in parts])
            whole = headers.get("connection", "").lower() != "close"
            return Reply(int(first.split(" ", 2)[1]), body, kind or "application/json", rest)
        finally:
            if not streams:
                self.release(whole=whole)

    def release(self, *, whole: bool) -> None:
        """Keep it for the next request, or close it if the answer was not completely read."""
        if not whole or self._reader.at_eof():
            self._writer.transport.abort()
            return
        self._since = time.monotonic()
        self._idle.append(self)

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := int((await self._reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readuntil(b"\r\n")

    async def _to_the_end(self) -> AsyncIterator[bytes]:
        yield await self._reader.read()


class EventReader:
    """The complete events of a stream, however it was split; closing it early abandons the request.

    Args:
        connection: Released at the end.
        parts: The received data.
    """

    def __init__(self, connection: HttpConnection, parts: AsyncIterator[bytes]) -> None:
        self._connection, self._parts = connection, parts
        self._held = b""
        self._ended = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            while b"\n\n" not in self._held:
                self._held += await anext(self._parts)
        except StopAsyncIteration:
            self._end(whole=True)
            raise
        except BaseException as error:
            self._end(whole=False)
            if isinstance(error, _BROKEN):
                raise ConnectionError(f"the gateway broke off a stream: {_named(error)}") from error
            raise
        event, _, self._held = self._held.partition(b"\n\n")
        return event + b"\n\n"

    async def aclose(self) -> None:
        self._end(whole=False)

    def _end(self, *, whole: bool) -> None:
        if not self._ended:
            self._ended = True
            self._connection.release(whole=whole)


_BROKEN = OSError, EOFError, asyncio.LimitOverrunError, ValueError


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class RemoteDoor:
    """A gateway in another process, callable in any thread and event loop.

    Args:
        url: As in `SharedSession`.
        in_flight: The session's work in progress.
    """

    # Of all instances in the process, by event loop and URL.
    _idle: ClassVar[dict[asyncio.AbstractEventLoop, dict[str, deque[HttpConnection]]]] = {}

    def __init__(self, url: str, in_flight: InFlight) -> None:
        self._url = url
        self._at = urlsplit(url)
        self._in_flight = in_flight
        local = self._at.scheme == "unix"
        self._host = "localhost" if local else self._at.netloc
        self._prefix = "" if local else self._at.path

    async def handle(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Reply | StreamReply:
        """See `Gateway.handle`; raises ConnectionError if there is no answer."""
        with self._in_flight.here():
            return await self.ask(method, path, headers, body)

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Reply | StreamReply:
        """Like `handle`, for requests that are not calls."""
        kept = (f"{k}: {v}\r\n" for k, v in headers.items() if k.lower() not in _OF_THE_WAY)
        lines = [f"host: {self._host}\r\n", f"content-length: {len(body)}\r\n", *kept]
        if any("\n" in line[:-2] for line in lines):
            raise ValueError("a header of the request has a line break")
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode("latin-1")
        try:
            connection = await self._connection()
            return await connection.ask(head + body)
        except _BROKEN as error:
            raise ConnectionError(
                f"the gateway at {self._url} gave no answer: {_named(error)}"
            ) from error

    async def _connection(self) -> HttpConnection:
        if (loop := asyncio.get_running_loop()) not in self._idle:
            for closed in [one for one in list(self._idle) if one.is_closed()]:
                self._idle.pop(closed, None)
        idle = self._idle.setdefault(loop, {}).setdefault(self._url, deque())
        while idle:
            if (found := idle.pop()).usable:
                return found
        async with asyncio.timeout(_CONNECT_SECONDS):
            if self._at.scheme == "unix":
                return HttpConnection(*await asyncio.open_unix_connection(self._at.path), idle)
            secure = ssl.create_default_context() if self._at.scheme == "https" else None
            port = self._at.port or (443 if secure else 80)
            reader, writer = await asyncio.open_connection(self._at.hostname, port, ssl=secure)
        for option in NOTICED:
            writer.get_extra_info("socket").setsockopt(*option)
        return HttpConnection(reader, writer, idle)

    def refusing(self, keys: Iterable[str], why: Callable[[], str]) -> AbstractContextManager[None]:
        """No-op: whatever blocks this event loop, the gateway's continues."""
        return nullcontext()


@cache
def _waiting_loop(process: int) -> asyncio.AbstractEventLoop:
    """The loop for requests of code that waits without awaiting, and so blocks its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="tuner-session", daemon=True).start()
    return loop


class RemoteSession(Access):
    """A session of a gateway in another process.

    Args:
        opened: The session.
    """

    # Values that are equal for all sessions of a gateway, by its URL.
    _known: ClassVar[dict[tuple[str, str], Any]] = {}

    def __init__(self, opened: SharedSession) -> None:
        self._opened = opened
        self._base_url = opened.base_url
        self._authorization = {"authorization": f"Bearer {opened.owner_key}"}
        self._credits = RemoteCredits(opened.id, self.ask)
        self.in_flight = RemoteInFlight(self._quiet)
        self._door = RemoteDoor(opened.url, self.in_flight)
        self.host: Door = self._door
        self.id, self.key = opened.id, opened.key
        self.errors: list[Exception] = []
        self._calls: list[Call] = []
        self.results: Results = RemoteResults(self.ask, scripted=opened.scripted)

    async def ask_async(self, operation: str, /, **arguments: Any) -> Any:
        """The result of an operation of the session, in any event loop; raises the session's
        error, or ConnectionError if there is no answer."""
        body = json.dumps(arguments, default=lambda value: value.item()).encode()  # NumPy's
        reply = await self._door.ask("POST", PATH + operation, self._authorization, body)
        assert isinstance(reply, Reply), "no operation streams"
        return value_of(reply)

    def ask(self, operation: str, /, **arguments: Any) -> Any:
        """Like `ask_async`, but blocking, in any thread."""
        asking = self.ask_async(operation, **arguments)
        return asyncio.run_coroutine_threadsafe(asking, _waiting_loop(os.getpid())).result()

    def _ask_once(self, what: str, read: Callable[[Any], Any]) -> Any:
        known = self._opened.url, what
        if known not in self._known:
            self._known[known] = read(self.ask(what))
        return self._known[known]

    def _quiet(self) -> float:
        """Seconds since a call of any client began or ended; with a port there are other
        clients."""
        return math.inf if self._base_url is None else float(self.ask("quiet"))

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
        """On the gateway's machine a port of loopback, which the first use opens."""
        if self._base_url is None:
            self._base_url = str(self.ask("base_url"))
        return self._base_url

    @property
    def other_names(self) -> Sequence[str]:
        found: Sequence[str] = self.ask("other_names")
        return found

    @other_names.setter
    def other_names(self, names: Sequence[str]) -> None:
        self.ask("set_other_names", names=list(names))

    def calls_so_far(self) -> list[RecordedCall]:
        known = self._calls
        found = [from_plain(Call, call) for call in self.ask("calls", begin=len(known))]
        self._calls = known = [*known, *found]
        return [RecordedCall(self._credits, call) for call in known]

    def text_of(self, ids: Sequence[int]) -> str:
        return str(self.ask("text_of", ids=list(ids)))

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        found: list[int] = self.ask("encode", prompt=prompt)
        return found

    @property
    def tokenizer(self) -> Any:
        """A copy of the model's."""
        return self._ask_once("tokenizer", self._unpickled)

    def _unpickled(self, data: bytes) -> Any:
        expected = self._opened.tokenizer_digest
        if expected is not None and _digest(data) != expected:
            raise TunerError(
                f"the tokenizer from {self._opened.url} is not the run's: something between this "
                "machine and the run changed it; use an https address in tuner.ray.base_url"
            )
        return pickle.loads(data)

    @property
    def end_ids(self) -> frozenset[int]:
        found: frozenset[int] = self._ask_once("end_ids", frozenset)
        return found

    @property
    def version(self) -> int:
        return int(self.ask("version"))

    async def complete_tokens(
        self, prompt_ids: Sequence[int], **settings: Any
    ) -> tuple[Generation, ...]:
        with self.in_flight.here():
            found = await self.ask_async(
                "complete_tokens", prompt_ids=list(prompt_ids), settings=settings
            )
        return tuple(from_plain(Generation, one) for one in found)

    def warn_once(self, setting: str, sentence: str) -> None:
        self.ask("warn", setting=setting, sentence=sentence)

    def seal(self) -> None:
        """Stop setting credit; the session itself rejects later requests."""
        self._credits.sealed = True


class RemoteInFlight(InFlight):
    """Work in progress, including that of clients that use a port."""

    def __init__(self, quiet: Callable[[], float]) -> None:
        self._moved = 0.0
        self._quiet = quiet
        super().__init__()

    @property
    def moved(self) -> float:
        """When a call last began or ended; asks the session if that seems to be long ago."""
        now = time.perf_counter()
        if now - self._moved > _LONG_AGO:
            self._moved = max(self._moved, now - self._quiet())
        return self._moved

    @moved.setter
    def moved(self, value: float) -> None:
        self._moved = value


_LONG_AGO = 30.0


class RemoteCredits(Credits):
    """Credit that is also sent to the session."""

    def __init__(self, session_id: str, ask: Callable[..., Any]) -> None:
        super().__init__(session_id)
        self._ask = ask

    def say(self, call_id: str, what: str, value: Any) -> None:
        super().say(call_id, what, value)
        self._ask("credit", call=call_id, what=what, value=value)


class RemoteResults(Results):
    """Results of recorded functions, stored by the session."""

    def __init__(self, ask: Callable[..., Any], *, scripted: bool) -> None:
        super().__init__(None, lambda: 0)
        self._ask, self._scripted = ask, scripted

    def given(
        self, function: str, arguments: dict[str, Any], occurrence: int
    ) -> FunctionResult | None:
        if not self._scripted:
            return None
        found = self._ask("given", function=function, arguments=arguments, occurrence=occurrence)
        return None if found is None else from_plain(FunctionResult, found)

    def keep(self, function: str, arguments: dict[str, Any], occurrence: int, value: Any) -> None:
        # Waits, so that the number of earlier committed calls is known.
        of = {"function": function, "arguments": arguments, "occurrence": occurrence}
        self._ask("keep", **of, value=value)
