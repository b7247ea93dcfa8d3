"""Which models can be served from rows of keys and values, and what their layers attend to."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from tuner.engines.kv_cache import Placement, SlotCache, attention_mask
from tuner.engines.runner import forward_options

_PROBE_LENGTH = 6


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


@torch.no_grad()
def rows_agree(model: PreTrainedModel, windows: dict[str, int | None]) -> str | None:
    """Compare a pass over rows with a plain forward pass; None if they agree, else what differs.

    For models whose code does something of its own with positions, masks or the cache (ALiBi,
    for example) and does not say so in its configuration.
    """
    device, dtype = model.device, model.dtype
    length = _PROBE_LENGTH
    ids = (torch.arange(length, device=device) * 7 + 3) % model.config.get_text_config().vocab_size
    try:
        wanted = model(input_ids=ids[None], use_cache=False).logits[0, -2:].float()
        cache = SlotCache(model.config.get_text_config().num_hidden_layers, 2, length)
        got = []
        for start, stop in ((0, length - 1), (length - 1, length)):
            positions = torch.arange(start, stop, device=device)[None]
            cache.placement = Placement(1, 2, stop, length + positions[0], None)
            masks = {k: attention_mask(positions, stop, w, dtype) for k, w in windows.items()}
            output = model(
                input_ids=ids[None, start:stop],
                position_ids=positions,
                attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                past_key_values=cache,
                use_cache=True,
                **forward_options(model),
            )
            got.append(output.logits[0, -1].float())
    except Exception as error:  # whatever a model's own code makes of the masks and the cache
        return f"its forward pass does not take them ({type(error).__name__}: {error})"
    allowed = 1e-3 if dtype in (torch.float32, torch.float64) else 0.25
    difference = float((torch.stack(got) - wanted).abs().max() / wanted.std())
    if difference > allowed:
        return f"its logits would differ by {difference:.2g} standard deviations"
    return None
