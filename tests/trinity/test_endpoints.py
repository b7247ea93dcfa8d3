"""The engine behind a vLLM server returns exactly what was sampled there."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from tests.trinity.served import serving
from tuner.engines import SamplingParams
from tuner.engines.base import EngineError
from tuner.engines.grammar_text import with_head
from tuner.engines.transformers.engine import TransformersEngine
from tuner.errors import ContextLengthError
from tuner.runs.models import load_model, load_tokenizer
from tuner.trinity.endpoints import TrinityVllmEngine

PROMPT = [10, 20, 30, 40]


@pytest.fixture(scope="module")
def model(random_model_path):
    import torch

    return load_model(
        str(random_model_path), device=torch.device("cpu"), dtype=torch.float32
    ), load_tokenizer(str(random_model_path))


@asynccontextmanager
async def served(model, version=lambda: 3):
    direct = TransformersEngine(*model, max_model_len=64, max_slots=4)

    async def model_version():
        return version()

    async with serving(direct) as (server, address):
        engine = TrinityVllmEngine(
            address,
            model_name="m",
            api_key="k",
            max_model_len=64,
            model_version=model_version,
        )
        try:
            yield engine, direct, server
        finally:
            await engine.close()
            await direct.close()


class Sink:
    def __init__(self, room=1000):
        self.tokens = []
        self.three = asyncio.Event()
        self.room = room

    def push(self, token_id, logprob, version):
        if len(self.tokens) == self.room:
            return False
        self.tokens.append((token_id, logprob, version))
        if len(self.tokens) == 3:
            self.three.set()
        return True


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=12, seed=5),
        SamplingParams(max_tokens=12, temperature=0.7, top_p=0.8, top_k=20, seed=6),
        SamplingParams(max_tokens=6, temperature=0.0, seed=7),
    ],
)
async def test_ids_log_probs_and_versions_are_the_servers(model, sampling):
    async with served(model) as (engine, direct, _):
        sink = Sink()
        generation = await engine.generate(PROMPT, sampling, "s", sink)
        expected = await direct.generate(PROMPT, sampling, "s")
        assert generation.completion_ids == expected.completion_ids
        assert generation.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        assert generation.versions == (3,) * len(expected.completion_ids)
        assert generation.finish_reason == expected.finish_reason
        assert [token_id for token_id, _, _ in sink.tokens] == list(generation.completion_ids)
        assert [logprob for _, logprob, _ in sink.tokens] == list(generation.logprobs)


async def test_every_sampling_setting_is_sent(model):
    async with served(model) as (engine, _, server):
        sampling = SamplingParams(
            max_tokens=3, temperature=0.5, top_p=0.9, top_k=7, stop=("zz",), seed=11, top_logprobs=2
        )
        generation = await engine.generate(PROMPT, sampling, "s")
        (body,) = server.requests
        names = ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "logprobs")
        assert {name: body[name] for name in names} == {
            "max_tokens": 3,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "stop": ["zz"],
            "seed": 11,
            "logprobs": 2,
        }
        assert body["prompt"] == PROMPT
        assert body["return_token_ids"] is True
        assert len(generation.top_logprobs) == 3


async def test_a_form_is_sent_and_its_log_probs_are_those_within_it(model):
    async with served(model) as (engine, direct, server):
        sampling = SamplingParams(max_tokens=8, seed=3, grammar='start: ("ab" | "cd")+\n')
        generation = await engine.generate(PROMPT, sampling, "s")
        expected = await direct.generate(PROMPT, sampling, "s")
        assert generation.completion_ids == expected.completion_ids
        assert generation.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        sent = server.requests[0]["structured_outputs"]["grammar"]
        assert sent == with_head(sampling.grammar)
        assert sent.startswith("%llguidance")
    assert engine.capabilities.grammars


async def test_an_adapter_is_loaded_once_for_each_version_and_named(model):
    versions = iter([0, 0, 1, 2])
    async with served(model, lambda: next(versions)) as (engine, _, server):
        engine._adapter = lambda version: f"/adapters/{version}"
        for _ in range(4):
            await engine.generate(PROMPT, SamplingParams(max_tokens=2), "s")
    names = [f"tuner-adapter-{version}" for version in (0, 0, 1, 2)]
    assert [body["model"] for body in server.requests] == names
    assert server.loaded == [
        {"lora_name": f"tuner-adapter-{version}", "lora_path": f"/adapters/{version}"}
        for version in (0, 1, 2)
    ]
    assert {"lora_name": "tuner-adapter-0"} in server.unloaded


async def test_an_adapter_that_is_loaded_already_is_used_and_one_that_cannot_be_is_an_error(model):
    async with served(model) as (engine, _, server):
        engine._adapter = lambda version: "/adapters/a"
        server.adapters = 400, "The lora adapter 'tuner-adapter-3' has already been loaded."
        await engine.generate(PROMPT, SamplingParams(max_tokens=2), "s")
        engine._loaded = -1
        server.adapters = 404, "there is no such folder"
        with pytest.raises(EngineError, match="404: there is no such folder"):
            await engine.generate(PROMPT, SamplingParams(max_tokens=2), "s")


async def test_a_cancelled_completion_is_cancelled_on_the_server(model):
    async with served(model) as (engine, _, server):
        sampling = SamplingParams(max_tokens=50, seed=1)
        sink = Sink()
        running = asyncio.ensure_future(engine.generate(PROMPT, sampling, "s", sink))
        await asyncio.wait_for(sink.three.wait(), 30)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.wait_for(server.cancelled.wait(), 30)


async def test_nothing_is_read_after_the_sink_is_full(model):
    async with served(model) as (engine, _, _):
        sink = Sink(room=2)
        with pytest.raises(asyncio.CancelledError):
            await engine.generate(PROMPT, SamplingParams(max_tokens=30, seed=1), "s", sink)
        assert len(sink.tokens) == 2


async def test_refusals_are_told_apart(model):
    async with served(model) as (engine, _, server):
        with pytest.raises(ContextLengthError, match="maximum context length is 64"):
            await engine.generate([1] * 60, SamplingParams(max_tokens=10), "s")
        server.refuses = "the server is draining"
        with pytest.raises(EngineError, match=r"rejected a completion with 503: .*draining"):
            await engine.generate(PROMPT, SamplingParams(max_tokens=5), "s")


def without_logprobs(event):
    event["choices"][0]["logprobs"]["token_logprobs"] = []
    return event


def aborted(event):
    if event["choices"][0]["finish_reason"]:
        event["choices"][0]["finish_reason"] = "abort"
    return event


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_logprobs, "1 token ids and 0 log-probs"),
        (aborted, "ended a completion after 4 tokens with abort"),
        (lambda event: {"error": {"message": "out of memory"}}, "engine failed: out of memory"),
    ],
)
async def test_what_is_not_whole_is_an_error_and_never_a_sample(model, spoil, message):
    async with served(model) as (engine, _, server):
        server.spoil = spoil
        with pytest.raises(EngineError, match=message):
            await engine.generate(PROMPT, SamplingParams(max_tokens=4, seed=1), "s")


async def test_a_server_that_is_gone_is_named():
    async def version():
        return 0

    engine = TrinityVllmEngine(
        "http://127.0.0.1:9", model_name="m", api_key="k", max_model_len=64, model_version=version
    )
    with pytest.raises(EngineError, match=r"engine at http://127.0.0.1:9.* broke: ConnectError"):
        await engine.generate(PROMPT, SamplingParams(max_tokens=4), "s")
    await engine.close()
