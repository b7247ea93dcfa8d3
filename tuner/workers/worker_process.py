"""A worker in another process of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import IO, Any

from tuner.functions.shipping import worker_path
from tuner.gateway.service import Door
from tuner.workers.any_worker import Worker
from tuner.workers.messages import Setup, framed

_LINES = 200
_WORDS = 600


class ChildProcess:
    """A process of `tuner.workers.child`, and all that it begins.

    Args:
        printed: Gets, in a thread, "stdout" or "stderr" and what is written there, line by line.
        ended: Is told, in a thread, that it has ended and all of that was passed on.

    Attributes:
        connection: Our end of its line.
    """

    def __init__(self, printed: Callable[[str, str], object], ended: Callable[[], object]) -> None:
        self._printed, self._ended = printed, ended
        self._said: deque[str] = deque(maxlen=_LINES)
        self._over = False
        self.connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tuner.workers.child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": worker_path(), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # Ctrl-C is the run's
            )
        self.connection.setblocking(False)
        threading.Thread(target=self._watch, name="tuner-worker", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def how(self) -> str:
        """How it ended, with its last words."""
        code = self._process.returncode
        if code is None:
            return "has ended"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        words = last_words(self._said)
        return f"{how}{': ' if words else ''}{words}"

    def kill(self) -> None:
        """End it at once, with all that it began; nothing where that is done."""
        if not self._over:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _watch(self) -> None:
        """In a thread: pass on what it prints, and see it end."""
        pairs = (self._process.stdout, "stdout"), (self._process.stderr, "stderr")
        threads = [
            threading.Thread(target=self._pass_on, args=pair, name="tuner-worker", daemon=True)
            for pair in pairs
        ]
        for thread in threads:
            thread.start()
        self._process.wait()
        self.kill()  # what its functions began
        self._over = True  # its number may be another one's from now on
        for thread in threads:
            thread.join(timeout=1)
        self._ended()

    def _pass_on(self, source: IO[bytes], target: str) -> None:
        with source:
            for line in source:
                text = line.decode(errors="replace")
                if target == "stderr":
                    self._said.append(text.rstrip())
                self._printed(target, text)


class WorkerProcess(asyncio.Protocol, Worker):
    """One process that calls the user's functions. To be made where an event loop runs.

    Args:
        setup: What it is for.
        doors: The gateways, by number.
        on_end: Is told, once, that it has ended.
    """

    def __init__(
        self, setup: Setup, doors: list[Door], on_end: Callable[[WorkerProcess], None]
    ) -> None:
        super().__init__(doors, on_end)
        self._transport: asyncio.WriteTransport | None = None
        self._unsent: list[bytes] = [framed(setup)]
        self._gone = False
        self._child = ChildProcess(print_here, self._has_ended)
        self._connecting = self._loop.create_task(self._connect())

    @property
    def name(self) -> str:
        return f"worker {self.pid}"

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def alive(self) -> bool:
        return super().alive and not self._gone

    async def _connect(self) -> None:
        await self._loop.create_unix_connection(lambda: self, sock=self._child.connection)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        unsent, self._unsent = self._unsent, []
        for data in unsent:
            transport.write(data)

    def _send(self, data: bytes) -> None:
        if self._transport is None:
            self._unsent.append(data)
        elif not self._transport.is_closing():
            self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._arrived(data)

    def _has_ended(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._exited)

    def _exited(self) -> None:
        self._gone = True
        if self._transport is None or self._transport.is_closing():
            self._end()
        else:  # what it still sent is read before that
            self._loop.call_later(1.0, self._transport.abort)

    def connection_lost(self, error: Exception | None) -> None:
        if self._gone:
            self._end()
        else:
            self._loop.call_later(1.0, self.kill, "it closed its line to the run")

    def _how(self) -> str:
        return self._child.how if self._gone else "has ended"

    def _kill(self) -> None:
        self._child.kill()

    async def aclose(self) -> None:
        await super().aclose()
        await asyncio.gather(self._connecting, return_exceptions=True)
        if self._transport is not None:
            self._transport.abort()


def print_here(target: str, text: str) -> None:
    """Write what a worker wrote, in any thread."""
    with contextlib.suppress(ValueError, OSError):  # closed
        getattr(sys, target).write(text)  # a console or a notebook may be before it


def last_words(lines: Iterable[str]) -> str:
    """What a process wrote before it died, on one line; of a crash, where the code was in it."""
    said = [line.strip() for line in lines if line.strip()]
    fatal = [index for index, line in enumerate(said) if line.startswith("Fatal Python error")]
    if fatal:
        said = said[fatal[-1] :]
        current = [n for n, line in enumerate(said) if line.startswith("Current thread")]
        found = [said[0], *(said[current[0] + 1 : current[0] + 5] if current else said[1:5])]
    else:
        found = said[-8:]
    text = " | ".join(found)
    return text if len(text) <= _WORDS else f"{text[:_WORDS]}..."
