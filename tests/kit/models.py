"""Tiny models with random weights."""

import copy
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
_TOWER = {"intermediate_size": 32, "hidden_size": 16, "initializer_range": 0.3}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_TOKENS = {
    "qwen": ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"],
    "idefics3": ["<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>"],
    "internvl": ["<IMG_CONTEXT>", "<img>", "</img>", "<video>"],
    "glm4v": [
        f"<|{mark}{kind}|>" for kind in ("image", "video") for mark in ("", "begin_of_", "end_of_")
    ],
    "llava": ["<image>"],
}


def _vision_tokenizer(kind: str, image: str) -> Any:
    """One token per byte, ChatML, and the tokens of images."""
    from tests.kit.toy import VISION_TEMPLATE, tokenizer

    spoken = copy.deepcopy(tokenizer())  # which others share
    spoken.chat_template = VISION_TEMPLATE.replace("IMAGE", image)
    spoken.add_special_tokens({"additional_special_tokens": _TOKENS[kind]})
    return spoken


def vision_tokenizer() -> tuple[Any, dict[str, int]]:
    """A tokenizer for Qwen's vision models, and the ids of images in their configuration."""
    spoken = _vision_tokenizer("qwen", "<|vision_start|><|image_pad|><|vision_end|>")
    names = ("vision_start", "image", "vision_end", "video")
    ids = zip(names, spoken.convert_tokens_to_ids(_TOKENS["qwen"]), strict=True)
    return spoken, {f"{name}_token_id": id_ for name, id_ in ids}


