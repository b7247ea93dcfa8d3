"""Tiny models with random weights."""

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}


def tiny_qwen3(vocabulary: int, *, seed: int = 0, **shape: Any) -> Qwen3ForCausalLM:
    """A Qwen3 of 20k parameters, or of another shape."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**{"vocab_size": vocabulary, **_SHAPE, **shape})).eval()


def save_chat_model(path: Path, **shape: Any) -> Path:
    """A Hugging Face folder: random parameters, ChatML, one token per byte."""
    from tests.kit.toy import TEMPLATE, tokenizer

    spoken = tokenizer()
    spoken.chat_template = TEMPLATE
    ids = {"eos_token_id": spoken.eos_token_id, "pad_token_id": spoken.pad_token_id}
    tiny_qwen3(len(spoken), **ids, **shape).save_pretrained(path)
    spoken.save_pretrained(path)
    return path
