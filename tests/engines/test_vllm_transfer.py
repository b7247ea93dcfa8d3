"""Weights that go from GPU to GPU are led over HTTP: real client and server, a recorder as vLLM."""

import json
import socket
import threading

import pytest
import uvicorn

from tests.engines.recorded_vllm import Recorder
from tuner.engines import EngineError, EngineLostError
from tuner.engines.servers import Weights
from tuner.engines.vllm import core
from tuner.engines.vllm.client import VllmServer
from tuner.engines.vllm.core import VllmSettings
from tuner.engines.vllm.server import VllmHost, make_app

SETTINGS = VllmSettings("float32", 64, 4, (), transfer="nccl", sleeps=True)
INFO = {"names": ["a.weight"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}


@pytest.fixture
def vllm(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(core, "_start", lambda settings, weights: recorder)
    return recorder


@pytest.fixture
def host():
    return VllmHost()


@pytest.fixture
def url(host):
    door = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    door.bind(("127.0.0.1", 0))
    door.listen(8)
    config = uvicorn.Config(make_app(host, "key"), lifespan="off", log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([door],))
    thread.start()
    yield f"http://127.0.0.1:{door.getsockname()[1]}"
    server.should_exit = True
    thread.join()


def test_weights_are_under_a_new_label_once_they_are_whole_and_nothing_old_is_left(
    vllm, host, url, tmp_path
):
    server = VllmServer(url, "key", SETTINGS)
    server.load(Weights(tmp_path, "old"))
    assert host.label == "old"
    server._transfer("begin", {})
    assert host.label is None
    server._transfer("update", INFO)
    assert host.label is None
    server._transfer("finish", {"label": "new"})
    assert host.label == "new"
    assert vllm.did == ["start", f"receive {json.loads(json.dumps(INFO))}", "finish", "forget"]


async def test_a_sleeper_has_memory_for_weights_before_they_come_and_for_keys_after(
    vllm, host, tmp_path
):
    await host.load(SETTINGS, Weights(tmp_path, "old"))
    await host.sleep()
    for verb, info in (("begin", {}), ("update", {}), ("finish", {"label": "new"})):
        await host.transfer(verb, info)
    assert vllm.did == [
        "sleep 2",
        "wake weights",
        "start",
        "receive {}",
        "finish",
        "wake kv_cache",
        "forget",
    ]
    assert host.label == "new"


def test_what_goes_wrong_comes_back_as_what_it_is(vllm, host, url, tmp_path):
    server = VllmServer(url, "key", SETTINGS)
    with pytest.raises(EngineLostError, match="has not been given any weights"):
        server._transfer("begin", {})
    server.load(Weights(tmp_path, "old"))
    with pytest.raises(EngineError, match="'pickle' is not a step"):
        server._transfer("pickle", {})
    with pytest.raises(EngineError, match="the key is missing or wrong"):
        VllmServer(url, "another", SETTINGS)._transfer("begin", {})
    assert host.label == "old"
    vllm.fails = "finish"
    with pytest.raises(EngineError, match="taking over new weights: RuntimeError: out of memory"):
        server._transfer("finish", {"label": "new"})
    assert host.label is None
    vllm.fails, vllm.errored = "start", True
    with pytest.raises(EngineLostError, match="preparing for new weights"):
        server._transfer("begin", {})
