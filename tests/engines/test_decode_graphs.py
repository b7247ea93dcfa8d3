"""Passes of few shapes; on a CPU they are computed as they would be recorded on a GPU."""

import asyncio

import pytest
import torch

from tests.engines.models import error, generate_all, make_engine, make_model, prompt, until
from tuner.engines import SamplingParams
from tuner.engines.transformers.passes import PassGraphs


def in_few_shapes(engine):
    """The engine with what a GPU records; returns the shapes of the steps, as they come."""
    runner = engine._runner
    runner._rows._shares = False  # nor does a GPU
    runner._graphs = PassGraphs(runner._pass, runner._cache, torch.device("cpu"))
    shapes, compute = [], runner._pass

    def seen(ids, positions, placement):
        shapes.append((*ids.shape, placement.kv_length))
        return compute(ids, positions, placement)

    runner._graphs._compute = seen
    return shapes


@pytest.mark.long
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
    assert columns == {1, 16, 32, 128}  # beginnings of prompts were kept, some all but a token
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


@pytest.mark.long
async def test_prompts_that_come_one_by_one_are_computed_together():
    """Answers of different lengths, each followed by the next turn of its agent."""
    passes = {}
    for recorded in (False, True):
        model = make_model()
        engine = make_engine(model, max_slots=16)
        shapes = in_few_shapes(engine) if recorded else []
        advance, prefills = engine._runner._advance, []

        def counted(version, runner=engine._runner, advance=advance, prefills=prefills):
            if runner._decoding < len(runner.active):
                prefills.append(None)
            return advance(version)

        engine._runner._advance = counted

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
    assert passes[True] < 0.8 * passes[False]


async def test_prompts_are_computed_in_the_rows_where_they_are():
    model = make_model()
    engine = make_engine(model, max_model_len=200, max_slots=6)
    shapes = in_few_shapes(engine)
    sampling = SamplingParams(max_tokens=60, seed=1)
    first = asyncio.create_task(engine.generate(prompt(30), sampling, "first"))
    await until(lambda: len(shapes) >= 5)
    # Rows 1 to 3 are computed as four beside row 0, which goes on afterwards.
    asked = [(prompt(20 + n, n), SamplingParams(max_tokens=3 + n, seed=n)) for n in (3, 4, 5)]
    for (ids, own), answer in zip(asked, await generate_all(engine, asked), strict=True):
        assert error(model, ids, answer, own) < 1e-4
    assert (4, 32, 128) in shapes[5:]
    assert error(model, prompt(30), await first, sampling) < 1e-4


async def test_a_prompt_with_one_token_left_is_not_taken_for_one_that_is_decoded():
    model = make_model()
    engine = make_engine(model, max_slots=4, prefill_tokens=20)
    in_few_shapes(engine)
    sampling = SamplingParams(max_tokens=40, seed=1)
    first = asyncio.create_task(engine.generate(prompt(20), sampling, "first"))
    await asyncio.sleep(0)
    ids, own = prompt(41, 2), SamplingParams(max_tokens=5, seed=2)  # 20, 20 and 1
    assert error(model, ids, await engine.generate(ids, own, "second"), own) < 1e-4
    assert error(model, prompt(20), await first, sampling) < 1e-4


async def test_passes_over_many_tokens_are_not_recorded(monkeypatch):
    monkeypatch.setattr("tuner.engines.transformers.passes._TOKENS", 256)
    model = make_model()
    engine = make_engine(model, max_model_len=200, max_slots=4)
    shapes = in_few_shapes(engine)
    asked = [(prompt(n, n), SamplingParams(max_tokens=20, seed=n)) for n in (65, 80, 150)]
    for (ids, sampling), answer in zip(asked, await generate_all(engine, asked), strict=True):
        assert error(model, ids, answer, sampling) < 1e-4
    assert {columns for _, columns, _ in shapes} == {1}
