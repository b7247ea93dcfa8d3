"""Workers on the machines of a Ray cluster.

Ray says where they run and notices when one is lost; it also carries what run and worker tell each
other (`messages`), token-level requests among it. What chat models and clients ask the gateway goes
there by HTTP, with their sessions' keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tuner.config.explorer import RaySection
from tuner.errors import ConfigError, MissingDependencyError, pip_install
from tuner.functions.shipping import worker_path
from tuner.gateway import Gateway
from tuner.gateway.http import Opening
from tuner.gateway.service import Door
from tuner.workers.any_worker import Worker
from tuner.workers.messages import Setup, framed
from tuner.workers.worker_process import ChildProcess, print_here

logger = logging.getLogger("tuner.rollout")
PACKAGE = "agentscope-tuner"
_CONNECT_SECONDS = 10.0
_WORDS = 160


class Begun(NamedTuple):
    """The process has begun."""

    address: str
    pid: int


class Printed(NamedTuple):
    """It has written a line on "stdout" or "stderr"."""

    target: str
    text: str


class Ended(NamedTuple):
    """The process has ended."""

    how: str


class Relay:
    """The actor beside a worker's process: hands on what the two ends of its line say.

    Args:
        version: Of this package, where the run is.

    Raises:
        RuntimeError: It is another one here.
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
        """Give the process what the run says; numbers are its order, whatever Ray's is."""
        self._heard[number] = data
        self._hand_on()

    def _hand_on(self) -> None:
        while self._writer is not None and self._next in self._heard:
            self._writer.write(self._heard.pop(self._next))
            self._next += 1

    async def said(self) -> AsyncIterator[Begun | bytes | Printed | Ended]:
        """Run the process, and give what it says, in its order, to its end."""
        import ray

        loop = asyncio.get_running_loop()
        items: asyncio.Queue[bytes | Printed | Ended] = asyncio.Queue()

        def put(item: bytes | Printed | Ended) -> None:
            loop.call_soon_threadsafe(items.put_nowait, item)

        child = ChildProcess(
            lambda target, text: put(Printed(target, text)), lambda: put(Ended(child.how))
        )
        try:
            yield Begun(ray.util.get_node_ip_address(), child.pid)
            reader, self._writer = await asyncio.open_unix_connection(sock=child.connection)
            self._hand_on()
            reading = loop.create_task(_read(reader, items))
            # It may have closed its line and live on.
            reading.add_done_callback(lambda _: loop.call_later(1.0, child.kill))
            while not isinstance(item := await items.get(), Ended):
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
class Placing:
    """How Ray places workers.

    Args:
        address: Of the cluster.
        section: What each of them asks for.
    """

    address: str
    section: RaySection

    def __str__(self) -> str:
        asks = ", ".join(f"{count:g} {name}" for name, count in self._asks.items())
        return f"on the Ray cluster at {self.address}, each with {asks}"

    @property
    def _asks(self) -> dict[str, float]:
        return {"CPU": self.section.cpus, **self.section.resources}

    def worker(
        self, setup: Setup, doors: list[Door], on_end: Callable[[RayWorker], None]
    ) -> RayWorker:
        """A worker that starts as soon as there is room for it."""
        import ray

        actor = ray.remote(Relay).options(
            num_cpus=self.section.cpus,
            resources=self.section.resources,
            max_restarts=0,  # a worker that is lost is replaced, by another one
            max_task_retries=0,
        )
        return RayWorker(actor.remote(metadata.version(PACKAGE)), setup, doors, on_end)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Ray for the time of the block, from this process.

        Raises:
            MissingDependencyError: It is not installed.
            ConfigError: There is no cluster at the address, or this process is in one already.
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
        """How many there are: as the file says, or as the cluster as it is now has room for."""
        import ray

        if self.section.workers is not None:
            return self.section.workers
        found = ray.cluster_resources()
        room = min(found.get(name, 0) // asked for name, asked in self._asks.items())
        return max(1, min(most, int(room)))

    def offers(self) -> str:
        """What the cluster has of what a worker asks for, in a sentence."""
        import ray

        found, free = ray.cluster_resources(), ray.available_resources()
        has = ", ".join(
            f"{free.get(name, 0):g} of {found.get(name, 0):g} {name}" for name in self._asks
        )
        return f"the cluster has free {has}"

    def opening(self, number: int = 0) -> Opening:
        """Where the door of a run's gateway is: the policy's, or that of another model after it.

        Raises:
            ConfigError: This machine does not know the address.
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
        """Let a gateway listen, before a rollout fails of that.

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
        """What workers ask for a door of ours."""
        return self.section.base_url or base_url


class RayWorker(Worker):
    """A worker on some machine of the cluster.

    Args:
        actor: Its `Relay`.
        setup: What it is for.
        doors: The gateways, by number.
        on_end: Is told, once, that it has ended.
    """

    def __init__(
        self, actor: Any, setup: Setup, doors: list[Door], on_end: Callable[[RayWorker], None]
    ) -> None:
        super().__init__(doors, on_end)
        self._actor = actor
        self._numbers = itertools.count()
        self._begun: Begun | None = None
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
        """A message that does not arrive leaves a worker that nobody can trust."""
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
                    case Begun() as begun:
                        self._begun = begun
                    case Printed(target, text):
                        print_here(target, text)
                    case Ended(how):
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
    """What was raised in the actor; None: it is Ray that has lost it."""
    causes = [line.strip() for line in str(error).splitlines() if "Error: " in line]
    causes = [line for line in causes if "ray.exceptions" not in line and "RpcError" not in line]
    return causes[-1] if causes else None


def _said(error: Exception) -> str:
    """The first line of an error of Ray's, which has a paragraph of advice."""
    text = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return text if len(text) <= _WORDS else f"{text[:_WORDS]}..."


def require_answer(address: str) -> None:
    """Refuse an address where nobody listens; Ray itself would ask there for minutes.

    Raises:
        ConfigError: Nobody does.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection(
            (host.removeprefix("ray://").strip("[]"), int(port)), timeout=_CONNECT_SECONDS
        ).close()
    except (OSError, ValueError) as error:
        raise not_joined(address, str(error) or type(error).__name__) from error


def not_joined(address: str, why: str) -> ConfigError:
    """The refusal of an address."""
    return ConfigError(
        f"cluster.ray_address is {address!r}, where no Ray cluster can be joined: {why}"
    )
