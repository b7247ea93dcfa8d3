"""Ends, cancellation, failures and event loops."""

import asyncio
import re
import threading
import time

import pytest
import torch

from tests.engines.models import (
    VOCABULARY,
    change_weights,
    error,
    generate_all,
    make_engine,
    make_model,
    make_tokenizer,
    prompt,
    until,
)
from tuner.engines import EngineError, SamplingParams
from tuner.engines.transformers.engine import TransformersEngine
from tuner.errors import ConfigError, ContextLengthError

both_ways = pytest.mark.parametrize("deterministic", [False, True])


@both_ways
async def test_the_end_of_sequence_token_stops_and_is_kept(deterministic):
    engine = make_engine(make_model(), deterministic=deterministic)
    free = await engine.generate(prompt(20), SamplingParams(max_tokens=20), "session")
    assert free.finish_reason == "length"
    engine._end_ids = frozenset({free.completion_ids[7], 9999})
    cut = free.completion_ids.index(free.completion_ids[7]) + 1
    got = await engine.generate(prompt(20), SamplingParams(max_tokens=20), "session")
    assert got.finish_reason == "stop"
    assert got.completion_ids == free.completion_ids[:cut]


def test_end_ids_are_the_models_and_the_tokenizers():
    model = make_model()
    model.generation_config.eos_token_id = [5, 6]
    engine = TransformersEngine(model, make_tokenizer(), max_model_len=64)
    assert engine._end_ids == {5, 6, make_tokenizer().eos_token_id}


@both_ways
async def test_a_stop_string_stops_and_its_tokens_are_kept(deterministic):
    engine = make_engine(make_model(), deterministic=deterministic)
    free = await engine.generate(prompt(20), SamplingParams(max_tokens=30), "session")
    decode = make_tokenizer().decode
    stop = re.findall(r"[!-~]{2,4}", decode(free.completion_ids))[-1]
    sampling = SamplingParams(max_tokens=30, stop=("not there", stop))
    got = await engine.generate(prompt(20), sampling, "session")
    assert got.finish_reason == "stop"
    assert got.completion_ids == free.completion_ids[: len(got.completion_ids)]
    assert stop in decode(got.completion_ids)
    assert stop not in decode(got.completion_ids[:-1])


@both_ways
async def test_the_end_of_the_context_is_a_length_stop(deterministic):
    engine = make_engine(make_model(), max_model_len=30, deterministic=deterministic)
    got = await engine.generate(prompt(25), SamplingParams(max_tokens=100), "session")
    assert (len(got.completion_ids), got.finish_reason) == (5, "length")


async def test_a_prompt_without_room_is_refused_with_both_numbers():
    engine = make_engine(make_model(), max_model_len=30)
    with pytest.raises(ContextLengthError, match=r"30 tokens.*max_model_len is 30"):
        await engine.generate(prompt(30), SamplingParams(max_tokens=1), "session")


@pytest.mark.parametrize("ids", [[], [1, VOCABULARY], [-1]])
async def test_prompts_that_the_model_cannot_read_are_refused(ids):
    engine = make_engine(make_model())
    with pytest.raises(EngineError, match="prompt"):
        await engine.generate(ids, SamplingParams(max_tokens=1), "session")


@both_ways
async def test_alternatives_are_of_the_sampled_distribution(deterministic):
    model = make_model()
    engine = make_engine(model, deterministic=deterministic)
    sampling = SamplingParams(max_tokens=6, temperature=0.7, top_k=3, top_logprobs=5)
    plain = SamplingParams(max_tokens=6, seed=1)
    got, other = await generate_all(engine, [(prompt(10), sampling), (prompt(10, 1), plain)])
    assert other.top_logprobs == ()
    assert len(got.top_logprobs) == 6
    for token, logprob, pairs in zip(
        got.completion_ids, got.logprobs, got.top_logprobs, strict=True
    ):
        assert len(pairs) == 3
        assert dict(pairs)[token] == logprob
        assert torch.tensor([p for _, p in pairs]).exp().sum().item() == pytest.approx(1, abs=1e-5)


