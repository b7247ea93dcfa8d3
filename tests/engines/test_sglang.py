"""SGLang's protocol: what is asked, what is understood, and on which servers nothing is asked."""

import asyncio
import json
import threading
import time

import httpx
import pytest
import torch
import uvicorn

from tests.engines.conformance import LONG, TOLERANCE, Rig, Sink, error, make_rig_model
from tests.engines.models import change_weights, make_tokenizer, prompt
from tests.engines.sglang_rig import END, connected, engine
from tests.engines.sglang_server import Server, make_app
from tests.kit.examples import grid
from tuner.engines import EngineError, EngineLostError, SamplingParams
from tuner.engines.servers import Weights
from tuner.engines.sglang.client import check_for_sglang, sampled, sglang_request
from tuner.errors import ConfigError

SHORT = SamplingParams(max_tokens=5)

# Chunks that SGLang 0.5.23 answered on a CPU, each cut to what is read, and one more field.
TOP_K = """{"text":"","output_ids":[113],"meta_info":{"id":"aa01","finish_reason":null,
"prompt_tokens":3,"weight_version":"default","num_retractions":0,"input_token_logprobs":[],
"output_token_logprobs":[[-2.456056833267212,113,null]],"output_token_logprobs_length":1,
"output_token_sampling_mask":[[113,282,297]],"output_token_sampling_logprobs":[[-0.6510611176490784,
-1.3871184587478638,-1.4752836227416992]],"output_token_sampling_mask_length":1,
"completion_tokens":1,"cached_tokens":0,"cached_tokens_details":null,"dp_rank":null}}"""
ALTERNATIVES = """{"text":"<|end|>","output_ids":[0],"meta_info":{"id":"949803b7","finish_reason":
{"type":"stop","matched":0},"prompt_tokens":4,"weight_version":"default","num_retractions":0,
"input_token_logprobs":[],"output_token_logprobs":[[-0.00002837221290974412,0,null]],
"output_token_logprobs_length":1,"input_top_logprobs":[],"output_top_logprobs":[[[
-0.00002837221290974412,0,null],[-10.468412399291992,299,null]]],"completion_tokens":1,
"cached_tokens":3,"weight_versions":[{"version":"default","start":0,"end":1}],
"cached_tokens_details":{"device":3,"host":0},"dp_rank":null,"e2e_latency":0.10259242699976312}}"""


def test_log_probs_of_cut_distributions_are_those_after_the_cut():
    asked = SamplingParams(max_tokens=3, temperature=0.7, top_k=3, top_logprobs=2)
    got = sampled(json.loads(TOP_K), asked, END, 4096)
    assert (got.ids, got.logprobs) == ((113,), (-0.6510611176490784,))
    assert got.top_logprobs == (((113, -0.6510611176490784), (282, -1.3871184587478638)),)
    assert (got.cached_tokens, got.finish_reason) == (0, None)
    one = json.loads(TOP_K)
    one["meta_info"]["output_token_sampling_logprobs"] = [-0.651]
    got = sampled(one, SamplingParams(max_tokens=3, temperature=0.7, top_k=3), END, 4096)
    assert got.logprobs == (-0.651,)


def test_log_probs_of_whole_distributions_and_their_alternatives():
    asked = SamplingParams(max_tokens=3, top_logprobs=2)
    got = sampled(json.loads(ALTERNATIVES), asked, END, 4096)
    assert (got.ids, got.logprobs) == ((0,), (-0.00002837221290974412,))
    assert got.top_logprobs == (((0, -0.00002837221290974412), (299, -10.468412399291992)),)
    assert (got.cached_tokens, got.finish_reason) == (3, "stop")
    greedy = SamplingParams(max_tokens=3, temperature=0, top_logprobs=2)
    got = sampled(json.loads(ALTERNATIVES), greedy, END, 4096)
    assert (got.logprobs, got.top_logprobs) == ((0.0,), (((0, 0.0),),))


