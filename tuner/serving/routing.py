"""Open sessions in this process, and finding the session that a request belongs to.

A request with a session's key belongs to that session. One with an application's key belongs to the
session named in its header; else to the session of an earlier request with the same
`Idempotency-Key`; else to the one whose response it continues (`previous_response_id`); else to the
one whose recorded conversation it continues; else a new session begins, which is stored with its
first call and not before: a rejected request leaves nothing.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import re
import secrets
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tuner.gateway import Gateway, SamplingDefaults, Session, SessionLimits
from tuner.gateway.app import (
    COUNT_TOKENS,
    EXCHANGES,
    IDEMPOTENCY_HEADER,
    presented_key,
)
from tuner.gateway.request_error import RequestError, has_ended
from tuner.gateway.service import Reply, StreamReply, served_path
from tuner.serving.serving_store import (
    CommittedCalls,
    Redact,
    ServingStore,
    SessionSink,
    StoredResponses,
    StoredSession,
    beginnings,
    digest,
    redact_messages,
    restored_conversations,
)
from tuner.traces import Call

RESTING_SECONDS = 600.0
"""How long a session without requests stays in memory; it is restored when one arrives."""
_ID = re.compile(r"s-[0-9a-f]{24}")
_ROUTED = 100_000  # number of requests that are recognised when they are repeated


def new_id() -> str:
    """The id of a new session; later ids sort after earlier ones."""
    return f"s-{time.time_ns():016x}{secrets.token_hex(4)}"


def new_session_key() -> str:
    """A session key without a dot, which separates the role."""
    return f"sk-tuner-{secrets.token_urlsafe(24)}"


class Onlooker(Protocol):
    """Learns from sessions, and decides which weights answer each."""

    def placed(self, session: Session, *, new: bool) -> None:
        """A session was created or restored; `new`: it has no call yet."""
        ...

    def noted(self, session_id: str) -> None:
        """A call of a session was stored."""
        ...


@dataclass
class _Live:
    """A session in memory, its sink, and the time of its last request (monotonic)."""

    session: Session
    sink: SessionSink
    asked: float = field(default_factory=time.monotonic)


class LiveSessions:
    """The sessions of a server.

    Args:
        gateway: Serves them.
        store: Stores them.
        names: Accepted values of `model` besides the gateway's name for it.
        defaults, limits: Of sessions that are opened without any.
        header: The header in which applications name sessions.
        redact: Which parts of messages are stored; None for all.
        noted: Called with what was committed.

    Attributes:
        onlooker: The learner, or None.
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
        noted: Callable[[CommittedCalls], None] = lambda _: None,
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
        """Parses requests, and answers those of no session; nothing is sampled in it."""
        self.reader.other_names = names

    @property
    def count(self) -> int:
        """Number of sessions in memory."""
        return len(self._live)

    def open(self, id_: str, *, key: str, **given: Any) -> StoredSession:
        """Store a new session; it is loaded when its key is used. See `ServingStore.open`."""
        return self._store.open(id_, key=digest(key), seed=secrets.randbits(63), **given)

    async def of_id(self, id_: str) -> Session:
        """An open session, restored if the process does not know it.

        Raises:
            RequestError: 409: it has ended.
            LookupError: There is no session with this id.
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
        """The session of an application that a request belongs to, possibly a new one.

        Raises:
            RequestError: 409, 404: it names a session that has ended, or is not the application's.
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
        """The session with this name of the application, or with this id."""
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
            f"the header {self._header} names session {name!r}, and this application has no "
            "session with this id: send your own name to open a new session",
            status=404,
            code="no_such_session",
        )

    def _of_repeated(self, application: str, request: str) -> str | None:
        """The open session of an earlier request with this idempotency key."""
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
        """The session that a request continues, by its previous response or its messages."""
        previous = _previous_response(body) if path == "/v1/responses" else None
        if previous is not None:
            found = self._store.session_of_response(application, previous)
            return found or self._of_unstored(application, previous)
        try:
            exchange = EXCHANGES[path](self.reader, None, body)
        except RequestError:
            return None  # the new session reports the reason
        messages = exchange.completion.request.messages
        if self._redact is not None:
            messages = redact_messages(self._redact, messages)
        for talk in beginnings(messages):
            if (found := self._store.go_on(application, talk)) is not None:
                return found
        return None

    def _of_unstored(self, application: str, response: str) -> str | None:
        """The session that keeps a response only in memory."""
        for id_, live in self._live.items():
            if live.sink.application == application and response in iter(live.session.responses):
                return id_
        return None

    def _begun(self, application: str, name: str | None) -> Session:
        """A new session, which is stored when it has a call."""
        id_, key, seed = new_id(), new_session_key(), secrets.randbits(63)

        def opening() -> None:
            self._store.open(id_, key=digest(key), seed=seed, application=application, name=name)
            self._named.pop((application, name or ""), None)

        if name is not None:
            self._named[application, name] = id_
        live = self._made(id_, application, key, seed, opening=opening)
        return live.session

    async def _restored(self, stored: StoredSession) -> _Live:
        """Restore a session from the store; its calls are read and rendered in another thread."""
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
            # What redacted calls asked is unknown: no seed and no id may repeat.
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

    def _told(self, noted: CommittedCalls) -> None:
        self._noted(noted)
        if self.onlooker is not None:
            self.onlooker.noted(noted.session)

    def end(self, id_: str) -> None:
        """Seal a session: requests in flight are cut off and stored, and no more are accepted.

        Raises:
            LookupError: There is no session with this id.
        """
        self._store.session(id_)
        self._leave(id_)
        self._store.end(id_)

    def delete(self, id_: str) -> None:
        """Delete a session with everything that belongs to it.

        Raises:
            LookupError: There is no session with this id.
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
        """Drop sessions without recent requests from memory, unless one is in flight."""
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


# A server's metrics for Prometheus, and its log: a line of JSON for each request.
#
# Neither contains anything of requests or answers, or a key. Sessions are named by their ids.


_KNOWN = {*EXCHANGES, COUNT_TOKENS, "/v1/models"}
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_log = logging.getLogger("tuner.serving.requests")


class Metrics:
    """The metrics of one server.

    Args:
        version: The version of the serving weights.
        live: Number of sessions in memory.
    """

    def __init__(self, version: Callable[[], int], live: Callable[[], int]) -> None:
        self._registry = registry = CollectorRegistry()

        def counted(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"tuner_{name}", what, labels, registry=registry)

        def gauge(name: str, what: str, *labels: str) -> Gauge:
            return Gauge(f"tuner_{name}", what, labels, registry=registry)

        self.requests = counted("requests", "Requests by path and status.", "path", "status")
        self.seconds = Histogram(
            "tuner_request_seconds",
            "Time until an answer, or a stream's beginning, by path.",
            ("path",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.calls = counted("calls", "Recorded calls by kind.", "kind")
        self.tokens = counted("sampled_tokens", "Recorded sampled tokens.")
        self.rewards = counted("rewards", "Rewards by target.", "to")
        self._sessions = gauge("sessions", "Sessions in the store, by state.", "state")
        self._unjudged = gauge("sessions_unjudged", "Sessions in the store without a reward.")
        self._untrained = gauge("sessions_untrained", "Judged sessions that are not trained yet.")
        self._bytes = gauge("store_bytes", "Size of the store's file.")
        gauge("sessions_in_memory", "Sessions in memory.").set_function(live)
        self._gauge = gauge
        self._of_request = cache(self._labelled)
        gauge("weights_version", "Version of the serving weights.").set_function(version)

    def learns(self, updates: Callable[[], int], failed: Callable[[], bool]) -> None:
        """Add the metrics of a learner.

        Args:
            updates: Number of updates.
            failed: Whether learning has stopped with an error.
        """
        self._gauge("updates", "Updates made.").set_function(updates)
        self._gauge("learning_failed", "1 if learning has stopped.").set_function(failed)

    def request(self, path: str, status: int, seconds: float) -> None:
        """A request to the gateway was answered, or its stream has begun."""
        requests, spent = self._of_request(path if path in _KNOWN else "other", status)
        requests.inc()
        spent.observe(seconds)

    def _labelled(self, path: str, status: int) -> tuple[Counter, Histogram]:
        return self.requests.labels(path, str(status)), self.seconds.labels(path)

    def noted(self, noted: CommittedCalls) -> None:
        """Calls were recorded."""
        for call in noted.calls:
            kind = "undelivered" if call.undelivered else "delivered"
            self.calls.labels("redacted" if noted.redacted else kind).inc()
            self.tokens.inc(call.usage.output_tokens)

    def text(self, store: ServingStore) -> tuple[bytes, str]:
        """All metrics in Prometheus' text format, and its media type; thread-safe for reading."""
        ((ended, unjudged, untrained, total),) = store.ask(
            "SELECT (SELECT COUNT(*) FROM sessions WHERE ended IS NOT NULL), "
            "(SELECT COUNT(*) FROM sessions WHERE NOT judged), "
            "(SELECT COUNT(*) FROM sessions WHERE judged AND trained IS NULL), "
            "(SELECT COUNT(*) FROM sessions)"
        )
        self._sessions.labels("ended").set(ended)
        self._sessions.labels("open").set(total - ended)
        self._unjudged.set(unjudged)
        self._untrained.set(untrained)
        self._bytes.set(store.path.stat().st_size)
        return generate_latest(self._registry), "text/plain; version=0.0.4; charset=utf-8"


