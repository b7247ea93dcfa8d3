"""What the gateway's parts share: whom requests are answered with, and what its doors lead to."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from tuner.engines.base import Engine, Generation
from tuner.errors import ConfigError
from tuner.gateway.families.renderer import ChatRenderer
from tuner.gateway.request_error import RequestError
from tuner.traces import Call, ReasoningPolicy

T = TypeVar("T")

EVENT_STREAM = "text/event-stream"

# Not asyncio's own threads: agents may wait in all of those for the answer to what is done here.
_LONG_WORK = ThreadPoolExecutor(4, "tuner-prompts")


@dataclass(frozen=True)
class Service:
    """Whom a gateway's requests are answered with; `Gateway` says what each of them is.

    Raises:
        ConfigError: `reasoning` is "keep", and the renderer cannot tell what reasoning is.
    """

    engine: Engine
    renderer: ChatRenderer
    model_name: str
    reasoning: ReasoningPolicy

    def __post_init__(self) -> None:
        if self.reasoning == "keep" and not self.renderer.reads_reasoning:
            raise ConfigError(
                "reasoning is 'keep', but the renderer has no reasoning_parser to tell reasoning "
                "from the rest of an answer: give it one, or set reasoning to 'template'"
            )


class Events(Protocol):
    """Server-sent events as they come; closing them early abandons the request."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def __anext__(self) -> bytes: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True)
class Reply:
    """An HTTP response, wherever it goes; `headers` are those beside its length and type."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class StreamReply:
    """A response with status 200 whose server-sent events come one by one.

    Nothing is sampled until the first is asked for; closing `events` early abandons the request.
    """

    events: Events
    headers: tuple[tuple[str, str], ...] = ()


@dataclass
class Replay:
    """What an idempotency key stands for: the SHA-256 of the request's body, and its answer once
    there is one."""

    request: bytes
    answer: Reply | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)


class CallSink(Protocol):
    """What keeps a session's calls and replies beyond the process; each method is done when it
    returns, and what it raises is a failure of the request."""

    def add(self, calls: Sequence[Call], request: str | None) -> None:
        """Keep calls, all or none, before anything of their end is sent.

        Args:
            request: The idempotency key of their request, or None.
        """
        ...

    def begin(self, request: str) -> Replay | None:
        """The kept answer to a request with this idempotency key, which is given again.

        None: it is sampled now. Had it been before, nobody saw the end: those calls are undelivered
        from now on.
        """
        ...

    def replied(self, request: str, replay: Replay) -> None:
        """Keep the answer to a request with an idempotency key."""
        ...


class Door(Protocol):
    """What takes a session's requests, in the gateway's process or in another."""

    async def handle(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Reply | StreamReply: ...

    def refusing(
        self, keys: Iterable[str], why: Callable[[], str]
    ) -> AbstractContextManager[None]: ...


class Answers(Protocol):
    """What a door on a port leads to."""

    async def handle(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Reply | StreamReply: ...

    def refusal(self, path: str, headers: Mapping[str, str], error: RequestError) -> Reply:
        """The reply to a request that could not be taken in whole."""
        ...

    def check_not_stuck(self, headers: Mapping[str, str]) -> None: ...


class Host(Answers, Door, Protocol):
    """What a session knows of the gateway that it is open at.

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


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event with a JSON payload."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


async def in_loop(home: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, done in the loop `home`, whichever loop it is awaited in."""
    try:
        here = asyncio.get_running_loop()
    except RuntimeError:
        # An agent that was left behind and catches everything, asking again while Python closes its
        # coroutine. What awaits then is ended; what only fails would try for ever.
        work.close()
        await asyncio.sleep(0)
        raise
    if here is home:
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, home))


async def in_turn(turns: asyncio.Lock, work: Callable[[], T], *, long: bool) -> T:
    """The result of `work`, done when all that asked for a turn earlier have had theirs.

    What the caller does without awaiting belongs to its turn.

    Args:
        turns: Whose turns they are.
        work: May be done in any thread.
        long: Whether it is done beside the event loop. If the caller is cancelled meanwhile, the
            turn lasts until the work has ended.
    """
    await turns.acquire()
    future: Future[T] | None = None
    try:
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
