"""A long-lived gateway for agents that run elsewhere; rewards come later, weights with proof."""

from tuner.serving.api_types import ApplicationKey, CallInfo, ServedModels, SessionInfo
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
