"""Chat models for agent frameworks whose client is the gateway's."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

from tuner.chat_models.agentscope1 import agentscope_version, trinity_chat_model
from tuner.chat_models.plain import PlainChatModel
from tuner.errors import MissingDependencyError

if TYPE_CHECKING:
    from tuner.gateway import Session

__all__ = ["PlainChatModel", "chat_model", "trinity_chat_model_class"]

logger = logging.getLogger(__name__)


def chat_model(session: Session, *, kind: Literal["agentscope1", "plain"]) -> Any:
    """The model that a workflow gets, for the framework it is written with.

    Raises:
        MissingDependencyError: The framework is not installed in a version that works.
    """
    model_class = trinity_chat_model() if kind == "agentscope1" else PlainChatModel
    return model_class(session)


def trinity_chat_model_class() -> type[Any]:
    """What `TrinityChatModel` means here: AgentScope 1.x's where that works, else the plain one."""
    found = agentscope_version()
    if found is None or not found.startswith("1."):
        return PlainChatModel
    try:
        return trinity_chat_model()
    except MissingDependencyError as error:
        logger.warning("TrinityChatModel is the plain chat model: %s", error)
        return PlainChatModel
