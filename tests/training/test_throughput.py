"""MFU: FLOPs against torch's own count of them, and what a GPU can do."""

from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.engines.models import make_model
from tests.training.configured import training
from tests.training.exact import model_of, row
from tests.training.test_trainer import random_batch, tiny_model
from tuner.traces import TokenTree
from tuner.training.batch import build_batch
from tuner.training.forward.tree_pass import tree_logprobs
from tuner.training.trainer import ModelFlops, PolicyTrainer, Throughput, peak_flops

ROWS = [row((3, 10, 17), (24, 31)), row((3, 10, 17), (24, 38, 45)), row((3, 10), (52, 3))]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_flops_are_those_that_torch_counts_on_the_tree(kind, frozen):
    model = make_model(kind)
    model.set_attn_implementation("eager")
    if frozen:  # the gradient still has to go through
        model.model.layers[1].mlp.requires_grad_(False)
    flops, tree = ModelFlops.of(model), TokenTree.build(ROWS)
    with FlopCounterMode(display=False) as seen:
        found = tree_logprobs(model, ROWS, windows={"full_attention": None}, with_entropy=False)
        found.logp_T.sum().backward()
    # `eager` compares every node with every other, and not just with its ancestors.
    dense = flops.pair * 2 * (tree.unique_tokens**2 - float((tree.depth + 1).sum()))
    assert flops(tree) + dense == pytest.approx(seen.get_total_flops(), rel=1e-3)


def test_pairs_outside_a_window_do_not_count():
    flops = ModelFlops.of(model_of("gemma3"))  # one layer of each kind, a window of 6
    long = TokenTree.build([row(range(1, 20), (24, 31))])
    assert dict(flops.layers) == {6: 1, None: 1}
    assert flops.node * 21 + flops.logits * 2 == flops(long) - flops.pair * (
        21 * 22 // 2 + 6 * 7 // 2 + 6 * 15
    )


def test_models_whose_sizes_do_not_say_what_they_compute_have_a_reason():
    assert "keeps a state" in ModelFlops.of(make_model("qwen3_next"))
    model = tiny_model()
    model.config.num_experts = 8
    assert ModelFlops.of(model) == "not every token passes all weights (num_experts)"


@pytest.mark.parametrize(
    ("device", "dtype", "tf32", "tflops"),
    [
        ("NVIDIA H200", torch.bfloat16, False, 989),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, False, 989),
        ("NVIDIA H100 PCIe", torch.float32, False, 51),
        ("NVIDIA A100-SXM4-80GB", torch.float32, True, 156),
        ("NVIDIA L40S", torch.bfloat16, False, 362),
        ("NVIDIA L4", torch.float32, False, 30.3),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, False, 165.2),
    ],
)
def test_peak_follows_the_name_of_the_device(device, dtype, tf32, tflops):
    assert peak_flops(device, dtype, tf32=tf32) == tflops * 1e12


def test_an_unknown_peak_is_none():
    assert peak_flops("NVIDIA A10", torch.bfloat16) is None
    assert peak_flops("NVIDIA L400", torch.bfloat16) is None
    assert peak_flops("NVIDIA H200", torch.float64) is None


def test_mfu_is_flops_over_seconds_over_the_peak():
    throughput, metrics = Throughput(tiny_model(), torch.device("cpu")), {}
    throughput._flops, throughput._peak = ModelFlops.of(tiny_model()), 1e9
    tree = TokenTree.build(ROWS)
    with (
        mock.patch("time.perf_counter", side_effect=[10.0, 12.0]),
        throughput.of(ROWS, 3, metrics),
    ):
        pass
    assert metrics == {
        "unique_tokens_per_second": 3 * tree.unique_tokens / 2,
        "row_tokens_per_second": 3 * tree.row_tokens / 2,
        "mfu": pytest.approx(3 * throughput._flops(tree) / 2 / 1e9),
    }


def test_an_update_reports_tokens_per_second_and_on_a_cpu_no_mfu():
    trainer = PolicyTrainer(tiny_model(), training(total_steps=1, kl="none"))
    batch = build_batch(random_batch(0))
    metrics = trainer.ppo_update(trainer.compute_advantages(batch))
    ratio = metrics["row_tokens_per_second"] / metrics["unique_tokens_per_second"]
    assert ratio == pytest.approx(TokenTree.build(batch.rows).merge_ratio)
    assert not {"mfu", "peak_memory_gib"} & metrics.keys()


def test_the_seconds_of_parts_are_those_since_the_last_update():
    throughput, metrics = Throughput(tiny_model(), torch.device("cpu")), {}
    with mock.patch(
        "time.perf_counter", side_effect=[0.0, 1.0, 10.0, 12.0, 15.0, 20.0, 24.0, 25.0]
    ):
        with throughput.part("scoring"):
            pass
        with throughput.of(ROWS, 1, metrics):
            for _ in range(2):
                with throughput.part("forward"):
                    pass
    assert (metrics["scoring_seconds"], metrics["forward_seconds"]) == (1.0, 3.0 + 4.0)
    with throughput.of(ROWS, 1, following := {}):
        pass
    assert not any(name.endswith("_seconds") for name in following)
    throughput._device = torch.device("cuda")
    with (
        mock.patch.multiple(
            "torch.cuda",
            synchronize=mock.DEFAULT,
            reset_peak_memory_stats=mock.DEFAULT,
            max_memory_allocated=lambda device: 0,
        ),
        throughput.part("forward"),
        throughput.of(ROWS, 1, on_gpu := {}),
    ):
        pass
    assert not any(name.endswith("_seconds") for name in on_gpu)


def test_a_gpu_whose_peak_is_unknown_is_said_once(caplog):
    model = tiny_model()
    caplog.set_level("INFO", "tuner")
    with mock.patch("torch.cuda.get_device_name", return_value="NVIDIA Unheard"):
        Throughput(model, torch.device("cuda"))
    assert caplog.messages == [
        "no MFU is reported: the peak of 'NVIDIA Unheard' in torch.float32 is not known"
    ]
