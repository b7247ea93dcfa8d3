"""vLLM in a process that we start keeps the contract of engines, and forgets what old weights
computed."""

import asyncio
import os
import re
import signal

import pytest

from tests.engines.conformance import *  # noqa: F403  # pytest collects the suite
from tests.engines.conformance import (
    CONTEXT,
    TOLERANCE,
    Rig,
    as_new,
    crashed,
    error,
    make_rig_model,
)
from tests.engines.models import change_weights, prompt
from tests.engines.threaded_vllm import ThreadedVllm
from tests.integration.vllm.rigs import BLOCK, CORE_DIED, engine, kill_engine_core, saver, settings
from tuner.engines import SamplingParams
from tuner.engines.vllm.client import VllmProcess

SHORT = SamplingParams(max_tokens=5)


@pytest.fixture(scope="module")
def parts(toy_folder, tmp_path_factory):
    """One engine for all tests; starting vLLM takes longer than all of them."""
    folder, model = tmp_path_factory.mktemp("vllm"), make_rig_model()
    # No more tokens in a step than one prompt may have.
    served = settings(toy_folder, extra={"max_num_batched_tokens": CONTEXT})
    process = VllmProcess(served, log=folder / "log.txt")
    made = engine([process], saver(model), folder / "weights")
    yield made, model, process
    process.stop()


@pytest.fixture
async def rig(parts):
    made, model, process = parts
    await as_new(made, model)
    return Rig(
        made,
        model,
        crash=lambda: os.killpg(process.pid, signal.SIGKILL),
        cause=r"(?s)it ended with -9\).*last lines of its log:.*INFO",
        spare=BLOCK,
    )


async def test_prompts_that_do_not_fit_into_one_step_together(rig):
    sampling = [SamplingParams(max_tokens=8, seed=number) for number in range(8)]
    asked = [prompt(CONTEXT // 2 + 8 * number, seed=number) for number in range(8)]
    found = await asyncio.gather(
        *(rig.engine.generate(*one, "session") for one in zip(asked, sampling, strict=True))
    )
    for ids, params, got in zip(asked, sampling, found, strict=True):
        assert error(rig, ids, got, params) < TOLERANCE


async def test_a_server_whose_own_vllm_dies_says_so_and_is_started_again(rig, parts):
    restarts = rig.engine.stats.restarts
    lost = await crashed(rig.engine, lambda: kill_engine_core(parts[2].pid))
    assert re.search(CORE_DIED, str(lost))
    got = await rig.engine.generate(prompt(9), SHORT, "again")
    assert error(rig, prompt(9), got, SHORT) < TOLERANCE
    assert rig.engine.stats.restarts == restarts + 1


async def test_what_old_weights_computed_is_forgotten_and_a_death_while_loading_is_survived(
    toy_folder, tmp_path, monkeypatch, request
):
    """In one test, because each start of vLLM takes long."""
    model, server = make_rig_model(), ThreadedVllm(settings(toy_folder), log=tmp_path / "log.txt")
    request.addfinalizer(server.stop)
    made = engine([server], saver(model), tmp_path / "weights")
    rig = Rig(made, model, lambda: None, "")
    await made.start()
    vllm, ids = server.host._core._engine, prompt(4 * BLOCK)

    # The reset after a load is what makes log-probs right: without it they are wrong.
    async def forget_nothing() -> bool:
        return True

    for forgets in (True, False):
        await made.generate(ids, SHORT, "session")
        change_weights(model)
        with monkeypatch.context() as patch:
            if not forgets:
                patch.setattr(vllm, "reset_prefix_cache", forget_nothing)
            await made.update_weights(made.version + 1)
        got = await made.generate(ids, SHORT, "session")
        assert (got.cached_tokens == 0) == forgets
        assert (error(rig, ids, got, SHORT) < TOLERANCE) == forgets

    # vLLM itself never answers what its dead process was asked.
    ask = vllm.collective_rpc

    async def ask_and_die(*args, **kwargs):
        call = asyncio.ensure_future(ask(*args, **kwargs))
        await asyncio.sleep(0)  # it is sent
        kill_engine_core()
        return await call

    monkeypatch.setattr(vllm, "collective_rpc", ask_and_die)
    change_weights(model)
    await asyncio.wait_for(made.update_weights(made.version + 1), 600)
    assert made.stats.restarts == 1
    got = await made.generate(ids, SHORT, "session")
    assert got.versions == (made.version,) * 5
    assert error(rig, ids, got, SHORT) < TOLERANCE
    await made.close()
