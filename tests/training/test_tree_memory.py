"""What an update needs beyond parameters and gradients does not grow with the vocabulary."""

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.engines.models import prompt
from tests.training.test_tree_forward import row
from tuner.training.tree_forward import tree_logprobs

WIDTH = 8


def peak_bytes(vocabulary):
    """Most bytes alive at once in forward and backward of 1100 trained tokens, beyond what was
    there before and all that has the size of the embedding's gradient."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).eval()
    rows = [row(prompt(10), prompt(550, seed)) for seed in (1, 2)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        found = tree_logprobs(model, rows, windows={"full_attention": None}, with_entropy=True)
        (found.logp_T.sum() + found.entropy_T.sum()).backward()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if abs(event.nbytes()) != 4 * vocabulary * WIDTH:
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def test_peak_memory_grows_by_less_than_a_tenth_from_8k_to_152k_tokens_of_vocabulary():
    assert peak_bytes(151_936) < 1.1 * peak_bytes(8_192)
