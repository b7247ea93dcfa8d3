"""The agent that may try again learns, whichever way it is written."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tuner.traces import TraceStore

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[2] / "examples" / "multi_turn_math"


def test_it_raises_the_held_out_reward(main, tmp_path):
    """In one of the two ways, which sample and become the same, below."""
    quickly = [  # few small steps, and long ones
        "buffer.total_steps=4",
        "buffer.batch_size=8",
        "algorithm.optimizer.lr=0.001",
        "algorithm.optimizer.lr_scheduler_type=constant",
    ]
    found = main.main(
        ["--way", "workflow", "--problems", "50", *quickly, f"checkpoint_root_dir={tmp_path}"]
    )
    start, trained = found["before"], found["workflow"]
    assert trained.first > start.first + 0.2
    assert trained.within_three >= trained.first
    assert trained.tries < start.tries


def test_both_ways_sample_the_same_and_become_the_same(main, tmp_path):
    settings = [
        "buffer.total_steps=1",
        "buffer.batch_size=2",  # in which no try is without its <think>
        "tuner.deterministic=true",
        f"checkpoint_root_dir={tmp_path}",
    ]
    sampled, weights = [], []
    for way in main.WAYS:
        checkpoint = Path(main.train(way, settings))
        weights.append(load_file(checkpoint / "model.safetensors"))
        traces = TraceStore(checkpoint.parents[1] / "traces")
        sampled.append(
            {
                str(trace.id): [(call.prompt_ids, call.completion_ids) for call in trace.calls]
                for trace in traces.read("train", 1)
            }
        )
    assert sampled[0] == sampled[1]
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), (tensor - weights[1][name]).abs().max()
    assert max(len(calls) for calls in sampled[0].values()) == 3
