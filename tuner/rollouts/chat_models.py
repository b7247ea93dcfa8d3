"""Chat models for agent frameworks whose client is the gateway's."""

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
    """The model that a workflow gets, for the framework it is written with.

    Raises:
        MissingDependencyError: The framework is not installed in a version that works.
    """
    return _CLASSES[kind]()(session)


def load_kind(kind: ChatModelKind) -> None:
    """Import the framework of a kind, which may take seconds.

    Raises:
        MissingDependencyError: It is not installed in a version that works.
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

    Whoever uses it holds back when the API asks for it (`tuner.rollouts.patience`).

    Args:
        max_concurrent: Requests in flight at most; None: any number.

    Raises:
        MissingDependencyError: The framework is not installed in a version that works.
    """
    from tuner.rollouts.patience import PatientClient

    return _REMOTE[kind](
        base_url=base_url,
        api_key=api_key,
        model_name=model_name,
        http_client=PatientClient(max_concurrent=max_concurrent),
    )


def remote_client(remote: RemoteModel, setting: str) -> AsyncOpenAI:
    """An OpenAI client of a model behind a URL, which holds back when the API asks for it.

    Args:
        setting: Where the model is set, as messages name it.

    Raises:
        ConfigError: The environment variable that should hold its key is not set.
    """
    import openai

    from tuner.rollouts.patience import PatientClient

    return openai.AsyncOpenAI(
        base_url=remote.base_url,
        api_key=remote.api_key(setting),
        http_client=PatientClient(max_concurrent=remote.max_concurrent),
    )


def default_kind() -> ChatModelKind:
    """The framework that workflows are written with here: AgentScope in the version that is
    installed, where it works, else none."""
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
    """What `TrinityChatModel` means here: the class of the `default_kind`."""
    return _CLASSES[default_kind()]()
