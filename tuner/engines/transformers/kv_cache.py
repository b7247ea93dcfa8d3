"""Keys and values of many requests, and which models can be served from them.

They are a cache that transformers models write to, with a row for each request. One layer's keys
(values likewise) are one tensor [slots, capacity, kv_heads, head_dim]; row r, position t holds
token t of the request in row r. A forward pass computes new tokens for the contiguous rows
[first, last) and attends to the first `kv_length` positions of each:

                  position 0 ............ kv_length ... capacity      one place more, never read
        row first  k k k k k N . . . . .  |                        k computed before
            ...    k k N N N N N N . . .  |                        N written by this pass
        row last-1 k k k k k k k k k k N  |                        . masked

The model gets a view of that block and not a copy, but for recorded prompts (`graphs`). Tokens are
next to each other in memory, so that writing one and copying a prefix from row to row are plain
copies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from tuner.engines.transformers.solo import differ, forward_options
from tuner.errors import ConfigError


@dataclass(frozen=True)
class Placement:
    """Where the tokens of one forward pass go.

    Attributes:
        rows: That the pass computes: consecutive ones, of which the model gets a view, or the
            indices of any, which are copied.
        kv_length: Positions that are attended to.
        target: For every token that is written its place `row * width + position`, shape [N].
        source: The places of those tokens in the flattened input [m * C], shape [N]; None when the
            input has no padding.
    """

    rows: slice | Tensor
    kv_length: int
    target: Tensor
    source: Tensor | None


class SlotLayer(CacheLayerMixin):
    """One layer's rows; shape and dtype are those of the first keys and values written."""

    is_sliding = False

    def __init__(self, store: SlotCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._store = store

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Not needed: the first `update` allocates."""

    def _empty(self, states: Tensor) -> Tensor:
        _, heads, _, width = states.shape
        # Zeros: a masked place still takes part in attention with weight 0, and 0 * NaN is NaN.
        return states.new_zeros(self._store.slots, self._store.width, heads, width)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new states [m, kv_heads, C, head_dim]; return the block that is attended to."""
        if self.keys is None or self.values is None:
            self.keys, self.values = self._empty(key_states), self._empty(value_states)
            self.is_initialized = True
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, stored: Tensor, states: Tensor) -> Tensor:
        place = self._store.placement
        flat = states.transpose(1, 2).flatten(0, 1)
        if place.source is not None:
            flat = flat.index_select(0, place.source)
        stored.flatten(0, 1).index_copy_(0, place.target, flat)
        return stored[place.rows, : place.kv_length].transpose(1, 2)

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # Asked for only when a model makes its own mask; ours is always given.
        raise RuntimeError("a slot cache needs an explicit attention mask")


_TOGETHER = 16
"""Keys or values of so many layers are one block of memory: few, so that a row is moved with few
operations; several, so that growing takes little more than what is grown."""


