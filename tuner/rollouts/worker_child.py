"""A worker: calls the user's functions for a run in another process, and ends with the run.

Started as `python -m tuner.rollouts.worker_child FD`, where FD is its end of a pair of sockets.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import logging
import logging.handlers
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tuner.errors import FunctionError
from tuner.gateway.session_api import RemoteSession, SharedSession, raise_file_limit
from tuner.rollouts.any_worker import (
    AttemptEnd,
    AttemptStart,
    Frames,
    FunctionRun,
    LoadFailure,
    ReadyNotice,
    RemoteAuxiliary,
    ResponseRelease,
    RunCancellation,
    RunFailure,
    RunResult,
    Setup,
    StopOrder,
    WorkerLog,
    WorkflowReturn,
    framed,
)
from tuner.rollouts.chat_models import chat_model, load_kind, remote_chat_model
from tuner.rollouts.limits import Watchdog
from tuner.rollouts.runner import (
    InProcessFunctions,
    describe,
    of_judge,
    of_workflow,
    place_of_error,
)
from tuner.tasks.functions import WorkflowOutput, end_run, response_text, traceback_of
from tuner.tasks.loading import load_together
from tuner.tasks.random_states import RandomStates

_CHUNK = 1 << 18


class Line:
    """A worker's connection to its run.

    Args:
        connection: The socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._frames = Frames()
        self._arrived: list[Any] = []
        self._sending = threading.Lock()

    def first(self) -> Any:
        """Wait for the first message."""
        while not self._arrived:
            self._arrived = self._frames.added(self._received())
        return self._arrived.pop(0)

    def listen(self, hear: Callable[[Any], object]) -> None:
        """From now on pass messages to `hear`, in a thread: the end of the run also ends code that
        blocks the event loop."""
        threading.Thread(target=self._listen, args=(hear,), name="tuner-line", daemon=True).start()

    def send(self, message: Any) -> None:
        """In any thread; it has left this process when this returns."""
        data = framed(message)
        with self._sending:
            self._socket.sendall(data)

    def _listen(self, hear: Callable[[Any], object]) -> None:
        while True:
            for message in self._arrived:
                hear(message)
            self._arrived = self._frames.added(self._received())

    def _received(self) -> bytes:
        try:
            data = self._socket.recv(_CHUNK)
        except OSError:
            data = b""
        if not data:  # the run is gone, and so is everything that was started here
            os.killpg(os.getpgrp(), signal.SIGKILL)
        return data


@dataclass
class AttemptInWorker:
    """An attempt at a rollout, or a group to judge, and the caller of its functions."""

    session: RemoteSession
    caller: InProcessFunctions


