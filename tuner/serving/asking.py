"""Requests of the control API with their retries, which the clients send; and the clients of openai
and anthropic for an agent's session."""

from __future__ import annotations

import math
import random
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Generic, Literal, TypedDict, TypeVar
from urllib.parse import quote

import httpx
import pydantic

from tuner.encoding import displayable
from tuner.errors import MissingDependencyError, ServingError

# Answers of the control API: one definition for the server and its clients.


class ServeAnswer(pydantic.BaseModel):
    """An answer of the API; a client ignores additional fields of a newer server."""

    model_config = pydantic.ConfigDict(frozen=True, extra="ignore")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _displayable(cls, given: Any) -> Any:
        return displayable(given)


class SessionInfo(ServeAnswer):
    """A session's state. Times are Unix seconds.

    Attributes:
        id: Its id; later sessions have later ids.
        application: Its application; None is the admin.
        group: The group it was opened with: sessions of one group are compared with each other.
        task: The task it was opened with: a row, as `tune()` gets it.
        metadata: Metadata it was opened with.
        tags: Tags for filtering lists.
        state: Whether it accepts calls.
        opened, last_call, ended: Times; None if it has not happened.
        calls: Number of stored calls.
        sampled_tokens: Sampled tokens of all calls.
        versions: The lowest and highest version of the weights that sampled a token of it.
        reward: The session's last reward.
        call_rewards: The last reward of each call, by its id.
        feedback: The last feedback given with or without a reward.
        judged: Whether it or a call has a reward.
        trained: Whether an update has used it.
        redacted: Number of calls stored without their tokens.
    """

    id: str
    application: str | None = None
    group: str | None = None
    task: Any = None
    metadata: dict[str, Any] | None = None
    tags: tuple[str, ...] = ()
    state: Literal["open", "ended"]
    opened: float
    last_call: float | None = None
    ended: float | None = None
    calls: int = 0
    sampled_tokens: int = 0
    versions: tuple[int, int] | None = None
    reward: float | None = None
    call_rewards: dict[str, float] = {}
    feedback: str | None = None
    judged: bool = False
    trained: bool = False
    redacted: int = 0


class CallInfo(ServeAnswer):
    """A recorded call, readable; `export` has its tokens.

    Attributes:
        id: The response's id, with the number of the choice: "chatcmpl-...-0".
        role: The role after the dot of its key.
        messages: The request's messages.
        response: The answer's message.
        finish_reason: As OpenAI names it.
        tokens: Number of sampled tokens.
        versions: The lowest and highest version of the weights that sampled it.
        started: Unix time, seconds.
        seconds: Until its commit.
        reward: Its last reward.
        undelivered: Whether its caller did not see its end; it is not trained.
        redacted: Whether it is stored without its tokens; it is not trained.
    """

    id: str
    role: str | None = None
    messages: list[dict[str, Any]] = []
    response: dict[str, Any] | None = None
    finish_reason: str | None = None
    tokens: int = 0
    versions: tuple[int, int] | None = None
    started: float
    seconds: float = 0.0
    reward: float | None = None
    undelivered: bool = False
    redacted: bool = False


class ServedModels(ServeAnswer):
    """The serving weights, the candidate, and earlier decisions.

    Attributes:
        serving: `version`, and `since` when, Unix seconds.
        candidate: The version being compared with it, or None.
        history: Promotions, rejections and rollbacks, with reasons; the oldest first.
        learning: Number of updates, the data waiting for the next, and why learning has stopped
            (`failure`); None if the server does not learn.
    """

    serving: dict[str, Any]
    candidate: dict[str, Any] | None = None
    history: list[dict[str, Any]] = []
    learning: dict[str, Any] | None = None


class ApplicationKey(ServeAnswer):
    """An application and its key, which is returned only once."""

    name: str
    key: str = pydantic.Field(repr=False)


class OpenedSession(ServeAnswer):
    """A new session; its key is returned only once."""

    id: str
    key: str = pydantic.Field(repr=False)
    base_url: str


