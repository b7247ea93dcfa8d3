"""Requests of the control API, what they do, and who may send them.

`tuner/serving/control_routes.py` has the routes.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from tuner.config.schema import Count, Temperature, TopKNumber
from tuner.gateway.request_error import RequestError
from tuner.serving.asking import CallInfo, ServedModels, SessionInfo
from tuner.serving.routing import (
    ApiCaller,
    ApiKeys,
    LiveSessions,
    Metrics,
    Rates,
    log_event,
    new_id,
    new_session_key,
    not_allowed,
    unknown_key,
)
from tuner.serving.serving_store import ServingStore, StoredCall, StoredSession, digest

T = TypeVar("T")

_SHORT = Field(max_length=256)


class RequestBody(BaseModel):
    """The body of a request; unknown fields are rejected by name."""

    model_config = ConfigDict(extra="forbid")


class NumbersBody(RequestBody):
    """Fields that are numbers; texts and booleans in their place are rejected."""

    model_config = ConfigDict(strict=True)


class SessionLimitsBody(NumbersBody):
    """Limits of a session; missing fields are taken from the configuration."""

    calls: Count | None = Field(default=None, ge=1)
    tokens: Count | None = Field(default=None, ge=1)


class SamplingBody(NumbersBody):
    """Sampling settings for a session's requests that do not set them."""

    temperature: Temperature | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: TopKNumber | None = None
    max_tokens: Count | None = Field(default=None, ge=1)


class OpenSession(RequestBody):
    """A new session."""

    task: dict[str, Any] = Field(default_factory=dict)
    group: Annotated[str, _SHORT] | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    tags: list[Annotated[str, _SHORT]] = Field(default_factory=list, max_length=100)
    limits: SessionLimitsBody = SessionLimitsBody()
    sampling: SamplingBody = SamplingBody()


class GiveReward(RequestBody):
    """A reward, feedback, or both; for the session, or for one of its calls."""

    reward: FiniteFloat | None = Field(default=None, strict=True)
    feedback: str | None = None
    call: Annotated[str, _SHORT] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> GiveReward:
        if self.reward is None and self.feedback is None:
            raise ValueError("give reward, feedback, or both")
        return self


class NewApplication(RequestBody):
    """A new application, which gets a key."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")


class ApplicationInfo(BaseModel):
    """An application, and when it was created, Unix seconds."""

    name: str
    made: float


class Applications(BaseModel):
    """The applications that have keys."""

    applications: list[ApplicationInfo]


class Models(Protocol):
    """Decides which weights serve."""

    def models(self) -> ServedModels: ...

    async def rollback(self) -> ServedModels:
        """Serve the weights before the last promotion.

        Raises:
            RequestError: 409: nothing was promoted.
        """
        ...


def session_info(store: ServingStore, session: StoredSession) -> SessionInfo:
    """A session as the API shows it."""
    low, high = session.lowest, session.highest
    return SessionInfo(
        id=session.id,
        application=session.application,
        group=session.group,
        task=session.task,
        metadata=session.metadata,
        tags=session.tags,
        state="open" if session.ended is None else "ended",
        opened=session.opened,
        last_call=session.last_call,
        ended=session.ended,
        calls=session.calls,
        sampled_tokens=session.sampled_tokens,
        versions=None if low is None or high is None else (low, high),
        reward=session.reward,
        call_rewards=store.call_rewards(session.id) if session.judged else {},
        feedback=session.feedback,
        judged=session.judged,
        trained=session.trained is not None,
        redacted=session.redacted,
    )


def call_info(stored: StoredCall) -> CallInfo:
    """A call as the API shows it."""
    call = stored.call
    return CallInfo(
        id=call.id,
        role=call.role,
        messages=call.messages,
        response=call.response,
        finish_reason=call.finish_reason,
        tokens=call.usage.output_tokens,
        versions=(min(call.versions), max(call.versions)) if call.versions else None,
        started=call.started,
        seconds=call.seconds,
        reward=call.reward,
        undelivered=call.undelivered,
        redacted=stored.redacted,
    )


def new_application_key() -> str:
    return f"sk-app-{secrets.token_urlsafe(24)}"


def repeatable_session_key(caller: str, request: str) -> str:
    """The key of a session that is opened with an idempotency key: a repeated request gets the same
    key, also from a restarted server, without storing it.

    Args:
        caller: The key of the request, which nobody else has.
        request: The idempotency key.
    """
    made = hmac.digest(caller.encode(), f"session {request}".encode(), "sha256")
    return f"sk-tuner-{base64.urlsafe_b64encode(made).decode().rstrip('=')}"


class Control:
    """Implementation of the control API.

    Args:
        store: The stored sessions.
        live: The open sessions.
        keys, rates: Owners and rate limits of keys.
        models: Decides which weights serve.
        metrics: Counters.
        failure: Why the engine no longer answers, or None.
        logs: Whether openings, rewards, ends and deletions are logged.
    """

    def __init__(
        self,
        store: ServingStore,
        live: LiveSessions,
        *,
        keys: ApiKeys,
        rates: Rates,
        models: Models,
        metrics: Metrics,
        failure: Callable[[], object],
        logs: bool,
    ) -> None:
        self.store, self.live = store, live
        self.keys, self.rates = keys, rates
        self.models, self.metrics, self.failure = models, metrics, failure
        self._logs = logs

    def caller(self, headers: Mapping[str, str]) -> ApiCaller:
        """The sender; raises RequestError 401 or 429."""
        caller = self.keys.caller(headers)
        self.rates.take(caller.key)
        return caller

    def log(self, event: str, caller: ApiCaller, id_: str, **said: Any) -> None:
        """Log what a caller did to a session."""
        if self._logs:
            log_event(event, session=id_, who=caller.kind, **said)

    async def read(self, work: Callable[[ServingStore], T]) -> T:
        """The result of `work`, which reads the store in another thread."""

        def beside() -> T:
            with self.store.reader() as store:
                return work(store)

        return await asyncio.to_thread(beside)

    def session(self, caller: ApiCaller, id_: str, *, own: bool = True) -> StoredSession:
        """A session that the caller may see; with `own`, also by the session's own key.

        Raises:
            RequestError: 401: the key of another session; 403: not allowed; 404: there is none.
        """
        if caller.session is not None and caller.session != id_:
            raise unknown_key()
        if caller.session is not None and not own:
            raise not_allowed("the key of the application, or the admin key")
        with suppress(LookupError):
            found = self.store.session(id_)
            if caller.kind != "application" or found.application == caller.application:
                return found
        raise RequestError(f"there is no session {id_!r}", status=404, code="no_such_session")

    def open(self, caller: ApiCaller, given: OpenSession, request: str | None) -> tuple[str, str]:
        """Id and key of a new session, or of the one that the same request opened before."""
        if caller.session is not None:
            raise not_allowed("the key of an application, or the admin key")
        asked = given.model_dump(exclude_none=True)
        key = new_session_key()
        opening = None
        if request:
            key = repeatable_session_key(caller.key, request)
            opening = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).digest()
            with suppress(LookupError):
                before = self.store.session_of_key(digest(key))
                if self.store.opening(digest(key)) == opening:
                    return before.id, key
                raise RequestError(
                    "this Idempotency-Key has opened another session: send each request with a "
                    "new one",
                    status=409,
                    code="idempotency_key_reused",
                )
        opened = self.live.open(
            new_id(), key=key, application=caller.application, opening=opening, **asked
        )
        return opened.id, key
