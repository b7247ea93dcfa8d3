"""The chat model for AgentScope 1.x: its own `OpenAIChatModel`, with the gateway as its client."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from tuner.errors import MissingDependencyError, pip_install
from tuner.rollouts.without_framework import SessionHandle

if TYPE_CHECKING:
    from tuner.gateway.sessions import Access


def agentscope_version() -> str | None:
    try:
        return version("agentscope")
    except PackageNotFoundError:
        return None


CONSOLE = "AGENTSCOPE_DISABLE_CONSOLE_OUTPUT"
"""AgentScope 1's environment variable, which each agent reads when it is made."""


@contextmanager
def quiet_agents() -> Iterator[str | None]:
    """While the block runs, AgentScope's agents do not print their messages, unless the environment
    says whether they do. Yields a line about it, or None."""
    if CONSOLE in os.environ:
        yield None
        return
    os.environ[CONSOLE] = "true"
    try:
        line = f"AgentScope's agents print nothing ({CONSOLE}=false shows their messages)"
        yield line if "agentscope" in sys.modules else None
    finally:
        del os.environ[CONSOLE]


def agentscope_modules(major: str, versions: str, extra: str, *names: str) -> list[Any]:
    """AgentScope's modules of these names. Type checkers see AgentScope 1.x or 2.x, never both,
    so the result is untyped.

    Args:
        major, versions: The required major version, and its supported versions: "1", ">=1.0.21,<2".
        extra: The extra that installs them.

    Raises:
        MissingDependencyError: They are not installed, or do not import.
    """
    found = agentscope_version()
    install = pip_install(extra)
    if found is None:
        raise MissingDependencyError(
            f"this needs AgentScope {major}.x, which is not installed: {install}"
        )
    if not found.startswith(f"{major}."):
        raise MissingDependencyError(
            f"this needs agentscope{versions}, but {found} is "
            f"installed: {install}, in a separate environment"
        )
    try:
        return [import_module(f"agentscope.{name}") for name in names]
    except ImportError as error:
        raise MissingDependencyError(
            f"agentscope {found} is installed but does not import ({error}): {install} brings "
            "versions that work together"
        ) from error


def require_agentscope1() -> None:
    """Fail with instructions to install AgentScope 1.x if it cannot be imported.

    Raises:
        MissingDependencyError: AgentScope 1.x is not installed, or does not import.
    """
    trinity_chat_model()


@cache
def trinity_chat_model() -> type[Any]:
    """The class `TrinityChatModel`, made when first used: importing AgentScope takes long.

    Raises:
        MissingDependencyError: AgentScope 1.x is not installed, or does not import.
    """
    model = _model()

    class TrinityChatModel(SessionHandle, ReadsStreams, model.OpenAIChatModel):  # type: ignore[misc, name-defined]
        """The model being trained, as an AgentScope 1.x chat model.

        Settings of the run (temperature, limits) apply if a call does not set them; by default none
        is sent.

        Attributes:
            client: An `openai.AsyncOpenAI` that reaches the gateway without a socket.
        """

        def __init__(self, session: Access, role: str | None = None) -> None:
            SessionHandle.__init__(self, session, role)
            client: Any = session.async_client(role)
            # AgentScope creates its own client here; given ours, it opens no connections.
            model.OpenAIChatModel.__init__(
                self,
                model_name=session.model_name,
                api_key=self.api_key,
                stream=False,
                client_kwargs={"http_client": client._client},
            )
            self.client = client

    return TrinityChatModel


class ReadsStreams:
    """Lets AgentScope 1.x's `OpenAIChatModel` read the streams of current openai versions."""

    def _parse_openai_stream_response(
        self, start_datetime: Any, response: Any, structured_model: Any = None
    ) -> Any:
        parse = super()._parse_openai_stream_response  # type: ignore[misc]
        return parse(start_datetime, _Readable(response), structured_model)


def _model() -> Any:
    """AgentScope's `model`."""
    (model,) = agentscope_modules("1", ">=1.0.21,<2", "agentscope1", "model")
    return model


class _Readable:
    """A stream that AgentScope 1.x can read: it reads `delta.audio`, which openai leaves out of
    text chunks."""

    def __init__(self, response: Any) -> None:
        self._response = response

    async def __aenter__(self) -> AsyncIterator[Any]:
        return self._items(await self._response.__aenter__())

    async def __aexit__(self, *error: Any) -> None:
        await self._response.__aexit__(*error)

    @staticmethod
    async def _items(stream: Any) -> AsyncIterator[Any]:
        async for item in stream:
            chunk = getattr(item, "chunk", item)  # structured output comes as events
            for choice in getattr(chunk, "choices", ()):
                if getattr(choice.delta, "audio", None) is None:
                    choice.delta.audio = {}
            yield item


class RemoteChatModel:
    """A model behind a URL, with the attributes of the trained chat model."""

    def __init__(self, *, base_url: str, api_key: str, model_name: str, http_client: Any) -> None:
        import openai

        self.client = openai.AsyncOpenAI(
            base_url=base_url, api_key=api_key, http_client=http_client
        )
        self.base_url = base_url
        self.api_key = api_key
        self.model_name = model_name


def agentscope1_remote_model(
    *, base_url: str, api_key: str, model_name: str, http_client: Any
) -> Any:
    """The same as AgentScope 1.x's own chat model."""
    # Not streamed: AgentScope 1.x cannot read the streams of current openai versions.
    return _model().OpenAIChatModel(
        model_name=model_name,
        api_key=api_key,
        stream=False,
        client_kwargs={"base_url": base_url, "http_client": http_client},
    )
