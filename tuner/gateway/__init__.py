"""The gateway: speaks OpenAI to agents and token ids to an engine, and records calls."""

from tuner.gateway.credit import RecordedCall
from tuner.gateway.model.renderer import ChatRenderer
from tuner.gateway.routes import Gateway
from tuner.gateway.sessions import SamplingDefaults, Session, SessionLimits

__all__ = [
    "ChatRenderer",
    "Gateway",
    "RecordedCall",
    "SamplingDefaults",
    "Session",
    "SessionLimits",
]
