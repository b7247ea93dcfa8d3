"""The chat model without a framework: what any agent needs to reach the gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.chat_models.handle import SessionHandle

if TYPE_CHECKING:
    import openai
    from openai.types.chat import ChatCompletionMessage

    from tuner.gateway import Session


class PlainChatModel(SessionHandle):
    """The model being trained, for code that speaks OpenAI.

    Attributes:
        client: An `openai.AsyncOpenAI` that reaches the gateway without a socket.
    """

    def __init__(self, session: Session, role: str | None = None) -> None:
        super().__init__(session, role)
        self.client: openai.AsyncOpenAI = session.async_client(role)

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
