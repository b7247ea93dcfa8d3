"""A rollout's identity at the gateway: its key, its committed calls, its end."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from tuner.gateway.continuation import Conversations
from tuner.gateway.errors import RequestError
from tuner.traces import Call

if TYPE_CHECKING:
    import openai

    from tuner.gateway.gateway import Gateway

T = TypeVar("T")


@dataclass(frozen=True)
class SamplingDefaults:
    """What a request that does not say is sampled with.

    Attributes:
        temperature: 0 is greedy.
        top_p: Nucleus mass in (0, 1].
        top_k: Keep the k most probable tokens; -1 keeps every token.
        max_tokens: Limit of a completion; None is the room left in the context.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = None


@dataclass
class Replay:
    """What an idempotency key stands for: the request, and its answer once there is one."""

    request: bytes
    answer: bytes | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Session:
    """One attempt at a rollout, as the gateway knows it. Made by `Gateway.open_session`.

    Attributes:
        id: The caller's name for it.
        key: The API key that stands for it; cannot be guessed.
        seed: Where the seeds of its calls come from.
        recorded: Whether its calls are kept; False for models that are not trained.
        defaults: What a request that does not say is sampled with.
        errors: What went wrong inside its calls that was not the caller's fault.
        malformed_tool_calls: Tool calls of its completions that could not be read.
        conversations: What it has prompted and sampled, for the prompts that go on from there.
    """

    def __init__(
        self,
        gateway: Gateway,
        session_id: str,
        *,
        seed: int,
        recorded: bool,
        defaults: SamplingDefaults,
    ) -> None:
        self._gateway = gateway
        self.id = session_id
        self.key = f"sk-tuner-{secrets.token_urlsafe(24)}"
        self.seed = seed
        self.recorded = recorded
        self.defaults = defaults
        self.errors: list[Exception] = []
        self.malformed_tool_calls = 0
        self.replays: dict[str, Replay] = {}
        self.conversations = Conversations(gateway.renderer)
        self._calls: list[Call] = []
        self._sealed = False
        self._asked: Counter[bytes] = Counter()
        self._in_flight: set[asyncio.Task[Any]] = set()
        self._busy_since = 0.0
        self._busy_seconds = 0.0

    @property
    def calls(self) -> tuple[Call, ...]:
        """Committed calls in order of commitment; empty where calls are not recorded."""
        return tuple(self._calls)

    @property
    def sealed(self) -> bool:
        return self._sealed

    @property
    def generation_seconds(self) -> float:
        """Wall time during which at least one of its calls was being generated."""
        running = time.perf_counter() - self._busy_since if self._in_flight else 0.0
        return self._busy_seconds + running

    @property
    def model_name(self) -> str:
        """The name that requests give as `model`."""
        return self._gateway.model_name

    @property
    def base_url(self) -> str:
        """Where HTTP clients find the gateway; the first use opens the door."""
        return self._gateway.base_url

    def async_client(self) -> openai.AsyncOpenAI:
        """An OpenAI client of this session that reaches the gateway without a socket."""
        from tuner.gateway.in_process import in_process_client

        return in_process_client(self._gateway, self.key)

    def seal(self) -> tuple[Call, ...]:
        """End the session: cancel what is in flight, refuse what comes later.

        Returns:
            The committed calls; none is added afterwards.
        """
        if not self._sealed:
            self._sealed = True
            self._gateway.forget(self)
            self.replays.clear()
            self.conversations = Conversations(self._gateway.renderer)
            for task in list(self._in_flight):
                task.get_loop().call_soon_threadsafe(task.cancel)
        return self.calls

    def occurrence(self, prompt: bytes) -> int:
        """How often this session has asked the prompt with this digest before; counts it."""
        before = self._asked[prompt]
        self._asked[prompt] += 1
        return before

    def digest(self, *parts: object) -> bytes:
        """32 bytes that depend on the session's seed and `parts` alone: equal runs, equal bytes."""
        return hashlib.blake2b(repr((self.seed, *parts)).encode(), digest_size=32).digest()

    def commit(self, calls: list[Call]) -> None:
        """Add completed calls to the trace, all or none.

        Raises:
            RequestError: 401: the session was sealed meanwhile.
        """
        if self._sealed:
            raise self.sealed_error()
        if self.recorded:
            self._calls.extend(calls)

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await `work()`, which `seal` cancels.

        Raises:
            RequestError: 401: the session was sealed before or meanwhile.
        """
        if self._sealed:
            raise self.sealed_error()
        task = asyncio.get_running_loop().create_task(work())
        try:
            with self._busy(task):
                return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._sealed and not (caller and caller.cancelling()):
                raise self.sealed_error() from None
            raise

    @contextmanager
    def _busy(self, task: asyncio.Task[Any]) -> Iterator[None]:
        if not self._in_flight:
            self._busy_since = time.perf_counter()
        self._in_flight.add(task)
        try:
            yield
        finally:
            self._in_flight.discard(task)
            if not self._in_flight:
                self._busy_seconds += time.perf_counter() - self._busy_since

    def sealed_error(self) -> RequestError:
        return RequestError(
            f"this key's rollout ({self.id}) has ended: its session takes no more calls",
            status=401,
            code="session_sealed",
        )
