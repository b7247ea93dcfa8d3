"""OpenAI's completions: text or token ids in, text out, without a chat template.

Also `complete_tokens` for agents that manage token ids themselves: ids in, calls out, without a
body.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tuner.engines.base import Generation, SamplingError
from tuner.gateway.completion import Completion
from tuner.gateway.dialects.chat import SHARED_FIELDS, ChatExchange, reported, usage
from tuner.gateway.families.parsing import Delta
from tuner.gateway.request_error import FieldError, Path, RequestError, kind, wrong
from tuner.gateway.requests import (
    MAX_CHOICES,
    Answer,
    Choice,
    CompletionRequest,
    Reader,
    boolean,
    check_top_logprobs,
    integer,
    only,
    read_fields,
    with_usage,
)
from tuner.gateway.service import Service, sse
from tuner.gateway.sessions import Session

_MAX_PROMPTS = 64


def read_text_request(body: bytes, service: Service) -> CompletionRequest:
    """Parse the completion request in `body`.

    Raises:
        RequestError: 400 that names the field, its value and what to do.
    """
    values = read_fields(body, _FIELDS, required=("model", "prompt"), what="a completion request")
    prompts = values.pop("prompt")
    vocabulary = len(service.renderer.tokenizer)
    for prompt in prompts:
        if not isinstance(prompt, str) and not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise wrong(
                ("prompt",),
                f"contains a token id that the model does not know: ids are 0 to {vocabulary - 1}",
            )
    n = values.get("n", 1)
    if values.pop("best_of", n) != n:
        raise wrong(
            ("best_of",), "differs from n: this gateway returns every completion, so send only n"
        )
    if len(prompts) * n > MAX_CHOICES:
        raise FieldError(
            f"{len(prompts)} prompts with n = {n} are more than {MAX_CHOICES} completions",
            path=("n",),
        )
    alternatives = values.pop("logprobs", None)
    check_top_logprobs(("logprobs",), alternatives or 0, service.engine.capabilities)
    return CompletionRequest(
        messages=[{"role": "prompt", "content": _text(prompt, service)} for prompt in prompts],
        prompts=prompts,
        logprobs=alternatives is not None,
        top_logprobs=alternatives or 0,
        include_usage=with_usage(values),
        **values,
    )


def _text(prompt: str | tuple[int, ...], service: Service) -> str:
    """A prompt as text; empty if the prompt will be rejected for its length."""
    if isinstance(prompt, str):
        return prompt
    fits = len(prompt) < service.engine.capabilities.max_model_len
    return service.renderer.decode(prompt) if fits else ""


class TextExchange(ChatExchange):
    """`POST /v1/completions`.

    Token ids in the prompt go to the engine unchanged; text is encoded once, with the special
    tokens that the tokenizer adds to a text, as in vLLM. In the trace the call's only message has
    the role "prompt".
    """

    chunk = "text_completion"

    def __init__(self, session: Session, role: str | None, body: bytes) -> None:
        request = read_text_request(body, session.service)
        self.completion = Completion(session, role, request, dialect="completions", prefix="cmpl-")

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

    def opening(self) -> Sequence[bytes]:
        return ()

    def delta(self, index: int, delta: Delta) -> Sequence[bytes]:
        return [self._chunk(index, {"text": delta.content or ""}, logprobs=None)]

    def _details(self, choice: Choice) -> dict[str, Any]:
        details = super()._details(choice)
        if self.completion.request.return_token_ids:
            details["prompt_token_ids"] = choice.prompt_ids
        return details

    def _logprobs(self, choice: Choice) -> dict[str, Any]:
        generation, text_of = choice.generation, self.completion.service.renderer.token_text
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

    def _chunk(
        self, index: int, delta: dict[str, Any], finish_reason: str | None = None, **details: Any
    ) -> bytes:
        said = {"index": index, "text": "", **delta, "finish_reason": finish_reason, **details}
        return sse({**self._frame(), "choices": [said]})


def _prompt(at: Path, value: Any) -> tuple[str | tuple[int, ...], ...]:
    """One prompt or several, each text or token ids."""
    if isinstance(value, str) or _are_ids(value):
        value = [value]
    if not isinstance(value, list):
        raise wrong(
            at,
            "must be a string, an array of strings, token ids, or an array of arrays of token "
            f"ids, not {kind(value)}",
        )
    if not value or len(value) > _MAX_PROMPTS:
        raise wrong(at, f"has {len(value)} prompts: send 1 to {_MAX_PROMPTS}")
    for index, item in enumerate(value):
        if not (isinstance(item, str) or _are_ids(item)) or not item:
            raise wrong((*at, index), "must be text or token ids, and not empty")
    return tuple(item if isinstance(item, str) else tuple(item) for item in value)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


_FIELDS: dict[str, Reader] = {
    **SHARED_FIELDS,
    "prompt": _prompt,
    "best_of": integer(1, MAX_CHOICES),
    "logprobs": integer(0, 20),
    "echo": only(False, because="the prompt is not repeated here"),
    "suffix": only("", because="text cannot be inserted here"),
    "add_special_tokens": boolean,
}


async def complete_tokens(
    session: Session,
    prompt_ids: Sequence[int],
    *,
    n: int = 1,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
    role: str | None = None,
) -> tuple[Generation, ...]:
    """Sample `n` completions of a prompt and commit them to the session, one call each.

    Equivalent to `POST /v1/completions` with these ids, and to a chat completion whose messages
    render to them: seeds depend only on the session and the prompt. May be called from any event
    loop.

    Args:
        session: Receives the calls.
        prompt_ids: Shape [P], at least one.
        temperature, top_p, top_k, max_tokens: None for the session's defaults.
        stop: Strings that end a completion; the tokens that spell them stay in the ids.
        role: The agent that calls, if there are several.

    Raises:
        RequestError: The session was sealed or has reached its limits, or the prompt has an unknown
            id or leaves no room for an answer.
        SamplingError: A sampling setting is out of its range.
        EngineError: The engine failed.
    """
    service, ids = session.service, tuple(prompt_ids)
    vocabulary = len(service.renderer.tokenizer)
    unknown = next((i for i in ids if not 0 <= i < vocabulary), None)
    if not ids or unknown is not None:
        found = "is empty" if not ids else f"has token id {unknown}"
        raise RequestError(
            f"the prompt {found}: send at least one id, each from 0 to {vocabulary - 1}",
            path=("prompt",),
        )
    if not 1 <= n <= MAX_CHOICES:
        raise RequestError(f"n is {n}: ask for 1 to {MAX_CHOICES} completions", path=("n",))
    request = CompletionRequest(
        model=service.model_name,
        messages=[{"role": "prompt", "content": _text(ids, service)}],
        prompts=(ids,),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        n=n,
        stop=tuple(stop),
        max_tokens=max_tokens,
    )

    async def answer() -> tuple[Generation, ...]:
        completion = Completion(session, role, request, dialect="completions", prefix="cmpl-")
        await completion.begin()
        try:
            return tuple(choice.generation for choice in (await completion.answer()).choices)
        except RequestError as error:
            if isinstance(error.__cause__, SamplingError):  # of the arguments, not of a request
                raise error.__cause__ from None
            raise

    return await session.at_home(answer())
