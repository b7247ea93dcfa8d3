"""A worker: calls the user's functions for a run in another process, and ends with that.

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
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tuner.errors import FunctionError
from tuner.rollouts.chat_models import chat_model, load_kind, remote_chat_model
from tuner.rollouts.limits import Watchdog
from tuner.rollouts.runner import Here, describe, of_judge, of_workflow, place_of_error
from tuner.rollouts.worker_session import (
    Cancel,
    Close,
    Done,
    Failed,
    Forget,
    Line,
    Log,
    Open,
    Opened,
    Ready,
    Refused,
    Remote,
    RemoteSession,
    Returned,
    Run,
    Setup,
    Stop,
    portable,
)
from tuner.tasks.functions import JudgeOutput, WorkflowOutput, end_run, response_text
from tuner.tasks.loading import load_together
from tuner.tasks.selection import seed_everything


@dataclass
class _Attempt:
    """An attempt at a rollout, or a group that is judged, and who calls its functions."""

    session: RemoteSession
    caller: Here


class Child:
    """Calls functions as it is told to.

    Args:
        line: To the run.
        setup: What the worker is for.
        workflow, judge: The user's functions.
    """

    def __init__(self, line: Line, setup: Setup, workflow: Callable[..., Any], judge: Any) -> None:
        self._line = line
        self._setup = setup
        self._functions = workflow, judge
        self._watchdog = Watchdog(setup.timeout)
        self._attempts: dict[int, _Attempt] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._responses: dict[int, Any] = {}
        self._remotes: dict[str, Any] = {}
        self._began = _cpu_seconds()
        self._stopped = asyncio.Event()

    async def work(self) -> None:
        """Until it is stopped."""
        loop = asyncio.get_running_loop()

        def hear(message: Any) -> None:
            loop.call_soon_threadsafe(self._hear, message)

        self._line.listen(hear)
        self._line.send(Ready())
        await self._stopped.wait()
        await end_run(self._functions[0])

    def _hear(self, message: Any) -> None:
        match message:
            case Open():
                self._open(message)
            case Run():
                task = asyncio.get_running_loop().create_task(self._run(message))
                self._calls[message.call] = task
                task.add_done_callback(lambda _: self._calls.pop(message.call, None))
            case Cancel(call):
                if call in self._calls:
                    self._calls[call].cancel()
            case Close(attempt):
                if (closed := self._attempts.pop(attempt, None)) is not None:
                    closed.session.seal()
            case Forget(response):
                self._responses.pop(response, None)
            case Stop():
                self._stopped.set()

    def _open(self, message: Open) -> None:
        if message.seed is not None:
            seed_everything(message.seed)
        session = RemoteSession(self._line, message.session)
        auxiliary = {name: self._auxiliary(name, one) for name, one in message.auxiliary.items()}
        make_model = partial(chat_model, kind=self._setup.kind)
        caller = Here(*self._functions, make_model, self._watchdog, session, auxiliary)
        self._attempts[message.attempt] = _Attempt(session, caller)

    def _auxiliary(self, name: str, opened: Opened | Remote) -> Any:
        if isinstance(opened, Opened):
            return chat_model(RemoteSession(self._line, opened), kind=self._setup.kind)
        if name not in self._remotes:  # whose client holds back for all rollouts
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

    async def _run(self, run: Run) -> None:
        attempt = self._attempts[run.attempt]
        try:
            with attempt.session.results.collecting():
                value = await self._called(attempt.caller, run)
        except BaseException as error:
            self._line.send(self._failure(run, error, attempt.session))
        else:
            self._line.send(Done(run.call, value, self._cpu()))

    async def _called(self, caller: Here, run: Run) -> Any:
        responses = [None if one is None else self._responses[one] for one in run.responses]
        if run.role == "workflow":
            return self._returned(run.call, await caller.workflow(run.task, run.feedback))
        if run.role == "judge":
            return _verdict(await caller.judge(run.task, responses[0]))
        return [_verdict(one) for one in await caller.group_judge(run.task, responses)]

    def _returned(self, call: int, output: WorkflowOutput) -> Returned:
        number = None
        if output.response is not None:
            number, self._responses[call] = call, output.response
        text = response_text(output.response)
        return Returned(output.reward, output.metrics, number, text)

    def _failure(self, run: Run, error: BaseException, session: RemoteSession) -> Failed:
        failed = Failed(run.call, self._cpu())
        if isinstance(error, asyncio.CancelledError):
            return failed._replace(cancelled=True)
        if isinstance(error, FunctionError):
            return failed._replace(mistake=portable(error))
        if run.role == "workflow":
            outcome, text = of_workflow(error, session)
        else:
            outcome, text = of_judge(error), describe(error, None)
        return failed._replace(outcome=outcome, described=text, place=place_of_error(error))

    def _cpu(self) -> float:
        return _cpu_seconds() - self._began


def _verdict(output: JudgeOutput) -> dict[str, Any]:
    return dict(output)


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


class _Sent(logging.handlers.QueueHandler):
    """Sends records to the run, whose handlers write them."""

    def __init__(self, line: Line) -> None:
        super().__init__(None)  # type: ignore[arg-type]  # there is no queue
        self._line = line

    def enqueue(self, record: logging.LogRecord) -> None:
        plain = (str, int, float, bool, type(None))
        fields = {k: v for k, v in vars(record).items() if isinstance(v, plain)}
        self._line.send(Log(fields))


def _log_to(line: Line, levels: Mapping[str, int]) -> None:
    logging.getLogger().addHandler(_Sent(line))
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def main(descriptor: int) -> None:
    """A worker's life."""
    os.set_inheritable(descriptor, False)
    faulthandler.enable()  # its last words, should a library crash
    line = Line(socket.socket(fileno=descriptor))
    setup: Setup = line.first()
    if setup.path is not None:
        sys.path[:] = setup.path
    _log_to(line, setup.levels)
    try:
        workflow, judge = load_together(setup.workflow, setup.judge)
        load_kind(setup.kind)
        importlib.import_module("tuner.gateway.clients")  # else the first call would, and its time
    except Exception as error:
        line.send(Refused(f"{type(error).__name__}: {error}"))
        return

    async def work() -> None:
        await Child(line, setup, workflow, judge).work()

    asyncio.run(work())


if __name__ == "__main__":
    main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no thread that a function left behind keeps it
