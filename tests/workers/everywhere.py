"""A plugin of pytest by which runs and rollouts have workers whose settings do not say:

    pytest -p tests.workers.everywhere tests/loop tests/chat_models

What a test asks of a session itself, as a chat model or a client of it, goes over the line of a
worker, too: `Beside`. Tests that cannot pass so are in `LEFT_OUT`, each with its reason.
"""

import asyncio
import socket
import sys
import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import wraps
from weakref import WeakKeyDictionary

import pytest

from tests import forked
from tuner import chat_models
from tuner.areal import TokenWorkflow
from tuner.assembly import stack
from tuner.gateway import Session
from tuner.rollout import RolloutRunner
from tuner.workers import pool
from tuner.workers.line import Line
from tuner.workers.messages import Ask, Opened
from tuner.workers.pool import Pool
from tuner.workers.remote_session import RemoteSession
from tuner.workers.worker import Worker

COUNT = 2

LEFT_OUT: dict[str, list[str]] = {}
"""Tests that cannot pass so, by the reason: files, functions or cases of them."""


def _with_workers(config, *functions):
    found = config.tuner.model_copy(update={"workers": config.tuner.workers or COUNT})
    return pool.pool_of(config.model_copy(update={"tuner": found}), *functions)


stack.pool_of = _with_workers


# Runners that a test makes itself.


async def _closing(pool):
    try:
        yield
    finally:
        await pool.aclose()


@dataclass(eq=False)
class Later:
    """Workers of a runner, which begin with its first rollout and end with the event loop."""

    runner: RolloutRunner
    count: int = COUNT
    _pools: WeakKeyDictionary = field(default_factory=WeakKeyDictionary)

    async def _pool(self, session):
        loop = asyncio.get_running_loop()
        if loop not in self._pools:
            runner = self.runner
            plain = isinstance(runner.make_model(session), chat_models.PlainChatModel)
            kind = "plain" if plain else chat_models.default_kind()
            made = Pool(COUNT, runner.workflow, runner.judge, kind, runner.settings.timeout)
            closing = _closing(made)
            await anext(closing)  # which the loop runs to its end when it is closed
            self._pools[loop] = made, closing
        return self._pools[loop][0]

    @asynccontextmanager
    async def calling(self, session, *of, **more):
        made = await self._pool(session)
        async with made.calling(session, *of, **more) as caller:
            yield caller


_init = RolloutRunner.__init__


@wraps(_init)
def _init_with_workers(self, *given, **named):
    _init(self, *given, **named)
    by_a_test = sys._getframe(1).f_globals["__name__"].startswith("tests.")
    # Token-level workflows refuse workers.
    if by_a_test and "workers" not in named and not isinstance(self.workflow, TokenWorkflow):
        self.workers = Later(self)


RolloutRunner.__init__ = _init_with_workers


# Runs in processes of their own.


def _forked(function, *arguments):
    """As `forked._forked`; that this module is imported for it is what it is for."""
    forked.mend_thread_pool()
    function(*arguments)


forked._forked = _forked


# Sessions that a test gives to an agent itself.


class _Line(Line):
    """The end of it is not that of the process."""

    def _received(self):
        data = self._socket.recv(1 << 18)
        if not data:
            raise SystemExit
        return data


class Beside(Worker):
    """A worker in this process: what an agent asks of its session goes over the line."""

    name, pid = "a worker beside", 0

    def __init__(self, session):
        super().__init__([session.host], lambda worker: None)
        self._socket, there = socket.socketpair()
        self.sessions[0] = session
        line = _Line(there)
        line.listen(lambda message: None)
        threading.Thread(target=self._listen, daemon=True).start()
        scripted = session.script is not None
        known = session.id, session.key, session.model_name, session.max_model_len
        self.session = RemoteSession(line, Opened(0, 0, *known, session.keeps_calls, scripted))

    def _listen(self):
        while data := self._socket.recv(1 << 18):
            for message in self._frames.added(data):
                if isinstance(message, Ask):  # whoever asks keeps the event loop meanwhile
                    self._hear(message)
                else:
                    self._loop.call_soon_threadsafe(self._hear, message)

    def _send(self, data):
        self._socket.sendall(data)

    def _kill(self):
        self._socket.shutdown(socket.SHUT_RDWR)

    def _how(self):
        return "has ended"


BESIDE = WeakKeyDictionary()


def over_the_line(session):
    """What a worker would have for this session."""
    if not isinstance(session, Session):
        return session
    if session not in BESIDE:
        BESIDE[session] = Beside(session)
    return BESIDE[session].session


def _patched(owner, name):
    """Let a method, or a function of a module, whose first argument is a session get the other."""
    found = getattr(owner, name)

    @wraps(found)
    def patched(session, *given, **named):
        return found(over_the_line(session), *given, **named)

    setattr(owner, name, patched)


for _name in ("async_client", "async_anthropic", "http_client"):
    _patched(Session, _name)
_patched(chat_models, "chat_model")


@pytest.fixture(autouse=True)
def _workers_beside_end():
    yield
    for worker in list(BESIDE.values()):
        worker._kill()
    BESIDE.clear()


# What cannot pass.


def pytest_collection_modifyitems(config, items):
    """Leave out what cannot pass, and fail where a name of the list is nobody's."""
    names = {name for of_reason in LEFT_OUT.values() for name in of_reason}
    used, left, kept = set(), [], []
    for item in items:
        mine = _names(item) & names
        used |= mine
        (left if mine else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)
    files = {item.nodeid.partition("::")[0] for item in (*kept, *left)}
    whole = {one for one in files if not any("::" in given for given in config.args)}
    if unused := {n for n in names - used if n.partition("::")[0] in whole}:
        raise pytest.UsageError(f"no test has the name {', '.join(sorted(unused))}")


def _names(item):
    """Of its file, its function and itself."""
    file, _, case = item.nodeid.partition("::")
    return {file, item.nodeid, f"{file}::{case.partition('[')[0]}"}
