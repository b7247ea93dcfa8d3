"""Clients of the openai and anthropic libraries for a session of a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

from tuner.errors import MissingDependencyError, ServingError
from tuner.serving.asking import IDEMPOTENCY_HEADER

_RETRIES = 10  # about a minute, in which a server has started again


@dataclass(frozen=True)
class Handle:
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
