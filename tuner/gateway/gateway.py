"""The gateway: finds the session behind a key and answers its requests, in process or over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tuner.engines.base import Engine
from tuner.errors import ConfigError
from tuner.gateway.answer import Answer
from tuner.gateway.anthropic import MessagesExchange, count_tokens
from tuner.gateway.chat import ChatExchange
from tuner.gateway.complete import Completion
from tuner.gateway.dialect import Exchange
from tuner.gateway.errors import RequestError
from tuner.gateway.renderer import ChatRenderer
from tuner.gateway.responses import ResponsesExchange
from tuner.gateway.session import ROLE, Replay, SamplingDefaults, Session, SessionLimits
from tuner.gateway.text import TextExchange
from tuner.traces import ReasoningPolicy

if TYPE_CHECKING:
    from tuner.gateway.http import HttpDoor

logger = logging.getLogger(__name__)

T = TypeVar("T")

IDEMPOTENCY_HEADER = "idempotency-key"
EVENT_STREAM = "text/event-stream"
_REMEMBERED_KEYS = 100_000  # sealed keys that still get a sentence of their own


class Events(Protocol):
    """Server-sent events as they come; closing them early abandons the request."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def __anext__(self) -> bytes: ...

    async def aclose(self) -> None: ...


_EXCHANGES: dict[str, type[Exchange]] = {
    "/v1/chat/completions": ChatExchange,
    "/v1/completions": TextExchange,
    "/v1/messages": MessagesExchange,
    "/v1/responses": ResponsesExchange,
}
_COUNT_TOKENS = "/v1/messages/count_tokens"


@dataclass(frozen=True)
class Reply:
    """An HTTP response, wherever it goes."""

    status: int
    body: bytes
    content_type: str = "application/json"


@dataclass(frozen=True)
class StreamReply:
    """A response with status 200 whose server-sent events come one by one.

    Nothing is sampled until the first is asked for; closing `events` early abandons the request.
    """

    events: Events


