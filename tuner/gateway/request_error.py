"""Errors of requests that cannot be answered: what was found, where, what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tuner.encoding import json_text

Path = tuple[str | int, ...]
"""A place in a request: `("messages", 0, "content")`."""


def dotted(path: Path) -> str:
    """A place as OpenAI writes it: `messages[0].content`."""
    first, *rest = path
    return f"{first}" + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in rest)


class RequestError(Exception):
    """A request that gets an error status instead of a completion.

    Errors found after parsing have a place in the `CompletionRequest`, and the request's dialect
    translates it. A `FieldError` has a place in the body that was sent.

    Args:
        problem: What was found, and what to do about it.
        path: The field, or None.
        begins: Whether the sentence begins with the field's name and continues with `problem`.

    Attributes:
        status: HTTP status.
        path: The field, or None.
        code: A code for programs, as OpenAI uses them ("context_length_exceeded"), or None.
        headers: Further headers of the answer.
    """

    headers: tuple[tuple[str, str], ...] = ()

    def __init__(
        self,
        problem: str,
        *,
        path: Path | None = None,
        begins: bool = False,
        status: int = 400,
        code: str | None = None,
    ) -> None:
        self._problem = problem
        self._begins = begins
        self.status = status
        self.path = path
        self.code = code
        super().__init__(self.message)

    @property
    def message(self) -> str:
        return self.told()[0]

    @property
    def param(self) -> str | None:
        return self.told()[1]

    def told(self, named: Callable[[Path], str] = dotted) -> tuple[str, str | None]:
        """The message, and the field, as `named` writes it."""
        if self.path is None:
            return self._problem, None
        name = named(self.path)
        return f"{name}{self._problem}" if self._begins else self._problem, name

    def body(self, named: Callable[[Path], str] = dotted) -> bytes:
        """The response body in OpenAI's form, ASCII JSON."""
        message, param = self.told(named)
        error = {
            "message": message,
            "type": _TYPES.get(self.status, "invalid_request_error"),
            "param": param,
            "code": self.code,
        }
        return json_text({"error": error}).encode()


_TYPES = {401: "authentication_error", 500: "server_error"}


class FieldError(RequestError):
    """A field of the body that cannot be parsed; named as it was sent."""

    def told(self, named: Callable[[Path], str] = dotted) -> tuple[str, str | None]:
        return super().told()


def wrong(at: Path, problem: str) -> FieldError:
    """An error whose sentence begins with the name of the field at `at`."""
    return FieldError(f" {problem}", path=at, begins=True)


def shown(value: Any, limit: int = 80) -> str:
    """`value` as quoted in a message: JSON, cut to `limit` characters."""
    try:
        text = json_text(value)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def kind(value: Any) -> str:
    """The JSON name of a value's type, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def too_long(found: str) -> RequestError:
    """Rejection of a prompt that leaves no room for an answer."""
    return RequestError(
        f"{found}: raise model.max_model_len or shorten the messages",
        path=("messages",),
        code="context_length_exceeded",
    )


def has_ended(session_id: str) -> RequestError:
    """Rejection of a request to a session that was sealed."""
    error = RequestError(
        f"session {session_id} has ended and accepts no more calls, only rewards: open a new "
        "session and use its key; a workflow must call its model before it returns",
        status=409,
        code="session_sealed",
    )
    error.headers = (("x-should-retry", "false"),)  # OpenAI's and Anthropic's clients repeat a 409
    return error


def has_diverged(session_id: str, where: str) -> RequestError:
    """Rejection of a request that is not in its session's script, if the session ends there."""
    return RequestError(
        f"this key's rollout ({session_id}) repeats a recorded one and has diverged {where}",
        status=409,
        code="diverged",
    )


def over_limit(found: str) -> RequestError:
    """Rejection of a call beyond the session's limits."""
    return RequestError(f"{found}: end the rollout here", status=403, code="rollout_limit")
