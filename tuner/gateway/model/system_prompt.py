r"""The prompts of recorded calls with another system prompt, as a teacher reads them.

Only the head of a prompt is exchanged. What follows it is taken over as ids, so a sampled turn is
never tokenized again:

    recorded   <|im_start|>user\nWhat is 6*7?<|im_end|>\n<|im_start|>assistant\n ...
    exchanged  <|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 6*7? ... the same

The head ends with a special token, behind which ids do not depend on what is before them. It is
looked for in the messages before the first assistant turn, so nothing in it was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tuner.errors import ConfigError
from tuner.gateway.model.renderer import ChatRenderer
from tuner.gateway.model.template import Message
from tuner.gateway.request_error import RequestError
from tuner.traces import Call

NO_PLACE = "prompt_has_no_place"
TOO_LONG = "prompt_too_long"
_CONVERSATION: list[Message] = [{"role": "user", "content": "What is 6*7?"}]


def with_system_prompt(messages: Sequence[Message], text: str) -> list[Message]:
    """A conversation that begins with `text`, in the place of its own system message."""
    own = messages[:1] if messages and messages[0]["role"] in ("system", "developer") else ()
    role = own[0]["role"] if own else "system"
    return [{"role": role, "content": text}, *messages[len(own) :]]


class SystemPrompt:
    """Exchanges the system prompt of recorded calls.

    Args:
        renderer: The chat form of the model.
        text: The system prompt.
        limit: Tokens of prompt and completion together.

    Raises:
        ConfigError: The chat template has no place for it, or it leaves no room within `limit`.
    """

    def __init__(self, renderer: ChatRenderer, text: str, *, limit: int) -> None:
        self._renderer = renderer
        self._text = text
        self._limit = limit
        heads = self._heads(_CONVERSATION, [])
        if heads is None or heads[0] == heads[1]:
            raise ConfigError(
                "tuner.algorithm.prompt would change nothing that this model reads, or more than "
                "what comes before the conversation: its chat template has no system message, or "
                "another place for it; set model.chat_template_path to one that begins with it"
            )
        if len(heads[1]) >= limit:
            raise ConfigError(
                f"tuner.algorithm.prompt has {len(heads[1])} tokens, which leaves no room in a "
                f"context of {limit}: shorten it, or raise model.max_model_len"
            )

    def __call__(self, call: Call) -> tuple[int, ...] | str:
        """The call's prompt with this system prompt in the place of its own.

        Returns:
            The ids, shape [P'], or why there are none: more than the head of the prompt would be
            another (`prompt_has_no_place`), or the call would be longer than the context
            (`prompt_too_long`).
        """
        for tools in (call.tools, []):  # with tool_choice none they were not shown
            heads = self._heads(call.messages, tools)
            if heads is not None and call.prompt_ids[: len(heads[0])] == heads[0]:
                prompt_ids = heads[1] + call.prompt_ids[len(heads[0]) :]
                fits = len(prompt_ids) + len(call.completion_ids) <= self._limit
                return prompt_ids if fits else TOO_LONG
        return NO_PLACE

    def _heads(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The ids of a prompt's head and of what takes its place; None where they cannot be told
        from what follows."""
        turns = [index for index, one in enumerate(messages) if one["role"] == "assistant"]
        try:
            own, other = self._texts(messages[: turns[0]] if turns else messages, tools)
            borders = self._renderer.special_tokens.borders(own)
            ends = (end for start, end in borders if other.endswith(own[start:]))
            if (end := next(ends, None)) is None:
                return None
            heads = own[:end], other[: len(other) - len(own) + end]
            if turns:
                own, other = self._texts(messages, tools)
                if other != heads[1] + own.removeprefix(heads[0]):
                    return None
            return self._renderer.encode(heads[0]), self._renderer.encode(heads[1])
        except RequestError:  # as of a template that wants a user's message first
            return None

    def _texts(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[str, str]:
        """The prompt as it was, and with this system prompt."""
        render = self._renderer.render_text
        exchanged = with_system_prompt(messages, self._text)
        return render(messages, tools), render(exchanged, tools)