class Child:
    """Calls functions as the run requests.

    Args:
        line: Connection to the run.
        setup: Configuration of the worker.
        workflow, judge: The user's functions.
    """

    def __init__(self, line: Line, setup: Setup, workflow: Callable[..., Any], judge: Any) -> None:
        self._line = line
        self._setup = setup
        self._functions = workflow, judge
        self._watchdog = Watchdog(setup.timeout)
        self._attempts: dict[int, AttemptInWorker] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._responses: dict[int, Any] = {}
        self._remotes: dict[str, Any] = {}
        self._began = _cpu_seconds()
        self._stopped = asyncio.Event()

    async def work(self) -> None:
        """Run until stopped."""
        loop = asyncio.get_running_loop()

        def hear(message: Any) -> None:
            loop.call_soon_threadsafe(self._hear, message)

        self._line.listen(hear)
        self._line.send(ReadyNotice())
        await self._stopped.wait()
        await end_run(self._functions[0])

    def _hear(self, message: Any) -> None:
        match message:
            case AttemptStart():
                self._open(message)
            case FunctionRun():
                task = asyncio.get_running_loop().create_task(self._run(message))
                self._calls[message.call] = task
                task.add_done_callback(lambda _: self._calls.pop(message.call, None))
            case RunCancellation(call):
                if call in self._calls:
                    self._calls[call].cancel()
            case AttemptEnd(attempt):
                if (closed := self._attempts.pop(attempt, None)) is not None:
                    closed.session.seal()
            case ResponseRelease(response):
                self._responses.pop(response, None)
            case StopOrder():
                self._stopped.set()

    def _open(self, message: AttemptStart) -> None:
        session = RemoteSession(message.session)
        auxiliary = {name: self._auxiliary(name, one) for name, one in message.auxiliary.items()}
        make_model = partial(chat_model, kind=self._setup.kind)
        caller = InProcessFunctions(
            *self._functions,
            make_model,
            self._watchdog,
            session,
            auxiliary,
            None if message.seed is None else RandomStates(message.seed),
        )
        self._attempts[message.attempt] = AttemptInWorker(session, caller)

    def _auxiliary(self, name: str, opened: SharedSession | RemoteAuxiliary) -> Any:
        if isinstance(opened, SharedSession):
            return chat_model(RemoteSession(opened), kind=self._setup.kind)
        if name not in self._remotes:  # whose client obeys rate limits for all rollouts
            model = remote_chat_model(
                base_url=opened.model.base_url,
                api_key=opened.key,
                model_name=opened.model.model_name,
                kind=self._setup.kind,
                max_concurrent=opened.max_concurrent,
            )
            model.remote = opened.model
            self._remotes[name] = model
        return self._remotes[name]

    async def _run(self, run: FunctionRun) -> None:
        attempt = self._attempts[run.attempt]
        try:
            with attempt.session.results.collecting():
                value = await self._called(attempt.caller, run)
        except BaseException as error:
            self._line.send(self._failure(run, error, attempt.session))
        else:
            self._line.send(RunResult(run.call, value, self._cpu()))

    async def _called(self, caller: InProcessFunctions, run: FunctionRun) -> Any:
        responses = [None if one is None else self._responses[one] for one in run.responses]
        if run.role == "workflow":
            return self._returned(run.call, await caller.workflow(run.task, run.feedback))
        if run.role == "judge":
            return dict(await caller.judge(run.task, responses[0]))
        return [dict(one) for one in await caller.group_judge(run.task, responses)]

    def _returned(self, call: int, output: WorkflowOutput) -> WorkflowReturn:
        number = None
        if output.response is not None:
            number, self._responses[call] = call, output.response
        text = response_text(output.response)
        return WorkflowReturn(output.reward, output.metrics, number, text)

    def _failure(
        self, run: FunctionRun, error: BaseException, session: RemoteSession
    ) -> RunFailure:
        failed = RunFailure(run.call, self._cpu())
        if isinstance(error, asyncio.CancelledError):
            return failed._replace(cancelled=True)
        if isinstance(error, FunctionError):
            return failed._replace(mistake=str(error))
        if run.role == "workflow":
            outcome, text = of_workflow(error, session)
        else:
            outcome, text = of_judge(error), describe(error, None)
        return failed._replace(
            outcome=outcome,
            described=text,
            place=place_of_error(error),
            frames=traceback_of(error),
        )

    def _cpu(self) -> float:
        return _cpu_seconds() - self._began


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


class RunLogHandler(logging.handlers.QueueHandler):
    """Sends log records to the run, whose handlers write them."""

    def __init__(self, line: Line) -> None:
        super().__init__(None)  # type: ignore[arg-type]  # there is no queue
        self._line = line

    def enqueue(self, record: logging.LogRecord) -> None:
        plain = (str, int, float, bool, type(None))
        fields = {k: v for k, v in vars(record).items() if isinstance(v, plain)}
        self._line.send(WorkerLog(fields))


def _log_to(line: Line, levels: Mapping[str, int]) -> None:
    logging.getLogger().addHandler(RunLogHandler(line))
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def main(descriptor: int) -> None:
    """Run a worker."""
    os.set_inheritable(descriptor, False)
    raise_file_limit()
    faulthandler.enable()  # its last words, should a library crash
    line = Line(socket.socket(fileno=descriptor))
    setup: Setup = line.first()
    if setup.path is not None:
        sys.path[:] = setup.path
    _log_to(line, setup.levels)
    try:
        workflow, judge = load_together(setup.workflow, setup.judge)
        load_kind(setup.kind)
        # otherwise the first call would, within its time limit
        importlib.import_module("tuner.gateway.clients")
    except Exception as error:
        line.send(LoadFailure(f"{type(error).__name__}: {error}"))
        return

    async def work() -> None:
        await Child(line, setup, workflow, judge).work()

    asyncio.run(work())


if __name__ == "__main__":
    main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no thread left by a function delays the exit
