"""The chat model without a framework, and the parts that all chat models share."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import anthropic
    import openai
    from openai.types.chat import ChatCompletionMessage

    from tuner.gateway import RecordedCall
    from tuner.gateway.sessions import Access


class SessionHandle:
    """A rollout's session as the workflow sees it: credentials, recorded calls, roles.

    Args:
        session: The rollout's session.
        role: The agent that calls through this handle; None if there is only one.

    Attributes:
        session: The rollout's session at the gateway.
        api_key: The rollout's key, for any other client; it also names the role.
        model_name: The `model` that requests must name.
    """

    def __init__(self, session: Access, role: str | None = None) -> None:
        self.session = session
        self._role = role
        self.api_key = session.key_of(role)
        self.model_name = session.model_name

    @property
    def base_url(self) -> str:
        """The gateway's URL for any other client; the first use starts the HTTP server."""
        return self.session.base_url

    @cached_property
    def anthropic_client(self) -> anthropic.AsyncAnthropic:
        """Anthropic's client of the session, which reaches the gateway without a socket.

        Raises:
            MissingDependencyError: The anthropic package is not installed.
        """
        return self.session.async_anthropic(self._role)

    @property
    def calls(self) -> list[RecordedCall]:
        """The calls committed so far, in order: those of this role, or all without a role."""
        calls = self.session.calls_so_far()
        return [c for c in calls if self._role is None or c.role == self._role]

    def role(self, name: str) -> Self:
        """The same model for one of several agents: its calls are recorded under `name`.

        Raises:
            ValueError: `name` is not 1 to 64 letters, digits, "_" or "-".
        """
        return type(self)(self.session, name)


class PlainChatModel(SessionHandle):
    """The model being trained, for code that uses OpenAI's client.

    Attributes:
        client: An `openai.AsyncOpenAI` that reaches the gateway without a socket.
    """

    def __init__(self, session: Access, role: str | None = None) -> None:
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
