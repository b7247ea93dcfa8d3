"""Weights that go from GPU to GPU have the names and values of the checkpoint that vLLM reads."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tuner.runs.models import checkpoint_tensors

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
MODELS = {
    "tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "untied": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False)),
    "experts": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_tensors_are_those_that_would_be_saved(name, tmp_path):
    torch.manual_seed(0)
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    saved, sent = load_file(tmp_path / "model.safetensors"), checkpoint_tensors(model)
    assert sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], saved[name]) for name in saved)
    assert not any(tensor.requires_grad for tensor in sent.values())
    if name != "experts":  # a checkpoint has each expert for itself
        held = {p.data_ptr() for p in model.parameters()}
        assert {tensor.data_ptr() for tensor in sent.values()} == held
