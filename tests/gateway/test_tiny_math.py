"""The gateway over the real engine and the model that comes with the project."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.kit.builders import trace
from tests.kit.toy import ADD_TOOL
from tests.training.configured import training
from tuner.gateway import ChatRenderer, Gateway, SamplingDefaults
from tuner.traces import Call
from tuner.training.batch import build_batch
from tuner.training.trainer import PolicyTrainer

MODEL = Path(__file__).parents[2] / "models" / "tiny_math"
QUESTION = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples?"}]


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tuner.engines.transformers.engine import TransformersEngine

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    engine = TransformersEngine(model, tokenizer, max_model_len=1024, deterministic=True)
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


class Sum(BaseModel):
    model_config = ConfigDict(extra="forbid")

    first: int = Field(ge=0, le=999)
    unit: Literal["apples", "coins"]


@pytest.mark.parametrize("seed", range(3))
async def test_forms_are_kept_and_their_log_probs_are_exact(gateway: Gateway, seed: int) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "sum", "schema": Sum.model_json_schema(), "strict": True},
    }
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    (answered,) = await calls_of(gateway, seed, response_format=form, max_tokens=200)
    tool = {"type": "function", "function": {"name": "s", "parameters": Sum.model_json_schema()}}
    (called,) = await calls_of(
        gateway,
        seed,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
        extra_body=quiet,
    )
    engine: Any = gateway.engine
    trainer = PolicyTrainer(
        engine._model, training(total_steps=1, kl="none"), grammars=engine.grammars
    )
    traces = [trace(0, i, [call], reward=float(i)) for i, call in enumerate((answered, called))]
    logps = trainer.compute_logp(build_batch(traces))
    for call, logp in zip((answered, called), logps, strict=True):
        assert call.constrained
        assert logp.tolist() == pytest.approx(call.logprobs, abs=5e-5)  # float32
    assert (answered.finish_reason, called.finish_reason) == ("stop", "tool_calls")
    Sum.model_validate_json(answered.response["content"])
    for tool_call in called.response["tool_calls"]:
        assert tool_call["function"]["name"] == "s"
        Sum.model_validate(json.loads(tool_call["function"]["arguments"]))
