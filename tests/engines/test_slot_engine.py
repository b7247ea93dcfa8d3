"""Log-probs, prefix reuse and weight updates of the batched engine, against plain passes."""

import asyncio
import logging
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engines.models import (
    SETTINGS,
    VOCABULARY,
    always_drafting,
    change_weights,
    crowd,
    error,
    generate_all,
    make_engine,
    make_model,
    prompt,
    until,
)
from tests.kit.examples import few, grid
from tuner.engines import SamplingParams
from tuner.engines.transformers import slot_rows as rows
from tuner.engines.transformers.kv_cache import Placement, SlotCache
from tuner.engines.transformers.passes import RowPass, rows_agree
from tuner.engines.transformers.slots import SlotRunner
from tuner.errors import ConfigError, ContextLengthError
from tuner.runs.stack import context_length

BATCHED = ["qwen3", "llama", "mistral", "gemma3", "gemma4"]


@grid("kind", BATCHED, quick=2)
async def test_log_probs_equal_a_fresh_forward_before_and_after_an_update(kind):
    model = make_model(kind)
    engine = make_engine(model)
    assert engine.batched
    for version in range(2):
        for _ in range(2):
            requests = list(crowd())
            results = await generate_all(engine, requests)
            for (ids, sampling), got in zip(requests, results, strict=True):
                assert error(model, ids, got, sampling) < 1e-5
                assert set(got.versions) == {version}
        assert engine.stats.prompt_tokens_reused > 0
        async with engine.pause():
            change_weights(model)
            await engine.update_weights(version + 1)
    assert engine.stats.unannounced_updates == 0


@pytest.mark.parametrize("announced", [True, False])
async def test_without_eviction_log_probs_would_be_wrong_after_an_update(announced, monkeypatch):
    """The proof that the test above can fail: with the eviction cut out, errors are large."""
    model = make_model()
    engine = make_engine(model)
    ids, sampling = prompt(40), SamplingParams(max_tokens=8)
    await engine.generate(ids, sampling, "session")
    change_weights(model)
    monkeypatch.setattr(SlotRunner, "evict", lambda self: None)
    if announced:
        await engine.update_weights(1)
    got = await engine.generate(ids, sampling, "session")
    assert got.cached_tokens == 39
    assert error(model, ids, got, sampling) > 1e-3


@pytest.mark.parametrize("fused", [True, False])
async def test_a_forgotten_update_still_evicts(fused):
    model = make_model()
    engine = make_engine(model)
    ids, sampling = prompt(40), SamplingParams(max_tokens=8)
    await engine.generate(ids, sampling, "session")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
    model.train()
    model(input_ids=torch.tensor([ids])).logits.logsumexp(-1).sum().backward()
    optimizer.step()
    got = await engine.generate(ids, sampling, "session")
    assert got.cached_tokens == 0
    assert error(model, ids, got, sampling) < 1e-5
    assert engine.stats.unannounced_updates == 1


@pytest.mark.parametrize("announced", [True, False])
async def test_an_update_in_flight_changes_version_and_distribution_at_one_token(announced):
    before, model = make_model(), make_model()
    engine = make_engine(model)
    requests = [
        (prompt(30), SamplingParams(max_tokens=40, seed=seed, stop=("never",))) for seed in range(5)
    ]
    running = asyncio.ensure_future(generate_all(engine, requests))
    await until(lambda: engine.stats.sampled_tokens >= 60)
    async with engine.pause():
        change_weights(model)
        if announced:
            await engine.update_weights(7)
        sampled = engine.stats.sampled_tokens
        so_far = {r.sampling.seed: len(r.completion_ids) for r in engine._in_flight}
        await asyncio.sleep(0.01)
        assert engine.stats.sampled_tokens == sampled
    results = await running
    assert engine.stats.unannounced_updates == (not announced)
    for (ids, sampling), got in zip(requests, results, strict=True):
        change = so_far[sampling.seed]
        assert 0 < change < 40
        assert got.versions == (0,) * change + (7 if announced else 0,) * (40 - change)
        for network, part in ((before, slice(0, change)), (model, slice(change, 40))):
            logits = network(input_ids=torch.tensor([[*ids, *got.completion_ids]])).logits
            wanted = logits[0, len(ids) - 1 : -1].log_softmax(-1)
            wanted = wanted.gather(-1, torch.tensor(got.completion_ids)[:, None])[part, 0]
            torch.testing.assert_close(torch.tensor(got.logprobs[part]), wanted, atol=1e-5, rtol=0)