def log_event(event: str, **said: Any) -> None:
    """Log what happened to a session: its id, who did it, numbers; no contents."""
    _log.info(event, extra={"said": said})


def log_request(
    method: str, path: str, status: int, seconds: float, *, session: str | None, who: str
) -> None:
    """Log a request.

    Args:
        seconds: Until the answer, or the beginning of its stream.
        session: Its id, if known.
        who: Owner of the key.
    """
    if _log.isEnabledFor(logging.INFO):
        said = {"method": method, "path": path, "status": status, "ms": round(1000 * seconds, 2)}
        # Created here: a logger would look up its caller, which is always the same.
        record = logging.LogRecord(_log.name, logging.INFO, __file__, 0, "request", None, None)
        record.__dict__["said"] = {**said, "session": session, "who": who}
        _log.handle(record)


class JsonLogFormatter(logging.Formatter):
    """A line of JSON for each record. For an error its type and place, not its message, which may
    repeat the request."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + "Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "said", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            said["error"] = record.exc_info[0].__name__
            said["at"] = [
                f"{frame.filename}:{frame.lineno}"
                for frame in traceback.extract_tb(record.exc_info[2])[-5:]
            ]
        return json.dumps(said)


def log_as_json() -> None:
    """Log `tuner` and its HTTP server as lines of JSON on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLogFormatter())
    for name in ("tuner", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
    logging.getLogger("tuner").setLevel(logging.INFO)


# Handling of requests on a server's port: by key to the session, and to the gateway.
#
# A key belongs to the admin, an application or a session, and has a rate limit.


logger = logging.getLogger(__name__)

_GONE = 499  # the client left before there was an answer; nobody gets this
_AFTER_THE_END = 0.05  # seconds until a request of an ended session is rejected
_BURST_SECONDS = 10
_REMEMBERED = 100_000  # number of keys whose last requests are remembered


@dataclass(frozen=True)
class ApiCaller:
    """The sender of a request.

    Attributes:
        kind: Owner of its key.
        key: The key itself, without a role.
        application: The application's name, if it is one.
        session: The session's id, if it is one.
    """

    kind: Literal["admin", "application", "session"]
    key: str
    application: str | None = None
    session: str | None = None


def unknown_key() -> RequestError:
    """Rejection of a request whose key is unknown, or has no access to what is requested."""
    return RequestError(
        "the API key is not valid here: send that of a session or of an application as "
        "`Authorization: Bearer KEY`",
        status=401,
        code="invalid_api_key",
    )


def not_allowed(needed: str) -> RequestError:
    """Rejection of a known key that may not do this."""
    return RequestError(f"this needs {needed}", status=403, code="not_allowed")


class TooOften(RequestError):
    """A request above the rate limit.

    Attributes:
        headers: When it may be repeated.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"this key is above its rate limit (tuner.serving.requests_per_minute): wait "
            f"{seconds:.1f} s",
            status=429,
            code="rate_limit_exceeded",
        )
        self.headers = (("Retry-After", str(math.ceil(seconds))),)


class ApiKeys:
    """Finds the owner of a key.

    Args:
        store: Holds digests of the keys.
        admin: The admin key.
    """

    def __init__(self, store: ServingStore, admin: str) -> None:
        self._store = store
        self._admin = digest(admin)
        # Owners of recently used keys, by digest, with the time: see `ServingStore.owners`.
        self._known: dict[bytes, tuple[str | None, str | None]] = {}
        self._as_of = store.owners

    def caller(self, headers: Mapping[str, str]) -> ApiCaller:
        """The sender of a request with these headers, by lower-case name.

        Raises:
            RequestError: 401: the key is unknown.
        """
        key, _ = presented_key(headers)
        if not key:
            raise unknown_key()
        known = digest(key)
        if hmac.compare_digest(known, self._admin):
            return ApiCaller("admin", key)
        application, session = self._owner(known)
        if application is not None:
            return ApiCaller("application", key, application=application)
        if session is not None:
            return ApiCaller("session", key, session=session)
        raise unknown_key()

    def _owner(self, key: bytes) -> tuple[str | None, str | None]:
        """The application, or the session, whose key has this digest; recently found keys are
        cached."""
        if self._as_of != self._store.owners or len(self._known) > _REMEMBERED:
            self._known.clear()
            self._as_of = self._store.owners
        found = self._known.get(key)
        if found is None:
            application = self._store.application_of_key(key)
            found = application, None if application else self._store.id_of_key(key)
            if found != (None, None):
                self._known[key] = found
        return found


class Rates:
    """Rate limit of each key: a bucket of requests that fills by a fixed number a minute.

    Args:
        per_minute: Requests with one key in a minute; None for no limit.
    """

    def __init__(self, per_minute: int | None) -> None:
        self._per_second = None if per_minute is None else per_minute / 60
        self._room = max(1.0, (per_minute or 0) * _BURST_SECONDS / 60)
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # requests, and when

    def take(self, key: str) -> None:
        """Count a request with a key.

        Raises:
            TooOften: The key is above its rate limit.
        """
        if self._per_second is None:
            return
        now = time.monotonic()
        left, before = self._left.get(key, (self._room, now))
        left = min(self._room, left + (now - before) * self._per_second)
        self._left[key] = (left - 1 if left >= 1 else left, now)
        self._left.move_to_end(key)
        if len(self._left) > _REMEMBERED:
            self._left.popitem(last=False)
        if left < 1:
            raise TooOften((1 - left) / self._per_second)


class Front:
    """Finds the session of a request, and lets the gateway answer it.

    Args:
        gateway: Serves sessions.
        live: Finds them.
        keys, rates: Owners and rate limits of keys.
        metrics: Counters.
        header: The header in which answers name their session.
        log: Whether each request is logged.
    """

    def __init__(
        self,
        gateway: Gateway,
        live: LiveSessions,
        *,
        keys: ApiKeys,
        rates: Rates,
        metrics: Metrics,
        header: str,
        log: bool,
    ) -> None:
        self._gateway, self._live = gateway, live
        self._keys, self._rates, self._metrics = keys, rates, metrics
        self._header, self._log = header.lower(), log

    async def handle(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Reply | StreamReply:
        """See `Gateway.handle`, for keys of the store's sessions and applications."""
        begun, who, status = time.perf_counter(), "nobody", _GONE
        session: Session | None = None
        reply: Reply | StreamReply
        try:
            caller = self._keys.caller(headers)
            who = caller.kind
            self._rates.take(caller.key)
            session = await self._session(caller, method, path, headers, body)
            reply = await self._gateway.handle(method, path, _with_key(headers, session), body)
            if session is not self._live.reader:
                said = (*reply.headers, (self._header, session.id))
                reply = replace(reply, headers=said)
            status = reply.status if isinstance(reply, Reply) else 200
        except RequestError as error:
            # slow down agents that keep sending requests in a loop
            if error.code == "session_sealed":
                await asyncio.sleep(_AFTER_THE_END)
            reply = self.refusal(path, headers, error)
            status = error.status
        except Exception as error:
            logger.exception("a request failed before it reached its session")
            failed = RequestError(f"the server failed: {type(error).__name__}", status=500)
            reply = self.refusal(path, headers, failed)
            status = reply.status
        finally:
            # After the answer is sent, which does not wait for this.
            of = None if session is None or session is self._live.reader else session.id
            seconds = time.perf_counter() - begun
            loop = asyncio.get_running_loop()
            loop.call_soon(self._answered, method, path, status, seconds, of, who)
        return reply

    def _answered(
        self, method: str, path: str, status: int, seconds: float, session: str | None, who: str
    ) -> None:
        self._metrics.request(served_path(path), status, seconds)
        if self._log:
            log_request(method, path, status, seconds, session=session, who=who)

    def refusal(self, path: str, headers: Mapping[str, str], error: RequestError) -> Reply:
        """See `Gateway.refusal`; errors of the control API have OpenAI's form."""
        if not path.startswith("/v1/"):
            return Reply(error.status, error.body(), headers=error.headers)
        return self._gateway.refusal(path, headers, error)

    def check_not_stuck(self, headers: Mapping[str, str]) -> None:
        """See `Gateway.check_not_stuck`: nothing blocks the event loop here."""

    async def _session(
        self, caller: ApiCaller, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Session:
        """The session that a request belongs to; the reader for requests that belong to none.

        An application's requests to count tokens belong to none: they do not include reasoning that
        `tuner.reasoning = keep` would restore.
        """
        path = served_path(path)
        try:
            if caller.session is not None:
                return await self._live.of_id(caller.session)
            if method != "POST" or path not in EXCHANGES:
                return self._live.reader
            if caller.application is None:
                raise not_allowed("the key of a session or an application: open a session")
            return await self._live.of_application(caller.application, path, headers, body)
        except LookupError:  # it was just deleted
            raise unknown_key() from None


def _with_key(headers: Mapping[str, str], session: Session) -> dict[str, str]:
    """Headers with the key that a session has in this process, and the role that was named."""
    _, role = presented_key(headers)
    key = f"{session.key}.{role}" if role else session.key
    return {**headers, "authorization": f"Bearer {key}"}
