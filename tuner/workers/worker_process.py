"""A worker as its run has it: a process, what is asked of it, and what it asks of the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, TypeVar

from tuner.errors import TunerError
from tuner.functions.shipping import worker_path
from tuner.gateway import Session
from tuner.gateway.service import Door, Events, StreamReply
from tuner.rollout.failures import Elsewhere
from tuner.rollout.limits import GRACE
from tuner.traces import Outcome
from tuner.workers.messages import (
    Abandon,
    Answered,
    Ask,
    Cancel,
    Close,
    Done,
    Event,
    Failed,
    Forget,
    Frames,
    Given,
    Log,
    Next,
    Ready,
    Refused,
    Request,
    Run,
    Setup,
    Stop,
    framed,
    portable,
)

T = TypeVar("T")
logger = logging.getLogger("tuner.rollout")
PATIENCE = 2 * GRACE
"""Seconds after which a worker that does not end what it is told to is ended itself."""
_LINES = 200
_WORDS = 600

_ASKED: Mapping[str, Callable[..., Any]] = {
    "base_url": lambda session: session.base_url,
    "quiet": lambda session: time.perf_counter() - session.in_flight.moved,
    "other_names": lambda session: session.other_names,
    "call_also": lambda session, names: setattr(session, "other_names", names),
    "calls": lambda session: [one.call for one in session.calls_so_far()],
    "credit": lambda session, *said: session.recording.credit(*said),
    "warn": lambda session, *said: session.warn_once(*said),
    "given": lambda session, *of: session.results.given(*of),
    "keep": lambda session, *of: session.results.keep(*of),
}


class WorkerProcess(asyncio.Protocol):
    """One process that calls the user's functions. To be made where an event loop runs.

    Args:
        setup: What it is for.
        doors: The gateways, by number.
        on_end: Is told, once, that it has ended.

    Attributes:
        sessions: Of its attempts, by number.
        attempts: Those it has.
        ready: Done once its functions are loaded; raises TunerError where they cannot be, and
            `Elsewhere` where the process died before.
        cpu: Seconds of CPU that its functions took.
    """

    def __init__(
        self, setup: Setup, doors: list[Door], on_end: Callable[[WorkerProcess], None]
    ) -> None:
        self._doors = doors
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self.sessions: dict[int, Session] = {}
        self.attempts: set[int] = set()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.ready.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.cpu = 0.0
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._frames = Frames()
        self._transport: asyncio.WriteTransport | None = None
        self._unsent: list[bytes] = [framed(setup)]
        self._calls: dict[int, asyncio.Future[Done | Failed]] = {}
        self._answers: dict[int, asyncio.Task[None]] = {}
        self._streams: dict[int, Events] = {}
        self._numbers = itertools.count(1)
        self._said: deque[str] = deque(maxlen=_LINES)
        self._code: int | None = None
        self._killed_for: str | None = None
        ours, theirs = socket.socketpair()
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
        ours.setblocking(False)
        self._socket = ours
        self._connecting = self._loop.create_task(self._connect())
        threading.Thread(target=self._watch, name="tuner-worker", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._killed_for is None and not self.ended.done() and self._code is None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def _connect(self) -> None:
        await self._loop.create_unix_connection(lambda: self, sock=self._socket)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        unsent, self._unsent = self._unsent, []
        for data in unsent:
            transport.write(data)

    def send(self, message: Any) -> None:
        """To be sent when there is room; into the void where the process has ended."""
        if self._transport is None:
            self._unsent.append(framed(message))
        elif not self._transport.is_closing():
            self._transport.write(framed(message))

    def forget(self, response: int) -> None:
        """Nobody asks for a response any more; in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.send, Forget(response))

    async def call(self, run: Run, session: Session) -> Any:
        """What a function returned.

        Cancelled, it seals the session, has the function cancelled, and waits until it has ended;
        a worker that does not answer because its event loop is kept is killed.

        Raises:
            Elsewhere: How the function failed, or that the worker died.
            FunctionError: The function is wrong.
        """
        if not self.alive:
            raise self._death()
        future: asyncio.Future[Done | Failed] = self._loop.create_future()
        self._calls[run.call] = future
        self.send(run)
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            session.seal()
            self.send(Cancel(run.call))
            ended, _ = await asyncio.wait([future], timeout=PATIENCE)
            if ended:
                future.exception()  # nobody asks any more
            else:
                self.kill(
                    f"{session.id} was cancelled and still kept its event loop {PATIENCE:g} s later"
                )
            raise
        finally:
            self._calls.pop(run.call, None)
        how = future.result()
        if isinstance(how, Failed):
            raise _raised(how)
        return how.value

    def close(self, attempt: int, sessions: list[int]) -> None:
        """An attempt has ended."""
        self.attempts.discard(attempt)
        for number in sessions:
            self.sessions.pop(number, None)
        self.send(Close(attempt))

    def data_received(self, data: bytes) -> None:
        for message in self._frames.added(data):
            self._hear(message)

    def _hear(self, message: Any) -> None:
        match message:
            case Request():
                self._answer(message.request, self._handle(message))
            case Next(request):
                self._answer(request, self._next_event(request))
            case Abandon(request):
                self._abandon(request)
            case Ask():
                self._asked(message)
            case Done(call, _, cpu):
                self.cpu = cpu
                self._settle(call, message)
            case Failed(call, cpu):
                self.cpu = cpu
                self._settle(call, message)
            case Log(fields):
                record = logging.makeLogRecord(fields)
                found = logging.getLogger(record.name)
                if found.isEnabledFor(record.levelno):
                    found.handle(record)
            case Ready():
                self.ready.set_result(None)
            case Refused(why):
                self.ready.set_exception(TunerError(why))

    def _settle(self, call: int, how: Done | Failed) -> None:
        future = self._calls.get(call)
        if future is not None and not future.done():
            future.set_result(how)

    def _answer(self, request: int, work: Any) -> None:
        task = self._answers[request] = self._loop.create_task(work)

        def ended(done: asyncio.Task[None]) -> None:
            if self._answers.get(request) is done:
                del self._answers[request]

        task.add_done_callback(ended)

    async def _handle(self, asked: Request) -> None:
        door = self._doors[asked.door]
        reply = await door.handle(asked.method, asked.path, asked.headers, asked.body)
        if isinstance(reply, StreamReply):
            self._streams[asked.request] = reply.events
            self.send(Answered(asked.request, 200, b"", "", reply.headers, streams=True))
            return
        self.send(
            Answered(asked.request, reply.status, reply.body, reply.content_type, reply.headers)
        )

    async def _next_event(self, request: int) -> None:
        events = self._streams[request]
        data = await anext(events, None)
        if data is None:
            del self._streams[request]
            await events.aclose()
        self.send(Event(request, data))

    def _abandon(self, request: int) -> None:
        task, events = self._answers.pop(request, None), self._streams.pop(request, None)
        if task is not None:
            task.cancel()

        async def close() -> None:
            if task is not None:
                await asyncio.wait([task])
            late = events or self._streams.pop(request, None)
            if late is not None:
                await late.aclose()

        self._answer(request, close())

    def _asked(self, message: Ask) -> None:
        value: Any = None
        error: Exception | None = None
        try:
            session = self.sessions.get(message.session)
            if session is not None:
                value = _ASKED[message.what](session, *message.arguments)
            elif message.ask is not None:
                error = TunerError("it was asked of a rollout that has ended")
        except Exception as raised:
            error = portable(raised)
        if message.ask is not None:
            self.send(Given(message.ask, value, error))

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
        with contextlib.suppress(OSError):  # what its functions began
            os.killpg(self._process.pid, signal.SIGKILL)
        for thread in threads:
            thread.join(timeout=1)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._exited)

    def _pass_on(self, source: IO[bytes], target: str) -> None:
        with source:
            for line in source:
                text = line.decode(errors="replace")
                if target == "stderr":
                    self._said.append(text.rstrip())
                with contextlib.suppress(ValueError, OSError):  # closed
                    getattr(sys, target).write(text)  # a console or a notebook may be before it

    def _exited(self) -> None:
        self._code = self._process.returncode
        if self._transport is None or self._transport.is_closing():
            self._end()
        else:  # what it still sent is read before that
            self._loop.call_later(1.0, self._transport.abort)

    def connection_lost(self, error: Exception | None) -> None:
        if self._code is not None:
            self._end()
        else:
            self._loop.call_later(1.0, self.kill, "it closed its line to the run")

    def _end(self) -> None:
        if self.ended.done():
            return
        self.ended.set_result(None)
        for task in self._answers.values():
            task.cancel()
        for events in self._streams.values():
            self._loop.create_task(events.aclose())
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self._death())
        if not self.ready.done():
            self.ready.set_exception(self._death())
        self._on_end(self)

    @property
    def how_it_ended(self) -> str:
        """In a sentence, with its last words."""
        worker, code = f"worker {self.pid}", self._code
        if self._killed_for is not None:
            return f"{worker} was stopped: {self._killed_for}"
        if code is None:
            return f"{worker} has ended"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        words = last_words(self._said)
        return f"{worker} {how}{': ' if words else ''}{words}"

    def _death(self) -> Elsewhere:
        """What its rollouts hear of that."""
        return Elsewhere(Outcome.WORKER_DIED, f"its {self.how_it_ended}")

    def kill(self, why: str) -> None:
        """End it at once, with all that its functions began."""
        if self._killed_for is None and self._code is None:
            self._killed_for = why
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def aclose(self) -> None:
        """End it, and wait for that."""
        if not self.ended.done():
            self.send(Stop())
            await asyncio.wait([self.ended], timeout=GRACE)
        if not self.ended.done():
            self.kill("it did not end when it was told to")
            await asyncio.wait([self.ended], timeout=GRACE)
        await asyncio.gather(self._connecting, return_exceptions=True)
        if self._transport is not None:
            self._transport.abort()


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


def _raised(failed: Failed) -> BaseException:
    """What a call raises here."""
    if failed.cancelled:
        return asyncio.CancelledError()
    if failed.mistake is not None:
        return failed.mistake
    return Elsewhere(failed.outcome, failed.described, failed.place)
