"""vLLM in a process that we start keeps the contract of engines."""

import os
import signal

import pytest

from tests.engines.conformance import *  # noqa: F403  # pytest collects the suite
from tests.engines.conformance import Rig, as_new, make_rig_model
from tests.integration.vllm.rigs import BLOCK, engine, saver, settings
from tuner.engines.vllm.client import VllmProcess


@pytest.fixture(scope="module")
def parts(toy_folder, tmp_path_factory):
    """One engine for all tests; starting vLLM takes longer than all of them."""
    folder, model = tmp_path_factory.mktemp("vllm"), make_rig_model()
    process = VllmProcess(settings(toy_folder), log=folder / "log.txt")
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
