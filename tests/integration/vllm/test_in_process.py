"""vLLM in this process keeps the contract of engines, and forgets what old weights computed."""

import asyncio

import pytest

from tests.engines.conformance import *  # noqa: F403  # pytest collects the suite
from tests.engines.conformance import CONTEXT, TOLERANCE, Rig, as_new, error, make_rig_model
from tests.engines.models import change_weights, prompt
from tests.integration.vllm.rigs import BLOCK, engine, kill_engine_core, saver, settings
from tuner.engines import SamplingParams
from tuner.engines.vllm.in_process import InProcessVllm


@pytest.fixture(scope="module")
def parts(toy_folder, tmp_path_factory):
    # No more tokens in a step than one prompt may have.
    served = settings(toy_folder, extra={"max_num_batched_tokens": CONTEXT})
    model, server = make_rig_model(), InProcessVllm(served)
    yield engine([server], saver(model), tmp_path_factory.mktemp("weights")), model, server
    server.stop()


@pytest.fixture
async def rig(parts):
    made, model, _ = parts
    await as_new(made, model)
    return Rig(made, model, kill_engine_core, "EngineDeadError", spare=BLOCK)


async def test_prompts_that_do_not_fit_into_one_step_together(rig):
    sampling = [SamplingParams(max_tokens=8, seed=number) for number in range(8)]
    asked = [prompt(CONTEXT // 2 + 8 * number, seed=number) for number in range(8)]
    found = await asyncio.gather(
        *(rig.engine.generate(*one, "session") for one in zip(asked, sampling, strict=True))
    )
    for ids, params, got in zip(asked, sampling, found, strict=True):
        assert error(rig, ids, got, params) < TOLERANCE


async def test_without_forgetting_the_prefix_cache_old_weights_would_be_served(
    rig, parts, monkeypatch
):
    """The reset after a load is what makes log-probs right: without it they are wrong."""
    ids, sampling = prompt(4 * BLOCK), SamplingParams(max_tokens=5)

    async def forget_nothing() -> bool:
        return True

    vllm = parts[2]._host._core._engine
    for forgets in (True, False):
        await rig.engine.generate(ids, sampling, "session")
        change_weights(rig.model)
        with monkeypatch.context() as patch:
            if not forgets:
                patch.setattr(vllm, "reset_prefix_cache", forget_nothing)
            await rig.engine.update_weights(rig.engine.version + 1)
        got = await rig.engine.generate(ids, sampling, "session")
        assert (got.cached_tokens == 0) == forgets
        assert (error(rig, ids, got, sampling) < TOLERANCE) == forgets


async def test_vllm_that_dies_while_it_loads_weights_is_started_with_them(rig, parts, monkeypatch):
    """vLLM itself never answers what its dead process was asked."""
    vllm = parts[2]._host._core._engine
    ask = vllm.collective_rpc

    async def ask_and_die(*args, **kwargs):
        call = asyncio.ensure_future(ask(*args, **kwargs))
        await asyncio.sleep(0)  # it is sent
        kill_engine_core()
        return await call

    monkeypatch.setattr(vllm, "collective_rpc", ask_and_die)
    restarts = rig.engine.stats.restarts
    change_weights(rig.model)
    await asyncio.wait_for(rig.engine.update_weights(rig.engine.version + 1), 600)
    assert rig.engine.stats.restarts == restarts + 1
    ids, sampling = prompt(30), SamplingParams(max_tokens=5)
    got = await rig.engine.generate(ids, sampling, "session")
    assert got.versions == (rig.engine.version,) * 5
    assert error(rig, ids, got, sampling) < TOLERANCE
