"""One chat completion: request, prompt ids, engine, answer; committed before it is answered."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from array import array
from collections.abc import Sequence
from typing import Any

from tuner.engines.base import Engine, Generation, SamplingParams
from tuner.errors import ContextLengthError
from tuner.gateway.errors import RequestError
from tuner.gateway.parsing import ParsedMessage
from tuner.gateway.renderer import ChatRenderer
from tuner.gateway.request import ChatRequest, parse_chat_request
from tuner.gateway.session import Session
from tuner.traces import Call

LOWEST_LOGPROB = -9999.0  # what OpenAI's API reports for "almost impossible"; JSON has no -inf


async def chat_completion(
    engine: Engine, renderer: ChatRenderer, model_name: str, session: Session, body: bytes
) -> bytes:
    """Answer one request of `session`, and commit its calls before returning.

    Returns:
        The body of the response, an OpenAI `ChatCompletion`.

    Raises:
        RequestError: The request cannot be honoured, or the session was sealed meanwhile.
    """
    started = time.time()
    clock = time.perf_counter()
    request = parse_chat_request(body, engine.capabilities)
    if request.model != model_name:
        raise RequestError(
            f"model is {request.model!r}, but this key's model is {model_name!r}",
            status=404,
            param="model",
            code="model_not_found",
        )
    text = renderer.render_text(
        request.messages,
        request.shown_tools,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    turns = sum(message["role"] == "assistant" for message in request.messages)
    continued = session.conversations.prompt(text, turns)
    prompt_ids = continued.ids
    room = _room(engine, prompt_ids)
    prompt = hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=16).digest()
    occurrence = session.occurrence(prompt)
    samplings = [
        _sampling(
            request, session, room, session.digest("seed", prompt, occurrence, choice), choice
        )
        for choice in range(request.n)
    ]
    try:
        generations = await session.run(lambda: _generate(engine, prompt_ids, samplings, session))
    except ContextLengthError as error:
        raise _too_long(str(error)) from error
    seconds = time.perf_counter() - clock

    response_id = f"chatcmpl-{session.digest('id', session.id, prompt, occurrence).hex()[:24]}"
    calls = []
    choices = []
    for index, (sampling, generation) in enumerate(zip(samplings, generations, strict=True)):
        parsed = renderer.parse(
            generation.completion_ids,
            tools=request.shown_tools,
            prompt_ids=prompt_ids,
            stop=request.stop,
        )
        session.malformed_tool_calls += parsed.malformed_tool_calls
        message = _message(parsed, f"{response_id}-{index}", session)
        finish_reason = (
            "tool_calls"
            if parsed.tool_calls and generation.finish_reason == "stop"
            else generation.finish_reason
        )
        choices.append(
            {
                "index": index,
                "message": message,
                "finish_reason": finish_reason,
                "logprobs": _logprobs(renderer, generation) if request.logprobs else None,
                **({"token_ids": generation.completion_ids} if request.return_token_ids else {}),
            }
        )
        calls.append(
            Call(
                id=f"{response_id}-{index}",
                prompt_ids=prompt_ids,
                completion_ids=generation.completion_ids,
                logprobs=generation.logprobs,
                versions=generation.versions,
                sampling=sampling,
                finish_reason=finish_reason,
                messages=request.messages,
                tools=request.tools,
                response=message,
                started=started,
                seconds=seconds,
                cached_tokens=generation.cached_tokens,
                reused_ids=continued.reused,
                rerendered=continued.rerendered,
            )
        )
    answer: dict[str, Any] = {
        "id": response_id,
        "object": "chat.completion",
        "created": int(started),
        "model": model_name,
        "choices": choices,
        "usage": _usage(prompt_ids, generations),
    }
    if request.return_token_ids:
        answer["prompt_token_ids"] = prompt_ids
    encoded = json.dumps(answer).encode()
    session.commit(calls)
    for call in calls:
        session.conversations.add(continued, call.completion_ids, tools=bool(request.shown_tools))
    return encoded


def _room(engine: Engine, prompt_ids: Sequence[int]) -> int:
    """How many tokens may follow the prompt."""
    limit = engine.capabilities.max_model_len
    if len(prompt_ids) >= limit:
        raise _too_long(
            f"the prompt has {len(prompt_ids)} tokens, which leaves no room for an answer within "
            f"the context of {limit}"
        )
    return limit - len(prompt_ids)


def _too_long(found: str) -> RequestError:
    return RequestError(
        f"{found}: raise model.max_model_len or shorten the messages",
        param="messages",
        code="context_length_exceeded",
    )


def _sampling(
    request: ChatRequest, session: Session, room: int, digest: bytes, choice: int
) -> SamplingParams:
    """The settings in force for one choice."""
    defaults = session.defaults
    limit = defaults.max_tokens if request.max_tokens is None else request.max_tokens
    seed = int.from_bytes(digest[:8], "big")
    if request.seed is not None:
        # Choices of one request differ; a single one has the very seed that was asked for.
        mixed = hashlib.blake2b(repr((request.seed, choice)).encode(), digest_size=8).digest()
        seed = request.seed if choice == 0 else int.from_bytes(mixed, "big")
    return SamplingParams(
        max_tokens=room if limit is None else min(limit, room),
        temperature=defaults.temperature if request.temperature is None else request.temperature,
        top_p=defaults.top_p if request.top_p is None else request.top_p,
        top_k=defaults.top_k if request.top_k is None else request.top_k,
        stop=request.stop,
        seed=seed & (2**63 - 1),
        top_logprobs=request.top_logprobs,
    )


async def _generate(
    engine: Engine,
    prompt_ids: Sequence[int],
    samplings: Sequence[SamplingParams],
    session: Session,
) -> list[Generation]:
    """One generation for each sampling; if one fails the others are cancelled."""
    if len(samplings) == 1:
        return [await engine.generate(prompt_ids, samplings[0], session.id)]
    tasks = [
        asyncio.ensure_future(engine.generate(prompt_ids, sampling, session.id))
        for sampling in samplings
    ]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _message(parsed: ParsedMessage, call_id: str, session: Session) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [
            {
                "id": f"call_{session.digest('tool', call_id, index).hex()[:24]}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(parsed.tool_calls)
        ]
    return message


def _logprobs(renderer: ChatRenderer, generation: Generation) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": renderer.token_text(token_id),
            "logprob": logprob if math.isfinite(logprob) else LOWEST_LOGPROB,
            "bytes": renderer.token_bytes(token_id),
        }

    tops = generation.top_logprobs or ((),) * len(generation.completion_ids)
    return {
        "content": [
            {**entry(token_id, logprob), "top_logprobs": [entry(*pair) for pair in top]}
            for token_id, logprob, top in zip(
                generation.completion_ids, generation.logprobs, tops, strict=True
            )
        ],
        "refusal": None,
    }


def _usage(prompt_ids: Sequence[int], generations: Sequence[Generation]) -> dict[str, Any]:
    completion = sum(len(generation.completion_ids) for generation in generations)
    return {
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": completion,
        "total_tokens": len(prompt_ids) + completion,
        "prompt_tokens_details": {
            "cached_tokens": max(generation.cached_tokens for generation in generations)
        },
    }