class Page(ServeAnswer):
    """Some sessions, and the id after which the next ones follow; None if these are the last."""

    sessions: list[SessionInfo]
    next: str | None = None


class CallList(ServeAnswer):
    """The calls of a session."""

    calls: list[CallInfo]


T = TypeVar("T")

IDEMPOTENCY_HEADER = "Idempotency-Key"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 4.0
_UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_BUSY = {429, 502, 503, 504}
_RETRIES = 10  # about a minute, in which a server has restarted

HttpOutcome = httpx.Response | httpx.TransportError


class SessionOptions(TypedDict, total=False):
    """Options for opening a session; see `Client.open`."""

    task: Any
    group: str | None
    metadata: Mapping[str, Any] | None
    tags: list[str] | None
    limits: Mapping[str, int] | None
    sampling: Mapping[str, float] | None


class SessionFilters(TypedDict, total=False):
    """Filters for listing sessions; see `Client.sessions`."""

    state: Literal["open", "ended"] | None
    judged: bool | None
    group: str | None
    application: str | None
    tag: str | None
    after: str | None


@dataclass(frozen=True)
class ApiRequest(Generic[T]):
    """One request.

    Attributes:
        read: Makes the result of the answer's body.
        repeatable: Whether it may be sent again where nobody knows if it arrived.
    """

    method: str
    path: str
    read: Callable[[Any], T]
    body: Mapping[str, Any] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True

    def result(self, outcome: HttpOutcome) -> T:
        """What came of it.

        Raises:
            ServingError: No answer came, it is a refusal, or it is none of this API.
        """
        if isinstance(outcome, httpx.TransportError):
            raise ServingError(
                f"{self.method} {outcome.request.url}: no answer came ({type(outcome).__name__}: "
                f"{outcome}): is `tuner serve` running there?",
                code="unreachable",
            ) from outcome
        if not outcome.is_success:
            raise _refusal(outcome)
        try:
            return self.read(outcome.json() if outcome.content else None)
        except ValueError as error:  # pydantic's, too
            raise ServingError(
                f"{self.method} {outcome.url} was answered with something else than this version's "
                f"API says: is it a server of `tuner serve`? ({error})",
                status=outcome.status_code,
                code="not_this_api",
            ) from error


def _refusal(response: httpx.Response) -> ServingError:
    try:
        error = response.json()["error"]
        message, code = str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):  # a proxy's page, say
        said = response.text[:200] or "nothing"
        message, code = f"{response.url} answered {response.status_code} and {said}", None
    return ServingError(message, status=response.status_code, code=code)