class Gateway:
    """Speaks OpenAI to agents and token ids to one engine, and records calls.

    It belongs to the event loop that it is made in, or that first uses it: the engine is called
    there, also for clients in other threads and loops.

    Args:
        engine: What generates.
        renderer: The model family's chat form.
        model_name: What requests must give as `model`.
        reasoning: What becomes of earlier reasoning that is missing from a rendered prompt:
            "template" leaves it out, "keep" puts it back as it was sampled.

    Attributes:
        warned: The settings that `Session.warn_once` has warned of.

    Raises:
        ConfigError: `reasoning` is "keep", and the renderer cannot tell what reasoning is.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: ChatRenderer,
        *,
        model_name: str,
        reasoning: ReasoningPolicy = "template",
    ) -> None:
        if reasoning == "keep" and not renderer.reads_reasoning:
            raise ConfigError(
                "reasoning is 'keep', but the renderer has no reasoning_parser to tell reasoning "
                "from the rest of an answer: give it one, or set reasoning to 'template'"
            )
        self.engine = engine
        self.renderer = renderer
        self.model_name = model_name
        self.warned: set[str] = set()
        self.reasoning = reasoning
        self._sessions: dict[str, Session] = {}
        self._ended: OrderedDict[str, RequestError] = OrderedDict()
        self._door: HttpDoor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        with contextlib.suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()

    def open_session(
        self,
        session_id: str,
        *,
        seed: int = 0,
        recorded: bool = True,
        defaults: SamplingDefaults | None = None,
        limits: SessionLimits | None = None,
    ) -> Session:
        """A new session with a key of its own, open until it is sealed.

        Args:
            session_id: A name for people, unique among the caller's; ids of calls depend on it.
            seed: Equal seeds, ids and requests give equal completions on equal weights.
            recorded: Whether its calls are kept.
            defaults: What a request that does not say is sampled with.
            limits: What it may ask for; None is anything.
        """
        session = Session(
            self,
            session_id,
            seed=seed,
            recorded=recorded,
            defaults=defaults or SamplingDefaults(),
            limits=limits or SessionLimits(),
        )
        self._sessions[session.key] = session
        return session

    def forget(self, session: Session) -> None:
        """Take a sealed session's key out of service."""
        self._sessions.pop(session.key, None)
        self._ended[session.key] = session.sealed_error()
        if len(self._ended) > _REMEMBERED_KEYS:
            self._ended.popitem(last=False)

    @property
    def base_url(self) -> str:
        """Where HTTP clients find this gateway; the first use opens the door.

        Raises:
            RuntimeError: The gateway has no event loop yet to serve from.
        """
        if self._door is None:
            from tuner.gateway.http import HttpDoor

            self._door = HttpDoor(self, self.home())
        return self._door.base_url

    async def aclose(self) -> None:
        """Seal every session and close the HTTP door."""
        for session in list(self._sessions.values()):
            session.seal()
        if self._door is not None:
            door, self._door = self._door, None
            await door.aclose()

    async def handle(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Reply | StreamReply:
        """Answer one request; every door leads here. Never raises, unless it is cancelled.

        Args:
            method: "GET" or "POST".
            path: Below the base URL's host, e.g. "/v1/chat/completions".
            headers: By lower-case name.
            body: The whole body.
        """
        home = self.home()
        if asyncio.get_running_loop() is home:
            return await self._answer(method, path, headers, body)
        reply = await _elsewhere(self._answer(method, path, headers, body), home)
        if isinstance(reply, StreamReply):
            return StreamReply(_from_elsewhere(reply.events, home))
        return reply

    def home(self) -> asyncio.AbstractEventLoop:
        """The event loop that the engine is called in.

        Raises:
            RuntimeError: There is none yet, and none is running.
        """
        if self._loop is None:
            try:
                self._loop = asyncio.get_running_loop()
            except RuntimeError:
                raise RuntimeError(
                    "the gateway was made outside an event loop and has none to serve from: "
                    "make it, or call it first, inside the loop that the engine runs in"
                ) from None
        return self._loop

    async def _answer(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Reply | StreamReply:
        session: Session | None = None
        kind = dialect_of(path, headers)
        path = _served(path)
        try:
            session, role = self._session(headers)
            if method == "POST" and path in _EXCHANGES:
                key = headers.get(IDEMPOTENCY_HEADER)
                if key:
                    return await self._once(kind, session, role, body, key)
                exchange = self._exchange(kind, session, role, body)
                return await self._complete(exchange, session)
            if (method, path) == ("GET", "/v1/models"):
                return Reply(200, json.dumps(kind.models(self.model_name)).encode())
            if (method, path) == ("POST", _COUNT_TOKENS):
                return Reply(200, json.dumps(count_tokens(self, session, body)).encode())
            raise RequestError(
                f"{method} {path} is not served here: this gateway answers GET /v1/models and "
                f"POST {', '.join((*_EXCHANGES, _COUNT_TOKENS))}",
                status=404,
            )
        except RequestError as error:
            return Reply(error.status, kind.error(error))
        except Exception as error:
            failure = _failure(session, error)
            return Reply(failure.status, kind.error(failure))

    def _session(self, headers: Mapping[str, str]) -> tuple[Session, str | None]:
        """The session behind the request's key, and the role that the key names."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get("x-api-key", "")
        key, _, role = given.strip().partition(".")
        session = self._sessions.get(key)
        if session is not None and (not role or ROLE.fullmatch(role)):
            return session, role or None
        if key in self._ended:
            raise self._ended[key]
        raise RequestError(
            "the API key belongs to no open session: use the api_key and base_url of the model "
            "that the workflow was given",
            status=401,
            code="invalid_api_key",
        )

    def _exchange(
        self, kind: type[Exchange], session: Session, role: str | None, body: bytes
    ) -> Exchange:
        exchange = kind.read(self, session, body)
        exchange.completion = Completion(
            self, session, role, exchange.request, dialect=kind.dialect, prefix=kind.prefix
        )
        return exchange

    async def _complete(self, exchange: Exchange, session: Session) -> Reply | StreamReply:
        if exchange.request.stream:
            return StreamReply(_events(exchange, session))
        answer = await exchange.completion.answer()
        return Reply(200, json.dumps(exchange.answer(answer)).encode())

    async def _once(
        self, kind: type[Exchange], session: Session, role: str | None, body: bytes, key: str
    ) -> Reply | StreamReply:
        """The answer to a request with an idempotency key: sampled once, then replayed."""
        while (known := session.replays.get(key)) is not None:
            if known.request != body:
                raise RequestError(
                    f"the idempotency key {key!r} was used for another request before: send each "
                    "request with a key of its own",
                    param="Idempotency-Key",
                )
            if known.answer is not None:
                return known.answer
            await known.done.wait()  # a retry that overtook the first attempt
        replay = session.replays[key] = Replay(body)

        def settle() -> None:
            if replay.answer is None:
                session.replays.pop(key, None)
            replay.done.set()

        reply: Reply | StreamReply | None = None
        try:
            exchange = self._exchange(kind, session, role, body)
            reply = await self._complete(exchange, session)
            if isinstance(reply, Reply):
                replay.answer = reply
                return reply
            return StreamReply(_Kept(reply.events, exchange.completion, replay, settle))
        finally:
            if not isinstance(reply, StreamReply):
                settle()


def dialect_of(path: str, headers: Mapping[str, str]) -> type[Exchange]:
    """The dialect that a request is answered in, also where its path is not served.

    Args:
        path: As in `Gateway.handle`.
        headers: By lower-case name; Anthropic's clients name their version in one.
    """
    path = _served(path)
    anthropic = path == _COUNT_TOKENS or "anthropic-version" in headers
    return _EXCHANGES.get(path, MessagesExchange if anthropic else ChatExchange)


def _served(path: str) -> str:
    """Anthropic's client adds "/v1/messages" to a base URL, which ends in "/v1" already here."""
    return path.removeprefix("/v1") if path.startswith("/v1/v1/") else path


async def _events(exchange: Exchange, session: Session) -> AsyncGenerator[bytes, None]:
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
        yield exchange.failure(_failure(session, error))


class _Kept:
    """A stream's events; they become the replay's answer when they have ended well."""

    def __init__(
        self, events: Events, completion: Completion, replay: Replay, settle: Callable[[], None]
    ) -> None:
        self._events = events
        self._completion = completion
        self._replay = replay
        self._settle = settle
        self._seen: list[bytes] = []

    def __aiter__(self) -> _Kept:
        return self

    async def __anext__(self) -> bytes:
        try:
            event = await anext(self._events)
        except BaseException:
            if self._completion.committed:
                self._replay.answer = Reply(200, b"".join(self._seen), EVENT_STREAM)
            self._settle()
            raise
        self._seen.append(event)
        return event

    async def aclose(self) -> None:
        await self._events.aclose()
        self._settle()


def _failure(session: Session | None, error: Exception) -> RequestError:
    """What a caller is told of a failure that is not its own; the session keeps the cause."""
    logger.exception("a call of session %s failed", session.id if session else None)
    if session is not None:
        session.errors.append(error)
    return RequestError(
        f"the call failed inside the engine or the gateway: {type(error).__name__}: {error}",
        status=500,
    )


async def _elsewhere(work: Coroutine[Any, Any, T], home: asyncio.AbstractEventLoop) -> T:
    """The result of `work`, done in another loop."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, home))


async def _from_elsewhere(
    events: Events, home: asyncio.AbstractEventLoop
) -> AsyncGenerator[bytes, None]:
    """The items of a generator that runs in another loop."""
    ended = False

    async def next_item() -> bytes | None:
        return await anext(events, None)

    try:
        while (event := await _elsewhere(next_item(), home)) is not None:
            yield event
        ended = True
    finally:
        if not ended:
            asyncio.run_coroutine_threadsafe(events.aclose(), home)
