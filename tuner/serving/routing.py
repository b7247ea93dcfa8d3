"""The sessions that are open in this process, and which of them a request belongs to.

A request with a session's key is that session's. One with an application's key belongs to the
session that its header names; else to the one that it was sent to before, if it is sent again
(`Idempotency-Key`); else to the one whose response it goes on from (`previous_response_id`); else
to the one whose recorded conversation it continues; else a new session begins, which is in the
store with its first call and not before: what is refused leaves nothing.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tuner.gateway import Gateway, SamplingDefaults, Session, SessionLimits
from tuner.gateway.request_error import RequestError, has_ended
from tuner.gateway.routes import EXCHANGES, IDEMPOTENCY_HEADER
from tuner.serving.restoring import (
    Noted,
    Redact,
    SessionSink,
    StoredResponses,
    beginnings,
    redact_messages,
    restored_conversations,
)
from tuner.serving.serving_store import ServingStore
from tuner.serving.tables import StoredSession, digest
from tuner.traces import Call

RESTING_SECONDS = 600.0
"""How long a session is kept in memory without a request; it is made again when one comes."""
_ID = re.compile(r"s-[0-9a-f]{24}")
_ROUTED = 100_000  # requests that are known again when they are repeated


def new_id() -> str:
    """The id of a session that begins: later ones sort after it."""
    return f"s-{time.time_ns():016x}{secrets.token_hex(4)}"


def new_session_key() -> str:
    """A key for a session, as the gateway's are: no dot is in it, behind which a role stands."""
    return f"sk-tuner-{secrets.token_urlsafe(24)}"


class Onlooker(Protocol):
    """Who learns from sessions, and decides which weights each is answered with."""

    def placed(self, session: Session, *, new: bool) -> None:
        """A session was made, or made again; `new`: it has no call yet."""
        ...

    def noted(self, session_id: str) -> None:
        """A call of a session is in the store."""
        ...


@dataclass
class _Live:
    """A session in memory, what it is written through, and when it was last asked (monotonic)."""

    session: Session
    sink: SessionSink
    asked: float = field(default_factory=time.monotonic)