async def test_weights_changed_during_a_forward_pass_spoil_no_token():
    """A change in the middle of a pass leaves a mixture behind: the pass is thrown away."""
    model = make_model()
    engine = make_engine(model)
    ids, sampling = prompt(20), SamplingParams(max_tokens=6)
    passes = 0

    def change_once(*_):
        nonlocal passes
        passes += 1
        if passes == 4:
            change_weights(model)

    handle = model.model.layers[0].register_forward_hook(change_once)
    got = await engine.generate(ids, sampling, "session")
    handle.remove()
    assert engine.stats.unannounced_updates == 1
    logits = model(input_ids=torch.tensor([[*ids, *got.completion_ids]])).logits
    wanted = logits[0, len(ids) - 1 : -1].log_softmax(-1)
    wanted = wanted.gather(-1, torch.tensor(got.completion_ids)[:, None])[3:, 0]
    torch.testing.assert_close(torch.tensor(got.logprobs[3:]), wanted, atol=1e-5, rtol=0)


async def test_one_of_a_group_computes_the_prompt_and_the_others_copy():
    model = make_model()
    engine = make_engine(model)
    ids = prompt(100)
    results = await generate_all(
        engine, [(ids, SamplingParams(max_tokens=4, seed=seed)) for seed in range(8)]
    )
    assert sorted(got.cached_tokens for got in results) == [0] + [99] * 7
    assert engine.stats.prompt_tokens_computed == 100
    assert engine.stats.prompt_tokens_reused == 7 * 99
    assert len({got.completion_ids for got in results}) > 1


async def test_the_next_turn_reuses_the_conversation_so_far():
    model = make_model()
    engine = make_engine(model)
    ids = prompt(30)
    for turn in range(4):
        sampling = SamplingParams(max_tokens=10, seed=turn)
        got = await engine.generate(ids, sampling, "session")
        assert error(model, ids, got, sampling) < 1e-5
        # The last sampled token was never computed, so it is not there to be reused.
        assert got.cached_tokens == (0 if turn == 0 else len(ids) - 6)
        ids = [*ids, *got.completion_ids, *prompt(5, seed=turn + 1)]


async def test_conversations_that_end_at_different_times_are_all_continued_rightly():
    model = make_model()
    engine = make_engine(model)
    conversations = [prompt(10 + n, n) for n in range(5)]
    for turn in range(3):
        requests = [
            (ids, SamplingParams(max_tokens=3 + (7 * n + turn) % 5, seed=turn))
            for n, ids in enumerate(conversations)
        ]
        results = await generate_all(engine, requests)
        for (ids, sampling), got in zip(requests, results, strict=True):
            assert error(model, ids, got, sampling) < 1e-5
            assert (got.cached_tokens > 0) == (turn > 0)
        conversations = [
            [*ids, *got.completion_ids, *prompt(3, turn)]
            for ids, got in zip(conversations, results, strict=True)
        ]


async def test_the_prefix_unused_for_longest_gives_way_first():
    engine = make_engine(make_model(), max_slots=3)

    async def cached(conversation):
        sampling = SamplingParams(max_tokens=1)
        return (await engine.generate(prompt(20, conversation), sampling, "s")).cached_tokens

    assert [await cached(n) for n in (1, 2, 3)] == [0, 0, 0]
    assert await cached(1) == 19
    assert await cached(4) == 0
    assert await cached(1) == 19
    assert await cached(2) == 0


async def test_a_shorter_prompt_of_a_finished_conversation_is_right():
    model = make_model()
    engine = make_engine(model)
    await engine.generate(prompt(60), SamplingParams(max_tokens=10), "session")
    ids, sampling = prompt(60)[:20], SamplingParams(max_tokens=10, seed=3)
    got = await engine.generate(ids, sampling, "session")
    assert got.cached_tokens == 19
    assert error(model, ids, got, sampling) < 1e-5


async def test_more_requests_than_slots_take_turns():
    model = make_model()
    engine = make_engine(model, max_slots=3)
    requests = list(crowd())
    results = await generate_all(engine, requests)
    for (ids, sampling), got in zip(requests, results, strict=True):
        assert error(model, ids, got, sampling) < 1e-5
    assert engine._runner._cache.slots == 3


