"""Servers on another host, as far as one machine has it: addresses, keys, connections that are cut.

The server is that of `tuner.engines.vllm.server`, with an engine over transformers in vLLM's place.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn

from tests.engines.local_server import LocalServer
from tuner.engines import SamplingParams
from tuner.engines.servers import SampledTokens, Weights
from tuner.engines.vllm.core import VllmSettings
from tuner.engines.vllm.server import VllmHost, make_app

KEY = "sesame"


class ToyHost(VllmHost):
    """Serves with an engine of this process what it is handed; `local.loaded` has the labels."""

    def __init__(self, local: LocalServer) -> None:
        super().__init__()
        self.local = local
        self._alive = False

    @property
    def label(self) -> str | None:
        return self.local.loaded[-1] if self._alive else None

    async def _serve(self, settings: VllmSettings, weights: Weights) -> None:
        self._alive = False
        await asyncio.to_thread(self.local.start, weights)
        self._settings, self._alive = settings, True

    def stream(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, label: str, adapter: str | None
    ) -> AsyncGenerator[SampledTokens, None]:
        return self.local.stream(prompt_ids, sampling, label, adapter)


def listening(address: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A socket that listens."""
    door = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    door.bind((address, port))
    door.listen(512)
    return door


def serve(host: VllmHost, door: socket.socket) -> uvicorn.Server:
    """The HTTP side of a host; its `run([door])` blocks."""
    app = make_app(host, KEY)
    return uvicorn.Server(
        uvicorn.Config(app, lifespan="off", log_level="warning", access_log=False)
    )


@contextmanager
def served(host: VllmHost, address: str = "127.0.0.1") -> Iterator[tuple[str, int]]:
    """Address and port of a host that a thread of this process serves."""
    with listening(address) as door:
        server = serve(host, door)
        thread = threading.Thread(target=server.run, args=([door],), daemon=True)
        thread.start()
        try:
            yield door.getsockname()
        finally:
            server.should_exit = server.force_exit = True
            thread.join(30)


class Proxy:
    """Passes TCP on to a server, and cuts connections.

    Args:
        to: Address and port of the server.

    Attributes:
        cuts: Is asked of each piece of an answer, after what was asked; what it is true of is not
            passed on, and the connection is cut.
        cut_count: How many were.
    """

    def __init__(self, to: tuple[str, int]) -> None:
        self._to = to
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[asyncio.StreamWriter] = set()
        self.cuts: Callable[[bytes, bytes], bool] = lambda asked, answered: False
        self.cut_count = 0
        self.door = listening()
        self.url = "http://{}:{}".format(*self.door.getsockname())

    async def _run(self) -> None:
        server = await asyncio.start_server(self._pass_on, sock=self.door)
        with contextlib.suppress(asyncio.CancelledError):
            await server.serve_forever()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, to_there = await asyncio.open_connection(*self._to)
        except OSError:
            self._cut(writer)
            return
        asked = bytearray()
        self._open |= {writer, to_there}

        async def requests() -> None:
            while piece := await reader.read(65536):
                asked[:] = piece if piece.startswith((b"POST", b"GET")) else asked + piece
                to_there.write(piece)
            to_there.close()

        async def answers() -> None:
            while piece := await there.read(65536):
                if self.cuts(bytes(asked), piece):
                    self.cut_count += 1
                    self._cut(writer)
                    self._cut(to_there)
                    return
                writer.write(piece)
            writer.close()

        with contextlib.suppress(OSError):
            await asyncio.gather(requests(), answers())
        self._open -= {writer, to_there}

    def _cut(self, writer: asyncio.StreamWriter) -> None:
        """As a broken line does: no goodbye, but a reset."""
        line: socket.socket = writer.get_extra_info("socket")
        if line.fileno() >= 0:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    @contextmanager
    def running(self) -> Iterator[Proxy]:
        """It passes on while the block runs."""
        work: list[asyncio.Task[None]] = []

        async def main() -> None:
            work.append(asyncio.ensure_future(self._run()))
            await work[0]

        thread = threading.Thread(target=self._run_loop, args=(main(),), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(lambda: [one.cancel() for one in work])
            thread.join(30)
            self.door.close()

    def _run_loop(self, main: Coroutine[Any, Any, None]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(main)
        for writer in self._open:
            writer.transport.abort()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def each(count: int, path: str, having: str = "") -> Callable[[bytes, bytes], bool]:
    """Cuts at each `count`-th piece of the answers to requests of a path that have this in them."""
    seen = 0

    def cuts(asked: bytes, answered: bytes) -> bool:
        nonlocal seen
        if not asked.startswith(f"POST {path} ".encode()) or having.encode() not in asked:
            return False
        seen += 1
        return seen % count == 0

    return cuts
