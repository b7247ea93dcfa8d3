"""Where vLLM runs, and what is refused because it does not fit."""

import asyncio
from dataclasses import replace

import pytest
import torch

from tests.engines.models import make_model, make_tokenizer, prompt
from tests.training.test_activations import model_of
from tuner.config import load_config
from tuner.engines import SamplingParams
from tuner.engines.transformers.engine import TransformersEngine
from tuner.engines.vllm.core import VllmSettings
from tuner.errors import ConfigError
from tuner.runs import placement
from tuner.runs.models import choose_dtype
from tuner.runs.placement import (
    Machine,
    Needs,
    choose_placement,
    generating,
    layout_of,
    needs_of,
    peak_of,
)
from tuner.training.memory import Activations

GIB = 2**30
SMALL = Needs(trainer=20 * GIB, weights=4 * GIB, request=GIB)
SGLANG = ["explorer.rollout_model.engine_type=sglang", "tuner.engine.urls=[http://a:1]"]


def choose(*overrides, gpus=(), memory=64, needs=SMALL):
    config = load_config(overrides=["explorer.rollout_model.engine_type=vllm", *overrides])
    return choose_placement(config, needs, Machine(tuple(g * GIB for g in gpus), memory * GIB))


def test_on_a_cpu_the_engine_gets_a_process_of_its_own():
    chosen = choose(needs=Needs(20 * GIB, 4 * GIB, GIB // 4))
    assert chosen.mode == "separate"
    assert chosen.gpus == ((),)
    assert chosen.cpu_cache == 64 // 4 * GIB
    assert choose("tuner.placement=colocate", memory=200).mode == "colocate"


@pytest.mark.parametrize(
    ("overrides", "gpus", "mode", "places", "part"),
    [
        ([], [80], "colocate", ((0,),), 0.73),
        (["explorer.rollout_model.gpu_memory_utilization=0.4"], [80], "colocate", ((0,),), 0.4),
        ([], [80, 80], "separate", ((1,),), None),
        (["tuner.placement=colocate"], [80, 80], "colocate", ((0,),), 0.73),
        (["explorer.rollout_model.engine_num=3"], [80] * 4, "separate", ((1,), (2,), (3,)), None),
        (
            [
                "explorer.rollout_model.engine_num=2",
                "explorer.rollout_model.tensor_parallel_size=2",
            ],
            [80] * 5,
            "separate",
            ((1, 2), (3, 4)),
            None,
        ),
    ],
)
def test_on_gpus_it_takes_the_others_or_what_the_trainer_leaves(
    overrides, gpus, mode, places, part
):
    chosen = choose(*overrides, gpus=gpus)
    assert (chosen.mode, chosen.gpus) == (mode, places)
    assert chosen.gpu_memory_utilization == part
    assert "20.00 GiB for training" in str(chosen)


@pytest.mark.parametrize(
    ("visible", "gpus", "seen"),
    [(None, [80], ["0"]), ("5", [80], ["5"]), ("GPU-a, GPU-b", [80, 80], ["GPU-b"])],
)
def test_a_started_server_sees_the_gpus_that_are_its_own(visible, gpus, seen, monkeypatch):
    """On one GPU that is the trainer's."""
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = load_config(overrides=["explorer.rollout_model.engine_type=vllm"])
    settings = VllmSettings("float32", 64, 4, ())
    servers = placement._vllm_servers(config, settings, choose(gpus=gpus), None)
    assert [server._environment["CUDA_VISIBLE_DEVICES"] for server in servers] == seen


@pytest.mark.parametrize(
    ("overrides", "gpus", "needs", "message"),
    [
        ([], [24], SMALL, r"vLLM needs 6.00 GiB .* gets 2.\d+ GiB of 24.00 GiB"),
        ([], [16], SMALL, "training needs 22.00 GiB .* has 16.00 GiB"),
        (["tuner.engine.sleep=false"], [16], SMALL, "training needs 20.00 GiB .* has 16.00 GiB"),
        (["tuner.placement=separate"], [80], SMALL, "need 2 GPUs, and there are 1"),
        (["explorer.rollout_model.engine_num=2"], [80, 80], SMALL, "need 3 GPUs, and there are 2"),
        (
            ["explorer.rollout_model.gpu_memory_utilization=0.9"],
            [80],
            SMALL,
            r"utilization is 0.9, 72.00 GiB, but the trainer leaves 59.00 GiB",
        ),
        ([], [], Needs(60 * GIB, 4 * GIB, 0), "vLLM does not fit: .*64.00 GiB of main memory"),
        (["explorer.rollout_model.tensor_parallel_size=2"], [], SMALL, "there is no GPU"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_numbers(overrides, gpus, needs, message):
    with pytest.raises(ConfigError, match=message):
        choose(*overrides, gpus=gpus, needs=needs)


UPDATING = Needs(trainer=40 * GIB, weights=10 * GIB, request=GIB, gradients=16 * GIB)


@pytest.mark.parametrize(
    ("overrides", "gpus", "sleeps", "part", "says"),
    [
        # 80 without a reserve of 1, and what the trainer has: without gradients while vLLM is awake
        ([], [80], True, 0.68, "next to 24.00 GiB, and sleeps during updates"),
        (["tuner.engine.sleep=false"], [80], False, 0.48, "all the time"),
        (["synchronizer.sync_offset=1"], [80], False, 0.48, "all the time"),
        (["tuner.engine.sleep=true"], [80], True, 0.68, "sleeps during updates"),
        ([], [43], True, 0.41, "sleeps during updates"),  # does not fit awake
        ([], [80, 80], False, None, "more than one GPU"),
        ([], [], False, None, "a separate process"),
    ],
)
def test_an_engine_on_the_trainers_gpu_sleeps_unless_collection_runs_ahead(
    overrides, gpus, sleeps, part, says
):
    chosen = choose(*overrides, gpus=gpus, needs=UPDATING, memory=200)
    assert (chosen.sleeps, chosen.gpu_memory_utilization) == (sleeps, part)
    assert says in str(chosen)


@pytest.mark.parametrize(
    ("overrides", "gpus", "memory", "message"),
    [
        (["tuner.engine.sleep=true"], [], 200, "there is no GPU, and vLLM cannot sleep on a CPU"),
        (["tuner.engine.sleep=true"], [80, 80], 200, "engine has its own GPUs"),
        # What vLLM keeps of its memory while it sleeps counts too.
        ([], [42], 200, "training needs 42.00 GiB .* has 42.00 GiB"),
        (["tuner.engine.sleep=false"], [50], 200, "vLLM needs 12.00 GiB .* gets 9.00 GiB"),
        (
            ["tuner.engine.sleep=true", "model.lora_configs=[{name: a}]"],
            [80],
            9,
            "base model of 10.00 GiB waits in main memory, .* 9.00 GiB",
        ),
    ],
)
def test_sleep_that_cannot_be_or_does_not_suffice_is_refused(overrides, gpus, memory, message):
    with pytest.raises(ConfigError, match=message):
        choose(*overrides, gpus=gpus, needs=UPDATING, memory=memory)


def test_engines_in_this_process_share_half_of_what_the_run_leaves(monkeypatch):
    needs = Needs(10 * GIB, 2 * GIB, GIB, gradients=3 * GIB, update=4 * GIB, loaded=2 * GIB)
    monkeypatch.setattr(placement, "_available", lambda _: 21 * GIB)
    monkeypatch.setattr(placement, "_left_to_groups", lambda: [16 * GIB])
    one, two = (
        load_config(),
        load_config(overrides=["explorer.auxiliary_models=[{name: a, model_path: a}]"]),
    )
    cpu = torch.device("cpu")
    assert placement.cache_memory(one, needs, cpu) == (16 + 2 - 10 + 3) * GIB // 2
    assert placement.cache_memory(two, needs, cpu) == (16 + 2 - 10 + 3) * GIB // 4
    monkeypatch.setattr(placement, "free_bytes", lambda _: 40 * GIB)
    assert placement.cache_memory(one, needs, cpu) == (40 + 2 - 10 - 4 - 1) * GIB // 2


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/a/b", "a", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:memory:/a/b",
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_the_limit_of_a_control_group_counts_and_not_its_cached_files(
    tmp_path, line, folder, names
):
    (tmp_path / "cgroup").write_text(f"3:cpuset:/\n{line}\n")
    group = tmp_path / folder
    group.mkdir()
    for name, text in zip(names, ("1000", "700"), strict=False):
        (group / name).write_text(text)
    (group / "memory.stat").write_text(f"anon 9\n{names[2]} 50\n")
    assert list(placement._left_to_groups(tmp_path / "cgroup", tmp_path)) == [350]
    (group / names[0]).write_text("max")
    assert list(placement._left_to_groups(tmp_path / "cgroup", tmp_path)) == []


async def test_an_engine_says_if_a_request_may_be_too_long_for_the_memory(caplog, monkeypatch):
    monkeypatch.setattr(placement, "cache_memory", lambda *_: 0)
    model, config = make_model(), load_config(overrides=["tuner.max_slots=3"])
    config = placement.EngineChoice("transformers").applied(config)
    needs = needs_of(config, model, 2000, references=0, critics=0)
    engine, _ = placement.build_engine(
        config,
        model,
        make_tokenizer(),
        max_model_len=2000,
        version=0,
        save=lambda _: None,
        needs=lambda: needs,
    )
    assert engine.cached_tokens == 1024
    assert "keys and values of 1024 tokens, and a request may have 2000" in caplog.text
    held = [
        generating(
            config, needs, 2000, [prompt(9)], longest=1500, together=3, limit=engine.cached_tokens
        ),
        generating(config, needs, 2000, [prompt(9)], longest=1500, together=3),
    ]
    assert held[0] < held[1]
    await engine.close()


def test_memory_of_cached_files_can_be_had(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemFree:   3 kB\nMemAvailable:   7 kB\nCached: 4 kB\n")
    assert placement._available(meminfo) == 7 * 1024
    assert placement._available(tmp_path / "no file") > 0


def test_servers_elsewhere_need_nothing_here():
    chosen = choose("tuner.engine.urls=[http://10.0.0.2:8100]", needs=Needs(0, 10**15, 0))
    assert chosen.mode == "separate"
    assert chosen.gpus == ()
    assert "10.0.0.2" in str(chosen)


def test_what_a_run_needs_is_counted_from_its_model():
    model = make_model()
    parameters = sum(p.numel() for p in model.parameters())
    config = load_config()
    needs = needs_of(config, model, 100, references=1, critics=0)
    assert needs.weights == 4 * parameters
    assert needs.trainer == (4 + 4 + 4 + 8) * parameters  # policy, reference, gradient, moments
    assert needs.request == 100 * 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, width, bytes
    assert needs.gradients == 4 * parameters
    more = needs_of(config, model, 100, references=1, critics=1, auxiliary=1000)
    assert more.trainer == needs.trainer + (4 + 4 + 8) * parameters + 1000
    assert more.gradients == 8 * parameters
    half = load_config(overrides=["tuner.dtype=bfloat16", "trainer.optimizer_offload=true"])
    needs = needs_of(half, model.to(torch.bfloat16), 100, references=0, critics=0)
    assert needs.weights == 2 * parameters
    assert needs.trainer == (2 + 4) * parameters


def test_an_update_is_counted_where_its_size_is_known():
    model = make_model()
    assert needs_of(load_config(), model, 100, references=0, critics=0).update == 0
    config = load_config(overrides=["trainer.max_token_len_per_gpu=1000"])
    needs = needs_of(config, model, 100, references=0, critics=0)
    kept = Activations.of(model).kept(1000, checkpointing=False)
    assert kept < needs.update < 3 * kept
    assert peak_of(config, model, needs, 1000) == needs.trainer + needs.update
    alone = peak_of(config, model, needs, 1000, sampled=1, alone=True)
    assert needs.trainer - needs.gradients < alone < needs.trainer + needs.update
    lower = load_config(
        overrides=["trainer.max_token_len_per_gpu=1000", "tuner.activation_checkpointing=true"]
    )
    assert needs_of(lower, model, 100, references=0, critics=0).update < needs.update


@pytest.mark.parametrize(("rollouts", "own"), [(3, 20), (12, 90), (30, 150)])
async def test_keys_and_values_of_a_step_are_what_the_engine_allocates(rollouts, own):
    model, config, context = make_model(), load_config(), 512
    needs = needs_of(config, model, context, references=0, critics=0)
    prompts = [prompt(160) + prompt(own, seed=1 + i) for i in range(rollouts)]
    engine = TransformersEngine(
        model, make_tokenizer(), max_model_len=context, max_slots=config.tuner.max_slots
    )
    sampling = SamplingParams(max_tokens=6)
    await asyncio.gather(*(engine.generate(ids, sampling, str(i)) for i, ids in enumerate(prompts)))
    stored = 160 * needs.request // context + sum(
        states.nbytes
        for layer in engine._runner._cache.rows
        for states in (layer.keys, layer.values)
    )
    expected = generating(
        config, needs, context, prompts, longest=len(prompts[0]) + 6, together=rollouts
    )
    assert expected - (needs.trainer - needs.gradients) == pytest.approx(stored, rel=0.1)
    await engine.close()


def test_freed_gradients_in_lower_precision_are_counted_on_a_cpu_if_they_are_small(monkeypatch):
    config, extra = load_config(), {}
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model().to(dtype)
        needs = needs_of(config, model, 100, references=0, critics=0)
        whole = peak_of(config, model, needs, 10)
        monkeypatch.setattr(placement, "HEAP_BLOCK", 0)
        extra[dtype] = whole - peak_of(config, model, needs, 10)
        monkeypatch.undo()
    weights = sum(p.nbytes for p in make_model().to(torch.bfloat16).parameters())
    assert extra == {torch.float32: 0, torch.bfloat16: weights}


def test_auto_is_counted_with_checkpoints_where_a_gpu_has_no_room_without(monkeypatch):
    model, config = make_model(), load_config()
    needs = needs_of(config, model, 100, references=0, critics=0)
    peaks = []
    for free in (None, 10**9, 0):
        monkeypatch.setattr(placement, "free_bytes", lambda device, free=free: free)
        peaks.append(peak_of(config, model, needs, 1000))
    assert peaks[0] == peaks[1] > peaks[2]


def test_awake_vllm_leaves_room_for_an_update_as_far_as_it_has_enough():
    awake, needs = "tuner.engine.sleep=false", replace(SMALL, update=30 * GIB)
    chosen = choose(awake, gpus=[80], needs=needs)
    assert chosen.gpu_memory_utilization == 0.36  # of 80: without 20, 1 and 30
    assert "20.00 GiB for training, 30.00 GiB more for its micro-batches, of 80.00" in str(chosen)
    assert choose(awake, gpus=[30], needs=needs).gpu_memory_utilization == 0.2  # 6 of 30
    assert choose(gpus=[80], needs=needs).gpu_memory_utilization == 0.73  # it sleeps
    with pytest.raises(ConfigError, match=r"80.00 GiB of main|lower trainer.max_token_len_per_gpu"):
        choose(needs=needs, memory=40)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["explorer.rollout_model.engine_num=2"], "engine_num is 2"),
        (["tuner.engine.urls=[http://a:1]"], r"tuner.engine.urls is \['http://a:1'\]"),
        (["tuner.placement=separate"], "tuner.placement is separate"),
        (["tuner.engine.weights=disk"], "tuner.engine.weights is disk"),
        (["tuner.engine.sleep=false"], "tuner.engine.sleep is false"),
        (
            [
                "explorer.rollout_model.engine_type=vllm",
                "tuner.engine.sleep=true",
                "synchronizer.sync_offset=1",
            ],
            "sync_offset is 1, so vLLM generates during updates",
        ),
        (
            [
                "explorer.rollout_model.engine_type=vllm",
                "explorer.rollout_model.extra_engine_args.enable_sleep_mode=true",
            ],
            "enable_sleep_mode cannot be set: set tuner.engine.sleep",
        ),
        (["explorer.rollout_model.engine_type=sglang"], "tuner.engine.urls is not set, but"),
        (
            [*SGLANG, "explorer.rollout_model.tensor_parallel_size=2"],
            "tensor_parallel_size is 2, but SGLang servers are remote",
        ),
        ([*SGLANG, "tuner.placement=colocate"], "tuner.placement is colocate"),
        ([*SGLANG, "tuner.deterministic=true"], "engine_type is sglang, whose numbers depend"),
        ([*SGLANG, "model.lora_configs=[{lora_rank: 4}]"], "whole models and no adapters"),
        ([*SGLANG, "model.top_k=3", "model.top_p=0.9"], r"top_k is 3 and model.top_p is 0\.9"),
        (
            ["explorer.rollout_model.engine_type=vllm", "tuner.deterministic=true"],
            "depend on concurrent requests",
        ),
        (
            ["explorer.rollout_model.engine_type=vllm", "tuner.engine.urls=[a:1]"],
            "does not start with http",
        ),
        (
            [
                "explorer.rollout_model.engine_type=vllm",
                "explorer.rollout_model.extra_engine_args.logprobs_mode=raw_logprobs",
            ],
            "logprobs_mode cannot be set: log-probs would not be exact",
        ),
        (
            [
                "explorer.rollout_model.engine_type=vllm",
                "explorer.rollout_model.extra_engine_args.dtype=float16",
            ],
            "dtype cannot be set: set tuner.dtype",
        ),
        (
            [
                "explorer.rollout_model.engine_type=vllm",
                "explorer.rollout_model.extra_engine_args.speculative_config={method: eagle3}",
            ],
            r"speculative_config\.method is 'eagle3', but only ngram",
        ),
        (
            [
                "explorer.rollout_model.engine_type=vllm",
                "explorer.rollout_model.extra_engine_args.speculative_config="
                "{method: ngram, num_speculative_tokens: 3, rejection_sample_method: synthetic}",
            ],
            r"speculative_config\.rejection_sample_method cannot be set",
        ),
        (
            [
                "explorer.rollout_model.engine_type=vllm",
                "explorer.rollout_model.extra_engine_args.speculative_config={method: ngram}",
                "model.adapters.writer={}",
            ],
            r"speculative_config is set with model\.adapters\.writer, but drafts",
        ),
        (
            [
                "explorer.rollout_model.engine_type=vllm",
                "tuner.placement=colocate",
                "tuner.engine.urls=[http://a:1]",
            ],
            "tuner.placement is colocate, but tuner.engine.urls",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused_by_name(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=overrides)


@pytest.mark.parametrize("computes", [True, False])
def test_weights_are_bfloat16_on_a_gpu_that_computes_with_it_unless_told_otherwise(
    computes, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: computes)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert choose_dtype("auto", gpu) == (torch.bfloat16 if computes else torch.float32)
    assert choose_dtype("auto", cpu) == torch.float32
    assert choose_dtype("float32", gpu) == torch.float32
    assert choose_dtype("bfloat16", cpu) == torch.bfloat16


@pytest.mark.parametrize(("kind", "layout"), [("qwen3", "tree"), ("lfm2", "packed")])
def test_memory_is_counted_for_the_layout_that_the_model_gets(kind, layout):
    more = {"layer_types": ["conv", "full_attention"]} if kind == "lfm2" else {}
    model = model_of(torch.float32, 2, kind=kind, **more)
    assert layout_of(load_config(), model) == layout
    padded = load_config(overrides=["tuner.layout=padded"])
    assert layout_of(padded, model) == "padded"
