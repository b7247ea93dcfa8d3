"""The gateway: finds the session of a key and answers its requests, from any transport."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tuner.encoding import json_text
from tuner.engines.base import Engine, Generation
from tuner.gateway import session_api
from tuner.gateway.completion import Completion
from tuner.gateway.dialects import Exchange, anthropic, chat
from tuner.gateway.dialects.responses import ResponsesExchange
from tuner.gateway.dialects.text import TextExchange, complete_tokens
from tuner.gateway.families.renderer import ChatRenderer
from tuner.gateway.request_error import FieldError, RequestError, has_ended
from tuner.gateway.requests import Answer
from tuner.gateway.script import Script
from tuner.gateway.service import (
    EVENT_STREAM,
    CallSink,
    Events,
    Replay,
    Reply,
    Roles,
    Service,
    StreamReply,
    in_loop,
    served_path,
)
from tuner.gateway.sessions import ROLE, SamplingDefaults, Session, SessionLimits
from tuner.traces import ReasoningPolicy

if TYPE_CHECKING:
    from tuner.gateway.http import HttpDoor, Opening


# Answering one request: whole or as events, sampled once per idempotency key.


logger = logging.getLogger(__name__)


async def complete(exchange: Exchange) -> Reply | StreamReply:
    await exchange.completion.begin()
    if exchange.completion.request.stream:
        return StreamReply(_events(exchange))
    answer = await exchange.completion.answer()
    return Reply(200, json_text(exchange.answer(answer)).encode())


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
                f"the idempotency key {key!r} was already used for another request: send each "
                "request with a new key",
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
    """A stream's events; they become the replayed answer if they end well."""

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
    """The error that a caller gets for an internal failure; the session keeps the cause."""
    logger.exception("a call of session %s failed", session.id if session else None)
    if session is not None:
        session.errors.append(error)
    return RequestError(
        f"the call failed inside the engine or the gateway: {type(error).__name__}: {error}",
        status=500,
    )


IDEMPOTENCY_HEADER = "idempotency-key"
_AFTER_THE_END = 0.05  # seconds until a request with a sealed key is refused
_REMEMBERED_KEYS = 100_000  # sealed keys that still get a specific message


EXCHANGES: dict[str, type[Exchange]] = {
    "/v1/chat/completions": chat.ChatExchange,
    "/v1/completions": TextExchange,
    "/v1/messages": anthropic.MessagesExchange,
    "/v1/responses": ResponsesExchange,
}
COUNT_TOKENS = "/v1/messages/count_tokens"
MODELS = "/v1/models"


