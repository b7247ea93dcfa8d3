"""What a request came to: finished choices, in no dialect yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tuner.engines.base import Generation
from tuner.gateway.parsing import ParsedMessage


@dataclass(frozen=True)
class Choice:
    """One finished completion as an answer shows it.

    Attributes:
        index: Its place in the answer.
        prompt_ids: The prompt it follows, shape [P].
        generation: As sampled.
        text: Its text without the final special token, cut before a stop string.
        stop_string: The stop string that ended it, if one did.
        parsed: The message it spells.
        tool_call_ids: One for each of `parsed.tool_calls`.
        finish_reason: "stop", "length" or "tool_calls".
    """

    index: int
    prompt_ids: tuple[int, ...]
    generation: Generation
    text: str
    stop_string: str | None
    parsed: ParsedMessage
    tool_call_ids: tuple[str, ...]
    finish_reason: str


@dataclass(frozen=True)
class Answer:
    """What a request came to, once its calls are committed."""

    choices: tuple[Choice, ...]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts; one that several choices share counts once."""
        return sum(len(ids) for ids in {choice.prompt_ids for choice in self.choices})

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.generation.completion_ids) for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the engine did not have to compute, at best."""
        return max(choice.generation.cached_tokens for choice in self.choices)


def assistant_message(choice: Choice) -> dict[str, Any]:
    """A choice as the assistant message of a chat completion."""
    parsed = choice.parsed
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [
            {
                "id": id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for id, call in zip(choice.tool_call_ids, parsed.tool_calls, strict=True)
        ]
    return message
