"""The door for everything else: the gateway as an ASGI app on a loopback port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tuner.gateway.request_error import RequestError
from tuner.gateway.service import EVENT_STREAM, Answers, Events, Reply, StreamReply

MAX_BODY_BYTES = 32 * 1024 * 1024
STALLED_SECONDS = 60
"""How long a client may neither send the rest of its body nor read what it is sent."""


class HttpDoor:
    """Serves `gateway` on a loopback port of its own choice, as a task of `loop`.

    The port is bound at once, so that `base_url` can be used from code that does not await:
    what arrives before the server runs waits in the socket's queue.
    """

    def __init__(self, gateway: Answers, loop: asyncio.AbstractEventLoop) -> None:
        # asyncio turns Nagle's algorithm off only for sockets that say they are TCP; with it on,
        # answers wait 40 ms for the client's delayed acknowledgement.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(2048)
        self.base_url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        config = uvicorn.Config(
            _Endpoint(gateway),
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None
        loop.call_soon_threadsafe(self._start)

    def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._server.serve([self._socket]))

    async def aclose(self) -> None:
        """Stop serving, on the loop that serves; requests in flight get a second to end."""
        await asyncio.sleep(0)  # a door that was opened this very moment has not started yet
        if self._task is not None:
            while not (self._server.started or self._task.done()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            self._server.should_exit = True
            await self._task
        self._socket.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signal handlers alone: Ctrl-C belongs to the run."""
        yield


class _Endpoint:
    """`Gateway.handle` as an ASGI application; a client that goes away cancels its request."""

    def __init__(self, gateway: Answers) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        try:
            body = await _body(receive)
        except RequestError as error:
            await _send(self._gateway.refusal(scope["path"], headers, error), scope, receive, send)
            return
        if body is None:
            return
        answer = asyncio.ensure_future(
            self._gateway.handle(scope["method"], scope["path"], headers, body)
        )
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                reply = answer.result()
                if isinstance(reply, StreamReply):
                    await _send_events(reply.events, gone, send)
                else:
                    await _send(reply, scope, receive, send)
        finally:
            answer.cancel()
            gone.cancel()


async def _body(receive: Receive) -> bytes | None:
    """The request's body, or None if the client left before its end."""
    chunks: list[bytes] = []
    size = 0
    while True:
        try:
            async with asyncio.timeout(STALLED_SECONDS):
                event = await receive()
        except TimeoutError:
            raise RequestError(
                f"nothing came for {STALLED_SECONDS} s while the body was read: send it at once",
                status=408,
            ) from None
        if event["type"] == "http.disconnect":
            return None
        chunk = event.get("body", b"")
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise RequestError(
                f"the body is larger than {MAX_BODY_BYTES} bytes: send fewer or shorter messages",
                status=413,
            )
        chunks.append(chunk)
        if not event.get("more_body", False):
            return b"".join(chunks)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(reply: Reply, scope: Scope, receive: Receive, send: Send) -> None:
    response = Response(reply.body, status_code=reply.status, media_type=reply.content_type)
    await response(scope, receive, send)


async def _send_events(events: Events, gone: asyncio.Future[None], send: Send) -> None:
    """Send a stream's events; a client that goes away, or stops reading, ends it.

    Generation does not wait for the client: only what is written does.
    """
    headers = [(b"content-type", EVENT_STREAM.encode()), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    try:
        while True:
            coming = asyncio.ensure_future(anext(events, None))
            both: set[asyncio.Future[Any]] = {coming, gone}
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not coming.done():
                    coming.cancel()
                    await asyncio.wait({coming})
            if gone.done():
                return
            event = coming.result()
            async with asyncio.timeout(STALLED_SECONDS):
                body = {"body": event or b"", "more_body": event is not None}
                await send({"type": "http.response.body", **body})
            if event is None:
                return
    except TimeoutError:
        return  # without the last chunk: the connection is closed, the client sees it broken
    finally:
        await events.aclose()
