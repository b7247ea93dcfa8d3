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


_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
}
SEEING = ("qwen2_5_vl",)
"""Families of models that see, as `seeing_model` builds them."""


def seeing_tokenizer() -> Any:
    """One token per byte, ChatML, and the tokens around and in pictures of all families."""
    from tests.kit.toy import SEEING_TEMPLATE, tokenizer

    spoken = tokenizer()
    spoken.chat_template = SEEING_TEMPLATE
    tokens = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
    spoken.add_special_tokens({"additional_special_tokens": tokens})
    return spoken


def seeing_model(family: str = "qwen2_5_vl", *, seed: int = 0) -> tuple[Any, Any]:
    """A model of this family with random weights that sees, and its tokenizer."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from tuner.engines.transformers.sight import Sight, processor_of

    spoken = seeing_tokenizer()
    ids = {
        f"{name}_token_id": spoken.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in (
            ("image", "image_pad"),
            ("video", "video_pad"),
            ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
        )
    }
    text = {**_TEXT, "vocab_size": len(spoken), "eos_token_id": spoken.eos_token_id}
    patches = {"patch_size": 4, "temporal_patch_size": 2}
    images = Qwen2VLImageProcessorPil(
        **patches, merge_size=2, size={"shortest_edge": 64, "longest_edge": 2048}
    )
    torch.manual_seed(seed)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 32,
        "window_size": 16,
        "fullatt_block_indexes": [0],
        "initializer_range": 0.3,
        **patches,
    }
    config = Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config=vision,
        tie_word_embeddings=False,
        **ids,
    )
    model: Any = Qwen2_5_VLForConditionalGeneration(config).eval()
    model.sight = Sight(processor_of(Qwen2_5_VLProcessor, images, spoken), config)
    return model, spoken


def png(width: int = 24, height: int = 16, *, seed: int = 0) -> bytes:
    """A picture of noise."""
    import io

    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def save_seeing_model(path: Path, family: str = "qwen2_5_vl", *, seed: int = 0) -> Path:
    """A Hugging Face folder with it and the files of its processor."""
    model, spoken = seeing_model(family, seed=seed)
    model.save_pretrained(path)
    spoken.save_pretrained(path)
    model.sight.processor.image_processor.save_pretrained(path)
    return path
