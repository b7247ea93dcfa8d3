"""What a dialect is: how a request is read, and what its answer looks like, whole or streamed."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from tuner.gateway.answer import Answer
from tuner.gateway.errors import RequestError
from tuner.gateway.message_stream import Delta
from tuner.gateway.request import CompletionRequest
from tuner.traces import Dialect

if TYPE_CHECKING:
    from tuner.gateway.complete import Completion
    from tuner.gateway.gateway import Gateway
    from tuner.gateway.session import Session


class Exchange(ABC):
    """One request of a dialect, and the form of its answer.

    Attributes:
        dialect: Its name in the trace.
        prefix: What the dialect's response ids begin with.
        request: What is asked for.
        completion: The request on its way; set before anything is written.
        created: Unix time, seconds.
    """

    dialect: ClassVar[Dialect]
    prefix: ClassVar[str]
    completion: Completion

    def __init__(self, gateway: Gateway, request: CompletionRequest) -> None:
        self.renderer = gateway.renderer
        self.model_name = gateway.model_name
        self.request = request
        self.created = int(time.time())

    @classmethod
    @abstractmethod
    def read(cls, gateway: Gateway, session: Session, body: bytes) -> Exchange:
        """The request in `body`.

        Raises:
            RequestError: 400 that names the field, its value and what to do.
        """

    @abstractmethod
    def answer(self, answer: Answer) -> dict[str, Any]:
        """The body of the response."""

    def opening(self) -> Sequence[bytes]:
        """The events before the first token."""
        return ()

    @abstractmethod
    def delta(self, index: int, delta: Delta) -> Sequence[bytes]:
        """The events that tell how choice `index` has grown."""

    @abstractmethod
    def closing(self, answer: Answer) -> Sequence[bytes]:
        """The events after the last token; what they end with is the terminal event."""

    def failure(self, error: RequestError) -> bytes:
        """The event that ends a stream which cannot be finished."""
        return sse(json.loads(self.error(error)))

    @staticmethod
    def error(error: RequestError) -> bytes:
        """The body of a response with an error status."""
        return error.body()

    @staticmethod
    def models(model_name: str) -> dict[str, Any]:
        """The body of the list of models, which holds the one."""
        model = {"id": model_name, "object": "model", "created": 0, "owned_by": "tuner"}
        return {"object": "list", "data": [model]}


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event with a JSON payload."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()
