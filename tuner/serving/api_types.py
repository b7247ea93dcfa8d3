"""What the control API answers with: one definition for the server and its clients."""

from __future__ import annotations

from typing import Any, Literal

import pydantic


class Answer(pydantic.BaseModel):
    """What the API answers; a client leaves out what a newer server says beside it."""

    model_config = pydantic.ConfigDict(frozen=True, extra="ignore")


class SessionInfo(Answer):
    """A session as the server has it. Times are Unix seconds.

    Attributes:
        id: Its name; later sessions have later names.
        application: Whose it is; None is the admin's.
        group: What its opener named: sessions of one group are compared with each other.
        task: What its opener gave: a row, as `tune()` gets it.
        metadata: Anything else that was given.
        tags: What lists can be filtered by.
        state: Whether it takes calls.
        opened, last_call, ended: When; None where it has not happened.
        calls: How many are stored.
        sampled_tokens: Of all calls.
        versions: The lowest and highest version of the weights that sampled a token of it.
        reward: The last one given to the session.
        call_rewards: The last one given to each call, by its id.
        feedback: The last words given with or without a reward.
        judged: Whether it or a call has a reward.
        trained: Whether an update has used it.
        redacted: How many calls were stored without their tokens.
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


class CallInfo(Answer):
    """A recorded call, for people; `export` has its tokens.

    Attributes:
        id: Of the response, with the number of the choice: "chatcmpl-...-0".
        role: What the key named behind its dot.
        messages: The request's.
        response: The answer's message.
        finish_reason: As OpenAI names it.
        tokens: Sampled ones.
        versions: The lowest and highest version of the weights that sampled it.
        started: Unix time, seconds.
        seconds: Until its commit.
        reward: The last one given to it.
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


class ServedModels(Answer):
    """Which weights serve, which would like to, and what was decided before.

    Attributes:
        serving: `version`, and `since` when, Unix seconds.
        candidate: What is being compared with it, or None.
        history: What was promoted, kept or rolled back, and why; the oldest first.
        learning: How many updates were made, what waits for the next, and why nothing is learned
            any more (`failure`); None where the server does not learn.
    """

    serving: dict[str, Any]
    candidate: dict[str, Any] | None = None
    history: list[dict[str, Any]] = []
    learning: dict[str, Any] | None = None


class ApplicationKey(Answer):
    """An application and its key, which is told once."""

    name: str
    key: str = pydantic.Field(repr=False)


class Opened(Answer):
    """A session that was opened; its key is told once."""

    id: str
    key: str = pydantic.Field(repr=False)
    base_url: str


class Page(Answer):
    """Some sessions, and the id after which the next are; None where these are the last."""

    sessions: list[SessionInfo]
    next: str | None = None


class Calls(Answer):
    """The calls of a session."""

    calls: list[CallInfo]
