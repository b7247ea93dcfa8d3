"""The gateway serves agents over OpenAI's API, calls an engine by token ids, and records calls."""

from tuner.gateway.app import Gateway
from tuner.gateway.families.renderer import ChatRenderer
from tuner.gateway.service import Roles
from tuner.gateway.sessions import RecordedCall, SamplingDefaults, Session, SessionLimits

__all__ = [
    "ChatRenderer",
    "Gateway",
    "RecordedCall",
    "Roles",
    "SamplingDefaults",
    "Session",
    "SessionLimits",
]
