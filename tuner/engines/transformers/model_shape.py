"""Properties of a model's layers from its configuration: windows, widths, length limits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

_FEW = 256
"""Up to this many tokens a comparison with a plain forward pass is cheap."""
_LENGTH = re.compile("(window|chunk)(_size)?$|original_max_position")
"""Configuration keys that say how far a token sees; "max_window_layers" is not one."""


def length_limit(config: Any) -> tuple[int, str] | None:
    """The number of positions up to which batching does not change a sequence's computation, and
    what happens beyond; None without such a limit.

    transformers takes the frequencies of RoPE `longrope` and `dynamic` from the largest position in
    the whole pass, so one long row would change every other row, and cached keys would have other
    frequencies than later ones. Doge attends to the highest-scoring keys: equal tokens score the
    same, and which of them it takes depends on the pass.
    """
    config = config.get_text_config(decoder=True)
    kept = getattr(config, "keep_window_size", None)
    if kept is not None:
        return kept, (
            f"beyond {kept} positions this model attends to {kept} tokens of its choice, and of "
            "equal tokens takes any, so sequences would not be computed as they are alone"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in rope.values() if isinstance(kind, Mapping)] or [rope]
    limits: dict[int, str] = {}
    for kind in kinds:
        name = str(kind.get("rope_type"))
        if name == "longrope":
            limits[int(kind["original_max_position_embeddings"])] = name
        elif "dynamic" in name:
            limits[int(config.max_position_embeddings)] = name
    if not limits:
        return None
    limit = min(limits)
    return limit, (
        f"beyond {limit} positions this model takes the frequencies of RoPE from the longest "
        f"sequence computed with (rope_type {limits[limit]!r}), so sequences would not be computed "
        "as they are alone"
    )


def probe_length(config: Any) -> int:
    """Number of tokens of a row that exceeds every short window and chunk in a model's
    configuration; larger ones would cost too much to try."""
    config = config.get_text_config(decoder=True)
    length = 6 + max((n for n in _named_lengths(config.to_dict()) if n <= _FEW), default=0)
    limit = length_limit(config)
    bounds = (limit and limit[0], getattr(config, "max_position_embeddings", None))
    return min([length, *(int(bound) for bound in bounds if bound and bound > 0)])


def _named_lengths(settings: Mapping[Any, Any]) -> Iterator[int]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _named_lengths(value)
        elif isinstance(value, int) and _LENGTH.search(str(key)):
            yield value


def layer_windows(model: PreTrainedModel) -> dict[str, int | None] | str:
    """The attention window of each kind of layer, or why the model cannot be served from rows.

    Returns:
        For each kind of layer as transformers names it ("full_attention", "sliding_attention")
        its window in tokens, None for unlimited; or a sentence.
    """
    config = model.config.get_text_config(decoder=True)
    if getattr(model, "_is_stateful", False):
        return "it keeps a state instead of keys and values"
    if getattr(config, "num_kv_shared_layers", 0):
        return "some of its layers share keys and values"
    if getattr(config, "attention_chunk_size", None):
        return "it attends in chunks"
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        return f"it has layers of the kinds {', '.join(sorted(kinds))}"
    try:
        layers = DynamicCache(config=config).layers
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return f"transformers has no cache for it ({error})"
    windows: dict[str, int | None] = {}
    for layer in layers:
        if type(layer) is DynamicLayer:
            windows["full_attention"] = None
        elif type(layer) is DynamicSlidingWindowLayer:
            window = int(layer.sliding_window)
            if windows.setdefault("sliding_attention", window) != window:
                return "its layers have windows of different lengths"
        else:
            return f"it has a {type(layer).__name__}"
    if not windows:
        return "its configuration does not say what its layers keep"
    return windows


def layer_configs(config: Any) -> list[Any]:
    """The configuration of each layer; Gemma 4's have heads of different sizes."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * config.num_hidden_layers


def head_width(config: Any) -> int:
    width = getattr(config, "head_dim", None)
    return int(width or config.hidden_size // config.num_attention_heads)


def cache_bytes(model: Any) -> int:
    """Bytes of keys and values of one token in all layers."""
    each = 2 * torch.finfo(model.dtype).bits // 8
    return sum(
        each * head_width(layer) * (getattr(layer, "num_key_value_heads", None) or heads)
        for layer in layer_configs(model.config.get_text_config(decoder=True))
        if (heads := getattr(layer, "num_attention_heads", 0))
    )
