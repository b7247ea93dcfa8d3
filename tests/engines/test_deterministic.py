"""Deterministic engines: the same bits whatever else is computed, with rows computed together."""

import asyncio
import logging
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.engines.models import SETTINGS, error, generate_all, make_engine, make_model, prompt
from tuner.engines.transformers.fixed_sizes import fixed_sizes
from tuner.engines.transformers.passes import row_pass_of

LONG = prompt(300, seed=99)


@st.composite
def mixes(draw):
    """Requests that share much, little or nothing, and two ways to group them into waves."""
    requests = [
        (
            LONG[: draw(st.sampled_from([0, 5, 60, 128, 200, 300]))]
            + prompt(draw(st.integers(1, 40)), seed=draw(st.integers(0, 3))),
            replace(
                draw(st.sampled_from(SETTINGS)),
                max_tokens=draw(st.sampled_from([1, 3, 12])),
                seed=seed,
            ),
        )
        for seed in range(draw(st.integers(2, 10)))
    ]
    ways = []
    for _ in range(2):
        order = draw(st.permutations(range(len(requests))))
        size = draw(st.integers(1, len(requests)))
        ways.append([order[at : at + size] for at in range(0, len(order), size)])
    return requests, ways


@cache
def engines(kind):
    """One with few rows and one with many, of one model."""
    model = make_model(kind)
    return model, [
        make_engine(model, deterministic=True, max_model_len=400, max_slots=slots)
        for slots in (5, 64)
    ]


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
@settings(max_examples=4, deadline=None)
@given(mix=mixes())
def test_company_and_order_change_no_bit_of_an_answer(kind, mix):
    requests, ways = mix
    model, both = engines(kind)

    async def answers(engine, way):
        found = {}
        for wave in way:
            got = await generate_all(engine, [requests[n] for n in wave])
            found.update(zip(wave, got, strict=True))
        return found

    assert all(engine.batched for engine in both)
    one, other = (asyncio.run(answers(engine, way)) for engine, way in zip(both, ways, strict=True))
    assert one == other
    ids, sampling = requests[0]
    assert error(model, ids, one[0], sampling) < 1e-5


async def test_rows_are_computed_together_and_prefixes_are_reused():
    engine = make_engine(make_model(), deterministic=True, max_model_len=400)
    requests = [([*LONG, 1 + n], replace(SETTINGS[0], seed=n)) for n in range(10)]
    got = await generate_all(engine, requests)
    assert engine.stats.steps < 2 * 12 + 10
    assert engine.stats.prompt_tokens_reused >= 9 * len(LONG)
    assert {one.cached_tokens for one in got} == {0}  # it would tell who else was there


class Leaky(nn.Module):
    """Adds a trace of the other tokens of a pass to each."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1e-6 * x.mean(dim=-2, keepdim=True)


async def test_where_bits_depend_on_the_others_requests_are_served_alone_and_it_is_said(caplog):
    model = make_model()
    row_pass = row_pass_of(model)
    assert fixed_sizes(model, row_pass, 256) == ((16, 32, 48, 64, 128, 256), True)
    layer = model.model.layers[-1]
    layer.mlp = Leaky(layer.mlp)
    with caplog.at_level(logging.WARNING):
        engine = make_engine(model, deterministic=True)
    assert not engine.batched
    assert caplog.text.count("one at a time") == 1
    requests = [(prompt(9), replace(SETTINGS[0], seed=n)) for n in range(3)]
    together = await generate_all(engine, requests)
    assert together == [await engine.generate(*request, "session") for request in requests]