class RetrySchedule:
    """When a request is sent again: soon at first, then less and less often, until `seconds` are
    over. A server that starts again is away for as long as its model takes to load."""

    def __init__(self, seconds: float, *, repeatable: bool) -> None:
        self._until = time.monotonic() + seconds
        self._pause = _FIRST_PAUSE
        self._repeatable = repeatable

    def after(self, outcome: HttpOutcome) -> float | None:
        """Seconds to wait before the next try; None where this is the outcome."""
        if not self._again(outcome):
            return None
        pause = _retry_after(outcome) or random.uniform(self._pause / 2, self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return pause if time.monotonic() + pause <= self._until else None

    def _again(self, outcome: HttpOutcome) -> bool:
        if isinstance(outcome, httpx.TransportError):
            return self._repeatable or isinstance(outcome, _UNSENT)
        return outcome.status_code in (_BUSY if self._repeatable else {429})


def _retry_after(outcome: HttpOutcome) -> float:
    if not isinstance(outcome, httpx.Response):
        return 0.0
    try:
        return max(0.0, float(outcome.headers.get("retry-after", 0)))
    except ValueError:  # a date: proxies send some
        return 0.0


# What can be asked. Values of None are not sent.


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def opening(asked: SessionOptions) -> ApiRequest[OpenedSession]:
    key = {IDEMPOTENCY_HEADER: uuid.uuid4().hex}
    return ApiRequest("POST", "/sessions", OpenedSession.model_validate, _given(asked), headers=key)


def page(filters: SessionFilters) -> ApiRequest[Page]:
    # httpx writes booleans in lower case, as the API reads them.
    return ApiRequest("GET", "/sessions", Page.model_validate, params=_given(filters))


def session(id_: str) -> ApiRequest[SessionInfo]:
    return ApiRequest("GET", f"/sessions/{quote(id_, safe='')}", SessionInfo.model_validate)


def calls(id_: str) -> ApiRequest[list[CallInfo]]:
    return ApiRequest(
        "GET",
        f"/sessions/{quote(id_, safe='')}/calls",
        lambda body: CallList.model_validate(body).calls,
    )


def reward(
    id_: str, value: float | None, feedback: str | None, call: str | None
) -> ApiRequest[SessionInfo]:
    if value is not None and not math.isfinite(value):
        raise ServingError(
            f"the reward of session {id_} is {value}: give a finite number, or none and say why "
            "in feedback",
            code="invalid_reward",
        )
    number = None if value is None else float(value)
    body = _given({"reward": number, "feedback": feedback, "call": call})
    return ApiRequest(
        "POST", f"/sessions/{quote(id_, safe='')}/reward", SessionInfo.model_validate, body
    )


def end(id_: str) -> ApiRequest[SessionInfo]:
    return ApiRequest("POST", f"/sessions/{quote(id_, safe='')}/end", SessionInfo.model_validate)


def export(id_: str) -> ApiRequest[dict[str, Any]]:
    return ApiRequest("GET", f"/sessions/{quote(id_, safe='')}/export", dict)


def deletion(id_: str) -> ApiRequest[None]:
    return ApiRequest("DELETE", f"/sessions/{quote(id_, safe='')}", _nothing)


def application(name: str) -> ApiRequest[ApplicationKey]:
    # A second one is refused, where the first arrived, and its key is told once.
    read = ApplicationKey.model_validate
    return ApiRequest("POST", "/applications", read, {"name": name}, repeatable=False)


def removal(name: str) -> ApiRequest[None]:
    return ApiRequest("DELETE", f"/applications/{quote(name, safe='')}", _nothing)


def models() -> ApiRequest[ServedModels]:
    return ApiRequest("GET", "/models", ServedModels.model_validate)


def rollback() -> ApiRequest[ServedModels]:
    # Twice would be two steps back.
    return ApiRequest("POST", "/rollback", ServedModels.model_validate, repeatable=False)


def _nothing(body: Any) -> None:
    return None


@dataclass(frozen=True)
class SessionCredentials:
    """A session's name, key and address; `ServedSession` says what each is."""

    id: str
    key: str | None = field(repr=False)
    base_url: str

    def client_options(
        self, role: str | None, options: dict[str, Any], ending: str
    ) -> dict[str, Any]:
        """What a library's client is made with.

        Raises:
            ServingError: The session's key is not known here.
        """
        if self.key is None:
            raise ServingError(
                f"the key of session {self.id} is told once, where it is opened: give it to "
                "`client.session(id, key=...)`",
                code="unknown_key",
            )
        key = self.key if role is None else f"{self.key}.{role}"
        base_url = self.base_url.removesuffix("/v1") + ending
        return {"max_retries": _RETRIES, **options, "api_key": key, "base_url": base_url}


@cache
def keyed(library: str, name: str) -> Any:
    """A library's client whose retries say that they are retries: each request has a key, so that
    the server answers it once, also where it was killed before its answer arrived.

    Raises:
        MissingDependencyError: The library is not installed.
    """
    try:
        client_class: Any = getattr(import_module(library), name)
    except ImportError as error:
        raise MissingDependencyError(
            f"the client of {library} does not import ({error}): pip install {library}"
        ) from error

    def made(self: Any, **options: Any) -> None:
        client_class.__init__(self, **options)
        # The libraries make a key for every request, and have no header for it unless told.
        self._idempotency_header = IDEMPOTENCY_HEADER

    return type(name, (client_class,), {"__init__": made})
