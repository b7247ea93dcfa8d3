"""The gateway: speaks OpenAI to agents and token ids to an engine, and records calls."""

from tuner.gateway.app import Gateway
from tuner.gateway.families.renderer import ChatRenderer
from tuner.gateway.sessions import RecordedCall, SamplingDefaults, Session, SessionLimits

__all__ = [
    "ChatRenderer",
    "Gateway",
    "RecordedCall",
    "SamplingDefaults",
    "Session",
    "SessionLimits",
]
