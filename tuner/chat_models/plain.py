"""The chat model without a framework: what any agent needs to reach the gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import openai
    from openai.types.chat import ChatCompletionMessage

    from tuner.gateway import Session


class PlainChatModel:
    """The model being trained, for code that speaks OpenAI.

    Attributes:
        client: An `openai.AsyncOpenAI` that reaches the gateway without a socket.
        api_key: The rollout's key, for any other client.
        model_name: What requests give as `model`.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.client: openai.AsyncOpenAI = session.async_client()
        self.api_key = session.key
        self.model_name = session.model_name

    @property
    def base_url(self) -> str:
        """Where any other client finds the gateway; the first use opens the HTTP door."""
        return self._session.base_url

    async def __call__(
        self, messages: list[Any], tools: list[Any] | None = None, **kwargs: Any
    ) -> ChatCompletionMessage:
        """One chat completion: the assistant message. `kwargs` are the OpenAI client's."""
        if tools:
            kwargs["tools"] = tools
        completion = await self.client.chat.completions.create(
            model=self.model_name, messages=messages, **kwargs
        )
        message: ChatCompletionMessage = completion.choices[0].message
        return message
