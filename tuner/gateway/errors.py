"""What a caller is told when a request cannot be answered: OpenAI's error body, for a person."""

from __future__ import annotations

import json
from typing import Any


class RequestError(Exception):
    """A request that gets an error status instead of a completion.

    Attributes:
        status: HTTP status.
        message: What was found, where, and what to do about it.
        param: The field of the request, or None.
        code: A word for programs, as OpenAI uses them ("context_length_exceeded"), or None.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> bytes:
        """The response body in OpenAI's form, ASCII JSON."""
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": error}).encode()


_TYPES = {401: "authentication_error", 500: "server_error"}


def shown(value: Any, limit: int = 80) -> str:
    """`value` as it is quoted in a message: JSON, cut to `limit` characters."""
    try:
        text = json.dumps(value)
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
