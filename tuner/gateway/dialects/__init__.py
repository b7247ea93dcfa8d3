"""Dialects: each parses requests and writes answers in its own format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tuner.gateway.completion import Completion
from tuner.gateway.families.parsing import Delta
from tuner.gateway.request_error import RequestError
from tuner.gateway.requests import Answer
from tuner.gateway.sessions import Session


class Exchange(Protocol):
    """A dialect: parses a request and writes its answer, whole or as events.

    Created from the session, the role that its key names, and the body; raises a `RequestError` if
    the request is invalid.

    Attributes:
        completion: The request, not yet begun.
    """

    completion: Completion

    def __init__(self, session: Session, role: str | None, body: bytes) -> None: ...

    def answer(self, answer: Answer) -> dict[str, Any]: ...

    def opening(self) -> Sequence[bytes]:
        """The events before the first token."""
        ...

    def delta(self, index: int, delta: Delta) -> Sequence[bytes]:
        """The events for new text of choice `index`."""
        ...

    def closing(self, answer: Answer) -> Sequence[bytes]:
        """The events after the last token, including the terminal event."""
        ...

    def failure(self, error: RequestError) -> bytes:
        """The event that ends a stream which cannot be finished."""
        ...

    @staticmethod
    def error(error: RequestError) -> bytes:
        """The body of a response with an error status, in the dialect's format."""
        ...
