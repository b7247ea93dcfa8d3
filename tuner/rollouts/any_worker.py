"""A worker as seen by its run, and their messages."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from tuner.config import RemoteModel
from tuner.errors import FunctionError, TunerError
from tuner.gateway import Session
from tuner.gateway.session_api import SharedSession
from tuner.rollouts.chat_models import ChatModelKind
from tuner.rollouts.limits import GRACE
from tuner.rollouts.runner import RemoteFailure
from tuner.tasks.functions import JudgeOutput, WorkflowOutput
from tuner.tasks.loading import worker_path
from tuner.traces import Outcome

# Messages between a run and its workers, over one private pair of sockets for each worker.
#
#     the run                                   a worker
#     Setup, once          ------------------>  loads the functions
#                          <------------------  ReadyNotice, or LoadFailure
#     AttemptStart         ------------------>  the sessions of an attempt
#     FunctionRun          ------------------>  calls a function, which asks the gateway by HTTP
#                          <------------------  RunResult, or RunFailure
#     AttemptEnd           ------------------>  the attempt has ended
#
# Each is a pickle after its length. Both ends are processes of one user and one version of this
# package, and no other process has the sockets.


_LENGTH = struct.Struct(">Q")


class Setup(NamedTuple):
    """Configuration of a worker.

    Attributes:
        workflow, judge: As `ship_together` names them.
        path: `sys.path` of the run; None on another machine, which has its own.
        levels: Levels of its loggers, by name.
        timeout: Seconds that code may block the event loop.
    """

    workflow: str
    judge: str | None
    kind: ChatModelKind
    path: list[str] | None
    levels: dict[str, int]
    timeout: float


class ReadyNotice(NamedTuple):
    """The functions are loaded."""


class LoadFailure(NamedTuple):
    """The functions cannot be loaded."""

    why: str


class RemoteAuxiliary(NamedTuple):
    """An auxiliary model behind a URL."""

    model: RemoteModel
    key: str
    max_concurrent: int | None


class AttemptStart(NamedTuple):
    """An attempt at a rollout, or a group to judge.

    Attributes:
        auxiliary: Its auxiliary models by name.
        seed: For the global random states, or None.
    """

    attempt: int
    session: SharedSession
    auxiliary: dict[str, SharedSession | RemoteAuxiliary]
    seed: int | None


class AttemptEnd(NamedTuple):
    attempt: int


class FunctionRun(NamedTuple):
    """Call a function.

    Attributes:
        role: "workflow", "judge" or "group_judge".
        feedback: For the workflow.
        responses: Numbers of the responses to judge; None is a response that is None.
    """

    call: int
    attempt: int
    role: str
    task: dict[str, Any]
    feedback: str | None = None
    responses: tuple[int | None, ...] = ()


class RunCancellation(NamedTuple):
    call: int


class ResponseRelease(NamedTuple):
    """Release a response."""

    response: int


class StopOrder(NamedTuple):
    """Stop the worker."""


class WorkflowReturn(NamedTuple):
    """A workflow returned; its response stays in the worker, under a number."""

    reward: float | None
    metrics: dict[str, float] | None
    response: int | None
    text: str


class RunResult(NamedTuple):
    """A function returned: `WorkflowReturn`, or the fields of `JudgeOutput`s.

    Attributes:
        cpu: CPU seconds that the worker and its children have used since it was ready.
    """

    call: int
    value: Any
    cpu: float


class RunFailure(NamedTuple):
    """A function failed.

    Attributes:
        mistake: Why the function itself is wrong, which ends the run; else None.
        cancelled: Whether it was cancelled, or cancelled itself.
        outcome, described, place, frames: As in `RemoteFailure`.
    """

    call: int
    cpu: float
    mistake: str | None = None
    cancelled: bool = False
    outcome: Outcome = Outcome.WORKFLOW_ERROR
    described: str = ""
    place: str | None = None
    frames: str = ""

    def error(self) -> BaseException:
        """The exception for the run's process."""
        if self.cancelled:
            return asyncio.CancelledError()
        if self.mistake is not None:
            return FunctionError(self.mistake)
        return RemoteFailure(self.outcome, self.described, self.place, self.frames)


class WorkerLog(NamedTuple):
    """A record of the worker's log."""

    fields: dict[str, Any]


