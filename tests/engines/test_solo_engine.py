"""One request at a time: deterministic runs, and models without keys and values per token."""

import asyncio
import logging

import pytest
import torch

from tests.engines.models import (
    CONFIGS,
    change_weights,
    crowd,
    error,
    generate_all,
    make_engine,
    make_model,
    prompt,
    until,
)
from tests.models.shapes import tiny_model
from tuner.engines import SamplingParams
from tuner.errors import ConfigError


@pytest.mark.long
async def test_deterministic_results_do_not_depend_on_who_else_is_there():
    model = make_model()
    requests = list(crowd())
    together = await generate_all(make_engine(model, deterministic=True), requests)
    for (ids, sampling), got in zip(requests, together, strict=True):
        engine = make_engine(model, deterministic=True)
        await engine.generate(ids[:-1], SamplingParams(max_tokens=3), "session")
        alone = await engine.generate(ids, sampling, "session")
        assert alone == got
        assert error(model, ids, got, sampling) < 1e-5


async def test_deterministic_results_survive_other_requests_being_cancelled():
    model = make_model()
    ids, sampling = prompt(30), SamplingParams(max_tokens=20, seed=1)
    alone = await make_engine(model, deterministic=True).generate(ids, sampling, "session")
    engine = make_engine(model, deterministic=True)
    other = asyncio.ensure_future(engine.generate(prompt(9), sampling, "session"))
    task = asyncio.ensure_future(engine.generate(ids, sampling, "session"))
    await until(lambda: engine.stats.sampled_tokens >= 3)
    other.cancel()
    assert await task == alone


async def test_an_update_in_flight_is_right_in_deterministic_mode():
    model = make_model()
    engine = make_engine(model, deterministic=True)
    ids, sampling = prompt(30), SamplingParams(max_tokens=40, seed=1)
    task = asyncio.ensure_future(engine.generate(ids, sampling, "session"))
    await until(lambda: engine.stats.sampled_tokens >= 10)
    async with engine.pause():
        change_weights(model)
        await engine.update_weights(1)
    got = await task
    change = got.versions.index(1)
    logits = model(input_ids=torch.tensor([[*ids, *got.completion_ids]])).logits
    wanted = logits[0, len(ids) - 1 : -1].log_softmax(-1)
    wanted = wanted.gather(-1, torch.tensor(got.completion_ids)[:, None])[change:, 0]
    torch.testing.assert_close(torch.tensor(got.logprobs[change:]), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba", "bloom", "bamba"])
async def test_models_that_rows_cannot_hold_are_served_alone_and_it_is_said(kind, caplog):
    model = make_model(kind) if kind in CONFIGS else tiny_model(kind)
    with caplog.at_level(logging.WARNING):
        engine = make_engine(model)
    assert not engine.batched
    assert "one at a time" in caplog.text
    requests = list(crowd())[:6]
    for (ids, sampling), got in zip(requests, await generate_all(engine, requests), strict=True):
        assert error(model, ids, got, sampling) < 1e-4
        assert got.cached_tokens == 0


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["bert", "blt", "xlnet"])
def test_a_model_that_generates_something_else_than_its_forward_pass_gives_is_refused(
    kind, deterministic
):
    with pytest.raises(ConfigError, match="does not generate what a plain forward pass gives: "):
        make_engine(tiny_model(kind), deterministic=deterministic)
