"""What becomes of a run when its vLLM server dies, is taken over, or forgets to forget."""

import asyncio
import os
import re
import signal

import httpx
import pytest

from tests.engines.conformance import TOLERANCE, Rig, crashed, error, make_rig_model
from tests.engines.models import change_weights, prompt
from tests.integration.vllm.rigs import engine, saver, settings
from tuner.engines import EngineError, EngineLostError, SamplingParams
from tuner.engines.servers import Weights
from tuner.engines.vllm.client import VllmProcess, VllmServer

SHORT = SamplingParams(max_tokens=5)


def kill(process):
    os.killpg(process.pid, signal.SIGKILL)


async def test_the_life_of_a_run_whose_server_dies(toy_folder, tmp_path):
    """In one test, because each start of vLLM takes long."""
    folder, model = tmp_path, make_rig_model()
    process = VllmProcess(settings(toy_folder), log=folder / "log.txt")
    made = engine([process], saver(model), folder / "weights", max_restarts=2)
    rig = Rig(made, model, lambda: None, "")
    ids = prompt(70)

    # The weights of the start, and a stranger at the door.
    await made.start()
    got = await made.generate(ids, SHORT, "s")
    assert error(rig, ids, got, SHORT) < TOLERANCE
    for path in ("/health", "/load", "/generate"):
        method = httpx.get if path == "/health" else httpx.post
        assert method(f"{process._url}{path}", trust_env=False).status_code == 401
    key = process._headers["authorization"].removeprefix("Bearer ")
    assert key not in " ".join(process._process.args)

    # Another run loads its own weights: the first gets no answer from them.
    other = VllmServer(process._url, key, settings(folder))
    mine = made._fleet.weights
    other._settings = process._settings
    await asyncio.to_thread(other.load, Weights(mine.folder, "somebody-elses"))
    with pytest.raises(EngineError, match=r"this server has somebody-elses"):
        await made.generate(ids, SHORT, "s")
    await asyncio.to_thread(process.load, mine)

    # Killed during an update: it is started with the new weights.
    change_weights(model)
    load = process.load

    def load_and_die(weights):
        process.load = load
        kill(process)
        load(weights)

    process.load = load_and_die
    await made.update_weights(1)
    assert made.stats.restarts == 1
    got = await made.generate(ids, SHORT, "s")
    assert got.versions == (1,) * 5
    assert error(rig, ids, got, SHORT) < TOLERANCE

    # Killed once more than restarts are allowed: the run ends with the cause.
    made._fleet._max_restarts = 1
    lost = await crashed(made, lambda: kill(process))
    assert isinstance(lost, EngineLostError)
    assert re.search(r"(?s)it ended with -9.*last lines of its log", str(lost))
    with pytest.raises(EngineError, match=r"(?s)max_restarts is 1.*last lines of its log"):
        await made.generate(ids, SHORT, "s")
    assert "max_restarts is 1" in str(made.failure)
    await made.close()
    assert not (folder / "weights").exists()