def test_a_part_is_asked_for_in_sglangs_words():
    asked = SamplingParams(max_tokens=3, temperature=0.7, seed=9, top_logprobs=2, stop=("x",))
    params = {
        "max_new_tokens": 3,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "sampling_seed": 9,
        "stop_token_ids": [0],
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    body = {"input_ids": [4, 5], "return_logprob": True, "stream": True}
    assert sglang_request([4, 5], asked, END, 4096) == {
        **body,
        "sampling_params": params,
        "top_logprobs_num": 2,
    }
    cut = SamplingParams(max_tokens=3, top_p=0.5, grammar="start: /a/", top_logprobs=1)
    head = '%llguidance {"no_forcing": true}\n'
    assert sglang_request([4, 5], cut, END, 4096) == {
        **body,
        "sampling_params": {
            **params,
            "temperature": 1.0,
            "top_p": 0.5,
            "top_k": 4096,
            "sampling_seed": 0,
            "ebnf": f"{head}start: /a/",
        },
        "top_logprobs_num": 0,
        "return_sampling_mask": True,
        "sampling_logprobs_mode": "support",
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 3, "top_p": 0.9}, r"top_k is 3 and top_p is 0\.9"),
        ({"temperature": 1e-7}, "temperature is 1e-07"),
        ({"top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_settings_that_sglang_takes_otherwise_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        check_for_sglang(SamplingParams(max_tokens=1, **changes))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            {"finish_reason": {"type": "abort", "message": "Sampling support exceeds 4096"}},
            "with abort: Sampling support exceeds 4096",
        ),
        (
            {
                "finish_reason": {"type": "stop", "matched": 7},
                "output_token_logprobs": [[-1, 7, 0]],
            },
            r"at token 7, which is not an end token of this model \(those are \[0\]\)",
        ),
        ({"output_token_logprobs": [[None, 7, None]]}, "log-prob nan: the model's logits"),
        ({"output_token_logprobs": [[-1.0, 8, None]]}, "does not have the form known"),
        ({"output_token_logprobs": []}, "does not have the form known"),
    ],
)
def test_answers_that_cannot_be_trained_are_refused(spoil, message):
    chunk = json.loads(ALTERNATIVES)
    chunk["output_ids"] = [7]
    chunk["meta_info"]["finish_reason"] = None
    chunk["meta_info"] |= spoil
    with pytest.raises(EngineError, match=message):
        sampled(chunk, SHORT, END, 4096)


def test_a_cut_that_is_wider_than_what_the_server_lists_is_refused():
    asked = SamplingParams(max_tokens=3, top_p=0.9)
    chunk = json.loads(TOP_K)
    chunk["meta_info"]["output_token_sampling_logprobs"] = [-0.651]
    assert sampled(chunk, asked, END, 4).logprobs == (-0.651,)
    with pytest.raises(EngineError, match=r"top_p = 0\.9 keeps 3 tokens or more"):
        sampled(chunk, asked, END, 3)


@pytest.fixture
def served(tmp_path):
    """A stand-in in a thread, its address and its model."""
    torch.manual_seed(0)
    model = make_rig_model()
    model.save_pretrained(tmp_path / "toy")
    make_tokenizer().save_pretrained(tmp_path / "toy")
    server = Server(tmp_path / "toy")
    config = uvicorn.Config(make_app(server, "sesame"), port=0, log_level="warning", lifespan="off")
    uvicorn_server = uvicorn.Server(config)
    thread = threading.Thread(target=uvicorn_server.run)
    thread.start()
    while not uvicorn_server.started:
        time.sleep(0.01)
    port = uvicorn_server.servers[0].sockets[0].getsockname()[1]
    yield server, f"http://127.0.0.1:{port}", model
    uvicorn_server.should_exit = True
    thread.join()


@pytest.fixture
async def rig(served, tmp_path):
    server, url, model = served
    made = engine([connected(url, "sesame")], model.save_pretrained, tmp_path / "weights")
    yield Rig(made, model, lambda: None, ""), server
    await made.close()


async def test_a_cancelled_part_is_ended_on_the_server(rig):
    made, server = rig[0].engine, rig[1]
    sink = Sink()
    request = asyncio.ensure_future(made.generate(prompt(5), LONG, "session", sink))
    await sink.has(3)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    async with asyncio.timeout(60):
        while server.running:  # noqa: ASYNC110  # in another thread
            await asyncio.sleep(0.001)
    ((ids, _),) = server.model.prefixes._stored[-1:]
    assert len(ids) < 100


async def test_a_server_that_was_started_again_gets_the_weights_again(rig):
    rig, server = rig
    await rig.engine.generate(prompt(5), SHORT, "session")
    change_weights(rig.model)
    await rig.engine.update_weights(1)
    server.weight_version = "default"
    with pytest.raises(EngineLostError, match="was restarted: it has the weights 'default'"):
        await rig.engine.generate(prompt(5), SHORT, "session")
    got = await rig.engine.generate(prompt(5), SHORT, "session")
    assert got.versions == (1,) * 5
    assert error(rig, prompt(5), got, SHORT) < TOLERANCE
    assert rig.engine.stats.restarts == 1