async def test_a_long_prompt_is_computed_in_parts():
    model = make_model("gemma3")
    engine = make_engine(model, prefill_tokens=16)
    steps = []
    model.register_forward_pre_hook(
        lambda _, __, kwargs: steps.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    ids, sampling = prompt(100), SamplingParams(max_tokens=5)
    got = await engine.generate(ids, sampling, "session")
    assert steps == [16] * 6 + [4] + [1] * 4
    assert error(model, ids, got, sampling) < 1e-5


async def test_prompts_are_computed_beside_those_of_about_their_length():
    model = make_model("gemma3")
    engine = make_engine(model)
    passes = []
    model.register_forward_pre_hook(
        lambda _, __, kwargs: passes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    asked = [
        (prompt(length, seed), SamplingParams(max_tokens=2, seed=seed))
        for seed, length in enumerate((100, 20, 90, 1, 25))
    ]
    answers = await generate_all(engine, asked)
    assert passes == [(2, 100), (2, 25), (5, 1), (1, 1)]
    for (ids, sampling), got in zip(asked, answers, strict=True):
        assert error(model, ids, got, sampling) < 1e-5


async def test_no_memory_is_taken_ahead_of_need():
    engine = make_engine(make_model(), max_model_len=100_000, max_slots=1000)
    await engine.generate(prompt(20), SamplingParams(max_tokens=5), "session")
    assert (engine._runner._cache.slots, engine._runner._cache.capacity) == (4, 128)


@pytest.mark.parametrize("kind", BATCHED)
async def test_bfloat16_log_probs_are_those_of_its_own_float32_logits(kind):
    model = make_model(kind, torch.bfloat16)
    engine = make_engine(model)
    assert engine.batched
    requests = list(crowd())
    for (ids, sampling), got in zip(requests, await generate_all(engine, requests), strict=True):
        if sampling.top_p == 1.0 and sampling.top_k == -1 and sampling.temperature:
            assert error(model, ids, got, sampling) < 0.5


async def test_eager_attention_takes_the_same_masks():
    model = make_model("gemma3")
    model.set_attn_implementation("eager")
    engine = make_engine(model)
    assert engine.batched
    for ids, sampling in list(crowd())[:3]:
        got = await engine.generate(ids, sampling, "session")
        assert error(model, ids, got, sampling) < 1e-5


async def test_the_same_seed_gives_the_same_completion_alone_and_in_a_crowd():
    model = make_model()
    requests = list(crowd())
    together = await generate_all(make_engine(model), requests)
    for (ids, sampling), got in zip(requests, together, strict=True):
        alone = await make_engine(model).generate(ids, sampling, "session")
        assert alone.completion_ids == got.completion_ids
        torch.testing.assert_close(
            torch.tensor(alone.logprobs), torch.tensor(got.logprobs), atol=1e-5, rtol=0
        )


async def test_training_works_beside_the_engine():
    """Nothing that a forward pass of the engine leaves in the model is unfit for autograd."""
    model = make_model("gemma3")
    engine = make_engine(model)
    await engine.generate(prompt(20), SamplingParams(max_tokens=5), "session")
    model.train()
    model(input_ids=torch.tensor([prompt(20)])).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def limited(engine, tokens):
    """Limit the tokens with memory for keys and values; returns their number in each pass."""
    runner, found = engine._runner, []
    runner.cache_limit = tokens
    compute = runner._pass

    def counted(*args):
        logits = compute(*args)
        found.append(runner._rows.allocated)
        return logits

    runner._pass = counted
    return found


@pytest.mark.long
@pytest.mark.parametrize("how", ["prefixes", "rows", "blocks"])
async def test_many_long_requests_stay_within_the_memory_and_all_end_exactly(how, monkeypatch):
    monkeypatch.setattr(rows, "_HEADROOM", 1)
    model = make_model()
    if how == "rows":
        model.set_attn_implementation("eager")
    engine = make_engine(model, deterministic=how == "blocks")
    peak = limited(engine, 600)
    requests = [
        (prompt(50) + prompt(9 + n, n % 5), SamplingParams(max_tokens=100, seed=n))
        for n in range(8)
    ]
    async with asyncio.timeout(60):
        results = await generate_all(engine, requests)
    assert 500 < max(peak) <= 600
    assert engine.stats.preempted > 0
    for (ids, sampling), got in zip(requests, results, strict=True):
        assert len(got.completion_ids) == 100
        assert error(model, ids, got, sampling) < 1e-5
    if how == "blocks":
        assert results == await generate_all(make_engine(model, deterministic=True), requests)


async def test_what_finished_requests_left_gives_way_before_a_request_waits():
    engine = make_engine(make_model())
    limited(engine, 4 * 129)

    async def cached(conversation):
        sampling = SamplingParams(max_tokens=2, seed=conversation)
        return (await engine.generate(prompt(100, conversation), sampling, "s")).cached_tokens

    assert [await cached(n) for n in (1, 2, 3, 4, 1)] == [0, 0, 0, 0, 99]
    assert [await cached(n) for n in (5, 1, 2)] == [0, 99, 0]
    # Two rows give way to a long request, and not the one that was used last.
    await engine.generate(prompt(200, 9), SamplingParams(max_tokens=2), "s")
    assert await cached(2) == 99
    assert engine.stats.preempted == 0


async def test_a_part_of_a_divided_prefix_is_not_stored_twice():
    engine, ids = make_engine(make_model()), prompt(220)
    sampling = SamplingParams(max_tokens=4)
    await generate_all(engine, [(ids, sampling)] * 2)
    await engine.generate([*ids[:120], *prompt(9, 1)], sampling, "s")
    held = engine._runner._rows
    row, other = (row for row in range(held.count) if held.base[row] > 120)
    held.leaf[other], held.base[other], held.computed[other] = None, 0, 0
    before, own = held.allocated, held.computed[row] - held.base[row]
    held.seal(row)
    assert held.allocated == before + own > before


async def test_a_request_that_is_too_long_for_the_memory_fails_alone():
    model = make_model()
    engine = make_engine(model, max_model_len=512)
    peak = limited(engine, 300)
    requests = [
        (prompt(length, seed), SamplingParams(max_tokens=tokens, seed=seed))
        for seed, (length, tokens) in enumerate([(100, 20), (400, 9), (150, 200), (100, 120)])
    ]
    asked = [engine.generate(ids, sampling, "s") for ids, sampling in requests]
    async with asyncio.timeout(60):
        results = await asyncio.gather(*asked, return_exceptions=True)
    for failed, tokens in ((results[1], 400), (results[2], range(265, 301))):
        assert isinstance(failed, ContextLengthError)
        said = re.search(r"has (\d+) tokens.* for 300: lower model.max_model_len", str(failed))
        assert said is not None
        assert int(said[1]) in (tokens if isinstance(tokens, range) else [tokens])
    for n in (0, 3):
        assert error(model, requests[n][0], results[n], requests[n][1]) < 1e-5
    assert max(peak) <= 300


requests_and_times = st.lists(
    st.tuples(
        st.integers(0, 3),  # which conversation the prompt is a prefix of
        st.integers(1, 60),  # prompt length
        st.sampled_from(SETTINGS),
        st.integers(1, 25),  # max_tokens
        st.integers(0, 12),  # steps to wait before the request is made
        st.one_of(st.none(), st.integers(0, 10)),  # steps after which it is cancelled
    ),
    min_size=1,
    max_size=14,
)
_MODELS = [make_model(kind) for kind in ("gemma3", "mistral", "qwen3")]
"""With layers of two kinds, computed by transformers' own code, and of one, by ours."""


@settings(max_examples=few(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(_MODELS),
    requests_and_times,
    st.integers(1, 6),
    st.sampled_from([8, 64, 4096]),
    st.sampled_from(
        [(2, 4, 0, 1), (2, 16, 64, 256), (5, 8, 0, 1 << 17), (5, 128, 8192, 1), (96, 128, 8192, 1)]
    ),
    st.booleans(),
    st.sampled_from([rows.NO_LIMIT, 600, 150]),
)
def test_any_order_of_arrivals_and_cancellations_gives_right_log_probs(
    model, plan, slots, budget, room, drafting, limit
):
    async def one(engine, conversation, length, base, max_tokens, wait, cancel, seed):
        ids = prompt(10)[: min(length, 10)] + prompt(60, conversation)[10:length]
        sampling = SamplingParams(**{**base.__dict__, "max_tokens": max_tokens, "seed": seed})
        for _ in range(wait):
            await asyncio.sleep(0)
        task = asyncio.ensure_future(engine.generate(ids, sampling, "session"))
        if cancel is not None:
            for _ in range(cancel):
                await asyncio.sleep(0)
            task.cancel()
        try:
            got = await task
        except asyncio.CancelledError:
            return
        assert len(got.completion_ids) == max_tokens
        assert all(0 <= token < VOCABULARY for token in got.completion_ids)
        assert error(model, ids, got, sampling) < 1e-5

    async def main():
        engine = make_engine(model, max_slots=slots, prefill_tokens=budget)
        peak = limited(engine, limit)
        engine._prompt_token_seconds = engine._decode_seconds = 0.0  # stay on the event loop
        async with asyncio.timeout(60):
            await asyncio.gather(*(one(engine, *item, n) for n, item in enumerate(plan)))
            await asyncio.sleep(0.001)
        stats = engine.stats
        assert (stats.running, stats.waiting) == (0, 0)
        assert max(peak, default=0) <= limit

    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(
            ("_WORTH_SHARING", "FIRST_CAPACITY", "_LITTLE", "_OPERATION"), room, strict=True
        ):
            patch.setattr(rows, name, value)
        if drafting:
            always_drafting(patch)
        asyncio.run(main())


@pytest.mark.parametrize("kind", ["phi3", "llama_dynamic"])
async def test_where_frequencies_depend_on_length_all_below_the_switch_is_exact_and_more_refused(
    kind,
):
    model = make_model(kind)
    engine = make_engine(model, max_model_len=24)
    assert engine.batched
    requests = [
        (prompt(length, seed=length), SamplingParams(max_tokens=24 - length, seed=length))
        for length in (3, 20, 12, 7, 23)
    ]
    for (ids, sampling), got in zip(requests, await generate_all(engine, requests), strict=True):
        assert len(ids) + len(got.completion_ids) == 24
        assert error(model, ids, got, sampling) < 1e-4
    for deterministic in (False, True):
        with pytest.raises(ConfigError, match=r"beyond 24 .*model\.max_model_len to 24 at most"):
            make_engine(model, max_model_len=25, deterministic=deterministic)


def test_rows_whose_window_differs_from_the_models_are_noticed_past_the_window():
    model = make_model("mistral")
    for way in ({}, {"shares": True}, {"shares": True, "plain": True}):
        assert rows_agree(model, RowPass(model, {"sliding_attention": 6}, **way)) is None
        wrong = rows_agree(model, RowPass(model, {"full_attention": None}, **way))
        assert "logits would differ" in str(wrong)


def test_the_length_that_is_not_set_ends_where_frequencies_change_and_it_is_said(caplog):
    config, setting = make_model("phi3").config, "model.max_model_len"
    with caplog.at_level(logging.WARNING):
        assert context_length(None, config, setting) == 24
    assert "model.max_model_len is not set and becomes 24: beyond 24 positions" in caplog.text
    assert context_length(24, config, setting) == 24
    with pytest.raises(ConfigError, match=r"= 25, but beyond 24 .*'longrope'.* to 24 at most"):
        context_length(25, config, setting)
    layered = make_model("gemma3").config
    layered.rope_parameters["full_attention"] = dict(config.rope_parameters)
    assert context_length(None, layered, setting) == 24
    assert context_length(None, make_model("qwen3").config, setting) == 512


async def test_agents_whose_last_words_are_changed_keep_their_rows_where_all_are_taken():
    model = make_model()
    engine = make_engine(model, max_slots=4)
    histories = [prompt(40, n) for n in range(4)]
    for turn in range(3):
        sampling = SamplingParams(max_tokens=6, seed=turn)
        answers = await generate_all(engine, [(ids, sampling) for ids in histories])
        for n, (ids, answer) in enumerate(zip(histories, answers, strict=True)):
            assert error(model, ids, answer, sampling) < 1e-5
            if turn:
                assert answer.cached_tokens >= len(ids) - 10
            # All but the last two tokens come back, and something else after them.
            histories[n] = [*ids, *answer.completion_ids[:-2], *prompt(6, 9 + n)]


def test_rows_of_layers_of_one_shape_are_moved_together():
    cache = SlotCache(20, 2, 4)
    cache.placement = Placement(slice(0, 2), 4, torch.arange(2) * cache.width, None)
    for n, layer in enumerate(cache.layers):
        layer.update(*torch.randn(2, 2, 3, 1, 8 if n < 10 else 4))
    stored = [states for layer in cache.layers for states in (layer.keys, layer.values)]
    assert not cache.together
    cache.grow(4, 8)
    assert cache.together
    assert sorted(len(block) for block in cache._parts()) == [4, 4, 16, 16]
    cache.copy(1, 3, 4)
    cache.swap(0, 1, 4)
    grown = [states for layer in cache.layers for states in (layer.keys, layer.values)]
    for before, after in zip(stored, grown, strict=True):
        assert after.shape == (4, 9, *before.shape[2:])
        assert torch.equal(after[[0, 1, 3], :4], before[[1, 0, 1], :4])
        assert not after[2].any()
        assert not after[:, 4:].any()