class Gateway:
    """Serves agents over OpenAI's API, calls one engine with token ids, and records calls.

    It belongs to the event loop in which it is created or first used: the engine is called there,
    also for clients in other threads and loops.

    Args:
        engine: Generates completions.
        renderer: Renders chats for the model family.
        model_name: The `model` that requests must name.
        reasoning: Treatment of earlier reasoning that is missing from a rendered prompt:
            "template" leaves it out, "keep" restores the sampled tokens.
        opening: Address for HTTP clients, opened when first needed; None is a free port of
            loopback.
        roles: The adapter of each role; a request may also name a role as its model.

    Attributes:
        service: The first four arguments, and the roles.
        warned: The settings that `Session.warn_once` has warned of.
        shared: Sessions that other processes use, by their owner's key.

    Raises:
        ConfigError: `reasoning` is "keep", and the renderer does not recognise reasoning.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: ChatRenderer,
        *,
        model_name: str,
        reasoning: ReasoningPolicy = "template",
        opening: Opening | None = None,
        roles: Roles | None = None,
    ) -> None:
        self._where = opening
        self.service = Service(engine, renderer, model_name, reasoning, roles or Roles())
        self.warned: set[str] = set()
        self.shared: dict[str, Session] = {}
        self._sessions: dict[str, Session] = {}
        self._ended: dict[str, str] = {}  # the sessions of sealed keys, oldest first
        self._stuck: dict[str, Callable[[], str]] = {}
        self._opening = threading.Lock()
        self._door: HttpDoor | None = None
        self._socket_door: HttpDoor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        with contextlib.suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()

    @property
    def engine(self) -> Engine:
        return self.service.engine

    @property
    def renderer(self) -> ChatRenderer:
        return self.service.renderer

    def open_session(
        self,
        session_id: str,
        *,
        seed: int = 0,
        recorded: bool = True,
        defaults: SamplingDefaults | None = None,
        limits: SessionLimits | None = None,
        script: Script | None = None,
        key: str | None = None,
        sink: CallSink | None = None,
    ) -> Session:
        """Create a session with its own key, open until it is sealed.

        Args:
            session_id: A readable name, unique among the caller's; ids of calls depend on it.
            seed: Equal seeds, ids and requests give equal completions on equal weights.
            recorded: Whether its calls are kept.
            defaults: Sampling settings for requests that do not set them.
            limits: Limits of its requests; None for no limits.
            script: A recorded rollout that answers it, as far as it goes.
            key: Its key if it already has one; without a dot.
            sink: Receives its calls before they are answered, and the replies.
        """
        session = Session(
            self.service,
            self,
            session_id,
            seed=seed,
            recorded=recorded,
            defaults=defaults or SamplingDefaults(),
            limits=limits or SessionLimits(),
            script=script,
            key=key,
            sink=sink,
        )
        self._sessions[session.key] = session
        return session

    def forget(self, key: str, session_id: str) -> None:
        """Invalidate a session's key; requests with it are told that the session has ended."""
        self._sessions.pop(key, None)
        self._ended[key] = session_id
        if len(self._ended) > _REMEMBERED_KEYS:
            del self._ended[next(iter(self._ended))]

    async def complete_tokens(
        self, session: Session, prompt_ids: Sequence[int], **settings: Any
    ) -> tuple[Generation, ...]:
        """See `tuner.gateway.dialects.text.complete_tokens`."""
        return await complete_tokens(session, prompt_ids, **settings)

    @property
    def base_url(self) -> str:
        """The URL for HTTP clients; the first use starts the server.

        Raises:
            RuntimeError: The gateway has no event loop to serve from yet.
        """
        return self._opened_door().base_url

    def _opened_door(self) -> HttpDoor:
        with self._opening:
            if self._door is None:
                from tuner.gateway.http import HttpDoor

                self._door = HttpDoor(self, self.home(), self._where)
            return self._door

    @property
    def socket_url(self) -> str:
        """Where other processes of this machine find this gateway, as `SharedSession` has it; the
        first use opens a Unix socket."""
        if self._socket_door is None:
            from tuner.gateway.http import HttpDoor, Opening

            session_api.raise_file_limit()
            # Functions may record results of any size.
            opening = Opening(unix=True, max_body_bytes=sys.maxsize)
            self._socket_door = HttpDoor(self, self.home(), opening)
        return self._socket_door.base_url

    async def aclose(self) -> None:
        """Seal every session and stop the HTTP servers."""
        for session in list(self._sessions.values()):
            session.seal()
        doors, self._door, self._socket_door = (self._door, self._socket_door), None, None
        for door in doors:
            if door is not None:
                await door.aclose()

    async def handle(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Reply | StreamReply:
        """Answer one request, from any transport. Never raises unless it is cancelled.

        Args:
            method: "GET", "HEAD" (answered like GET; who sends the reply omits the body) or "POST".
            path: Below the base URL's host, e.g. "/v1/chat/completions".
            headers: By lower-case name.
            body: The whole body.
        """
        home = self.home()
        reply = await in_loop(home, self._answer(method, path, headers, body))
        if isinstance(reply, StreamReply) and asyncio.get_running_loop() is not home:
            return StreamReply(_from_elsewhere(reply.events, home), reply.headers)
        return reply

    def refusal(self, path: str, headers: Mapping[str, str], error: RequestError) -> Reply:
        """The reply to a request that could not be read completely."""
        body = _dialect(served_path(path), headers).error(error)
        return Reply(error.status, body, headers=error.headers)

    @contextlib.contextmanager
    def refusing(self, keys: Iterable[str], why: Callable[[], str]) -> Iterator[None]:
        """While the block runs, refuse requests with these keys from a thread: the code that sends
        them blocks the event loop and would wait forever.

        Args:
            why: Makes the message of each refusal.
        """
        self._stuck = dict.fromkeys(keys, why)
        try:
            with self._opened_door().beside():
                yield
        finally:
            self._stuck = {}

    def check_not_stuck(self, headers: Mapping[str, str]) -> None:
        """Raise RequestError if requests with this key are refused; callable in any thread."""
        if self._stuck and (why := self._stuck.get(presented_key(headers)[0])) is not None:
            raise RequestError(why(), status=400, code="event_loop_blocked")

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
                    "the gateway was created outside an event loop and has none to serve from: "
                    "create it, or call it first, inside the loop that the engine runs in"
                ) from None
        return self._loop

    async def _answer(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Reply | StreamReply:
        session: Session | None = None
        path = served_path(path)
        if method == "POST" and path.startswith(session_api.PATH):
            return await session_api.answer(self.shared.get(presented_key(headers)[0]), path, body)
        kind = _dialect(path, headers)
        try:
            session, role = await self._session(headers)
            method = "GET" if method == "HEAD" else method
            if method == "GET" and (path == MODELS or path.startswith(f"{MODELS}/")):
                form = anthropic if kind is anthropic.MessagesExchange else chat
                if name := path.removeprefix(MODELS)[1:]:
                    session.check_model(name)
                    return Reply(200, json_text(form.model(name)).encode())
                names = (self.service.model_name, *self.service.roles.adapters)
                return Reply(200, json_text(form.models(names)).encode())
            return await self._reply(session, role, f"{method} {path}", kind, headers, body)
        except RequestError as error:
            return Reply(error.status, kind.error(error), headers=error.headers)
        except Exception as error:
            told = failure(session, error)
            return Reply(told.status, kind.error(told))

    async def _reply(
        self,
        session: Session,
        role: str | None,
        asked: str,
        kind: type[Exchange],
        headers: Mapping[str, str],
        body: bytes,
    ) -> Reply | StreamReply:
        """The answer to `asked`, a method and a path."""
        method, _, path = asked.partition(" ")
        if method == "POST" and path in EXCHANGES:
            key = headers.get(IDEMPOTENCY_HEADER)
            if key:
                return await once(kind, session, role, body, key)
            return await complete(kind(session, role, body))
        if (method, path) == ("POST", COUNT_TOKENS):
            return Reply(200, json_text(await anthropic.count_tokens(session, body)).encode())
        raise RequestError(
            f"{asked} is not served here: this gateway answers GET {MODELS}, GET {MODELS}/ID and "
            f"POST {', '.join((*EXCHANGES, COUNT_TOKENS))}",
            status=404,
        )

    async def _session(self, headers: Mapping[str, str]) -> tuple[Session, str | None]:
        """The session of the request's key, and the role that the key names."""
        key, role = presented_key(headers)
        session = self._sessions.get(key)
        if session is not None and (not role or ROLE.fullmatch(role)):
            return session, role or None
        if key in self._ended:
            # Slow down an agent that keeps sending requests in a loop.
            await asyncio.sleep(_AFTER_THE_END)
            raise has_ended(self._ended[key])
        raise RequestError(
            "the API key belongs to no open session: use the api_key and base_url of the model "
            "passed to the workflow",
            status=401,
            code="invalid_api_key",
        )


def presented_key(headers: Mapping[str, str]) -> tuple[str, str]:
    """A request's key and the role that it names; both may be empty.

    Anthropic's client sends the key in `x-api-key`, Azure's in `api-key`.
    """
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = headers.get("x-api-key") or headers.get("api-key", "")
    key, _, role = given.strip().partition(".")
    return key, role


def _dialect(path: str, headers: Mapping[str, str]) -> type[Exchange]:
    """The dialect of a request, also for paths that are not served.

    Args:
        path: As returned by `served_path`.
        headers: By lower-case name; Anthropic's clients send their version in one.
    """
    claude = path == COUNT_TOKENS or "anthropic-version" in headers
    return EXCHANGES.get(path, anthropic.MessagesExchange if claude else chat.ChatExchange)


async def _from_elsewhere(
    events: Events, home: asyncio.AbstractEventLoop
) -> AsyncGenerator[bytes, None]:
    """The items of a generator that runs in another loop."""
    ended = False

    async def next_item() -> bytes | None:
        return await anext(events, None)

    try:
        while (event := await in_loop(home, next_item())) is not None:
            yield event
        ended = True
    finally:
        if not ended:
            asyncio.run_coroutine_threadsafe(events.aclose(), home)
