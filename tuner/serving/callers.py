"""Who asks: the admin, an application or a session, by its key; and how often it may."""

from __future__ import annotations

import base64
import hashlib
import hmac
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tuner.gateway.request_error import RequestError
from tuner.gateway.routes import presented_key
from tuner.serving.serving_store import ServingStore

_BURST_SECONDS = 10
_REMEMBERED = 100_000  # keys whose last requests are known


def digest(key: str) -> bytes:
    """What is stored of a key. Keys are random and long, so that a plain hash hides them."""
    return hashlib.sha256(key.encode()).digest()


def new_session_key() -> str:
    """A key for a session, as the gateway's are: no dot is in it, behind which a role stands."""
    return f"sk-tuner-{secrets.token_urlsafe(24)}"


def new_application_key() -> str:
    """A key for an application."""
    return f"sk-app-{secrets.token_urlsafe(24)}"


def repeatable_session_key(caller: str, request: str) -> str:
    """The key of a session that is opened with an idempotency key: whoever asks again gets the same
    one, also from a server that was started again, and nothing of it need be stored.

    Args:
        caller: The key that the request came with, which nobody else has.
        request: The idempotency key.
    """
    made = hmac.digest(caller.encode(), f"session {request}".encode(), "sha256")
    return f"sk-tuner-{base64.urlsafe_b64encode(made).decode().rstrip('=')}"


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
        if (application := self._store.application_of_key(known)) is not None:
            return Caller("application", key, application=application)
        if (session := self._store.id_of_key(known)) is not None:
            return Caller("session", key, session=session)
        raise unknown_key()


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
