"""What an update needs beyond parameters and gradients: not more with a larger vocabulary, and not
much more with more layers where activations are checkpointed."""

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.engines.models import prompt
from tests.training.test_tree_forward import row
from tuner.training.forward import Forward
from tuner.training.tree_forward import tree_logprobs

WIDTH = 8


def model_with(vocabulary=50, layers=1):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def peak_bytes(compute, *, leave_out=0):
    """Most bytes alive at once in forward and backward of 1100 trained tokens, beyond what was
    there before and all that has a size of `leave_out`."""
    rows = [row(prompt(10), prompt(550, seed)) for seed in (1, 2)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        found = compute(rows)
        (found.logp_T.sum() + found.entropy_T.sum()).backward()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if abs(event.nbytes()) != leave_out:
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def peak_of_vocabulary(vocabulary):
    model = model_with(vocabulary)
    return peak_bytes(
        lambda rows: tree_logprobs(
            model, rows, windows={"full_attention": None}, with_entropy=True
        ),
        leave_out=4 * vocabulary * WIDTH,  # the embedding's gradient
    )


def test_peak_memory_grows_by_less_than_a_tenth_from_8k_to_152k_tokens_of_vocabulary():
    assert peak_of_vocabulary(151_936) < 1.1 * peak_of_vocabulary(8_192)


def peak_of_layers(layers, *, checkpointing):
    model = model_with(300, layers)
    forward = Forward.of(model, None, checkpointing=checkpointing)
    return peak_bytes(lambda rows: forward.logprobs(model, rows, with_entropy=True))


def test_a_checkpointed_layer_adds_a_fifth_of_the_memory_that_a_kept_one_adds():
    added = [
        peak_of_layers(8, checkpointing=checkpointing)
        - peak_of_layers(2, checkpointing=checkpointing)
        for checkpointing in (True, False)
    ]
    assert added[0] < added[1] / 5