def framed(message: Any) -> bytes:
    """A message with its length."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Received data, as messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def added(self, data: bytes) -> list[Any]:
        """The messages that are complete with this data."""
        self._data += data
        found = []
        while len(self._data) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._data)[0]
            if end > len(self._data):
                break
            found.append(pickle.loads(self._data[_LENGTH.size : end]))
            del self._data[:end]
        return found


# A worker as seen by its run.


PATIENCE = 2 * GRACE
"""Seconds after which a worker is killed that does not end what it should."""


class Worker(ABC):
    """Calls the user's functions. Create it where an event loop runs.

    Args:
        on_end: Called once when it has ended.

    Attributes:
        attempts: Its current attempts.
        ready: Done once its functions are loaded; raises TunerError if they cannot be, and
            `RemoteFailure` if it died before.
        ended: Done once it has ended.
        cpu: CPU seconds of its functions.
        lost: Whether its machine was lost, rather than the worker failing.
        shared: Whether it ended with several attempts in it, any of which may be the cause.
    """

    lost = False
    shared = False

    def __init__(self, on_end: Callable[[Any], None]) -> None:
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self.attempts: set[int] = set()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.ready.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.cpu = 0.0
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._frames = Frames()
        self._calls: dict[int, asyncio.Future[RunResult | RunFailure]] = {}
        self._killed_for: str | None = None

    @property
    @abstractmethod
    def name(self) -> str:
        """Name for messages."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """Its process id; 0 if unknown."""

    @property
    def alive(self) -> bool:
        """Whether it can be used."""
        return self._killed_for is None and not self.ended.done()

    @abstractmethod
    def _send(self, data: bytes) -> None:
        """Queue data for sending; discarded if it has ended."""

    @abstractmethod
    def _kill(self) -> None:
        """End it at once, with everything that its functions started."""

    @abstractmethod
    def _how(self) -> str:
        """How it ended by itself, as the continuation of its name."""

    def send(self, message: Any) -> None:
        """Queue a message for sending; discarded if it has ended."""
        self._send(framed(message))

    def forget(self, response: int) -> None:
        """Release a response; in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.send, ResponseRelease(response))

    async def call(self, run: FunctionRun, session: Session) -> Any:
        """The result of a function.

        If cancelled, it seals the session, has the function cancelled, and waits until it has
        ended; a worker that does not answer because its event loop is blocked is killed.

        Raises:
            RemoteFailure: The function failed, or the worker died.
            FunctionError: The function itself is wrong.
        """
        if not self.alive:
            raise self._death()
        future: asyncio.Future[RunResult | RunFailure] = self._loop.create_future()
        self._calls[run.call] = future
        self.send(run)
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            session.seal()
            self.send(RunCancellation(run.call))
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
        if isinstance(how, RunFailure):
            raise how.error()
        return how.value

    def close(self, attempt: int) -> None:
        """An attempt has ended."""
        self.attempts.discard(attempt)
        self.send(AttemptEnd(attempt))

    def _arrived(self, data: bytes) -> None:
        for message in self._frames.added(data):
            self._hear(message)

    def _hear(self, message: Any) -> None:
        match message:
            case RunResult(call, _, cpu) | RunFailure(call, cpu):
                self.cpu = cpu
                future = self._calls.get(call)
                if future is not None and not future.done():
                    future.set_result(message)
            case WorkerLog(fields):
                record = logging.makeLogRecord(fields)
                found = logging.getLogger(record.name)
                if found.isEnabledFor(record.levelno):
                    found.handle(record)
            case ReadyNotice():
                self.ready.set_result(None)
            case LoadFailure(why):
                self.ready.set_exception(TunerError(why))

    def _end(self) -> None:
        if self.ended.done():
            return
        if self._killed_for is None:
            self.shared = len(self.attempts) > 1
        self.ended.set_result(None)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self._death())
        if not self.ready.done():
            self.ready.set_exception(self._death())
        self._on_end(self)

    @property
    def how_it_ended(self) -> str:
        """A sentence, with its last words."""
        if self._killed_for is not None:
            return f"{self.name} was stopped: {self._killed_for}"
        return f"{self.name} {self._how()}"

    def _death(self) -> RemoteFailure:
        """The failure of its rollouts."""
        return RemoteFailure(Outcome.WORKER_DIED, f"its {self.how_it_ended}")

    def kill(self, why: str) -> None:
        """End it at once, with everything that its functions started."""
        if self.alive:
            self._killed_for, self.shared = why, len(self.attempts) > 1
            self._kill()

    async def aclose(self) -> None:
        """End it, and wait for that."""
        if not self.ended.done():
            self.send(StopOrder())
            await asyncio.wait([self.ended], timeout=GRACE)
        if not self.ended.done():
            self.kill("it did not end when it was told to")
            await asyncio.wait([self.ended], timeout=GRACE)


