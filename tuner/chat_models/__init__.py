"""Chat models for agent frameworks whose client is the gateway's."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

from tuner.chat_models.agentscope1 import (
    agentscope_version,
    require_agentscope1,
    trinity_chat_model,
)
from tuner.chat_models.plain import PlainChatModel
from tuner.chat_models.remote import RemoteChatModel, agentscope1_remote_model
from tuner.errors import MissingDependencyError

if TYPE_CHECKING:
    from tuner.gateway import Session

__all__ = [
    "ChatModelKind",
    "PlainChatModel",
    "RemoteChatModel",
    "chat_model",
    "default_kind",
    "remote_chat_model",
    "require_agentscope1",
    "trinity_chat_model_class",
]

ChatModelKind = Literal["agentscope1", "plain"]

logger = logging.getLogger(__name__)


def chat_model(session: Session, *, kind: ChatModelKind) -> Any:
    """The model that a workflow gets, for the framework it is written with.

    Raises:
        MissingDependencyError: The framework is not installed in a version that works.
    """
    model_class = trinity_chat_model() if kind == "agentscope1" else PlainChatModel
    return model_class(session)


def remote_chat_model(*, base_url: str, api_key: str, model_name: str, kind: ChatModelKind) -> Any:
    """A model behind an OpenAI-compatible URL, in the form of the framework.

    Raises:
        MissingDependencyError: The framework is not installed in a version that works.
    """
    make = agentscope1_remote_model if kind == "agentscope1" else RemoteChatModel
    return make(base_url=base_url, api_key=api_key, model_name=model_name)


def default_kind() -> ChatModelKind:
    """The kind that `trinity_chat_model_class` gives."""
    return "plain" if trinity_chat_model_class() is PlainChatModel else "agentscope1"


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
