"""Chat models for agent frameworks, with the gateway as their client."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from tuner.errors import MissingDependencyError
from tuner.rollouts import agentscope1, agentscope2
from tuner.rollouts.agentscope1 import (
    RemoteChatModel,
    agentscope1_remote_model,
    agentscope_version,
    quiet_agents,
    require_agentscope1,
)
from tuner.rollouts.agentscope2 import require_agentscope2
from tuner.rollouts.without_framework import PlainChatModel
from tuner.tasks.loading import without_collection

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from tuner.config import RemoteModel
    from tuner.gateway.sessions import Access


__all__ = [
    "ChatModelKind",
    "PlainChatModel",
    "RemoteChatModel",
    "chat_model",
    "default_kind",
    "load_kind",
    "quiet_agents",
    "remote_chat_model",
    "remote_client",
    "require_agentscope1",
    "require_agentscope2",
    "trinity_chat_model_class",
]

ChatModelKind = Literal["agentscope1", "agentscope2", "plain"]

logger = logging.getLogger(__name__)

_CLASSES: dict[ChatModelKind, Callable[[], type[Any]]] = {
    "agentscope1": agentscope1.trinity_chat_model,
    "agentscope2": agentscope2.trinity_chat_model,
    "plain": lambda: PlainChatModel,
}
_REMOTE: dict[ChatModelKind, Callable[..., Any]] = {
    "agentscope1": agentscope1_remote_model,
    "agentscope2": agentscope2.agentscope2_remote_model,
    "plain": RemoteChatModel,
}


def chat_model(session: Access, *, kind: ChatModelKind) -> Any:
    """The model that a workflow gets, for its framework.

    Raises:
        MissingDependencyError: The framework is not installed in a supported version.
    """
    return _CLASSES[kind]()(session)


def load_kind(kind: ChatModelKind) -> None:
    """Import the framework of a kind, which may take seconds.

    Raises:
        MissingDependencyError: It is not installed in a supported version.
    """
    with without_collection():
        _CLASSES[kind]()


def remote_chat_model(
    *,
    base_url: str,
    api_key: str,
    model_name: str,
    kind: ChatModelKind,
    max_concurrent: int | None = None,
) -> Any:
    """A model behind an OpenAI-compatible URL, in the form of the framework.

    It obeys the API's rate limits (`tuner.rollouts.patience`).

    Args:
        max_concurrent: Maximum number of requests in flight; None: any number.

    Raises:
        MissingDependencyError: The framework is not installed in a supported version.
    """
    from tuner.rollouts.patience import PatientClient

    return _REMOTE[kind](
        base_url=base_url,
        api_key=api_key,
        model_name=model_name,
        http_client=PatientClient(max_concurrent=max_concurrent),
    )


def remote_client(remote: RemoteModel, setting: str) -> AsyncOpenAI:
    """An OpenAI client of a model behind a URL, which obeys the API's rate limits.

    Args:
        setting: Where the model is set, for messages.

    Raises:
        ConfigError: The environment variable for its key is not set.
    """
    import openai

    from tuner.rollouts.patience import PatientClient

    return openai.AsyncOpenAI(
        base_url=remote.base_url,
        api_key=remote.api_key(setting),
        http_client=PatientClient(max_concurrent=remote.max_concurrent),
    )


def default_kind() -> ChatModelKind:
    """The framework for workflows: AgentScope in the installed version, if it works, else none."""
    found = agentscope_version()
    if found is None:
        return "plain"
    kind: ChatModelKind = "agentscope1" if found.startswith("1.") else "agentscope2"
    try:
        load_kind(kind)
    except MissingDependencyError as error:
        logger.warning("TrinityChatModel is the plain chat model: %s", error)
        return "plain"
    return kind


def trinity_chat_model_class() -> type[Any]:
    """The meaning of `TrinityChatModel` here: the class of the `default_kind`."""
    return _CLASSES[default_kind()]()
