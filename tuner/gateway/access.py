"""What code that has a session reaches the gateway with, in the gateway's process or in another."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuner.engines.base import Generation
from tuner.gateway.credit import RecordedCall
from tuner.gateway.in_flight import InFlight
from tuner.gateway.model.template import Message
from tuner.gateway.results import Results
from tuner.gateway.service import Door

if TYPE_CHECKING:
    import anthropic
    import openai

ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Access(ABC):
    """A session, as the user's functions and chat models know it.

    Attributes:
        host: What takes its requests.
        id: The caller's name for it.
        key: The API key that stands for it.
        model_name: The name that requests give as `model`.
        max_model_len: Tokens of prompt and answer together.
        other_names: What requests may give as `model` besides.
        errors: What went wrong inside its calls that was not the caller's fault.
        in_flight: What is being generated.
        results: What recorded functions returned in it.
    """

    host: Door
    id: str
    key: str
    other_names: Sequence[str]
    errors: list[Exception]
    in_flight: InFlight
    results: Results

    @property
    @abstractmethod
    def model_name(self) -> str: ...

    @property
    @abstractmethod
    def max_model_len(self) -> int: ...

    @property
    @abstractmethod
    def base_url(self) -> str:
        """Where HTTP clients find the gateway; the first use opens the door."""

    @property
    @abstractmethod
    def keeps_calls(self) -> bool:
        """Whether calls are kept; not those of models that are not trained."""

    @abstractmethod
    def calls_so_far(self) -> list[RecordedCall]:
        """The calls that were delivered, in order of commitment."""

    @abstractmethod
    def text_of(self, ids: Sequence[int]) -> str:
        """Tokens in the tokenizer's words, special ones left out."""

    @abstractmethod
    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Token ids of text as it is, or of messages in the chat template; shape [P]."""

    @property
    @abstractmethod
    def tokenizer(self) -> Any:
        """The model's."""

    @property
    @abstractmethod
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a completion."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Updates that the weights have seen which sample the next token."""

    @abstractmethod
    async def complete_tokens(
        self, prompt_ids: Sequence[int], **settings: Any
    ) -> tuple[Generation, ...]:
        """As `tuner.gateway.dialects.text.complete_tokens`."""

    @abstractmethod
    def warn_once(self, setting: str, sentence: str) -> None:
        """Log that a setting of the user's agent is unsafe, once for all sessions of a gateway."""

    @abstractmethod
    def seal(self) -> object:
        """End the session: what comes later is refused."""

    def key_of(self, role: str | None) -> str:
        """The API key that names `role` as the agent that calls; None is the session's own.

        Raises:
            ValueError: `role` is not a name.
        """
        if role is None:
            return self.key
        if not ROLE.fullmatch(role):
            raise ValueError(f"role {role!r} must be 1 to 64 letters, digits, '_' or '-'")
        return f"{self.key}.{role}"

    def async_client(self, role: str | None = None) -> openai.AsyncOpenAI:
        """An OpenAI client of this session that needs no port."""
        from tuner.gateway.clients import in_process_client

        return in_process_client(self.host, self.key_of(role))

    def async_anthropic(self, role: str | None = None) -> anthropic.AsyncAnthropic:
        """Anthropic's client of this session, which needs no port.

        Raises:
            MissingDependencyError: The anthropic package is not installed.
        """
        from tuner.gateway.clients import in_process_anthropic

        return in_process_anthropic(self.host, self.key_of(role))

    def http_client(self, client_class: type) -> Any:
        """A client of the library that `client_class` is built on, which needs no port."""
        from tuner.gateway.clients import in_process_http_client

        return in_process_http_client(self.host, client_class)