class LiveSessions:
    """The sessions of a server.

    Args:
        gateway: Where they are open.
        store: Where they stay.
        names: What requests may give as `model` besides the gateway's name for it.
        defaults, limits: Of sessions that are opened without any.
        header: The header in which applications name sessions.
        redact: What is stored of messages; None is all.
        noted: Is told of what was committed.

    Attributes:
        onlooker: Who learns beside, or None.
    """

    def __init__(
        self,
        gateway: Gateway,
        store: ServingStore,
        *,
        names: tuple[str, ...] = (),
        defaults: SamplingDefaults | None = None,
        limits: SessionLimits | None = None,
        header: str = "x-tuner-session",
        redact: Redact | None = None,
        noted: Callable[[Noted], None] = lambda _: None,
    ) -> None:
        self._gateway = gateway
        self._store = store
        self._names = names
        self._defaults = defaults or SamplingDefaults()
        self._limits = limits or SessionLimits()
        self._header = header.lower()
        self._redact = redact
        self._noted = noted
        self.onlooker: Onlooker | None = None
        self._live: dict[str, _Live] = {}
        self._named: dict[tuple[str, str], str] = {}  # of sessions that are not stored yet
        self._routed: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._restoring: dict[str, asyncio.Task[_Live]] = {}
        self.reader = gateway.open_session("reader", recorded=False)
        """Reads requests, and answers what belongs to no session; nothing is sampled in it."""
        self.reader.other_names = names

    @property
    def count(self) -> int:
        """How many are in memory."""
        return len(self._live)

    def open(self, id_: str, *, key: str, **given: Any) -> StoredSession:
        """A new session in the store; it is made when its key comes. See `ServingStore.open`."""
        return self._store.open(id_, key=digest(key), seed=secrets.randbits(63), **given)

    async def of_id(self, id_: str) -> Session:
        """An open session, made again where the process does not know it.

        Raises:
            RequestError: 401: it has ended.
            LookupError: There is none of this id.
        """
        live = self._live.get(id_)
        if live is None:
            stored = self._store.session(id_)
            if stored.ended is not None:
                raise has_ended(id_)
            if id_ not in self._restoring:
                task = asyncio.ensure_future(self._restored(stored))
                self._restoring[id_] = task
                task.add_done_callback(lambda _: self._restoring.pop(id_, None))
            live = await asyncio.shield(self._restoring[id_])
        live.asked = time.monotonic()
        return live.session

    async def of_application(
        self, application: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Session:
        """The session of an application that a request belongs to, which may be a new one.

        Raises:
            RequestError: 401, 404: it names a session that has ended, or is not the application's.
        """
        request = headers.get(IDEMPOTENCY_HEADER)
        name = headers.get(self._header)
        if name is not None:
            found = self._of_name(application, name)
        else:
            found = self._of_repeated(application, request) if request else None
            found = found or self._of_words(application, path, body)
        if found is None:
            session = self._begun(application, name)
        else:
            session = await self.of_id(found)
        if request:
            self._routed[application, request] = session.id
            if len(self._routed) > _ROUTED:
                self._routed.popitem(last=False)
        return session

    def _of_name(self, application: str, name: str) -> str | None:
        """The session that an application calls so, or whose id it is."""
        if not _ID.fullmatch(name):
            known = self._store.session_of_name(application, name)
            return known or self._named.get((application, name))
        if (live := self._live.get(name)) is not None and not live.sink.stored:
            if live.sink.application == application:
                return name
        else:
            try:
                if self._store.session(name).application == application:
                    return name
            except LookupError:
                pass
        raise RequestError(
            f"the header {self._header} names session {name!r}, and this application has none of "
            "this id: send a name of your own for a new session",
            status=404,
            code="no_such_session",
        )

    def _of_repeated(self, application: str, request: str) -> str | None:
        """The open session that a request with this idempotency key was sent to before."""
        found = self._routed.get((application, request))
        found = found or self._store.session_of_request(application, request)
        return found if found is not None and self._is_open(found) else None

    def _is_open(self, id_: str) -> bool:
        if id_ in self._live:
            return True
        try:
            return self._store.session(id_).ended is None
        except LookupError:
            return False

    def _of_words(self, application: str, path: str, body: bytes) -> str | None:
        """The session that a request goes on from, by the response that it names or its words."""
        previous = _previous_response(body) if path == "/v1/responses" else None
        if previous is not None:
            found = self._store.session_of_response(application, previous)
            return found or self._of_unstored(application, previous)
        try:
            exchange = EXCHANGES[path](self.reader, None, body)
        except RequestError:
            return None  # the session that begins is told why
        messages = exchange.completion.request.messages
        if self._redact is not None:
            messages = redact_messages(self._redact, messages)
        for talk in beginnings(messages):
            if (found := self._store.go_on(application, talk)) is not None:
                return found
        return None

    def _of_unstored(self, application: str, response: str) -> str | None:
        """The session that keeps a response in memory alone."""
        for id_, live in self._live.items():
            if live.sink.application == application and response in iter(live.session.responses):
                return id_
        return None

    def _begun(self, application: str, name: str | None) -> Session:
        """A new session, which is in the store when it has a call."""
        id_, key, seed = new_id(), new_session_key(), secrets.randbits(63)

        def opening() -> None:
            self._store.open(id_, key=digest(key), seed=seed, application=application, name=name)
            self._named.pop((application, name or ""), None)

        if name is not None:
            self._named[application, name] = id_
        live = self._made(id_, application, key, seed, opening=opening)
        return live.session

    async def _restored(self, stored: StoredSession) -> _Live:
        """A session of the store; its calls are read and rendered in another thread."""
        calls: list[Call] = []
        conversations = None
        if stored.calls:
            service = self._gateway.service

            def read() -> list[Call]:
                with self._store.reader() as beside:
                    return [one.call for one in beside.calls(stored.id)]

            calls = await asyncio.to_thread(read)
            conversations = await asyncio.to_thread(
                restored_conversations, service.renderer, service.reasoning, calls
            )
            if self._store.session(stored.id).ended is not None:  # meanwhile
                raise has_ended(stored.id)
        live = self._made(
            stored.id,
            stored.application,
            new_session_key(),
            # Of redacted calls it is not known what they asked: no seed and no id comes again.
            (stored.seed + stored.redacted) % 2**63,
            sampling=stored.sampling,
            limits=stored.limits,
            new=not stored.calls,
        )
        live.session.resume(calls)
        if conversations is not None:
            live.session.conversations = conversations
        return live

    def _made(
        self,
        id_: str,
        application: str | None,
        key: str,
        seed: int,
        *,
        sampling: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
        opening: Callable[[], None] | None = None,
        new: bool = True,
    ) -> _Live:
        sink = SessionSink(
            self._store,
            id_,
            application=application,
            redact=self._redact,
            opening=opening,
            noted=self._told,
        )
        session = self._gateway.open_session(
            id_,
            seed=seed,
            recorded=False,  # in memory
            defaults=SamplingDefaults(**(vars(self._defaults) | dict(sampling or {}))),
            limits=SessionLimits(**(vars(self._limits) | dict(limits or {}))),
            key=key,
            sink=sink,
        )
        session.other_names = self._names
        session.responses = StoredResponses(self._store, id_, sink)
        if self.onlooker is not None:
            self.onlooker.placed(session, new=new)
        live = self._live[id_] = _Live(session, sink)
        return live

    def _told(self, noted: Noted) -> None:
        self._noted(noted)
        if self.onlooker is not None:
            self.onlooker.noted(noted.session)

    def end(self, id_: str) -> None:
        """Seal a session: what is in flight is cut off and stored, and nothing is taken any more.

        Raises:
            LookupError: There is none of this id.
        """
        self._store.session(id_)
        self._leave(id_)
        self._store.end(id_)

    def delete(self, id_: str) -> None:
        """Delete a session with all that belongs to it.

        Raises:
            LookupError: There is none of this id.
        """
        self._store.session(id_)
        if (live := self._live.get(id_)) is not None:
            live.sink.closed = True
        self._leave(id_)
        self._store.delete(id_)

    def busy(self, id_: str) -> bool:
        """Whether a session has requests in flight."""
        if (live := self._live.get(id_)) is None:
            return id_ in self._restoring
        session = live.session
        return bool(session.recording.carried or session.replays or session.in_flight.tasks)

    def rest(self) -> None:
        """Let go of the sessions that were not asked for long; those in flight stay."""
        since = time.monotonic() - RESTING_SECONDS
        for id_, live in list(self._live.items()):
            if live.asked < since and not self.busy(id_):
                self._leave(id_)

    def _leave(self, id_: str) -> None:
        if (live := self._live.pop(id_, None)) is not None:
            live.session.seal()
            self._named = {name: of for name, of in self._named.items() if of != id_}


def _previous_response(body: bytes) -> str | None:
    try:
        found = json.loads(body)["previous_response_id"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) else None