class HeldResponse:
    """A response that stays where the workflow returned it.

    Args:
        worker: The worker that has it.
        number: Its number; None if the response is None.
        text: Its readable text.
    """

    def __init__(self, worker: Worker, number: int | None, text: str) -> None:
        self.worker = worker
        self.number = number
        self._text = text
        if number is not None:
            weakref.finalize(self, worker.forget, number).atexit = False

    def get_text_content(self) -> str:
        return self._text


@dataclass(frozen=True)
class WorkerCaller:
    """Calls the functions in a worker.

    Args:
        worker: The worker.
        attempt: The number of the attempt there.
        session: The attempt's session.
        numbers: Source of numbers.
        judged: Called when its group is judged.
    """

    worker: Worker
    attempt: int
    session: Session
    numbers: itertools.count[int]
    judged: Callable[[], object]

    @property
    def suspect(self) -> bool:
        return self.worker.shared

    async def workflow(self, task: Mapping[str, Any], feedback: str | None) -> WorkflowOutput:
        found: WorkflowReturn = await self._call("workflow", task, feedback)
        held = None
        if found.response is not None:
            held = HeldResponse(self.worker, found.response, found.text)
        return WorkflowOutput(reward=found.reward, metrics=found.metrics, response=held)

    async def judge(self, task: Mapping[str, Any], response: Any) -> JudgeOutput:
        return JudgeOutput(**await self._call("judge", task, None, [response]))

    async def group_judge(
        self, task: Mapping[str, Any], responses: Sequence[Any]
    ) -> list[JudgeOutput]:
        found = await self._call("group_judge", task, None, responses)
        self.judged()
        return [JudgeOutput(**one) for one in found]

    async def _call(
        self,
        role: str,
        task: Mapping[str, Any],
        feedback: str | None,
        responses: Sequence[Any] = (),
    ) -> Any:
        for held in responses:
            if held is not None and held.worker is not self.worker:
                raise RemoteFailure(Outcome.WORKER_DIED, f"its {held.worker.how_it_ended}")
        numbers = tuple(None if held is None else held.number for held in responses)
        run = FunctionRun(next(self.numbers), self.attempt, role, dict(task), feedback, numbers)
        return await self.worker.call(run, self.session)


# A worker in another process of this machine.


_LINES = 200
_WORDS = 600


class ChildProcess:
    """A process of `tuner.rollouts.worker_child`, with everything that it starts.

    Args:
        printed: Called in a thread with "stdout" or "stderr" and each line written there.
        ended: Called in a thread when it has ended and all output was passed on.

    Attributes:
        connection: Our end of its socket pair.
    """

    def __init__(self, printed: Callable[[str, str], object], ended: Callable[[], object]) -> None:
        self._printed, self._ended = printed, ended
        self._said: deque[str] = deque(maxlen=_LINES)
        self._over = False
        self.connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tuner.rollouts.worker_child", str(theirs.fileno())],
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
        """End it at once, with everything that it started; no-op if that is done."""
        if not self._over:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _watch(self) -> None:
        """In a thread: pass on its output, and wait for its end."""
        pairs = (self._process.stdout, "stdout"), (self._process.stderr, "stderr")
        threads = [
            threading.Thread(target=self._pass_on, args=pair, name="tuner-worker", daemon=True)
            for pair in pairs
        ]
        for thread in threads:
            thread.start()
        self._process.wait()
        self.kill()  # processes that its functions started
        self._over = True  # its number may be reused from now on
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
    """One process that calls the user's functions. Create it where an event loop runs.

    Args:
        setup: Its configuration.
        on_end: Called once when it has ended.
    """

    def __init__(self, setup: Setup, on_end: Callable[[WorkerProcess], None]) -> None:
        super().__init__(on_end)
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
    """Write a worker's output, in any thread."""
    with contextlib.suppress(ValueError, OSError):  # closed
        getattr(sys, target).write(text)  # it may be a console or a notebook


def last_words(lines: Iterable[str]) -> str:
    """Output of a process before it died, on one line; for a crash, the place in the code."""
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
