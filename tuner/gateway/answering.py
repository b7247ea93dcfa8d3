"""One request on its way: its answer whole or as events, sampled once where its key says so."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from tuner.gateway.completion import Completion
from tuner.gateway.completion_request import Answer
from tuner.gateway.dialects import Exchange
from tuner.gateway.request_error import FieldError, RequestError
from tuner.gateway.service import EVENT_STREAM, Events, Replay, Reply, StreamReply
from tuner.gateway.sessions import Session

logger = logging.getLogger(__name__)


async def complete(exchange: Exchange) -> Reply | StreamReply:
    await exchange.completion.begin()
    if exchange.completion.request.stream:
        return StreamReply(_events(exchange))
    answer = await exchange.completion.answer()
    return Reply(200, json.dumps(exchange.answer(answer)).encode())


async def _events(exchange: Exchange) -> AsyncGenerator[bytes, None]:
    """A completion as the server-sent events of its dialect."""
    try:
        for event in exchange.opening():
            yield event
        async with contextlib.aclosing(exchange.completion.stream()) as parts:
            async for part in parts:
                if isinstance(part, Answer):
                    for event in exchange.closing(part):
                        yield event
                else:
                    for event in exchange.delta(*part):
                        yield event
    except RequestError as error:
        yield exchange.failure(error)
    except Exception as error:
        yield exchange.failure(failure(exchange.completion.session, error))


async def once(
    kind: type[Exchange], session: Session, role: str | None, body: bytes, key: str
) -> Reply | StreamReply:
    """The answer to a request with an idempotency key: sampled once, then replayed."""
    digest, sink = hashlib.sha256(body).digest(), session.sink

    def kept() -> Replay | None:
        known = session.replays.get(key)
        return known if known is not None or sink is None else sink.begin(key)

    while (known := kept()) is not None:
        if known.request != digest:
            raise FieldError(
                f"the idempotency key {key!r} was used for another request before: send each "
                "request with a key of its own",
                path=("Idempotency-Key",),
            )
        if known.answer is not None:
            return known.answer
        await known.done.wait()  # a retry that overtook the first attempt
    replay = session.replays[key] = Replay(digest)

    def settle() -> None:
        if replay.done.is_set():
            return
        replay.done.set()
        if replay.answer is None or sink is not None:
            session.replays.pop(key, None)
        if replay.answer is not None and sink is not None:
            sink.replied(key, replay)

    reply: Reply | StreamReply | None = None
    try:
        exchange = kind(session, role, body)
        exchange.completion.key = key
        reply = await complete(exchange)
        if isinstance(reply, Reply):
            replay.answer = reply
            return reply
        return StreamReply(_Kept(reply.events, exchange.completion, replay, settle))
    finally:
        if not isinstance(reply, StreamReply):
            settle()


@dataclass(eq=False)
class _Kept:
    """A stream's events; they become the replay's answer when they have ended well."""

    events: Events
    completion: Completion
    replay: Replay
    settle: Callable[[], None]
    seen: list[bytes] = field(default_factory=list)

    def __aiter__(self) -> _Kept:
        return self

    async def __anext__(self) -> bytes:
        try:
            event = await anext(self.events)
        except BaseException:
            if self.completion.committed:
                self.replay.answer = Reply(200, b"".join(self.seen), EVENT_STREAM)
            self.settle()
            raise
        self.seen.append(event)
        return event

    async def aclose(self) -> None:
        await self.events.aclose()
        self.settle()


def failure(session: Session | None, error: Exception) -> RequestError:
    """What a caller is told of a failure that is not its own; the session keeps the cause."""
    logger.exception("a call of session %s failed", session.id if session else None)
    if session is not None:
        session.errors.append(error)
    return RequestError(
        f"the call failed inside the engine or the gateway: {type(error).__name__}: {error}",
        status=500,
    )
