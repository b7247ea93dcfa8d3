"""Types that the gateway's parts share: engine and settings, replies, and transports."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from tuner.config.schema import ANY_ROLE, role_key
from tuner.encoding import json_text
from tuner.engines.base import Engine, Generation
from tuner.errors import ConfigError
from tuner.gateway.families.renderer import ChatRenderer
from tuner.gateway.request_error import RequestError
from tuner.traces import Call, ReasoningPolicy

T = TypeVar("T")

EVENT_STREAM = "text/event-stream"

# Not asyncio's default threads: agents may block all of those while waiting for work done here.
LONG_THREADS = 4
"""Threads that read long requests."""
_LONG_WORK = ThreadPoolExecutor(LONG_THREADS, "tuner-prompts")


@dataclass(frozen=True)
class Roles:
    """The adapters that calls are sampled with.

    Attributes:
        adapters: The engine's name of each role's adapter; None is the model without one. Empty:
            all calls are sampled with the same weights.
    """

    adapters: Mapping[str, str | None] = field(default_factory=dict)

    def asked(self, model: str, role: str | None) -> str | None:
        """The role of a request: that of its key, or the one that it names as its model.

        Raises:
            RequestError: They differ, or the role has no adapter.
        """
        if model in self.adapters and role not in (None, model):
            raise RequestError(
                f"model is {model!r}, but the API key is that of role {role!r}: use "
                f"model.role({model!r}), or the model's own name",
                path=("model",),
            )
        role = model if model in self.adapters else role
        if self.adapters and role_key(self.adapters, role) is None:
            told = "the call names no role" if role is None else f"role {role!r} has no adapter"
            raise RequestError(
                f"{told}: model.adapters has {', '.join(self.adapters)}; call model.role(name), "
                f"name a role as the request's model, or add {ANY_ROLE} to model.adapters"
            )
        return role

    def adapter(self, role: str | None) -> str | None:
        """The engine's name of a role's adapter."""
        key = role_key(self.adapters, role)
        return None if key is None else self.adapters[key]


@dataclass(frozen=True)
class Service:
    """Engine, renderer and settings that serve a gateway's requests (see `Gateway`).

    Raises:
        ConfigError: `reasoning` is "keep", and the renderer does not recognise reasoning.
    """

    engine: Engine
    renderer: ChatRenderer
    model_name: str
    reasoning: ReasoningPolicy
    roles: Roles = Roles()

    def __post_init__(self) -> None:
        if self.reasoning == "keep" and not self.renderer.reads_reasoning:
            raise ConfigError(
                "reasoning is 'keep', but the renderer has no reasoning_parser to separate "
                "reasoning from the answer: give it one, or set reasoning to 'template'"
            )


class Events(Protocol):
    """Server-sent events as they arrive; closing them early abandons the request."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def __anext__(self) -> bytes: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True)
class Reply:
    """An HTTP response, for any transport; `headers` are those besides its length and type."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class StreamReply:
    """A response with status 200 whose server-sent events arrive one by one.

    Nothing is sampled until the first is requested; closing `events` early abandons the request.
    """

    events: Events
    headers: tuple[tuple[str, str], ...] = ()


@dataclass
class Replay:
    """The SHA-256 of the body of a request with an idempotency key, and its answer once there is
    one."""

    request: bytes
    answer: Reply | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)


class CallSink(Protocol):
    """Stores a session's calls and replies outside the process. Each method is done when it
    returns; what it raises fails the request."""

    def add(self, calls: Sequence[Call], request: str | None) -> None:
        """Store calls, all or none, before any part of their end is sent.

        Args:
            request: The idempotency key of their request, or None.
        """
        ...

    def begin(self, request: str) -> Replay | None:
        """The stored answer to a request with this idempotency key, to be sent again.

        None: it is sampled now. Earlier calls of this key, whose end nobody saw, become
        undelivered.
        """
        ...

    def replied(self, request: str, replay: Replay) -> None:
        """Store the answer to a request with an idempotency key."""
        ...


class Door(Protocol):
    """Answers a session's requests, in the gateway's process or in another."""

    async def handle(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Reply | StreamReply: ...

    def refusing(
        self, keys: Iterable[str], why: Callable[[], str]
    ) -> AbstractContextManager[None]: ...


class Answers(Protocol):
    """Handler of the requests on a port."""

    async def handle(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Reply | StreamReply: ...

    def refusal(self, path: str, headers: Mapping[str, str], error: RequestError) -> Reply:
        """The reply to a request that could not be read completely."""
        ...

    def check_not_stuck(self, headers: Mapping[str, str]) -> None: ...


class Host(Answers, Door, Protocol):
    """A session's view of its gateway.

    Attributes:
        warned: Settings of the user's agents that were warned of.
        shared: Sessions that other processes use, by their owner's key (`session_api`).
    """

    warned: set[str]
    shared: dict[str, Any]

    @property
    def socket_url(self) -> str: ...

    @property
    def base_url(self) -> str: ...

    def home(self) -> asyncio.AbstractEventLoop: ...

    def forget(self, key: str, session_id: str) -> None: ...

    async def complete_tokens(
        self, session: Any, prompt_ids: Sequence[int], **settings: Any
    ) -> tuple[Generation, ...]: ...


_DEPLOYMENT = re.compile(r"^(?:/v1|/openai)/deployments/[^/]+(?=/)")


def served_path(path: str) -> str:
    """The path that a client means.

    A base URL with a slash at its end makes two in a path, Anthropic's client appends
    "/v1/messages" to one that ends in "/v1", and Azure's puts the model's name into the path.
    """
    path = re.sub("/{2,}", "/", path).rstrip("/") or "/"
    path = _DEPLOYMENT.sub("/v1", path)
    return path.removeprefix("/v1") if path.startswith("/v1/v1/") else path


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event with a JSON payload."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json_text(data)}\n\n".encode()


async def in_loop(home: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, run in the loop `home`, from any loop."""
    try:
        here = asyncio.get_running_loop()
    except RuntimeError:
        # An abandoned agent that catches everything may ask again while Python closes its
        # coroutine. Awaiting then is ended; just failing would make it try forever.
        work.close()
        await asyncio.sleep(0)
        raise
    if here is home:
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, home))


async def in_turn(
    turns: asyncio.Lock,
    work: Callable[[], T],
    *,
    long: bool,
    first: Callable[[], Awaitable[None]],
) -> T:
    """The result of `work`, run after all earlier turns.

    What the caller does without awaiting belongs to its turn.

    Args:
        turns: The lock.
        work: May run in any thread.
        long: Whether it runs outside the event loop. If the caller is cancelled meanwhile, the turn
            lasts until the work has ended.
        first: Awaited before the work, in the same turn.
    """
    await turns.acquire()
    future: Future[T] | None = None
    try:
        await first()
        if not long:
            return work()
        future = _LONG_WORK.submit(work)
        return await asyncio.wrap_future(future)
    finally:
        if future is None or future.done():
            turns.release()
        else:
            loop = asyncio.get_running_loop()

            def release(_: Future[T]) -> None:
                with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
                    loop.call_soon_threadsafe(turns.release)

            future.add_done_callback(release)
