"""A worker as its run has it, and what both tell each other."""

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

# What a run and its workers tell each other, over one private pair of sockets for each worker.
#
#     the run                                   a worker
#     Setup, once          ------------------>  loads the functions
#                          <------------------  ReadyNotice, or LoadFailure
#     AttemptStart         ------------------>  the sessions of an attempt
#     FunctionRun          ------------------>  calls a function, which asks the gateway by HTTP
#                          <------------------  RunResult, or RunFailure
#     AttemptEnd           ------------------>  the attempt has ended
#
# Each is a pickle behind its length. Both ends are processes of one user and one version of this
# package, and nobody else has the sockets.


_LENGTH = struct.Struct(">Q")


class Setup(NamedTuple):
    """What a worker is for.

    Attributes:
        workflow, judge: As `ship_together` names them.
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
    """An attempt at a rollout, or a group that is judged.

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
        responses: Numbers of the responses that are judged; None is a response that is None.
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
    """Nobody asks for this response any more."""

    response: int


class StopOrder(NamedTuple):
    """End."""


class WorkflowReturn(NamedTuple):
    """What a workflow returned; its response stays in the worker, under a number."""

    reward: float | None
    metrics: dict[str, float] | None
    response: int | None
    text: str


class RunResult(NamedTuple):
    """A function returned: `WorkflowReturn`, or what `JudgeOutput`s are made of.

    Attributes:
        cpu: Seconds of CPU that the worker and its children have used since it was ready.
    """

    call: int
    value: Any
    cpu: float


class RunFailure(NamedTuple):
    """A function did not return.

    Attributes:
        mistake: Why the function is wrong, which ends the run; else None.
        cancelled: Whether it was cancelled, or cancelled itself.
        outcome, described, place: As `RemoteFailure` has them.
    """

    call: int
    cpu: float
    mistake: str | None = None
    cancelled: bool = False
    outcome: Outcome = Outcome.WORKFLOW_ERROR
    described: str = ""
    place: str | None = None

    def error(self) -> BaseException:
        """What the call raises in the run's process."""
        if self.cancelled:
            return asyncio.CancelledError()
        if self.mistake is not None:
            return FunctionError(self.mistake)
        return RemoteFailure(self.outcome, self.described, self.place)


class WorkerLog(NamedTuple):
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

    def added(self, data: bytes) -> list[Any]:
        """The messages that are complete with this."""
        self._data += data
        found = []
        while len(self._data) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._data)[0]
            if end > len(self._data):
                break
            found.append(pickle.loads(self._data[_LENGTH.size : end]))
            del self._data[:end]
        return found


# A worker as its run has it.


PATIENCE = 2 * GRACE
"""Seconds after which a worker that does not end what it is told to is ended itself."""


class Worker(ABC):
    """Something that calls the user's functions. To be made where an event loop runs.

    Args:
        on_end: Is told, once, that it has ended.

    Attributes:
        attempts: Those it has.
        ready: Done once its functions are loaded; raises TunerError where they cannot be, and
            `RemoteFailure` where it died before.
        ended: Done once it has ended.
        cpu: Seconds of CPU that its functions took.
        lost: Whether it is its machine that was lost, and nothing that it did.
    """

    lost = False

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
        """What messages call it."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """Its process, by its number; 0 where it is not known."""

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._killed_for is None and not self.ended.done()

    @abstractmethod
    def _send(self, data: bytes) -> None:
        """To be sent when there is room; into the void where it has ended."""

    @abstractmethod
    def _kill(self) -> None:
        """End it at once, with all that its functions began."""

    @abstractmethod
    def _how(self) -> str:
        """How it ended by itself, as what follows its name."""

    def send(self, message: Any) -> None:
        """To be sent when there is room; into the void where it has ended."""
        self._send(framed(message))

    def forget(self, response: int) -> None:
        """Nobody asks for a response any more; in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.send, ResponseRelease(response))

    async def call(self, run: FunctionRun, session: Session) -> Any:
        """What a function returned.

        Cancelled, it seals the session, has the function cancelled, and waits until it has ended;
        a worker that does not answer because its event loop is kept is killed.

        Raises:
            Elsewhere: How the function failed, or that the worker died.
            FunctionError: The function is wrong.
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
        self.ended.set_result(None)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self._death())
        if not self.ready.done():
            self.ready.set_exception(self._death())
        self._on_end(self)

    @property
    def how_it_ended(self) -> str:
        """In a sentence, with its last words."""
        if self._killed_for is not None:
            return f"{self.name} was stopped: {self._killed_for}"
        return f"{self.name} {self._how()}"

    def _death(self) -> RemoteFailure:
        """What its rollouts hear of that."""
        return RemoteFailure(Outcome.WORKER_DIED, f"its {self.how_it_ended}")

    def kill(self, why: str) -> None:
        """End it at once, with all that its functions began."""
        if self.alive:
            self._killed_for = why
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
    """A response that is where the workflow returned it.

    Args:
        worker: Where that is.
        number: Of the response; None where it is None.
        text: As people read it.
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
        worker: Which.
        attempt: The number of the attempt there.
        session: The attempt's.
        numbers: Gives numbers.
        judged: Is told that its group is.
    """

    worker: Worker
    attempt: int
    session: Session
    numbers: itertools.count[int]
    judged: Callable[[], object]

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
    """A process of `tuner.rollouts.worker_child`, and all that it begins.

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
        on_end: Is told, once, that it has ended.
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
