"""OpenAI's completions: text or token ids in, text out, without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuner.gateway.answer import Answer, Choice
from tuner.gateway.chat import DONE, reported, usage
from tuner.gateway.dialect import Exchange, sse
from tuner.gateway.errors import RequestError, kind
from tuner.gateway.fields import Reader, integer, only, read_fields
from tuner.gateway.message_stream import Delta
from tuner.gateway.request import (
    CHAT_FIELDS,
    MAX_CHOICES,
    CompletionRequest,
    check_top_logprobs,
    with_usage,
)

if TYPE_CHECKING:
    from tuner.gateway.gateway import Gateway
    from tuner.gateway.session import Session

_MAX_PROMPTS = 64


class TextExchange(Exchange):
    """`POST /v1/completions`.

    Token ids as prompt go to the engine as they are; text is encoded once, without special tokens
    of the tokenizer's own. In the trace the call's one message has the role "prompt".
    """

    dialect = "completions"
    prefix = "cmpl-"

    @classmethod
    def read(cls, gateway: Gateway, session: Session, body: bytes) -> TextExchange:
        values = read_fields(
            body, _FIELDS, required=("model", "prompt"), what="a completion request"
        )
        prompts = values.pop("prompt")
        vocabulary = len(gateway.renderer.tokenizer)
        for prompt in prompts:
            if not isinstance(prompt, str) and not all(0 <= i < vocabulary for i in prompt):
                raise RequestError(
                    f"prompt holds a token id that the model does not know: ids are 0 to "
                    f"{vocabulary - 1}",
                    param="prompt",
                )
        n = values.get("n", 1)
        if values.pop("best_of", n) != n:
            raise RequestError(
                "best_of differs from n: every completion is returned here, so send n alone",
                param="best_of",
            )
        if len(prompts) * n > MAX_CHOICES:
            raise RequestError(
                f"{len(prompts)} prompts with n = {n} are more than {MAX_CHOICES} completions",
                param="n",
            )
        alternatives = values.pop("logprobs", None)
        check_top_logprobs("logprobs", alternatives or 0, gateway.engine.capabilities)
        request = CompletionRequest(
            messages=[{"role": "prompt", "content": prompt} for prompt in _shown(gateway, prompts)],
            prompts=prompts,
            logprobs=alternatives is not None,
            top_logprobs=alternatives or 0,
            include_usage=with_usage(values),
            **values,
        )
        return cls(gateway, request)

    def answer(self, answer: Answer) -> dict[str, Any]:
        return {
            **self._frame(),
            "choices": [
                {
                    "index": choice.index,
                    "text": choice.text,
                    "finish_reason": choice.finish_reason,
                    **self._details(choice),
                }
                for choice in answer.choices
            ],
            "usage": usage(answer),
        }

    def delta(self, index: int, delta: Delta) -> Sequence[bytes]:
        return [self._chunk(index, delta.content or "", None, logprobs=None)]

    def closing(self, answer: Answer) -> Sequence[bytes]:
        events = [
            self._chunk(choice.index, "", choice.finish_reason, **self._details(choice))
            for choice in answer.choices
        ]
        if self.request.include_usage:
            events.append(sse({**self._frame(), "choices": [], "usage": usage(answer)}))
        return [*events, DONE]

    def _details(self, choice: Choice) -> dict[str, Any]:
        details: dict[str, Any] = {"logprobs": None}
        if self.request.logprobs:
            details["logprobs"] = self._logprobs(choice)
        if self.request.return_token_ids:
            details["token_ids"] = choice.generation.completion_ids
            details["prompt_token_ids"] = choice.prompt_ids
        return details

    def _logprobs(self, choice: Choice) -> dict[str, Any]:
        generation, text_of = choice.generation, self.renderer.token_text
        tokens = [text_of(token_id) for token_id in generation.completion_ids]
        offsets, end = [], 0
        for token in tokens:
            offsets.append(end)
            end += len(token)
        tops = [
            {text_of(token_id): reported(logprob) for token_id, logprob in pairs}
            for pairs in generation.top_logprobs
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [reported(logprob) for logprob in generation.logprobs],
            "top_logprobs": tops or None,
            "text_offset": offsets,
        }

    def _chunk(self, index: int, text: str, finish_reason: str | None, **details: Any) -> bytes:
        choice = {"index": index, "text": text, "finish_reason": finish_reason, **details}
        return sse({**self._frame(), "choices": [choice]})

    def _frame(self) -> dict[str, Any]:
        return {
            "id": self.completion.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model_name,
        }


def _shown(gateway: Gateway, prompts: Sequence[str | tuple[int, ...]]) -> list[str]:
    return [
        prompt if isinstance(prompt, str) else gateway.renderer.decode(prompt) for prompt in prompts
    ]


def _prompt(name: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
    """One prompt or several, each text or token ids."""
    if isinstance(value, str) or _are_ids(value):
        value = [value]
    if not isinstance(value, list):
        raise RequestError(
            f"{name} must be a string, an array of strings, token ids, or an array of arrays of "
            f"token ids, not {kind(value)}",
            param=name,
        )
    if not value or len(value) > _MAX_PROMPTS:
        raise RequestError(f"{name} has {len(value)} prompts: send 1 to {_MAX_PROMPTS}", param=name)
    prompts: list[str | tuple[int, ...]] = []
    for index, item in enumerate(value):
        if not (isinstance(item, str) or _are_ids(item)) or not item:
            raise RequestError(
                f"{name}[{index}] must be text or token ids, and not empty",
                param=f"{name}[{index}]",
            )
        prompts.append(item if isinstance(item, str) else tuple(item))
    return tuple(prompts)


def _are_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    )


# What a completion request shares with chat completions means the same there.
_SHARED = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "n",
    "seed",
    "stop",
    "max_tokens",
    "user",
    "return_token_ids",
    "stream",
    "stream_options",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_p",
    "min_tokens",
    "ignore_eos",
)
_FIELDS: dict[str, Reader] = {
    **{name: CHAT_FIELDS[name] for name in _SHARED},
    "prompt": _prompt,
    "best_of": integer(1, MAX_CHOICES),
    "logprobs": integer(0, 20),
    "echo": only(False, because="the prompt is not repeated here"),
    "suffix": only("", because="text cannot be inserted here"),
    "add_special_tokens": only(False, because="text is encoded as it is; send token ids"),
}