def _qwen(kind: str) -> tuple[Any, Any, Any]:
    import transformers
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    spoken, ids = vision_tokenizer()
    sizes = {"patch_size": 4, "temporal_patch_size": 2}
    images = Qwen2VLImageProcessorPil(
        **sizes, merge_size=2, size={"shortest_edge": 64, "longest_edge": 2048}
    )
    vision = {**_TOWER, **sizes, "num_heads": 2, "spatial_merge_size": 2, "out_hidden_size": 32}
    text = {**_text_of(spoken), "rope_parameters": _ROPE}
    processor = Qwen3VLProcessor
    if kind == "Qwen2VL":
        vision |= {"depth": 1, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
        processor = Qwen2VLProcessor
    elif kind == "Qwen2_5_VL":
        vision |= {"depth": 1, "window_size": 16, "fullatt_block_indexes": [0]}
        processor = Qwen2_5_VLProcessor
    elif kind == "Qwen3VL":  # its first layers are given features of the tower's first layer, too
        vision |= {"depth": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    else:
        vision |= {"depth": 1, "num_position_embeddings": 16}
        heads = {f"linear_num_{part}_heads": 2 for part in ("key", "value")}
        widths = {f"linear_{part}_head_dim": 8 for part in ("key", "value")}
        text |= {"layer_types": ["linear_attention", "full_attention"], **heads, **widths}
        text["rope_parameters"] = _ROPE | {"partial_rotary_factor": 1.0}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=False, **ids
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    return model, processor, (spoken, images, {})


def _text_of(spoken: Any) -> dict[str, Any]:
    return {**_TEXT, "vocab_size": len(spoken), "eos_token_id": spoken.eos_token_id}


def _glm4v() -> tuple[Any, Any, Any]:
    from transformers import Glm4vConfig, Glm4vForConditionalGeneration
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
    from transformers.models.glm4v.processing_glm4v import Glm4vProcessor

    spoken = _vision_tokenizer("glm4v", "<|begin_of_image|><|image|><|end_of_image|>")
    parts = (
        f"{kind}{part}_token_id" for kind in ("image", "video") for part in ("", "_start", "_end")
    )
    ids = dict(zip(parts, spoken.convert_tokens_to_ids(_TOKENS["glm4v"]), strict=True))
    sizes = {"patch_size": 4, "temporal_patch_size": 2}
    images = Glm4vImageProcessorPil(
        **sizes, merge_size=2, size={"shortest_edge": 64, "longest_edge": 4096}
    )
    tower = {**_TOWER, **sizes, "depth": 1, "num_heads": 2, "spatial_merge_size": 2}
    config = Glm4vConfig(
        text_config={
            **_text_of(spoken),
            "pad_token_id": spoken.pad_token_id,
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0},
        },
        vision_config={**tower, "out_hidden_size": 32, "image_size": 32},
        tie_word_embeddings=False,
        **ids,
    )
    return Glm4vForConditionalGeneration(config), Glm4vProcessor, (spoken, images, {})


def _llava() -> tuple[Any, Any, Any]:
    from transformers import LlavaConfig, LlavaForConditionalGeneration
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava.processing_llava import LlavaProcessor

    spoken = _vision_tokenizer("llava", "<image>")
    images = CLIPImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    )
    config = LlavaConfig(
        text_config={**_text_of(spoken), "model_type": "llama"},
        vision_config={
            **_TOWER,
            "model_type": "clip_vision_model",
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 4,
            "image_size": 16,
            "projection_dim": 16,
        },
        image_token_id=spoken.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    settings = {
        "patch_size": 4,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    return LlavaForConditionalGeneration(config), LlavaProcessor, (spoken, images, settings)


def _idefics3() -> tuple[Any, Any, Any]:
    """Large images in four tiles, with words between them."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import (
        Idefics3ImageProcessorPil,
    )
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    return _tiled("Idefics3", Idefics3Processor, Idefics3ImageProcessorPil)


def _smolvlm() -> tuple[Any, Any, Any]:
    """As Idefics3, with its own processor."""
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
    from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

    return _tiled("SmolVLM", SmolVLMProcessor, SmolVLMImageProcessorPil)


def _tiled(kind: str, processor: Any, images: Any) -> tuple[Any, Any, Any]:
    import transformers

    spoken = _vision_tokenizer("idefics3", "<image>")
    config = getattr(transformers, f"{kind}Config")(
        text_config={**_TEXT, "model_type": "llama", "vocab_size": len(spoken)},
        vision_config={
            **_TOWER,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "patch_size": 4,
            "image_size": 16,
        },
        image_token_id=spoken.convert_tokens_to_ids("<image>"),
        pad_token_id=spoken.pad_token_id,
        tie_word_embeddings=False,
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    sizes = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    return model, processor, (spoken, images(**sizes), {"image_seq_len": 4})


def _internvl() -> tuple[Any, Any, Any]:
    from transformers import InternVLConfig, InternVLForConditionalGeneration
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
        GotOcr2ImageProcessorPil,
    )
    from transformers.models.internvl.processing_internvl import InternVLProcessor

    spoken = _vision_tokenizer("internvl", "<IMG_CONTEXT>")
    parts = ("context_image_token", "start_image_token", "end_image_token", "video_token")
    for part, token in zip(parts, _TOKENS["internvl"], strict=True):
        setattr(spoken, part, token)
        setattr(spoken, f"{part}_id", spoken.convert_tokens_to_ids(token))
    images = GotOcr2ImageProcessorPil(
        size={"height": 16, "width": 16}, crop_to_patches=True, min_patches=1, max_patches=3
    )
    config = InternVLConfig(
        text_config={**_TEXT, "model_type": "qwen2", "vocab_size": len(spoken)},
        vision_config={
            **_TOWER,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "patch_size": [4, 4],
            "image_size": [16, 16],
        },
        image_token_id=spoken.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    model, settings = InternVLForConditionalGeneration(config), {"image_seq_length": 4}
    return model, InternVLProcessor, (spoken, images, settings)


_FAMILIES: dict[str, Any] = {
    "qwen2_vl": lambda: _qwen("Qwen2VL"),
    "qwen2_5_vl": lambda: _qwen("Qwen2_5_VL"),
    "qwen3_vl": lambda: _qwen("Qwen3VL"),
    "qwen3_5": lambda: _qwen("Qwen3_5"),
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "internvl": _internvl,
    "glm4v": _glm4v,
    "llava": _llava,
}
VISION = tuple(_FAMILIES)
"""Families of vision models, as `vision_model` builds them."""
STATEFUL = ("qwen3_5",)
"""Those that keep a state: computed in padded rows, and generated one request at a time."""


def vision_model(family: str = "qwen2_5_vl", *, seed: int = 0) -> tuple[Any, Any]:
    """A vision model of this family with random weights, and its tokenizer."""
    from tuner.engines.transformers.vision import give_vision, processor_of

    torch.manual_seed(seed)
    model, processor, (spoken, images, settings) = _FAMILIES[family]()
    give_vision(model.eval(), (processor_of(processor, images, spoken, **settings), {}))
    return model, spoken


def png(width: int = 24, height: int = 16, *, seed: int = 0) -> bytes:
    """An image of noise."""
    import io

    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def save_vision_model(path: Path, family: str = "qwen2_5_vl", *, seed: int = 0) -> Path:
    """A Hugging Face folder with it and the files of its processor."""
    model, spoken = vision_model(family, seed=seed)
    model.save_pretrained(path)
    spoken.save_pretrained(path)
    model.vision.processor.image_processor.save_pretrained(path)
    return path
