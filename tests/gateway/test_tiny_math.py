"""The gateway over the real engine and the model that comes with the project."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.gateway.fuzzing import BODIES
from tests.kit.builders import trace
from tests.kit.examples import grid
from tests.kit.toy import ADD_TOOL
from tests.training.configured import training
from tuner.gateway import ChatRenderer, Gateway, SamplingDefaults
from tuner.gateway.dialects import anthropic, chat, responses
from tuner.gateway.service import StreamReply
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


@pytest.mark.long
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


NUMBERS = ["-1", "0", "1", "2", "1e-320", "1e-40", "1e18", "2147483648", "9223372036854775808"]
NUMBERS += ["NaN", "-Infinity", "1e400", "-1" + "0" * 30, "1" + "0" * 400, "1" + "0" * 5000]
NUMBERS += ['"many"', "[1]", "[1" + "0" * 30 + "]", "true"]
NUMBERS += [f'{{"{digits}": 1}}' for digits in ("1", "9" * 25, "9" * 5000)]
FIELDS = {
    "/v1/chat/completions": chat.CHAT_FIELDS,
    "/v1/completions": {**chat.SHARED_FIELDS, "best_of": None, "logprobs": None},
    "/v1/responses": responses.RESPONSES_FIELDS,
    "/v1/messages": anthropic.MESSAGES_FIELDS,
}


@grid("path", FIELDS, quick=2)
async def test_every_number_in_every_field_is_used_or_refused_by_name(
    gateway: Gateway, path: str
) -> None:
    limits = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
    limit = {"max_output_tokens" if "responses" in path else "max_tokens": 1}
    first = {**BODIES[path][0], "model": "tiny"}
    answered = set()
    for field in FIELDS[path].keys() - {"model"}:
        session = gateway.open_session(field, defaults=SamplingDefaults(max_tokens=1))
        rest = {key: value for key, value in first.items() if key not in {field, *limits}}
        rest |= {"logprobs": True} if (field, "chat" in path) == ("top_logprobs", True) else {}
        rest |= {} if field in limits else limit
        for number in NUMBERS:
            body = f'{json.dumps(rest)[:-1]}, "{field}": {number}}}'.encode()
            headers = {"authorization": f"Bearer {session.key}"}
            reply = await gateway.handle("POST", path, headers, body)
            if isinstance(reply, StreamReply):
                await reply.events.aclose()
                continue
            assert reply.status in (200, 400), (field, number[:40], reply.body)
            if reply.status == 200:
                answered.add(field)
            else:
                assert field in json.loads(reply.body)["error"]["message"], number[:40]
    assert {"temperature", "top_p", "top_k", "seed"} <= answered
