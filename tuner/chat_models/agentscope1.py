"""The chat model for AgentScope 1.x: its own `OpenAIChatModel` whose client is the gateway's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from tuner.chat_models.without_framework import SessionHandle
from tuner.errors import MissingDependencyError

if TYPE_CHECKING:
    from tuner.gateway import Session

_INSTALL = "pip install 'agentscope-tuner[agentscope1]'"


def agentscope_version() -> str | None:
    """The installed version of AgentScope, or None."""
    try:
        return version("agentscope")
    except PackageNotFoundError:
        return None


def require_agentscope1() -> None:
    """Say what to install, where a program that imports AgentScope 1.x would only fail.

    Raises:
        MissingDependencyError: AgentScope 1.x is not installed, or does not import.
    """
    trinity_chat_model()


@cache
def trinity_chat_model() -> type[Any]:
    """The class `TrinityChatModel`, made when first asked for: importing AgentScope takes long.

    Raises:
        MissingDependencyError: AgentScope 1.x is not installed, or does not import.
    """
    found = agentscope_version()
    if found is None:
        raise MissingDependencyError(
            f"this needs AgentScope 1.x, which is not installed: {_INSTALL}"
        )
    if not found.startswith("1."):
        raise MissingDependencyError(
            f"this needs agentscope>=1.0.12,<2, but {found} is "
            f"installed: {_INSTALL}, in an environment of its own"
        )
    try:
        from agentscope.model import OpenAIChatModel
    except ImportError as error:
        raise MissingDependencyError(
            f"agentscope {found} is installed but does not import ({error}): {_INSTALL} brings "
            "versions that work together"
        ) from error

    class TrinityChatModel(SessionHandle, OpenAIChatModel):
        """The model being trained, as an AgentScope 1.x chat model.

        Settings of the run (temperature, limits) apply where a call does not say: none is
        sent by default.

        Attributes:
            client: An `openai.AsyncOpenAI` that reaches the gateway without a socket.
        """

        def __init__(self, session: Session, role: str | None = None) -> None:
            SessionHandle.__init__(self, session, role)
            client: Any = session.async_client(role)
            # AgentScope makes a client of its own here; given ours, it opens no connections.
            OpenAIChatModel.__init__(
                self,
                model_name=session.model_name,
                api_key=self.api_key,
                stream=False,
                client_kwargs={"http_client": client._client},
            )
            self.client = client

        def _parse_openai_stream_response(
            self, start_datetime: Any, response: Any, structured_model: Any = None
        ) -> Any:
            readable: Any = _Readable(response)
            return super()._parse_openai_stream_response(start_datetime, readable, structured_model)

    return TrinityChatModel


class _Readable:
    """A stream that AgentScope 1.x can read: it looks into `delta.audio`, which openai leaves None
    in a text's chunks."""

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
    """A model behind a URL, with the attributes of the chat model that is trained."""

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
    """The same as AgentScope 1.x's own chat model.

    Raises:
        MissingDependencyError: AgentScope 1.x is not installed, or does not import.
    """
    trinity_chat_model()  # says what is wrong with the installation, if anything is
    from agentscope.model import OpenAIChatModel

    # Not streamed: AgentScope 1.x cannot read the streams of today's openai package.
    return OpenAIChatModel(
        model_name=model_name,
        api_key=api_key,
        stream=False,
        client_kwargs={"base_url": base_url, "http_client": http_client},
    )