class SlotCache(Cache):
    """All layers' rows. Rows and capacity grow by doubling; nothing is allocated ahead of need."""

    placement: Placement

    def __init__(self, layers: int, slots: int, capacity: int) -> None:
        self.slots = slots
        self.capacity = capacity
        self._rows = [SlotLayer(self) for _ in range(layers)]
        self._blocks: list[Tensor] = []
        super().__init__(layers=list(self._rows))

    @property
    def width(self) -> int:
        """Places of a row: those of its tokens, and one more for a token that counts nothing."""
        return self.capacity + 1

    @property
    def together(self) -> bool:
        """Whether what is stored is in few blocks; `grow` sees to it, of the same size too."""
        return bool(self._blocks) or not self._stored()

    def grow(self, slots: int, capacity: int) -> None:
        """Make room for `slots` rows of `capacity` tokens, keeping what is stored."""
        old_slots, old_capacity = self.slots, self.capacity
        self.slots, self.capacity = slots, capacity
        self._blocks = []
        for layers in self._stored():
            old = getattr(*layers[0])
            block = old.new_zeros(len(layers), slots, self.width, *old.shape[2:])
            for new, (layer, name) in zip(block, layers, strict=True):
                new[:old_slots, :old_capacity] = getattr(layer, name)[:, :old_capacity]
                setattr(layer, name, new)
            self._blocks.append(block)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one row to another."""
        for block in self._parts():
            block[:, target, :length].copy_(block[:, source, :length])

    def swap(self, one: int, other: int, length: int) -> None:
        """Exchange the first `length` tokens of two rows."""
        for block in self._parts():
            kept = block[:, one, :length].clone()
            block[:, one, :length] = block[:, other, :length]
            block[:, other, :length] = kept

    def clear(self) -> None:
        """Forget everything, so that not even a NaN of earlier weights is left behind."""
        for block in self._parts():
            block.zero_()

    def _parts(self) -> list[Tensor]:
        """All that is stored, shape [layers, slots, width, kv_heads, head_dim] each."""
        return self._blocks or [
            getattr(layer, name)[None] for layers in self._stored() for layer, name in layers
        ]

    def _stored(self) -> list[list[tuple[SlotLayer, str]]]:
        """Keys and values that are stored, those of one shape and dtype together."""
        alike: dict[Any, list[tuple[SlotLayer, str]]] = {}
        for layer in self._rows:
            for name in ("keys", "values"):
                states = getattr(layer, name)
                if states is not None:
                    alike.setdefault((states.shape, states.dtype), []).append((layer, name))
        return [
            layers[at : at + _TOGETHER]
            for layers in alike.values()
            for at in range(0, len(layers), _TOGETHER)
        ]


MASK_ELEMENTS = 1 << 24
"""Upper limit of the elements of one mask over prompts."""


def attention_mask(
    positions: Tensor, kv_length: int, window: int | None, dtype: torch.dtype
) -> Tensor:
    """What each token may attend to, as an additive mask (understood by eager and sdpa alike).

    Args:
        positions: Position of each query token in its row, shape [m, C].
        kv_length: Number of key positions, K.
        window: A query sees the last `window` positions up to its own; None is all of them.
        dtype: Of the attention scores.

    Returns:
        Shape [m, 1, C, K]: 0 where attention is allowed, the dtype's lowest number elsewhere.
    """
    query = positions[:, None, :, None]
    key = torch.arange(kv_length, device=positions.device)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    lowest = torch.finfo(dtype).min
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(
        hidden, lowest
    )


_FEW = 256
"""Tokens up to which a comparison with a plain forward pass costs next to nothing."""
_LENGTH = re.compile("(window|chunk)(_size)?$|original_max_position")
"""Keys of a configuration that say how far a token is seen; "max_window_layers" is none."""


def length_limit(config: Any) -> tuple[int, str] | None:
    """Up to how many positions a model computes a sequence as it is alone, and what it does
    beyond; None where it always does.

    transformers takes the frequencies of RoPE `longrope` and `dynamic` from the largest position in
    the whole pass, so one long row would change every other row beside it, and what a cache keeps
    would be of other frequencies than what comes after. Doge attends to the keys that score highest
    by their tokens: equal tokens score the same, and which of them it takes depends on the pass.

    Args:
        config: The model's, as transformers has it.
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
    """Tokens of a row that goes past every window and chunk that a model's configuration names,
    of those that are short; larger ones would cost too much to try."""
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
    """Numbers of one attention head, as a layer's configuration has it."""
    width = getattr(config, "head_dim", None)
    return int(width or config.hidden_size // config.num_attention_heads)


@torch.no_grad()
def rows_agree(model: PreTrainedModel, windows: dict[str, int | None]) -> str | None:
    """Compare a pass over rows with a plain forward pass; None if they agree, else what differs.

    For models whose code does something of its own with positions, masks or the cache (ALiBi,
    for example) and does not say so in its configuration.
    """
    device, dtype = model.device, model.dtype
    length = probe_length(model.config)
    ids = (torch.arange(length, device=device) * 7 + 3) % model.config.get_text_config().vocab_size
    try:
        # A row of one token and a long one, which goes on beside it.
        alone = [model(input_ids=row[None], use_cache=False).logits[0] for row in (ids[:1], ids)]
        wanted = torch.cat([alone[1][-2:-1], alone[0], alone[1][-1:]])
        cache = SlotCache(model.config.get_text_config().num_hidden_layers, 2, length)
        got = []
        for first, places in ((1, [[*range(length - 1)]]), (0, [[0], [length - 1]])):
            positions = torch.tensor(places, device=device)
            stop = places[-1][-1] + 1
            rows = torch.arange(first, 2, device=device)[:, None]
            target = (rows * cache.width + positions).flatten()
            cache.placement = Placement(slice(first, 2), stop, target, None)
            masks = {k: attention_mask(positions, stop, w, dtype) for k, w in windows.items()}
            output = model(
                input_ids=ids[positions],
                position_ids=positions,
                attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                past_key_values=cache,
                use_cache=True,
                **forward_options(model),
            )
            got.append(output.logits[:, -1])
    except Exception as error:  # whatever a model's own code makes of the masks and the cache
        return f"its forward pass does not take them ({type(error).__name__}: {error})"
    return differ(torch.cat(got), wanted)


def servable_layers(model: PreTrainedModel) -> dict[str, int | None] | str:
    """What each layer attends to, as `layer_windows`; where rows cannot serve it, the reason.

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
    return rows_agree(model, windows) or windows
