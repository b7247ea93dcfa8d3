"""The workers of a run: which of them runs what, and what becomes of one that dies."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tuner.chat_models import ChatModelKind
from tuner.config import RemoteModel, RunConfig
from tuner.errors import ConfigError, FunctionError, TunerError, WorkerError
from tuner.functions.calling import judges_groups
from tuner.functions.shipping import ship_together
from tuner.gateway import Gateway, Session
from tuner.gateway.http import Opening
from tuner.gateway.service import Door
from tuner.rollout.failures import Elsewhere
from tuner.traces import RolloutId
from tuner.workers.any_worker import There, Worker
from tuner.workers.messages import Open, Opened, Remote, Setup
from tuner.workers.ray_worker import Placing
from tuner.workers.worker_process import WorkerProcess

logger = logging.getLogger("tuner.rollout")
MOST_STARTS = 3
"""Workers one after the other that may die before they have loaded the functions."""
_PLACED = 60.0
"""Seconds after which those that a cluster has placed begin, without the others."""
_FOUND = 300.0
"""Seconds that a cluster may have no worker at all."""


@dataclass(eq=False)
class Pool:
    """Processes that run the workflow and the judge.

    Args:
        count: How many.
        workflow, judge: The user's functions.
        kind: The framework of the chat models.
        timeout: Seconds that code may keep an event loop.
        open_choice: Whether `settle` decides how many there are.
        may_stop: Whether it may decide for none.
        placing: Where they are, unless on this machine.

    Raises:
        FunctionError: A function cannot be sent to another process; names what cannot.
        ConfigError: There are no such processes on this system.
    """

    count: int
    workflow: Callable[..., Any]
    judge: Callable[..., Any] | None
    kind: ChatModelKind
    timeout: float
    open_choice: bool = False
    may_stop: bool = True
    placing: Placing | None = None
    _doors: list[Door] = field(default_factory=list, init=False)
    _workers: list[Worker] = field(default_factory=list, init=False)
    _of_group: dict[tuple[str, int, int], Worker] = field(default_factory=dict, init=False)
    _failure: TunerError | None = field(default=None, init=False)
    _died_early: int = field(default=0, init=False)
    _begun: list[Worker] = field(default_factory=list, init=False)
    _retired: set[Worker] = field(default_factory=set, init=False)
    _ending: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _closed: bool = field(default=False, init=False)
    _spent: float = field(default=0.0, init=False)
    _asked: float = field(default=0.0, init=False)
    _told: bool = field(default=False, init=False)
    _started_at: float = field(default=0.0, init=False)
    _joined: ExitStack = field(default_factory=ExitStack, init=False)

    def __post_init__(self) -> None:
        if sys.platform == "win32":
            raise ConfigError("tuner.workers needs Unix: set it to 0")
        self._sent = ship_together(self.workflow, self.judge)
        self._groups = self.judge is not None and judges_groups(self.judge)
        self._numbers = itertools.count(1)

    def __str__(self) -> str:
        if self.placing is not None:
            return f"workers: up to {self.count} run the workflow and the judge, {self.placing}"
        found = f"workers: {self.count} run the workflow and the judge"
        return f"{found}; after the first step it is decided anew" if self.open_choice else found

    def looked_at(self) -> str:
        """What there is for them, in a sentence; a cluster is joined for that, and left.

        Raises:
            ConfigError: It cannot be joined, or this machine cannot listen where they would ask.
        """
        if self.placing is None:
            return str(self)
        self.placing.opening()
        with self.placing.joined():
            self.count = self.placing.count(self.count)
            return f"{self}; {self.placing.offers()}"

    def settle(self, rollouts: int, seconds: float) -> str | None:
        """Decide how many workers there are from now on, once, and say why.

        Args:
            rollouts: Of the first step.
            seconds: That they took.
        """
        if not self.open_choice or not rollouts:
            return None
        self.open_choice = False
        before, used = self.count, self.cpu / max(seconds, 1e-9)
        self.count = count_for(used, most=cores(), fewest=0 if self.may_stop else 1)
        for worker in self._workers[self.count :]:
            self._retire(worker)
        how = f"{self.count} of {before} workers stay"
        if not self.count:
            how = f"this process runs them from now on, and the {before} workers end"
        return (
            f"workers: the functions took {self.cpu / rollouts:.3f} s of CPU for a rollout, which "
            f"kept {used:.2f} of {cores()} cores busy: {how}"
        )

    def _retire(self, worker: Worker) -> None:
        """Give it nothing more; it ends when it has nothing left to do."""
        self._retired.add(worker)
        if not worker.attempts:
            task = asyncio.get_running_loop().create_task(worker.aclose())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    @property
    def cpu(self) -> float:
        """Seconds of CPU that the functions have taken so far, in all workers."""
        return self._spent + sum(worker.cpu for worker in self._workers)

    def cpu_since(self) -> float:
        """Seconds of CPU that they have taken since this was last asked."""
        before, self._asked = self._asked, self.cpu
        return self._asked - before

    @property
    def pids(self) -> list[int]:
        """The processes, by their numbers."""
        return [worker.pid for worker in self._workers]

    def start(self, gateways: Sequence[Gateway] = ()) -> None:
        """Begin to start the workers.

        Args:
            gateways: What workers on other machines will ask, by HTTP.

        Raises:
            ConfigError: They are on a cluster that cannot be joined, or this machine cannot listen
                where they would ask.
        """
        if not self._begun and not self._closed:
            if self.placing is not None:
                for gateway in gateways:
                    self.placing.open(gateway)
                self._joined.enter_context(self.placing.joined())
                self.count = self.placing.count(self.count)
            self._started_at = time.monotonic()
            self._workers = [self._started() for _ in range(self.count)]
            self._begun = [*self._workers]

    def _started(self) -> Worker:
        root = logging.getLogger()
        named = {
            name: found.level
            for name, found in logging.Logger.manager.loggerDict.items()
            if isinstance(found, logging.Logger) and found.level
        }
        levels = {"": root.level, **named}
        path = [*sys.path] if self.placing is None else None
        sent = Setup(*self._sent, self.kind, path, levels, timeout=self.timeout)
        if self.placing is not None:
            return self.placing.worker(sent, self._doors, self._replace)
        return WorkerProcess(sent, self._doors, self._replace)

    def _replace(self, worker: Worker) -> None:
        """One has ended; another one begins, if that is of use."""
        self._workers.remove(worker)
        self._retired.discard(worker)
        self._spent += worker.cpu
        if self._closed or self._failure is not None:
            return
        error = worker.ready.exception()
        if error is None:
            self._died_early = 0
        elif isinstance(error, Elsewhere):
            self._died_early += not worker.lost
            if self._died_early >= MOST_STARTS:
                self._failure = WorkerError(
                    f"{MOST_STARTS} workers died one after the other before they had loaded the "
                    f"workflow and the judge, at last {worker.how_it_ended}. Set tuner.workers to "
                    "0 to run them in this process"
                )
        else:
            self._failure = FunctionError(f"the functions cannot be loaded in a worker: {error}")
        if self._failure is None and len(self._workers) < self.count:
            if error is None:
                logger.warning("%s; another one is started", worker.how_it_ended)
            self._workers.append(self._started())

    @asynccontextmanager
    async def calling(
        self, session: Session, auxiliary: Mapping[str, Any], id: RolloutId, *, seed: int | None
    ) -> AsyncIterator[There]:
        """A caller for the time of the block.

        Raises:
            WorkerError: No worker starts.
            FunctionError: The functions cannot be loaded there.
        """
        group = id.split, id.step, id.task
        worker = await self._place(group)
        sessions: list[int] = []

        def opened(one: Session) -> Opened:
            number = next(self._numbers)
            worker.sessions[number] = one
            sessions.append(number)
            if one.host not in self._doors:
                self._doors.append(one.host)
            return Opened(
                number,
                self._doors.index(one.host),
                one.id,
                one.key,
                one.model_name,
                one.max_model_len,
                keeps_calls=one.keeps_calls,
                scripted=one.script is not None,
                base_url=None if self.placing is None else self.placing.reached(one.base_url),
            )

        attempt = next(self._numbers)
        worker.attempts.add(attempt)
        judged = partial(self._of_group.pop, group, None)
        try:
            models = {
                name: opened(model.session)
                if isinstance(getattr(model, "session", None), Session)
                else self._remote(name, model)
                for name, model in auxiliary.items()
            }
            worker.send(Open(attempt, opened(session), models, seed))
            yield There(worker, attempt, session, self._numbers, judged)
        finally:
            worker.close(attempt, sessions)
            if worker in self._retired:
                self._retire(worker)

    def _remote(self, name: str, model: Any) -> Remote:
        remote: RemoteModel = model.remote
        most = remote.max_concurrent
        return Remote(
            remote,
            remote.api_key(f"tuner.auxiliary_models.{name}"),
            None if most is None else max(1, most // self.count),
        )

    async def _place(self, group: tuple[str, int, int]) -> Worker:
        """The worker that has least to do; where groups are judged together, that of the group."""
        self.start()
        if starting := [one.ready for one in self._begun if not one.ready.done()]:
            # Else the first one that is there gets all.
            _, late = await asyncio.wait(starting, timeout=self._left(self._started_at + _PLACED))
            if late and self.placing is not None and not self._told:
                self._told = True
                logger.warning(
                    "%d of %d workers have begun %s; the others do as soon as there is room: %s",
                    self.count - len(late),
                    self.count,
                    self.placing,
                    self.placing.offers(),
                )
        deadline = time.monotonic() + _FOUND
        while True:
            if self._failure is not None:
                raise self._failure
            if self._closed or not self._workers:
                raise WorkerError("the workers have ended")
            ready = [one for one in self._workers if one.alive and one.ready.done()]
            ready = [one for one in ready if one.ready.exception() is None]
            ready = [one for one in ready if one not in self._retired] or ready
            if self._groups and self._of_group.get(group) in ready:
                return self._of_group[group]
            if ready:
                found = min(ready, key=lambda one: len(one.attempts))
                if self._groups:
                    self._of_group[group] = found
                return found
            waited = {one.ready for one in self._workers} | {one.ended for one in self._workers}
            pending = [one for one in waited if not one.done()]
            seconds = self._left(deadline)
            if seconds == 0 and self.placing is not None:
                raise WorkerError(
                    f"no worker has begun {self.placing} in {_FOUND:g} s: {self.placing.offers()}; "
                    "lower tuner.ray.cpus, or add machines"
                )
            if pending:
                await asyncio.wait(pending, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)

    def _left(self, deadline: float) -> float | None:
        """Seconds until then; None: on this machine workers begin, or die."""
        return None if self.placing is None else max(0.0, deadline - time.monotonic())

    async def aclose(self) -> None:
        """End the workers, and wait for that."""
        self._closed = True
        with self._joined:
            ended = (worker.aclose() for worker in list(self._workers))
            await asyncio.gather(*ended, *self._ending)


def opening_of(workers: Pool | None, number: int = 0) -> Opening | None:
    """Where the door of the gateway with this number is, for workers; None: on loopback."""
    if workers is None or workers.placing is None:
        return None
    return workers.placing.opening(number)


def pool_of(
    config: RunConfig,
    workflow: Callable[..., Any] | None,
    judge: Callable[..., Any] | None,
    kind: ChatModelKind,
) -> Pool | None:
    """The workers that a configuration asks for, which have not started; None: it wants none.

    Raises:
        FunctionError, ConfigError: As `Pool`.
    """
    wanted = config.tuner.workers
    if workflow is None or not wanted:
        return None
    placing, most = None, config.explorer.runner_per_model
    if wanted == "ray":
        assert config.cluster.ray_address is not None, "a conflict says it"
        placing = Placing(config.cluster.ray_address, config.tuner.ray)
        count = config.tuner.ray.workers or most
    else:
        count = min(cores(), most) if wanted == "auto" else wanted
    return Pool(
        count,
        workflow,
        judge,
        kind,
        timeout=config.explorer.max_timeout,
        open_choice=wanted == "auto",
        may_stop=not config.synchronizer.sync_offset,
        placing=placing,
    )


LIGHT = 0.1
"""Cores that functions keep busy, below which it is not worth a process to run them in."""
_ROOM = 1.5
"""Workers for each core that functions keep busy: they wait for each other, and come in bursts."""


def count_for(used: float, *, most: int, fewest: int) -> int:
    """How many workers functions want that keep so many cores busy."""
    if used < LIGHT:
        return fewest
    return max(1, min(most, math.ceil(used * _ROOM)))


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
