"""The HTTP server: the gateway as an ASGI app on a port, of loopback by default."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
import weakref
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from tuner.gateway.request_error import RequestError, shown
from tuner.gateway.service import EVENT_STREAM, Answers, Reply, StreamReply, served_path

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Maximum size of a body, compressed or not."""
STALLED_SECONDS = 60
"""How long a client may pause while sending headers or body, or while reading the answer."""
MAX_CONNECTIONS = 16384
"""Maximum of connections; never more than half of the files that the process may open."""
# Other Host values are rejected to prevent DNS rebinding: a web page could reach the server by
# them.
_LOOPBACK = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d*)?", re.IGNORECASE)
_PORT = re.compile(r":\d*$")
# As in uvicorn: the proxies whose forwarding headers are trusted.
_PROXIES = os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1,::1")
_CONNECTION = "tuner.connection"  # key of the state in a scope


@dataclass(frozen=True)
class Opening:
    """Address of an HTTP server, and the clients that it accepts.

    Attributes:
        host: Address to listen at, or its name.
        port: 0 takes a free one.
        names: Accepted `Host` values besides the names of loopback, without a port.
        max_body_bytes: Larger bodies are rejected; None is `MAX_BODY_BYTES`.
        beside: An application for every path that does not begin with "/v1/", or None.
        patience: Seconds that requests in flight get to finish when it closes.
        unix: Whether to listen at a Unix socket in a temporary folder instead of host and port.
    """

    host: str = "127.0.0.1"
    port: int = 0
    names: frozenset[str] = frozenset()
    max_body_bytes: int | None = None
    beside: ASGIApp | None = None
    patience: int = 1
    unix: bool = False


