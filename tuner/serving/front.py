"""What the door of a server leads to: a request by its key to its session, and to the gateway.

Whose the key is: the admin's, an application's or a session's; and how often it may ask.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from tuner.gateway import Gateway, Session
from tuner.gateway.request_error import RequestError
from tuner.gateway.routes import EXCHANGES, presented_key, served_path
from tuner.gateway.service import Reply, StreamReply
from tuner.serving.routing import LiveSessions
from tuner.serving.serving_store import ServingStore
from tuner.serving.tables import digest
from tuner.serving.telemetry import Metrics, log_request

logger = logging.getLogger(__name__)

_GONE = 499  # the client left before there was an answer; nobody gets this
_AFTER_THE_END = 0.05  # seconds until a request of an ended session is refused
_BURST_SECONDS = 10
_REMEMBERED = 100_000  # keys whose last requests are known


@dataclass(frozen=True)
class Caller:
    """Who sent a request.

    Attributes:
        kind: Whose key it came with.
        key: The key itself, without a role.
        application: The application's name, where it is one.
        session: The session's id, where it is one.
    """

    kind: Literal["admin", "application", "session"]
    key: str
    application: str | None = None
    session: str | None = None


def unknown_key() -> RequestError:
    """The refusal of a request whose key is nobody's, or has no right to what is asked for."""
    return RequestError(
        "the API key opens nothing here: give that of a session or of an application as "
        "`Authorization: Bearer KEY`",
        status=401,
        code="invalid_api_key",
    )


def not_allowed(needed: str) -> RequestError:
    """The refusal of a key that is known, and may not do this."""
    return RequestError(f"this needs {needed}", status=403, code="not_allowed")


class TooOften(RequestError):
    """A request that came too soon.

    Attributes:
        headers: Say when it may come again.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"this key asks too often (tuner.serving.requests_per_minute): wait {seconds:.1f} s",
            status=429,
            code="rate_limit_exceeded",
        )
        self.headers = (("Retry-After", str(math.ceil(seconds))),)


class Keys:
    """Tells whose a key is.

    Args:
        store: Where digests of the keys are.
        admin: The admin key.
    """

    def __init__(self, store: ServingStore, admin: str) -> None:
        self._store = store
        self._admin = digest(admin)
        # Whose keys the store knew, by their digests, and when: see `ServingStore.owners`.
        self._known: dict[bytes, tuple[str | None, str | None]] = {}
        self._as_of = store.owners

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Who sent a request with these headers, by lower-case name.

        Raises:
            RequestError: 401: nobody who is known.
        """
        key, _ = presented_key(headers)
        if not key:
            raise unknown_key()
        known = digest(key)
        if hmac.compare_digest(known, self._admin):
            return Caller("admin", key)
        application, session = self._owner(known)
        if application is not None:
            return Caller("application", key, application=application)
        if session is not None:
            return Caller("session", key, session=session)
        raise unknown_key()

    def _owner(self, key: bytes) -> tuple[str | None, str | None]:
        """The application, or the session, whose key has this digest; of the last keys that were
        found, the store is not asked again."""
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
    """How often each key asks: a bucket of requests that fills by so many in a minute.

    Args:
        per_minute: Requests with one key in a minute; None is any number.
    """

    def __init__(self, per_minute: int | None) -> None:
        self._per_second = None if per_minute is None else per_minute / 60
        self._room = max(1.0, (per_minute or 0) * _BURST_SECONDS / 60)
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # requests, and when

    def take(self, key: str) -> None:
        """Count a request with a key.

        Raises:
            TooOften: There is no room for it.
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
    """What the door leads to: finds the session of a request, and lets the gateway answer it.

    Args:
        gateway: Where sessions are open.
        live: Finds them.
        keys, rates: Who asks, and how often.
        metrics: What is counted.
        header: In which answers say their session.
        log: Whether each request is logged.
    """

    def __init__(
        self,
        gateway: Gateway,
        live: LiveSessions,
        *,
        keys: Keys,
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
        """As `Gateway.handle`, for keys of the store's sessions and applications."""
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
            if error.code == "session_sealed":  # agents that go on regardless, in a loop
                await asyncio.sleep(_AFTER_THE_END)
            reply = self.refusal(path, headers, error)
            status = error.status
        except Exception as error:
            logger.exception("a request failed before it reached its session")
            failed = RequestError(f"the server failed: {type(error).__name__}", status=500)
            reply = self.refusal(path, headers, failed)
            status = reply.status
        finally:
            # Once the answer is sent, which waits for none of this.
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
        """As `Gateway.refusal`; the control API's errors are OpenAI's."""
        if not path.startswith("/v1/"):
            return Reply(error.status, error.body())
        reply = self._gateway.refusal(path, headers, error)
        return replace(reply, headers=getattr(error, "headers", ()))

    def check_not_stuck(self, headers: Mapping[str, str]) -> None:
        """As `Gateway.check_not_stuck`: here nobody keeps the event loop."""

    async def _session(
        self, caller: Caller, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Session:
        """The session that a request belongs to; the reader for what belongs to none.

        Counts that an application asks for belong to none: they are without the reasoning that
        `tuner.reasoning = keep` would put back.
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
        except LookupError:  # it was deleted this moment
            raise unknown_key() from None


def _with_key(headers: Mapping[str, str], session: Session) -> dict[str, str]:
    """Headers with the key that a session has in this process, and the role that was named."""
    _, role = presented_key(headers)
    key = f"{session.key}.{role}" if role else session.key
    return {**headers, "authorization": f"Bearer {key}"}
