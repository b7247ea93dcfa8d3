"""vLLM on the trainer's GPU: what is asked of it, in which order, while the weights are trained.

A CPU cannot sleep, so vLLM itself is a recorder here, in a server that is a thread of this process.
Everything else is the real thing.
"""

import asyncio
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.engines.conformance import CONTEXT, Sink, make_rig_model
from tests.engines.models import VOCABULARY, make_tokenizer, prompt
from tests.engines.recorded_vllm import Recorder
from tests.engines.threaded_vllm import ThreadedVllm
from tuner.engines import EngineError, SamplingParams
from tuner.engines.remote import ServedEngine
from tuner.engines.servers import SampledTokens, Weights
from tuner.engines.vllm import core
from tuner.engines.vllm.core import VllmCore, VllmSettings

SHORT = SamplingParams(max_tokens=3)


@pytest.fixture
def vllm(monkeypatch):
    recorder = Recorder()

    async def stream(self, prompt_ids, sampling, label, adapter):
        if label != self.label:
            raise EngineError(f"{label} were asked for, but vLLM has {self.label}")
        recorder.note("generate")
        yield SampledTokens(
            (5,) * sampling.max_tokens, (0.0,) * sampling.max_tokens, (), 0, "length"
        )

    monkeypatch.setattr(core, "_start", lambda settings, weights: recorder)
    monkeypatch.setattr(VllmCore, "stream", stream)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: recorder.note("trainer frees"))
    return recorder


@pytest.fixture
async def engine(vllm, tmp_path):
    settings = VllmSettings("float32", CONTEXT, 4, (), sleeps=True)
    made = ServedEngine(
        [ThreadedVllm(settings, log=tmp_path / "log.txt")],
        save=make_rig_model().save_pretrained,
        folder=tmp_path / "weights",
        tokenizer=make_tokenizer(),
        end_ids=frozenset(),
        vocabulary=VOCABULARY,
        max_model_len=CONTEXT,
        sleeps=True,
    )
    await made.start()
    vllm.did.clear()
    yield made
    await made.close()


async def test_memory_is_the_trainers_during_an_update_and_vllms_before_anything_is_generated(
    engine, vllm
):
    await engine.generate(prompt(5), SHORT, "s")
    sink = Sink()
    async with engine.training():
        waits = asyncio.ensure_future(engine.generate(prompt(5), SHORT, "s", sink))
        for _ in range(100):
            await asyncio.sleep(0)
        vllm.note("train")
        await engine.update_weights(1)
        for _ in range(100):
            await asyncio.sleep(0)
    got = await asyncio.wait_for(waits, 30)
    assert got.versions == (1, 1, 1)
    assert vllm.did == [
        "generate",
        "sleep 2",
        "train",
        "trainer frees",
        "wake weights",
        "load weights",
        "wake kv_cache",
        "forget",
        "generate",
    ]


async def test_what_cannot_sleep_or_wake_serves_nothing_any_more(engine, vllm):
    vllm.fails = "sleep 2"
    with pytest.raises(EngineError, match="going to sleep: RuntimeError: out of memory"):
        async with engine.training():
            raise AssertionError("nothing may be trained")
    assert "out of memory" in str(engine.failure)
    with pytest.raises(EngineError, match="out of memory"):
        await engine.generate(prompt(5), SHORT, "s")


async def test_a_failed_wake_up_is_the_end_with_its_cause(engine, vllm):
    vllm.fails = "wake kv_cache"
    with pytest.raises(EngineError, match=r"loading .*: RuntimeError: out of memory"):
        async with engine.training():
            await engine.update_weights(1)
    with pytest.raises(EngineError, match="out of memory"):
        await engine.generate(prompt(5), SHORT, "s")


async def test_weights_that_an_adapter_is_added_to_are_kept_through_sleep(vllm, tmp_path):
    """vLLM's level 1 has them wait in main memory; nobody would send them again."""
    settings = VllmSettings("float32", CONTEXT, 4, (), model="base", lora_rank=4, sleeps=True)
    await VllmCore(settings, Weights(tmp_path, "label")).sleep()
    assert vllm.did == ["sleep 1"]


async def test_adapters_that_have_not_changed_stay_until_vllm_sleeps(vllm, tmp_path, monkeypatch):
    requests = SimpleNamespace(LoRARequest=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm.lora.request", requests)
    roles = {"<a>": "a", "<b>": "b"}
    settings = VllmSettings("float32", CONTEXT, 4, (), "base", lora_rank=4, adapters=roles)
    made = VllmCore(settings, Weights(tmp_path, "start"))

    async def load(label, **adapters):
        for role, content in adapters.items():
            (folder := tmp_path / label / role).mkdir(parents=True)
            (folder / "adapter_config.json").write_text("{}")
            (folder / "adapter_model.safetensors").write_text(content)
        await made.load(Weights(tmp_path / label, label))

    await load("one", a="1", b="1")
    await load("two", a="1", b="2")
    await load("three", a="1", b="2")
    await made.sleep()
    await load("four", a="1", b="3")
    assert [what for what in vllm.did if "as" in what or "remove" in what] == [
        *("add one/a as 1", "add one/b as 2"),
        *("remove 2", "add two/b as 3"),
        *("remove 1", "add four/a as 4", "remove 3", "add four/b as 5"),
    ]
    assert vllm.did.count("forget") == 4


async def test_an_error_that_vllm_wraps_is_named_by_its_cause(vllm, tmp_path):
    async def sleep(level):
        raise RuntimeError from MemoryError("none is free")

    vllm.sleep = sleep
    settings = VllmSettings("float32", CONTEXT, 4, (), sleeps=True)
    with pytest.raises(EngineError, match="going to sleep: MemoryError: none is free"):
        await VllmCore(settings, Weights(tmp_path, "label")).sleep()
