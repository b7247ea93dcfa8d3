"""The workers of a run: which worker runs what, and replacing those that die."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tuner.config import RemoteModel, RunConfig
from tuner.config.schema import RaySection
from tuner.errors import (
    ConfigError,
    FunctionError,
    MissingDependencyError,
    TunerError,
    WorkerError,
    pip_install,
)
from tuner.gateway import Gateway, Session
from tuner.gateway.http import Opening
from tuner.gateway.session_api import SharedSession, shared
from tuner.rollouts.any_worker import (
    AttemptStart,
    ChildProcess,
    HeldResponse,
    RemoteAuxiliary,
    Setup,
    Worker,
    WorkerCaller,
    WorkerProcess,
    framed,
    print_here,
)
from tuner.rollouts.chat_models import ChatModelKind
from tuner.rollouts.runner import RemoteFailure
from tuner.tasks.functions import judges_groups
from tuner.tasks.loading import ship_together, worker_path
from tuner.traces import RolloutId

# Workers on the machines of a Ray cluster.
#
# Ray places them and detects lost ones; it also carries the messages between run and worker.
# Requests to sessions go to the gateway by HTTP, as on one machine.


logger = logging.getLogger("tuner.rollout")
PACKAGE = "agentscope-tuner"
_CONNECT_SECONDS = 10.0
_WORDS = 160


class ProcessStart(NamedTuple):
    """The process has started."""

    address: str
    pid: int


class ProcessOutput(NamedTuple):
    """It has written a line on "stdout" or "stderr"."""

    target: str
    text: str


class ProcessEnd(NamedTuple):
    """The process has ended."""

    how: str


class WorkerRelay:
    """The actor next to a worker's process: forwards the messages of both ends.

    Args:
        version: Version of this package on the run's machine.

    Raises:
        RuntimeError: The version here differs.
    """

    def __init__(self, version: str) -> None:
        if (own := metadata.version(PACKAGE)) != version:
            raise RuntimeError(
                f"{PACKAGE} is {version} where the run is and {own} here: install the same"
            )
        self._heard: dict[int, bytes] = {}
        self._next = 0
        self._writer: asyncio.StreamWriter | None = None

    async def hear(self, number: int, data: bytes) -> None:
        """Forward data from the run to the process; numbers give its order, since Ray may
        change it."""
        self._heard[number] = data
        self._hand_on()

    def _hand_on(self) -> None:
        while self._writer is not None and self._next in self._heard:
            self._writer.write(self._heard.pop(self._next))
            self._next += 1

    async def said(self) -> AsyncIterator[ProcessStart | bytes | ProcessOutput | ProcessEnd]:
        """Run the process, and yield its messages in order, until its end."""
        import ray

        loop = asyncio.get_running_loop()
        items: asyncio.Queue[bytes | ProcessOutput | ProcessEnd] = asyncio.Queue()

        def put(item: bytes | ProcessOutput | ProcessEnd) -> None:
            loop.call_soon_threadsafe(items.put_nowait, item)

        child = ChildProcess(
            lambda target, text: put(ProcessOutput(target, text)),
            lambda: put(ProcessEnd(child.how)),
        )
        try:
            yield ProcessStart(ray.util.get_node_ip_address(), child.pid)
            reader, self._writer = await asyncio.open_unix_connection(sock=child.connection)
            self._hand_on()
            reading = loop.create_task(_read(reader, items))
            # It may have closed its connection without ending.
            reading.add_done_callback(lambda _: loop.call_later(1.0, child.kill))
            while not isinstance(item := await items.get(), ProcessEnd):
                yield item
            await reading  # what it still sent
            while not items.empty():
                yield items.get_nowait()
            yield item
        finally:
            child.kill()


async def _read(reader: asyncio.StreamReader, items: asyncio.Queue[Any]) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 18):
            items.put_nowait(data)


@dataclass(frozen=True)
class RayPlacement:
    """How Ray places workers.

    Args:
        address: Address of the cluster.
        section: Resources of each worker.
    """

    address: str
    section: RaySection

    def __str__(self) -> str:
        asks = ", ".join(f"{count:g} {name}" for name, count in self._asks.items())
        return f"on the Ray cluster at {self.address}, each with {asks}"

    @property
    def _asks(self) -> dict[str, float]:
        return {"CPU": self.section.cpus, **self.section.resources}

    def worker(self, setup: Setup, on_end: Callable[[RayWorker], None]) -> RayWorker:
        """A worker that starts as soon as there is room for it."""
        import ray

        actor = ray.remote(WorkerRelay).options(
            num_cpus=self.section.cpus,
            resources=self.section.resources,
            max_restarts=0,  # a lost worker is replaced by a new one
            max_task_retries=0,
        )
        return RayWorker(actor.remote(metadata.version(PACKAGE)), setup, on_end)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Connect this process to Ray while the block runs.

        Raises:
            MissingDependencyError: Ray is not installed.
            ConfigError: There is no cluster at the address, or this process is already in one.
        """
        try:
            import ray
        except ImportError as error:
            raise MissingDependencyError(
                f"tuner.workers is ray, and Ray is not installed: {pip_install('ray')}"
            ) from error

        if ray.is_initialized():
            raise ConfigError(
                "this process is connected to a Ray cluster already: call ray.shutdown() first"
            )
        require_answer(self.address)
        given = self.section.runtime_env
        variables = {"PYTHONPATH": worker_path(), **given.get("env_vars", {})}
        try:
            ray.init(
                address=self.address,
                log_to_driver=False,
                logging_level=logging.WARNING,
                runtime_env={**given, "env_vars": variables},
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise not_joined(self.address, str(error).splitlines()[0]) from error
        try:
            yield
        finally:
            ray.shutdown()

    def count(self, most: int) -> int:
        """Number of workers: as configured, or as many as the cluster has room for now."""
        import ray

        if self.section.workers is not None:
            return self.section.workers
        found = ray.cluster_resources()
        room = min(found.get(name, 0) // asked for name, asked in self._asks.items())
        return max(1, min(most, int(room)))

    def offers(self) -> str:
        """The cluster's free resources of the kinds that a worker needs, in a sentence."""
        import ray

        found, free = ray.cluster_resources(), ray.available_resources()
        has = ", ".join(
            f"{free.get(name, 0):g} of {found.get(name, 0):g} {name}" for name in self._asks
        )
        return f"the cluster has free {has}"

    def opening(self, number: int = 0) -> Opening:
        """Address of a gateway's server: the policy's, or an auxiliary model's after it.

        Raises:
            ConfigError: This machine cannot resolve the address.
        """
        where = urlsplit(f"//{self.section.gateway}")
        host = where.hostname or ""
        try:
            port = 0 if where.port is None else where.port + number
            found = {str(one[4][0]) for one in socket.getaddrinfo(host, port)}
        except (OSError, ValueError) as error:  # a name of another form is a ValueError
            raise self._not_here(error) from error
        names = {host, *found, *(f"[{address}]" for address in found)}
        if self.section.base_url is not None:
            names.add(urlsplit(self.section.base_url).hostname or "")
        return Opening(host, port, names=frozenset(names))

    def open(self, gateway: Gateway) -> None:
        """Start a gateway's server, before a rollout would fail without it.

        Raises:
            ConfigError: It cannot.
        """
        try:
            found = gateway.base_url
        except OSError as error:
            raise self._not_here(error) from error
        logger.info("the gateway listens at %s, for workers on other machines", found)

    def _not_here(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"tuner.ray.gateway is {self.section.gateway}, where this machine cannot listen: "
            f"{getattr(error, 'strerror', None) or error}"
        )

    def reached(self, base_url: str) -> str:
        """The URL that workers use for one of our servers."""
        return self.section.base_url or base_url


class RayWorker(Worker):
    """A worker on some machine of the cluster.

    Args:
        actor: Its `WorkerRelay`.
        setup: Its configuration.
        on_end: Called once when it has ended.
    """

    def __init__(self, actor: Any, setup: Setup, on_end: Callable[[RayWorker], None]) -> None:
        super().__init__(on_end)
        self._actor = actor
        self._numbers = itertools.count()
        self._begun: ProcessStart | None = None
        self._last = "has ended"
        self._sending: set[asyncio.Task[None]] = set()
        self._listening = self._loop.create_task(self._listen())
        self._send(framed(setup))

    @property
    def name(self) -> str:
        if self._begun is None:
            return "a worker that has not begun"
        return f"worker {self._begun.pid} on {self._begun.address}"

    @property
    def pid(self) -> int:
        return 0 if self._begun is None else self._begun.pid

    def _send(self, data: bytes) -> None:
        if not self.alive:
            return
        answer = self._actor.hear.remote(next(self._numbers), data)
        task = self._loop.create_task(self._heard(answer))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _heard(self, answer: Any) -> None:
        """A worker that misses a message cannot be trusted any more."""
        from ray.exceptions import RayError

        try:
            await answer
        except RayError as error:
            if not self.ended.done():
                await asyncio.wait([self.ended], timeout=1.0)  # and says how
            self.kill(f"it does not hear the run: {_cause(error) or _said(error)}")

    async def _listen(self) -> None:
        from ray.exceptions import RayError

        try:
            async for answer in self._actor.said.options(num_returns="streaming").remote():
                match await answer:
                    case ProcessStart() as begun:
                        self._begun = begun
                    case ProcessOutput(target, text):
                        print_here(target, text)
                    case ProcessEnd(how):
                        self._last = how
                    case data:
                        self._arrived(data)
        except RayError as error:
            self.lost = _cause(error) is None
            self._last = f"was lost: {_cause(error) or _said(error)}"
        self._end()

    def _how(self) -> str:
        return self._last

    def _kill(self) -> None:
        import ray

        ray.kill(self._actor)

    async def aclose(self) -> None:
        if self._begun is None:  # it may never be placed
            self.kill("it is not needed any more")
        await super().aclose()
        self._kill()
        self._listening.cancel()
        await asyncio.gather(self._listening, *self._sending, return_exceptions=True)


def _cause(error: Exception) -> str | None:
    """The exception raised in the actor; None: Ray has lost it."""
    causes = [line.strip() for line in str(error).splitlines() if "Error: " in line]
    causes = [line for line in causes if "ray.exceptions" not in line and "RpcError" not in line]
    return causes[-1] if causes else None


def _said(error: Exception) -> str:
    """The first line of Ray's error, which has a paragraph of advice."""
    text = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return text if len(text) <= _WORDS else f"{text[:_WORDS]}..."


def require_answer(address: str) -> None:
    """Reject an address where nothing listens; Ray itself would try for minutes.

    Raises:
        ConfigError: Nothing listens there.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection(
            (host.removeprefix("ray://").strip("[]"), int(port)), timeout=_CONNECT_SECONDS
        ).close()
    except (OSError, ValueError) as error:
        raise not_joined(address, str(error) or type(error).__name__) from error


def not_joined(address: str, why: str) -> ConfigError:
    """The error for an address."""
    return ConfigError(
        f"cluster.ray_address is {address!r}, where no Ray cluster can be joined: {why}"
    )


MOST_STARTS = 3
"""Number of consecutive workers that may die before they have loaded the functions."""
_PLACED = 60.0
"""Seconds after which the workers that a cluster has placed start without the others."""
_FOUND = 300.0
"""Seconds that a cluster may have no worker at all."""


@dataclass(eq=False)
class Pool:
    """Processes that run the workflow and the judge.

    Args:
        count: Their number.
        workflow, judge: The user's functions.
        kind: The framework of the chat models.
        timeout: Seconds that code may block an event loop.
        open_choice: Whether `settle` decides their number.
        may_stop: Whether it may decide for none.
        placing: Where they run, if not on this machine.

    Raises:
        FunctionError: A function cannot be sent to another process; names the cause.
        ConfigError: This system has no such processes.
    """

    count: int
    workflow: Callable[..., Any]
    judge: Callable[..., Any] | None
    kind: ChatModelKind
    timeout: float
    open_choice: bool = False
    may_stop: bool = True
    placing: RayPlacement | None = None
    _workers: list[Worker] = field(default_factory=list, init=False)
    _of_group: dict[tuple[str, int, int], Worker] = field(default_factory=dict, init=False)
    _failure: TunerError | None = field(default=None, init=False)
    _died_early: int = field(default=0, init=False)
    _begun: list[Worker] = field(default_factory=list, init=False)
    _retired: set[Worker] = field(default_factory=set, init=False)
    _ending: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _alone: set[Worker] = field(default_factory=set, init=False)
    _asking_alone: list[tuple[str, int, int]] = field(default_factory=list, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
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
        """The available resources, in a sentence; joins and leaves a cluster for that.

        Raises:
            ConfigError: The cluster cannot be joined, or this machine cannot listen for workers.
        """
        if self.placing is None:
            return str(self)
        self.placing.opening()
        with self.placing.joined():
            self.count = self.placing.count(self.count)
            return f"{self}; {self.placing.offers()}"

    def settle(self, rollouts: int, seconds: float) -> str | None:
        """Decide, once, the number of workers from now on, and say why.

        Args:
            rollouts: Number of rollouts in the first step.
            seconds: Their duration.
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
        """Give it no more work; it ends when it is idle."""
        self._retired.add(worker)
        if not worker.attempts:
            task = asyncio.get_running_loop().create_task(worker.aclose())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    @property
    def cpu(self) -> float:
        """CPU seconds of the functions so far, in all workers."""
        return self._spent + sum(worker.cpu for worker in self._workers)

    def cpu_since(self) -> float:
        """Their CPU seconds since the last call."""
        before, self._asked = self._asked, self.cpu
        return self._asked - before

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return [worker.pid for worker in self._workers]

    def start(self, gateways: Sequence[Gateway] = ()) -> None:
        """Start the workers in the background.

        Args:
            gateways: The gateways that workers on other machines use, by HTTP.

        Raises:
            ConfigError: They are on a cluster that cannot be joined, or this machine cannot listen
                for them.
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
        make = WorkerProcess if self.placing is None else self.placing.worker
        worker: Worker = make(sent, self._replace)
        for changed in (worker.ready, worker.ended):
            changed.add_done_callback(self._wake)
        return worker

    def _replace(self, worker: Worker) -> None:
        """A worker has ended; start another one if that makes sense."""
        self._workers.remove(worker)
        self._retired.discard(worker)
        self._spent += worker.cpu
        if self._closed or self._failure is not None:
            return
        error = worker.ready.exception()
        if error is None:
            self._died_early = 0
            self.may_stop = False  # functions that end their process do not get the run's
        elif isinstance(error, RemoteFailure):
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
        self,
        session: Session,
        auxiliary: Mapping[str, Any],
        id: RolloutId,
        *,
        seed: int | None,
        alone: bool = False,
    ) -> AsyncIterator[WorkerCaller]:
        """A caller while the block runs; `alone` in its worker, if another one has died with it.

        Raises:
            WorkerError: No worker starts.
            FunctionError: The functions cannot be loaded there.
        """
        group = id.split, id.step, id.task
        worker = await self._place(group, alone)
        attempt = next(self._numbers)
        worker.attempts.add(attempt)
        judged = partial(self._of_group.pop, group, None)
        with ExitStack() as ending:
            ending.callback(self._close, worker, attempt)

            def opened(one: Session) -> SharedSession:
                url = None if self.placing is None else self.placing.reached(one.base_url)
                return ending.enter_context(shared(one, url))

            models = {
                name: opened(model.session)
                if isinstance(getattr(model, "session", None), Session)
                else self._remote(name, model)
                for name, model in auxiliary.items()
            }
            worker.send(AttemptStart(attempt, opened(session), models, seed))
            yield WorkerCaller(worker, attempt, session, self._numbers, judged)

    def lost(self, response: Any) -> str | None:
        """How the worker with a response has ended, if it has."""
        if not isinstance(response, HeldResponse) or response.worker.alive:
            return None
        return response.worker.how_it_ended

    def _close(self, worker: Worker, attempt: int) -> None:
        worker.close(attempt)
        self._alone.discard(worker)
        self._wake()
        if worker in self._retired:
            self._retire(worker)

    def _remote(self, name: str, model: Any) -> RemoteAuxiliary:
        remote: RemoteModel = model.remote
        most = remote.max_concurrent
        return RemoteAuxiliary(
            remote,
            remote.api_key(f"tuner.auxiliary_models.{name}"),
            None if most is None else max(1, most // self.count),
        )

    async def _place(self, group: tuple[str, int, int], alone: bool) -> Worker:
        """The least busy worker, or an empty one; if groups are judged together, that of the
        group."""
        self.start()
        if starting := [one.ready for one in self._begun if not one.ready.done()]:
            # Otherwise the first one that is ready would get everything.
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
        with ExitStack() as asking:
            if alone:
                self._asking_alone.append(group)
                asking.callback(self._wake)
                asking.callback(self._asking_alone.remove, group)
            while True:
                if self._failure is not None:
                    raise self._failure
                if self._closed or not self._workers:
                    raise WorkerError("the workers have ended")
                alive = [one for one in self._workers if one.alive]
                alive = [one for one in alive if one not in self._retired] or alive
                ready = [one for one in alive if one.ready.done()]
                ready = [one for one in ready if one.ready.exception() is None]
                if (found := self._free(group, alive, ready, alone)) is not None:
                    if self._groups:
                        self._of_group[group] = found
                    if alone:
                        self._alone.add(found)
                    return found
                if ready:
                    deadline = time.monotonic() + _FOUND
                seconds = self._left(deadline)
                if seconds == 0 and self.placing is not None:
                    raise WorkerError(
                        f"no worker has begun {self.placing} in {_FOUND:g} s: "
                        f"{self.placing.offers()}; lower tuner.ray.cpus, or add machines"
                    )
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), seconds)

    def _free(
        self, group: tuple[str, int, int], alive: list[Worker], ready: list[Worker], alone: bool
    ) -> Worker | None:
        """A worker for an attempt; None: it has to wait.

        Those that wait to be alone get the least busy worker, or that of their group, as soon as it
        is empty: until then it gets no other attempts.
        """
        least = min(alive, key=lambda one: len(one.attempts), default=None)

        def own(asking: tuple[str, int, int]) -> Worker | None:
            found = self._of_group.get(asking)
            return found if found in alive else None

        found = ready if (held := own(group)) is None else [held]
        if alone:
            found = [one for one in found if not one.attempts]
        else:
            emptied = {own(asking) or least for asking in self._asking_alone}
            found = [one for one in found if one not in emptied | self._alone]
        return min(found, key=lambda one: len(one.attempts), default=None)

    def _wake(self, *_: object) -> None:
        """Let those look again that wait for a worker."""
        self._changed.set()
        self._changed.clear()

    def _left(self, deadline: float) -> float | None:
        """Seconds until then; None: workers on this machine start, or die."""
        return None if self.placing is None else max(0.0, deadline - time.monotonic())

    async def aclose(self) -> None:
        """End the workers, and wait for that."""
        self._closed = True
        with self._joined:
            ended = (worker.aclose() for worker in list(self._workers))
            await asyncio.gather(*ended, *self._ending)


def opening_of(workers: Pool | None, number: int = 0) -> Opening | None:
    """Address of the server of the gateway with this number, for workers; None: on loopback."""
    if workers is None or workers.placing is None:
        return None
    return workers.placing.opening(number)


def pool_of(
    config: RunConfig,
    workflow: Callable[..., Any] | None,
    judge: Callable[..., Any] | None,
    kind: ChatModelKind,
) -> Pool | None:
    """The configured workers, not started; None: there are none.

    Raises:
        FunctionError, ConfigError: As `Pool`.
    """
    wanted = config.tuner.workers
    if workflow is None or not wanted:
        return None
    placing, most = None, config.concurrent_rollouts
    if wanted == "ray":
        assert config.cluster.ray_address is not None, "a conflict says it"
        placing = RayPlacement(config.cluster.ray_address, config.tuner.ray)
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
"""Number of busy cores below which functions are not worth a process."""
_ROOM = 1.5
"""Workers for each busy core: they wait for each other, and work comes in bursts."""


def count_for(used: float, *, most: int, fewest: int) -> int:
    """Number of workers for functions that keep `used` cores busy."""
    if used < LIGHT:
        return fewest
    return max(1, min(most, math.ceil(used * _ROOM)))


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