@both_ways
async def test_a_cancelled_request_frees_its_slot(deterministic):
    engine = make_engine(make_model(), max_slots=1, deterministic=deterministic)
    endless = SamplingParams(max_tokens=240)
    tasks = [
        asyncio.ensure_future(engine.generate(prompt(5, n), endless, "session")) for n in range(3)
    ]
    await until(lambda: engine.stats.sampled_tokens > 3)
    assert (engine.stats.running, engine.stats.waiting) == (1, 2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: engine.stats.running == engine.stats.waiting == 0)
    sampled = engine.stats.sampled_tokens
    await engine.generate(prompt(5), SamplingParams(max_tokens=2), "session")
    assert engine.stats.sampled_tokens == sampled + 2


@both_ways
async def test_a_failing_forward_pass_fails_its_requests_and_not_the_next(deterministic):
    model = make_model()
    engine = make_engine(model, deterministic=deterministic)
    passes = []

    def fail(*_):
        passes.append(1)
        if len(passes) == 3:
            raise RuntimeError("out of luck")

    handle = model.register_forward_pre_hook(fail)
    async with asyncio.timeout(60):
        results = await asyncio.gather(
            *(engine.generate(prompt(9, n), SamplingParams(max_tokens=9), "s") for n in range(4)),
            return_exceptions=True,
        )
    handle.remove()
    assert all(isinstance(r, EngineError) and "out of luck" in str(r) for r in results)
    assert all(isinstance(r.__cause__, RuntimeError) for r in results)
    ids, sampling = prompt(9), SamplingParams(max_tokens=9)
    got = await engine.generate(ids, sampling, "session")
    assert error(model, ids, got, sampling) < 1e-5


async def test_a_failure_while_rows_are_given_out_loses_no_request(monkeypatch):
    engine = make_engine(make_model())

    def fail(*_):
        raise MemoryError("no rows left")

    monkeypatch.setattr(engine._runner._cache, "grow", fail)
    async with asyncio.timeout(60):
        results = await asyncio.gather(
            *(engine.generate(prompt(9, n), SamplingParams(max_tokens=9), "s") for n in range(9)),
            return_exceptions=True,
        )
    assert all(isinstance(r, EngineError) for r in results)


@both_ways
async def test_weights_that_diverged_are_a_clear_error_and_leave_nothing_behind(deterministic):
    model = make_model()
    engine = make_engine(model, deterministic=deterministic)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.fill_(float("nan"))
    await engine.update_weights(1)
    with pytest.raises(EngineError, match="not finite"):
        await engine.generate(prompt(50), SamplingParams(max_tokens=3), "session")
    model.load_state_dict(kept)
    await engine.update_weights(2)
    # Together, so that the short one's row has masked places where the NaNs were.
    requests = [(prompt(n, n), SamplingParams(max_tokens=3)) for n in (5, 30)]
    for (ids, sampling), got in zip(requests, await generate_all(engine, requests), strict=True):
        assert error(model, ids, got, sampling) < 1e-5


async def test_close_fails_what_is_in_flight_and_what_comes_later():
    engine = make_engine(make_model())
    endless = SamplingParams(max_tokens=240)
    task = asyncio.ensure_future(engine.generate(prompt(5), endless, "session"))
    await until(lambda: engine.stats.sampled_tokens > 3)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await task
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(prompt(5), endless, "session")


@both_ways
def test_one_event_loop_after_another(deterministic):
    model = make_model()
    engine = make_engine(model, deterministic=deterministic)
    ids, sampling = prompt(20), SamplingParams(max_tokens=9)

    async def abandon():
        task = asyncio.ensure_future(
            engine.generate(prompt(5), SamplingParams(max_tokens=240), "session")
        )
        await until(lambda: engine.stats.sampled_tokens > 3)
        assert not task.done()

    for _ in range(3):
        asyncio.run(abandon())
        got = asyncio.run(asyncio.wait_for(engine.generate(ids, sampling, "session"), 60))
        assert error(model, ids, got, sampling) < 1e-5
    assert engine.stats.running == 0


