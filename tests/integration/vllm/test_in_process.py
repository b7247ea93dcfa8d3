"""vLLM in this process keeps the contract of engines, and forgets what old weights computed."""

import pytest

from tests.engines.conformance import *  # noqa: F403  # pytest collects the suite
from tests.engines.conformance import TOLERANCE, Rig, as_new, error, make_rig_model
from tests.engines.models import change_weights, prompt
from tests.integration.vllm.rigs import BLOCK, engine, kill_engine_core, saver, settings
from tuner.engines import SamplingParams
from tuner.engines.vllm.in_process import InProcessVllm


@pytest.fixture(scope="module")
def parts(toy_folder, tmp_path_factory):
    model, server = make_rig_model(), InProcessVllm(settings(toy_folder))
    yield engine([server], saver(model), tmp_path_factory.mktemp("weights")), model, server
    server.stop()


@pytest.fixture
async def rig(parts):
    made, model, _ = parts
    await as_new(made, model)
    return Rig(made, model, kill_engine_core, "EngineDeadError", spare=BLOCK)


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
