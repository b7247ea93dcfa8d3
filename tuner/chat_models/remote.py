"""Auxiliary models behind somebody else's OpenAI-compatible URL."""

from __future__ import annotations

from typing import Any

from tuner.chat_models.agentscope1 import trinity_chat_model


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