def test_a_loop_that_was_closed_in_flight_does_not_hold_a_slot():
    engine = make_engine(make_model(), max_slots=1)
    loop = asyncio.new_event_loop()
    task = loop.create_task(engine.generate(prompt(5), SamplingParams(max_tokens=240), "session"))
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    del task
    sampling = SamplingParams(max_tokens=4)
    got = asyncio.run(asyncio.wait_for(engine.generate(prompt(5), sampling, "session"), 60))
    assert len(got.completion_ids) == 4
    assert engine.stats.running == 0


def test_several_event_loops_at_once():
    model = make_model()
    engine = make_engine(model)
    errors = []

    async def work(thread):
        requests = [
            (prompt(10 + n, thread), SamplingParams(max_tokens=15, seed=n)) for n in range(6)
        ]
        async with asyncio.timeout(60):
            results = await generate_all(engine, requests)
        errors.extend(error(model, i, g, s) for (i, s), g in zip(requests, results, strict=True))

    threads = [threading.Thread(target=lambda t=t: asyncio.run(work(t))) for t in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 18
    assert max(errors) < 1e-5


@pytest.mark.parametrize("slow", [True, False])
async def test_slow_steps_leave_the_event_loop_free(slow):
    engine = make_engine(make_model())
    seconds = 1.0 if slow else 0.0
    engine._measure = lambda computed, taken: None  # type: ignore[method-assign]
    engine._prompt_token_seconds = engine._decode_seconds = seconds
    threads = set()
    engine._model.register_forward_pre_hook(lambda *_: threads.add(threading.get_ident()))
    await engine.generate(prompt(5), SamplingParams(max_tokens=5), "session")
    assert (threading.get_ident() in threads) == (not slow)
    assert len(threads) == 1


async def test_pauses_may_be_nested():
    engine = make_engine(make_model())
    async with engine.pause():
        task = asyncio.ensure_future(
            engine.generate(prompt(5), SamplingParams(max_tokens=5), "session")
        )
        async with engine.pause():
            await engine.update_weights(3)
        await asyncio.sleep(0.01)
        assert not task.done()
    got = await asyncio.wait_for(task, 60)
    assert got.versions == (3,) * 5


@pytest.mark.parametrize("name", ["max_model_len", "max_slots", "prefill_tokens"])
def test_sizes_must_be_positive(name):
    with pytest.raises(ConfigError, match=name):
        make_engine(make_model(), **{name: 0})


def test_attention_that_takes_no_mask_is_refused():
    model = make_model()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ConfigError, match="flash_attention_2"):
        make_engine(model)


async def test_update_weights_serves_the_new_version():
    model = make_model()
    engine = make_engine(model, version=4)
    assert engine.version == 4
    change_weights(model)
    await engine.update_weights(5)
    assert engine.version == 5
    got = await engine.generate(prompt(5), SamplingParams(max_tokens=2), "session")
    assert got.versions == (5, 5)


async def test_a_step_in_a_thread_gets_its_turns_beside_agents_that_are_always_busy():
    engine = make_engine(make_model())
    engine._measure = lambda computed, seconds: None
    engine._prompt_token_seconds = engine._decode_seconds = 1.0  # in the thread
    turns = 0

    async def agent():
        nonlocal turns
        while True:
            end = time.perf_counter() + 0.0005
            while time.perf_counter() < end:
                pass
            turns += 1
            await asyncio.sleep(0)

    busy = asyncio.ensure_future(agent())
    async with asyncio.timeout(60):
        got = await engine.generate(prompt(20), SamplingParams(max_tokens=8), "session")
    busy.cancel()
    assert len(got.completion_ids) == 8
    assert turns > 8, "agents have theirs meanwhile"


async def test_an_update_finds_no_keys_and_values_in_memory():
    engine = make_engine(make_model())
    await generate_all(engine, [(prompt(40), SamplingParams(max_tokens=4))])
    assert engine._runner._cache._blocks
    async with engine.training():
        assert not engine._runner._cache._blocks
    (again,) = await generate_all(engine, [(prompt(40), SamplingParams(max_tokens=4))])
    assert again.cached_tokens == 0
    await engine.close()
