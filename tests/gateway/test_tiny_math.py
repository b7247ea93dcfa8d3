"""The gateway over the real engine and the model that comes with the project."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.gateway.toy import ADD_TOOL
from tuner.gateway import ChatRenderer, Gateway, SamplingDefaults
from tuner.traces import Call

MODEL = Path(__file__).parents[2] / "models" / "tiny_math"
QUESTION = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples?"}]


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tuner.engines.transformers import TransformersEngine

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    engine = TransformersEngine(model, tokenizer, max_model_len=512, deterministic=True)
    gateway = Gateway(engine, ChatRenderer(tokenizer), model_name="tiny")
    yield gateway
    await gateway.aclose()
    await engine.close()


async def calls_of(gateway: Gateway, seed: int, **fields: object) -> tuple[Call, ...]:
    session = gateway.open_session("r", seed=seed, defaults=SamplingDefaults(max_tokens=24))
    client = session.async_client()
    await client.chat.completions.create(model="tiny", messages=QUESTION, **fields)
    return session.seal()


async def test_calls_are_exact_and_depend_on_the_seed_alone(gateway: Gateway) -> None:
    alone = await calls_of(gateway, 1, n=2)
    crowd = await asyncio.gather(*(calls_of(gateway, seed, n=2) for seed in range(4)))
    assert [call.completion_ids for call in crowd[1]] == [call.completion_ids for call in alone]
    assert [call.logprobs for call in crowd[1]] == [call.logprobs for call in alone]
    assert len({call.completion_ids for calls in crowd for call in calls}) > 4
    for calls in crowd:
        for call in calls:
            assert call.invalid is None
            assert len(call.completion_ids) <= 24


async def test_prompt_is_what_the_models_own_template_renders(gateway: Gateway) -> None:
    (call,) = await calls_of(gateway, 0, tools=[ADD_TOOL])
    tokenizer = gateway.renderer.tokenizer
    rendered = tokenizer.apply_chat_template(
        QUESTION, tools=[ADD_TOOL], add_generation_prompt=True, return_dict=False
    )
    assert list(call.prompt_ids) == rendered
