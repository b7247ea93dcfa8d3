"""A tiny configuration of every causal LM that transformers knows.

The default one with its sizes made small by the names of their keys, and of its layers one of each
kind. Windows, chunks, compression and choices of a few keys then take effect within a few tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from tests.engines.models import VOCABULARY, change_weights

NEAR, FAR = 6, 260
"""How far tokens see in windows, chunks and sparse attention: within what the comparison at the
start of a run goes past, and beyond."""

_SIZES = [
    (r"(^|_)vocab_size$|vocab_size_per_layer", VOCABULARY),
    (r"codebook_size", 256),
    (r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length)$", 512),
    (r"^(model_max_length|max_(target|source)_positions)$", 512),
    (
        r"^(hidden_size|hidden_size_global|cross_attention_hidden_size|d_model|n_embd|lru_width)$",
        64,
    ),
    (r"^((emb|embed|embedding)_(dim|size)|attention_hidden_size|word_embed_proj_dim)$", 64),
    (r"^dim_model_base$|^adapter_(in_dim|out_dim|input_size)$", 64),
    (r"intermediate_size|ffn|dim_ff$|^(d_ff|d_inner|dff)$|feed_forward_size|mlp_dim", 64),
    # Of few heads a choice of keys would score many the same: which of these it takes depends on
    # the width of the pass.
    (r"^index_n_heads$", 64),
    (r"^mamba_(n|num)_heads$", 8),
    (r"(kv|key_value|key)_heads$|query_groups$|^kv_n_heads$", 2),
    (r"window(_size|_len)?$|^local_attention$|^attention_chunk_size$|chunk_length$", None),
    (r"^index_topk$|^indexer_budget$", None),
    (r"^index_(block_size|topk_blocks)$", 4),
    (r"heads$|^n_head$|experts?(_num)?$|_attention$", 4),
    (r"head_?dim$|_dim_head$|^(d|v)_?head|^d_kv$|kv_channels|d_head$|_rank$", 16),
    (r"^rotary_dim$|extent$|max_distance$|chunk_size$|state_size$|d_state$", 8),
    (r"experts_per_tok|moe_top_?k|moe_k$|^(n_group|topk_group|num_expert_group)$", 2),
    (r"(period|interval|every_n_layers|group_size|_step)$|layers$|^n_layer$|^depth$|_blocks", 2),
    (r"^(first_k_dense_replace|num_dense_layers)$|_offset$", 1),
]
"""The first pattern that a key matches says how large it is at most; None is how far tokens see."""

_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_PLACES = re.compile(r"_ids$|_idxs$|^(moe|cross_attention)_layers$")
_OF_TEXT = re.compile("(bos|eos|decoder_start|sep|cls|mask)_token_id$")

_BOTH = ["sliding_attention", "full_attention"]
_ZAMBA = {
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "num_hidden_layers": 4,
    "attention_hidden_size": 128,
    "attention_head_dim": 32,
}
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"vocab_size": VOCABULARY, "encoder_hash_byte_group_vocab": VOCABULARY},
    "blt_local_decoder": {"vocab_size": VOCABULARY},
    "blt_local_encoder": {"vocab_size": VOCABULARY},
    "blt_patcher": {"vocab_size": VOCABULARY},
    "cohere_compass_text": {
        "layer_types": _BOTH,
        "num_hidden_layers": 2,
        "rope_parameters": {k: {"rope_type": "default", "rope_theta": 1e4} for k in _BOTH},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "doge": {"keep_window_size": 24},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
    },
    "dots3_note_text": {"head_dim": 32},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_layers_per_stack": None},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"qk_head_dim": 32},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_n_heads": 2,
    },
    "ministral": {"head_dim": 16},
    "moshi": {"sliding_window": 512},  # as many as there are positions
    "nemotron": {"num_key_value_heads": 2},
    "phi3": {
        "original_max_position_embeddings": 24,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0 + 0.5 * i for i in range(8)],
            "long_factor": [4.0 + 2.0 * i for i in range(8)],
        },
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 64,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": NEAR,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 48]},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": _ZAMBA,
    "zamba2": _ZAMBA | {"hybrid_layer_ids": [1, 3], "n_mamba_heads": 8, "mamba_headdim": 16},
}
"""By the configuration's own model_type, also where it is part of another one."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    }
}
"""What a configuration cannot be made without."""


def tiny_config(model_type: str, reach: int = NEAR, **changed: Any) -> PreTrainedConfig:
    """The default configuration of a model type, made small."""
    kind = CONFIG_MAPPING[model_type]
    default = kind(**_DEFAULTS.get(model_type, {}))
    return kind(**(_shrunk(default.to_dict(), reach) | changed))


def tiny_model(model_type: str, reach: int = NEAR, **changed: Any) -> PreTrainedModel:
    """A random model of this type on a CPU in float32, the same one every time; none of its weights
    is zero or one, so that all of them count.

    Raises:
        Exception: Whatever transformers makes of a configuration that it cannot build.
    """
    config = tiny_config(model_type, reach, **changed)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    change_weights(model, 1.0)
    return model


def _shrunk(config: Mapping[str, Any], reach: int) -> dict[str, Any]:
    count = next((config[key] for key in _COUNTS if isinstance(config.get(key), int)), 0)
    by_layer = {
        key: value
        for key, value in config.items()
        if isinstance(value, list) and len(value) == count > 2 and not _PLACES.search(key)
    }
    own = {int(i): value for i, value in (config.get("per_layer_config") or {}).items()}
    kinds: dict[str, int] = {}
    for i in range(count):
        kinds.setdefault(str([[value[i] for value in by_layer.values()], own.get(i)]), i)
    kept = list(kinds.values()) if len(kinds) > 1 else list(range(count))[:2]

    def small(key: str, value: Any) -> Any:
        if key in by_layer and isinstance(value, list):
            return [small(key, value[i]) for i in kept]
        if isinstance(value, list) and _PLACES.search(key):
            return [kept.index(i) for i in value if i in kept]
        if isinstance(value, dict):
            return value if key in ("id2label", "label2id") else _shrunk(value, reach)
        if type(value) is int and key in _COUNTS and value == count:
            return len(kept)
        if key == "pad_token_id" and value is not None:
            return 0  # which no prompt has: RoBERTa counts positions without it
        if type(value) is int and key.endswith(("token_id", "token_index")):
            # Those of images stay out of the vocabulary, and so out of the prompts.
            return min(value, VOCABULARY - 1) if _OF_TEXT.search(key) else value
        if key == "num_key_value_heads" and "qk_nope_head_dim" in config:
            return min(value, 4)  # latent attention has as many as there are heads
        if type(value) is int:
            sizes = (most or reach for pattern, most in _SIZES if re.search(pattern, key))
            return min(value, next(sizes, value))
        if value == 1.0 and key.endswith(("multiplier", "logits_scaling")):
            return 0.5
        return value

    left_out = ("transformers_version", "architectures", "per_layer_config", "_name_or_path")
    result = {key: small(key, value) for key, value in config.items() if key not in left_out}
    if own:
        result["per_layer_config"] = {
            kept.index(i): _shrunk(own[i], reach) for i in own if i in kept
        }
    return result | _EXCEPTIONS.get(str(config.get("model_type")), {})
