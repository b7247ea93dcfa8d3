"""A tiny model that reads images: a Qwen3-VL, its processor, and how rows of a corpus show them."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL.Image import Image
from transformers import PreTrainedTokenizerBase
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration

TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
SIDE = 32
"""Every image is scaled to as many pixels in each direction."""
PATCH = 4
MERGE = 2  # patches that one token stands for, in each direction
SHOWN = TOKENS[0] + TOKENS[1] * (SIDE // PATCH // MERGE) ** 2 + TOKENS[2]
"""Stands for an image in a row's text."""


def image_processor() -> Qwen2VLImageProcessorPil:
    """Scales images and cuts them into patches."""
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        temporal_patch_size=2,
        merge_size=MERGE,
        size={"shortest_edge": SIDE**2, "longest_edge": SIDE**2},
    )


def build_model(
    tokenizer: PreTrainedTokenizerBase, shape: dict[str, Any]
) -> Qwen3VLForConditionalGeneration:
    """A model of Qwen3-VL's architecture, randomly started, whose decoder is a Qwen3 of a shape."""
    start, image, end, video = map(tokenizer.convert_tokens_to_ids, TOKENS)
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    }
    config = Qwen3VLConfig(
        text_config={**shape, "rope_parameters": rope},
        vision_config={
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_heads": 4,
            "patch_size": PATCH,
            "temporal_patch_size": 2,
            "spatial_merge_size": MERGE,
            "out_hidden_size": shape["hidden_size"],
            "num_position_embeddings": (SIDE // PATCH) ** 2,
            "deepstack_visual_indexes": [],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
        dtype="float32",
    )
    return Qwen3VLForConditionalGeneration(config)


def inputs(model: Any, ids: torch.Tensor, images: Sequence[Image]) -> dict[str, torch.Tensor]:
    """What the model is given beside ids (rows, length): their images, in order."""
    pixels = image_processor()(images=images, return_tensors="pt")
    return {**pixels, "mm_token_type_ids": (ids == model.config.image_token_id).int()}