async def test_tokens_of_somebody_elses_weights_are_refused(rig, tmp_path):
    rig, _ = rig
    await rig.engine.generate(prompt(5), SHORT, "session")
    mine = rig.engine._fleet.weights
    other = connected(rig.engine._fleet.seats[0].server._url, "sesame")
    await asyncio.to_thread(other.start, Weights(mine.folder, "another-run"))
    with pytest.raises(EngineError, match="has the weights 'another-run'"):
        await rig.engine.generate(prompt(5), SHORT, "session")


async def test_without_a_flush_the_prefixes_of_old_weights_would_be_served(rig):
    rig, server = rig
    flush, ids = server.model.prefixes.flush, prompt(60)
    for flushes in (True, False):
        await rig.engine.generate(ids, SHORT, "session")
        change_weights(rig.model)
        server.model.prefixes.flush = flush if flushes else lambda: None
        await rig.engine.update_weights(rig.engine.version + 1)
        got = await rig.engine.generate(ids, SHORT, "session")
        assert (got.cached_tokens == 0) == flushes
        assert (error(rig, ids, got, SHORT) < TOLERANCE) == flushes


async def test_weights_that_cannot_be_loaded_end_the_run_and_leave_the_server_running(rig):
    rig, server = rig
    await rig.engine.start()
    rig.engine._fleet._save = lambda folder: (folder / "config.json").write_text("{}")
    with pytest.raises(EngineError, match="refused a request with 400: Failed to update weights"):
        await rig.engine.update_weights(1)
    assert "Failed to update weights" in str(rig.engine.failure)
    assert server.unpaused.is_set()


@grid(
    "info, message",
    [
        ({"enable_deterministic_inference": False}, "with --enable-deterministic-inference"),
        ({"incremental_streaming_output": False}, "with --incremental-streaming-output"),
        ({"grammar_backend": "xgrammar"}, "grammar_backend is 'xgrammar'.*llguidance"),
        ({"rl_on_policy_target": "fsdp"}, "without --rl-on-policy-target"),
        ({"speculative_algorithm": "EAGLE"}, "without speculative decoding"),
        ({"preferred_sampling_params": {"min_p": 0.1}}, "without --preferred-sampling-params"),
        ({"enable_watermark": True}, "without --enable-watermark"),
        ({"tokenizer_worker_num": 2}, "with --tokenizer-worker-num 1"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16': start it with --dtype float32"),
    ],
    quick=3,
)
async def test_a_server_that_was_started_otherwise_is_refused_by_flag(rig, info, message):
    rig, server = rig
    server.info |= info
    with pytest.raises(EngineError, match=message):
        await rig.engine.start()


async def test_every_reason_against_a_server_is_named_at_once(served, tmp_path):
    server, url, model = served
    server.info = {"version": "0.4.9"}
    client = connected(url, "sesame", max_model_len=600)
    made = engine([client], model.save_pretrained, tmp_path / "weights")
    with pytest.raises(EngineError) as caught:
        await made.start()
    message = str(caught.value)
    assert "version 0.4.9" in message
    assert "enable_deterministic_inference is 'not there'" in message
    assert "cannot list the tokens kept by top_k and top_p" in message
    assert "max_req_input_len is 506: set model.max_model_len, which is 600, to 506" in message
    await made.close()


async def test_log_probs_of_another_temperature_are_noticed(rig):
    rig, server = rig
    server.original_logprobs = True
    with pytest.raises(EngineError, match="without SGLANG_RETURN_ORIGINAL_LOGPROB"):
        await rig.engine.start()


async def test_the_wrong_key_opens_nothing(served, tmp_path):
    _, url, model = served
    made = engine([connected(url, "wrong")], model.save_pretrained, tmp_path / "weights")
    with pytest.raises(EngineError, match="refused a request with 401: Unauthorized"):
        await made.start()
    async with httpx.AsyncClient(base_url=url, trust_env=False) as nobody:
        for path in ("/generate", "/update_weights_from_disk", "/pause_generation"):
            assert (await nobody.post(path)).status_code == 401
    await made.close()
