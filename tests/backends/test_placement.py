"""Where vLLM runs, and what is refused because it does not fit."""

import pytest
import torch

from tests.engines.models import make_model
from tuner.backends.placement import Machine, Needs, choose_placement, needs_of
from tuner.config import load_config
from tuner.errors import ConfigError

GIB = 2**30
SMALL = Needs(trainer=20 * GIB, weights=4 * GIB, request=GIB)


def choose(*overrides, gpus=(), memory=64, needs=SMALL):
    config = load_config(overrides=["explorer.rollout_model.engine_type=vllm", *overrides])
    return choose_placement(config, needs, Machine(tuple(g * GIB for g in gpus), memory * GIB))


def test_on_a_cpu_the_engine_gets_a_process_of_its_own():
    placement = choose(needs=Needs(20 * GIB, 4 * GIB, GIB // 4))
    assert placement.mode == "separate"
    assert placement.gpus == ((),)
    assert placement.cpu_cache == 64 // 4 * GIB
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
    placement = choose(*overrides, gpus=gpus)
    assert (placement.mode, placement.gpus) == (mode, places)
    assert placement.gpu_memory_utilization == part
    assert "20.00 GiB for training" in str(placement)


@pytest.mark.parametrize(
    ("overrides", "gpus", "needs", "message"),
    [
        ([], [24], SMALL, r"vLLM needs 6.00 GiB .* gets 2.\d+ GiB of 24.00 GiB"),
        ([], [16], SMALL, "training needs 20.00 GiB .* has 16.00 GiB"),
        (["tuner.placement=separate"], [80], SMALL, "need 2 GPUs, and there are 1"),
        (["explorer.rollout_model.engine_num=2"], [80, 80], SMALL, "need 3 GPUs, and there are 2"),
        (
            ["explorer.rollout_model.gpu_memory_utilization=0.9"],
            [80],
            SMALL,
            r"utilization is 0.9, 72.00 GiB, but training leaves 59.00 GiB",
        ),
        ([], [], Needs(60 * GIB, 4 * GIB, 0), "vLLM does not fit: .*64.00 GiB of main memory"),
        (["explorer.rollout_model.tensor_parallel_size=2"], [], SMALL, "there is no GPU"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_numbers(overrides, gpus, needs, message):
    with pytest.raises(ConfigError, match=message):
        choose(*overrides, gpus=gpus, needs=needs)


def test_servers_elsewhere_need_nothing_here():
    placement = choose("tuner.engine.urls=[http://10.0.0.2:8100]", needs=Needs(0, 10**15, 0))
    assert placement.mode == "separate"
    assert placement.gpus == ()
    assert "10.0.0.2" in str(placement)


def test_what_a_run_needs_is_counted_from_its_model():
    model = make_model()
    parameters = sum(p.numel() for p in model.parameters())
    config = load_config()
    needs = needs_of(config, model, 100, references=1, critics=0)
    assert needs.weights == 4 * parameters
    assert needs.trainer == (4 + 4 + 4 + 8) * parameters  # policy, reference, gradient, moments
    assert needs.request == 100 * 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, width, bytes
    half = load_config(overrides=["tuner.dtype=bfloat16", "trainer.optimizer_offload=true"])
    needs = needs_of(half, model.to(torch.bfloat16), 100, references=0, critics=0)
    assert needs.weights == 2 * parameters
    assert needs.trainer == (2 + 4) * parameters


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["explorer.rollout_model.engine_num=2"], "engine_num is 2"),
        (["tuner.engine.urls=[http://a:1]"], r"tuner.engine.urls is \['http://a:1'\]"),
        (["tuner.placement=separate"], "tuner.placement is separate"),
        (["explorer.rollout_model.engine_type=sglang"], "engine_type"),
        (["explorer.rollout_model.engine_type=vllm", "tuner.deterministic=true"], "who else"),
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
