"""One forward pass over rows of keys and values, in the quickest way that is right for a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tuner.engines.transformers.cascade import RowAttention, attention_mask, levels_of
from tuner.engines.transformers.kv_cache import Placement, SlotCache
from tuner.engines.transformers.model_shape import layer_windows, probe_length
from tuner.engines.transformers.plain_decoder import PlainDecoder, is_plain
from tuner.engines.transformers.solo import differ, forward_options
from tuner.errors import ConfigError


class RowPass:
    """A model's forward pass over rows of a cache.

    Args:
        windows: For each kind of layer ("full_attention", "sliding_attention") in the model its
            window, None for unlimited.
        shares: Rows may have prefixes, and attention is ours (`cascade`); otherwise it is the
            model's, over a view of the rows.
        plain: The model's code, but for its modules with weights, is ours too (`plain_decoder`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        windows: dict[str, int | None],
        *,
        shares: bool = False,
        plain: bool = False,
    ) -> None:
        self._model = model
        self._windows = windows
        self._options = forward_options(model)
        self._plain = PlainDecoder(model, windows) if plain else None
        self.shares = shares
        self.layers: int = model.config.get_text_config(decoder=True).num_hidden_layers

    def logits(
        self, cache: SlotCache, ids: Tensor, positions: Tensor, placement: Placement
    ) -> Tensor:
        """Logits of the last column: ids and positions [m, C] -> [m, V]."""
        cache.placement = placement
        dtype = self._model.dtype
        if placement.own is None:
            masks: dict[str, Any] = {
                kind: attention_mask(positions, placement.kv_length, window, dtype)
                for kind, window in self._windows.items()
            }
        else:
            attentions = {
                kind: RowAttention(cache, placement, positions, window, dtype)
                for kind, window in self._windows.items()
            }
            if self._plain is not None and not self._plain.hooked:
                return self._plain(cache, attentions, ids, positions, placement)
            masks = {kind: attention.mask() for kind, attention in attentions.items()}
        output = self._model(
            input_ids=ids,
            position_ids=positions,
            # Models with one kind of layer take a tensor, those with several a dict.
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            past_key_values=cache,
            use_cache=True,
            **self._options,
        )
        logits: Tensor = output.logits[:, -1]
        return logits


def row_pass_of(model: PreTrainedModel) -> RowPass | str:
    """How to serve a model from rows of keys and values; or why that cannot be.

    Raises:
        ConfigError: Its attention implementation takes no mask.
    """
    windows = layer_windows(model)
    if isinstance(windows, str):
        return windows
    attention = model.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise ConfigError(
            f"attn_implementation is {attention!r}, but the engine needs one that takes a "
            "mask: load the model with attn_implementation='sdpa' or 'eager'"
        )
    why = ""
    for row_pass in _ways(model, windows, ours=attention == "sdpa"):
        found = rows_agree(model, row_pass)
        if found is None:
            return row_pass
        why = found
    return why


def _ways(
    model: PreTrainedModel, windows: dict[str, int | None], *, ours: bool
) -> Iterator[RowPass]:
    """The quickest first. The kernel that ours is built of is one of the CPU's; on a GPU steps are
    recorded, which makes what is around the products cheap there."""
    if ours and model.device.type == "cpu":
        if is_plain(model):
            yield RowPass(model, windows, shares=True, plain=True)
        yield RowPass(model, windows, shares=True)
    yield RowPass(model, windows)


@torch.no_grad()
def rows_agree(model: PreTrainedModel, row_pass: RowPass) -> str | None:
    """Compare passes over rows with a plain forward pass; None if they agree, else what differs.

    For models whose code does something of its own with positions, masks or the cache (ALiBi,
    for example) and does not say so in its configuration.
    """
    device = model.device
    length = probe_length(model.config)
    ids = (torch.arange(length, device=device) * 7 + 3) % model.config.get_text_config().vocab_size
    try:
        # A row of one token and a long one, which goes on beside it.
        alone = [model(input_ids=row[None], use_cache=False).logits[0] for row in (ids[:1], ids)]
        wanted = torch.cat([alone[1][-2:-1], alone[0], alone[1][-1:]])
        cache = SlotCache(row_pass.layers, 2, length)
        prefix = None
        got = []
        for first, places in ((1, [[*range(length - 1)]]), (0, [[0], [length - 1]])):
            positions = torch.tensor(places, device=device)
            own = positions.clone()
            if prefix is not None:
                own[1] -= prefix.end
            stop = int(own.max()) + 1
            rows = torch.arange(first, 2, device=device)[:, None]
            target = (rows * cache.width + own).flatten()
            placement = Placement(slice(first, 2), stop, target, None)
            if row_pass.shares:
                levels = levels_of((None, prefix)[first:], device)
                placement = Placement(slice(first, 2), stop, target, None, own, levels)
            got.append(row_pass.logits(cache, ids[positions], positions, placement))
            if row_pass.shares:
                # What is left of the row is its last two tokens.
                prefix = cache.seal(1, None, length - 3, 2)
    except Exception as error:  # whatever a model's own code makes of the masks and the cache
        return f"its forward pass does not take them ({type(error).__name__}: {error})"
    return differ(torch.cat(got), wanted)
