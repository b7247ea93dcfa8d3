"""The dialects: each reads what a request asks for, and writes the answer in its own form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tuner.gateway.completion import Completion
from tuner.gateway.families.parsing import Delta
from tuner.gateway.request_error import RequestError
from tuner.gateway.requests import Answer
from tuner.gateway.sessions import Session


class Exchange(Protocol):
    """What a dialect is: a request that is read, and its answer written, whole or as events.

    It is made of the session that asks, the role that its key names, and the body; and raises a
    `RequestError` where the request cannot be read.

    Attributes:
        completion: The request on its way, not yet begun.
    """

    completion: Completion

    def __init__(self, session: Session, role: str | None, body: bytes) -> None: ...

    def answer(self, answer: Answer) -> dict[str, Any]:
        """The body of the response."""
        ...

    def opening(self) -> Sequence[bytes]:
        """The events before the first token."""
        ...

    def delta(self, index: int, delta: Delta) -> Sequence[bytes]:
        """The events that tell how choice `index` has grown."""
        ...

    def closing(self, answer: Answer) -> Sequence[bytes]:
        """The events after the last token; what they end with is the terminal event."""
        ...

    def failure(self, error: RequestError) -> bytes:
        """The event that ends a stream which cannot be finished."""
        ...

    @staticmethod
    def error(error: RequestError) -> bytes:
        """The body of a response with an error status, in the dialect's own words."""
        ...