class HttpDoor:
    """Serves `gateway` on a port, as a task of `loop`.

    The port is bound at once, so that code that does not await can use `base_url`: what arrives
    before the server runs waits in the socket's queue.

    Raises:
        OSError: The port cannot be bound.
    """

    def __init__(
        self, gateway: Answers, loop: asyncio.AbstractEventLoop, opening: Opening | None = None
    ) -> None:
        opening = opening or Opening()
        if opening.unix:
            # A socket's path has 108 characters at most, and TMPDIR may be long.
            short = tempfile.gettempdir() if len(tempfile.gettempdir()) < 60 else "/tmp"
            folder = tempfile.mkdtemp(prefix="tuner-", dir=short)
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self._listen(socket.socket(socket.AF_UNIX), path := os.path.join(folder, "door"))
            self.port, self.base_url = 0, f"unix:{path}"
        else:
            family, *_, address = socket.getaddrinfo(
                opening.host, opening.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            # asyncio turns Nagle's algorithm off only for sockets that say they are TCP; with it
            # on, answers wait 40 ms for the client's delayed acknowledgement.
            made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            # A restarted server finds connections of the previous one, which end slowly.
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(opening.port != 0))
            self._listen(made, address)
            host, self.port = made.getsockname()[:2]
            self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/v1"
        config = uvicorn.Config(
            _Endpoint(gateway, opening),
            http=_HttpConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # only the additional application reads it
            timeout_graceful_shutdown=opening.patience,
            # uvicorn's default of 5 s equals httpx's: requests sent while both sides close the
            # connection would be lost.
            timeout_keep_alive=STALLED_SECONDS,
        )
        self._server, self._gateway = _Server(config), gateway
        self._task: asyncio.Task[None] | None = None
        loop.call_soon_threadsafe(self._start)

    def _listen(self, made: socket.socket, address: Any) -> None:
        self._socket = made
        try:
            made.bind(address)
            made.listen(2048)
        except OSError:
            made.close()
            raise

    def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._server.serve([self._socket]))

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Also accept connections in a thread while the block runs, because the loop is blocked."""
        endpoint = _Endpoint(self._gateway)
        server = _Server(
            uvicorn.Config(
                endpoint, http=_HttpConnection, ws="none", lifespan="off", log_config=None
            )
        )
        sockets = [self._socket.dup()]
        threading.Thread(
            target=lambda: asyncio.run(server.serve(sockets)), name="tuner-door", daemon=True
        ).start()
        try:
            yield
        finally:
            server.should_exit = True  # once what it has accepted is answered

    async def aclose(self) -> None:
        """Stop serving, on the loop that serves; requests in flight get a second to end."""
        await asyncio.sleep(0)  # a server that was opened this moment has not started yet
        if self._task is not None:
            while not (self._server.started or self._task.done()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            self._server.end()
            await self._task
        self._socket.close()


class _Server(uvicorn.Server):
    """uvicorn's server, which ends at once; uvicorn's own sleeps for 0.1 s between looks."""

    _ticking: asyncio.Future[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signal handlers alone: Ctrl-C belongs to the run."""
        yield

    def end(self) -> None:
        """On the loop that serves."""
        self.should_exit = True
        if self._ticking is not None:
            self._ticking.cancel()

    async def main_loop(self) -> None:
        self._ticking = asyncio.ensure_future(super().main_loop())
        try:
            await asyncio.wait([self._ticking])
        finally:
            self._ticking.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self.server_state
        for listening in (*self.servers, *(sockets or ())):
            listening.close()
        for connection in list(state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                # uvicorn has no event for it.
                while state.connections or state.tasks:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        except TimeoutError:
            for task in state.tasks:
                task.cancel()


class _HttpConnection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # h11 or httptools
    """A connection with a time limit for the headers of each request, and a limit of connections.
    uvicorn's own `timeout_keep_alive` begins only after the first answer and ends with the first
    byte; its `limit_concurrency` leaves connections open."""

    _deadline: asyncio.TimerHandle | None = None
    answering: asyncio.Task[Any] | None = None
    """The task that answers its request, cancelled when the client disconnects."""
    gone = False
    parser: Any  # of httptools; h11 has none

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_Joined(transport))
        # Becomes the state of a request's scope.
        self.app_state: dict[str, Any] = {**vars(self)["app_state"], _CONNECTION: self}
        limit = _most_connections()
        if len(self.connections) > limit:
            error = RequestError(f"{limit} connections are open: close some", status=503)
            head = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\n"
            transport.write(head + b"content-type: application/json\r\n\r\n" + error.body())
            transport.close()
            return
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        self._data = data
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._deadline is None:
            self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)
        self.gone = True
        if self.answering is not None:
            self.answering.cancel()

    def _should_upgrade(self) -> bool:
        """Whether httptools would skip the body of a request: if it offers to go on in another
        protocol, as Java's client offers `h2c`. WebSockets are refused by `_check_door`."""
        offered = hasattr(self, "parser") and self._get_upgrade()
        return bool(offered) and offered != b"websocket"

    def handle_websocket_upgrade(self, *_: Any) -> None:
        """Parse such a request again without its offer, which a server may ignore."""
        stopped: Any = sys.exc_info()[1]  # httptools.HttpParserUpgrade: at which byte
        rest = self._data[stopped.args[0] :]
        kept = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        version = self.parser.get_http_version().encode()
        request = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)
        self.parser = type(self.parser)(self)
        self.data_received(b"\r\n".join([request, *kept, b"", rest]))

    @property
    def read_whole(self) -> bool:
        """Whether the whole body of the current request has arrived."""
        return not self.cycle.more_body

    def _wait_for_headers(self) -> None:
        self._deadline = self.loop.call_later(STALLED_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Joined:
    """A transport that sends the head of an answer together with its body, in one packet."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._head: bytes | None = None
        self.more_comes = False
        """Whether the next write waits for the one after it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self.more_comes:
            self._head, self.more_comes = data, False
            return
        if self._head is not None:
            data, self._head = self._head + data, None
        self._transport.write(data)


def _most_connections() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return MAX_CONNECTIONS
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return min(MAX_CONNECTIONS, files // 2) if files > 0 else MAX_CONNECTIONS


class _Endpoint:
    """`Gateway.handle` as an ASGI application; a client that disconnects cancels its request."""

    def __init__(self, gateway: Answers, opening: Opening | None = None) -> None:
        self._gateway = gateway
        self._opening = opening = opening or Opening()
        beside: Any = opening.beside  # uvicorn has its own types for an application
        self._beside: Any = None if beside is None else ProxyHeadersMiddleware(beside, _PROXIES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        connection: _HttpConnection | None = scope.get("state", {}).get(_CONNECTION)
        path = served_path(scope["path"])
        head = scope["method"] == "HEAD"
        try:
            _check_door(headers, self._opening.names)
            there = connection is not None and connection.read_whole
            limit = self._opening.max_body_bytes or MAX_BODY_BYTES
            body = await _body(receive, limit, None if there else STALLED_SECONDS)
            if body and (encoding := headers.get("content-encoding")):
                body = _decompressed(body, encoding.lower(), limit)
            self._gateway.check_not_stuck(headers)
        except RequestError as error:
            refusal = self._gateway.refusal(path, headers, error)
            await _send(refusal, send, connection, head=head)
            return
        if body is None:
            return
        if self._beside is not None and not path.startswith("/v1/"):
            await self._beside(scope, _received(body, receive), send)
            return
        task = asyncio.current_task()
        if connection is not None:
            connection.answering = task
        try:
            reply = await self._gateway.handle(scope["method"], path, headers, body)
            if isinstance(reply, StreamReply):
                await _send_events(reply, send)
            else:
                await _send(reply, send, connection, head=head)
        except asyncio.CancelledError:
            if connection is None or not connection.gone or (task and task.uncancel()):
                raise  # this request was cancelled
        finally:
            if connection is not None:
                connection.answering = None


def _check_door(headers: Mapping[str, str], names: frozenset[str]) -> None:
    """Reject a Host that is neither this machine nor one of `names`, and WebSockets."""
    host = headers.get("host", "localhost")
    if not _LOOPBACK.fullmatch(host) and _PORT.sub("", host).lower() not in names:
        known = ", ".join(("127.0.0.1", "localhost", *sorted(names)))
        raise RequestError(f"the Host header is {shown(host)}: use {known} or [::1]", status=421)
    if headers.get("upgrade", "").lower() == "websocket":
        raise RequestError("WebSockets are not served: send an HTTP request", status=400)


def _received(body: bytes, receive: Receive) -> Receive:
    """What an application receives of a request whose body was already read."""
    events: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_event() -> Message:
        return events.pop() if events else await receive()

    return next_event


async def _body(receive: Receive, limit: int, patience: float | None) -> bytes | None:
    """The request's body, or None if the client disconnected before its end.

    Args:
        limit: Maximum number of bytes.
        patience: Seconds that the next part of it may take; None if it is complete.
    """
    chunks: list[bytes] = []
    size = 0
    while True:
        try:
            event = await receive() if patience is None else await _in_time(receive, patience)
        except TimeoutError:
            raise RequestError(
                f"no data arrived for {STALLED_SECONDS} s while the body was read: send it at once",
                status=408,
            ) from None
        if event["type"] == "http.disconnect":
            return None
        chunk = event.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
        if not event.get("more_body", False):
            return b"".join(chunks)


def _decompressed(body: bytes, encoding: str, limit: int) -> bytes:
    """A body without its `Content-Encoding`.

    Args:
        limit: Maximum number of bytes of the result; no more are made.
    """
    if encoding == "identity":
        return body
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise RequestError(
            f"the Content-Encoding is {shown(encoding)}: send gzip, deflate or no encoding",
            status=415,
        )
    decoder = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # gzip or zlib, by its head
    try:
        text = decoder.decompress(body, min(limit + 1, sys.maxsize))
    except zlib.error as error:
        raise RequestError(
            f"the body is not {encoding}, as its Content-Encoding says: {error}"
        ) from None
    if len(text) > limit:
        raise _too_large(limit)
    if not decoder.eof or decoder.unused_data:
        raise RequestError(f"the body is not one complete {encoding} stream: send it whole")
    return text


def _too_large(limit: int) -> RequestError:
    return RequestError(
        f"the body is larger than {limit} bytes: send fewer or shorter messages", status=413
    )


async def _in_time(receive: Receive, patience: float) -> Message:
    async with asyncio.timeout(patience):
        return await receive()


async def _send(
    reply: Reply, send: Send, connection: _HttpConnection | None, *, head: bool
) -> None:
    """Send a reply. HEAD gets no body, and the connection ends for clients that wait for one."""
    kind = reply.content_type
    own = (
        ("content-length", str(len(reply.body))),
        ("content-type", f"{kind}; charset=utf-8" if kind.startswith("text/") else kind),
    )
    headers = [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in (*reply.headers, *own)
    ]
    if head:
        headers.append((b"connection", b"close"))
    elif connection is not None:
        connection.transport.more_comes = True
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


async def _send_events(reply: StreamReply, send: Send) -> None:
    """Send a stream's events; a client that stops reading ends it.

    Generation does not wait for the client, only sending does.
    """
    own = ("content-type", EVENT_STREAM), ("cache-control", "no-cache")
    headers = [(name.encode(), value.encode("latin-1")) for name, value in own + reply.headers]
    events = reply.events
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    try:
        while True:
            event = await anext(events, None)
            async with asyncio.timeout(STALLED_SECONDS):
                body = {"body": event or b"", "more_body": event is not None}
                await send({"type": "http.response.body", **body})
            if event is None:
                return
    except TimeoutError:
        return  # without the last chunk: the connection is closed, the client sees it broken
    finally:
        await events.aclose()
