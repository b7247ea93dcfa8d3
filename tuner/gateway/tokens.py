"""The door for agents that own their tokens: ids in, calls out, without a body in between."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tuner.engines.base import Generation
from tuner.gateway.complete import Completion
from tuner.gateway.errors import RequestError
from tuner.gateway.request import MAX_CHOICES, CompletionRequest

if TYPE_CHECKING:
    from tuner.gateway.session import Session


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

    The same as `POST /v1/completions` with these ids, and the same tokens as a chat completion
    whose messages render to them: seeds depend on the session and the prompt alone. May be called
    from any event loop.

    Args:
        session: Whose calls they are.
        prompt_ids: Shape [P], at least one.
        temperature, top_p, top_k, max_tokens: None is what the session's requests default to.
        stop: Strings that end a completion; the tokens that spell them stay in the ids.
        role: The agent that calls, where there are several.

    Raises:
        RequestError: The session was sealed or has used up its limits, the prompt has an id that
            the model does not know, or leaves no room for an answer.
        ConfigError: A sampling setting is out of its range.
        EngineError: The engine failed.
    """
    gateway = session.gateway
    ids = tuple(prompt_ids)
    vocabulary = len(gateway.renderer.tokenizer)
    wrong = next((i for i in ids if not 0 <= i < vocabulary), None)
    if not ids or wrong is not None:
        found = "is empty" if not ids else f"has token id {wrong}"
        raise RequestError(
            f"the prompt {found}: send at least one id, each from 0 to {vocabulary - 1}",
            param="prompt",
        )
    if not 1 <= n <= MAX_CHOICES:
        raise RequestError(f"n is {n}: ask for 1 to {MAX_CHOICES} completions", param="n")
    request = CompletionRequest(
        model=gateway.model_name,
        messages=[{"role": "prompt", "content": gateway.renderer.decode(ids)}],
        prompts=(ids,),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        n=n,
        stop=tuple(stop),
        max_tokens=max_tokens,
    )

    async def answer() -> tuple[Generation, ...]:
        completion = Completion(
            gateway, session, role, request, dialect="completions", prefix="cmpl-"
        )
        return tuple(choice.generation for choice in (await completion.answer()).choices)

    home = gateway.home()
    if asyncio.get_running_loop() is home:
        return await answer()
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answer(), home))
