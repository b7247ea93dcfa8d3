"""Decode steps of few shapes; on a CPU they are computed as they would be recorded on a GPU."""

import asyncio

import pytest
import torch

from tests.engines.models import error, generate_all, make_engine, make_model, prompt
from tuner.engines import SamplingParams
from tuner.engines.transformers.graphs import DecodeGraphs


def in_few_shapes(engine):
    """The engine with what a GPU records; returns the shapes of the steps, as they come."""
    runner = engine._runner
    runner._graphs = DecodeGraphs(runner._pass, runner._cache, torch.device("cpu"))
    shapes, compute = [], runner._pass

    def seen(ids, positions, placement):
        shapes.append((*ids.shape, placement.kv_length))
        return compute(ids, positions, placement)

    runner._graphs._compute = seen
    return shapes


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
async def test_rows_and_lengths_are_rounded_up_and_log_probs_are_the_same(kind):
    model = make_model(kind)
    engine = make_engine(model, max_model_len=200, max_slots=6)
    shapes = in_few_shapes(engine)
    # Some wait for a row, and rows that keep prefixes are beside those that are computed.
    asked = [
        (prompt(40 + 9 * n, n // 3), SamplingParams(max_tokens=5 + 11 * n, seed=n))
        for n in range(8)
    ]
    for _ in range(2):
        got = await generate_all(engine, asked)
        for (ids, sampling), answer in zip(asked, got, strict=True):
            assert error(model, ids, answer, sampling) < 1e-4
    rows, columns, lengths = (set(sizes) for sizes in zip(*shapes, strict=True))
    assert columns == {1}
    assert rows == {1, 2, 4, 6}
    assert lengths == {128, 200}  # 256 is more than there is room for


async def test_rows_too_many_change_nothing_that_is_kept():
    model = make_model()
    engine = make_engine(model, max_slots=4)
    in_few_shapes(engine)
    kept = prompt(60)
    await generate_all(engine, [(kept, SamplingParams(max_tokens=1))])
    # Three rows are computed as four; the fourth is that of the first prompt.
    others = [(prompt(30, n), SamplingParams(max_tokens=20, seed=n)) for n in (1, 2, 3)]
    await generate_all(engine, others)
    sampling = SamplingParams(max_tokens=9, seed=4)
    (again,) = await generate_all(engine, [([*kept, 7], sampling)])
    assert again.cached_tokens == 60
    assert error(model, [*kept, 7], again, sampling) < 1e-4


async def test_prompts_that_come_one_by_one_are_computed_together():
    """Answers of different lengths, each followed by the next turn of its agent."""
    passes = {}
    for recorded in (False, True):
        model = make_model()
        engine = make_engine(model, max_slots=16)
        shapes = in_few_shapes(engine) if recorded else []
        compute, prefills = engine._runner._prefill, []

        def prefill(version, compute=compute, prefills=prefills):
            prefills.append(None)
            return compute(version)

        engine._runner._prefill = prefill

        async def agent(n, engine=engine, model=model):
            ids = prompt(20, n)
            for turn in range(4):
                sampling = SamplingParams(max_tokens=8 + 3 * n, seed=turn)
                answer = await engine.generate(ids, sampling, f"session-{n}")
                assert error(model, ids, answer, sampling) < 1e-4
                ids = [*ids, *answer.completion_ids, *prompt(3, turn)]

        await asyncio.gather(*(agent(n) for n in range(12)))
        passes[recorded] = len(prefills)
        assert not recorded or shapes
    assert passes[True] < 0.6 * passes[False]
