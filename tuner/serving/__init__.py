"""A long-lived gateway for agents that run elsewhere; rewards arrive later, new weights are
promoted by proof.

Names are imported when first used: the command line imports this package, and needs neither HTTP
clients nor their types.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.serving.asking import ApplicationKey, CallInfo, ServedModels, SessionInfo
    from tuner.serving.client import AsyncClient, AsyncServedSession, Client, ServedSession

__all__ = [
    "ApplicationKey",
    "AsyncClient",
    "AsyncServedSession",
    "CallInfo",
    "Client",
    "ServedModels",
    "ServedSession",
    "SessionInfo",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tuner.serving' has no attribute {name!r}")
    of_client = "Client" in name or name.startswith(("Async", "ServedSession"))
    return getattr(import_module(f"tuner.serving.{'client' if of_client else 'asking'}"), name)
