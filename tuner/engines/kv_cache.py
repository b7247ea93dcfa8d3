"""Keys and values of many requests, one row each, as a cache that transformers models write to.

One layer's keys (values likewise) are one tensor [slots, capacity, kv_heads, head_dim]; row r,
position t holds token t of the request in row r. A forward pass computes new tokens for the
contiguous rows [first, last) and attends to the first `kv_length` positions of each:

                  position 0 ............ kv_length ... capacity
        row first  k k k k k N . . . . .  |                        k computed before
            ...    k k N N N N N N . . .  |                        N written by this pass
        row last-1 k k k k k k k k k k N  |                        . masked

The model gets a view of that block, never a copy. Tokens are next to each other in memory, so that
writing one and copying a prefix from row to row are plain copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True)
class Placement:
    """Where the tokens of one forward pass go.

    Attributes:
        first, last: Rows the pass computes, [first, last).
        kv_length: Positions that are attended to.
        target: For every token that is written its place `row * capacity + position`, shape [N].
        source: The places of those tokens in the flattened input [(last - first) * C], shape
            [N]; None when the input has no padding.
    """

    first: int
    last: int
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
        return states.new_zeros(self._store.slots, self._store.capacity, heads, width)

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
        return stored[place.first : place.last, : place.kv_length].transpose(1, 2)

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # Asked for only when a model makes its own mask; ours is always given.
        raise RuntimeError("a slot cache needs an explicit attention mask")


class SlotCache(Cache):
    """All layers' rows. Rows and capacity grow by doubling; nothing is allocated ahead of need."""

    placement: Placement

    def __init__(self, layers: int, slots: int, capacity: int) -> None:
        self.slots = slots
        self.capacity = capacity
        self._rows = [SlotLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self._rows))

    def grow(self, slots: int, capacity: int) -> None:
        """Make room for `slots` rows of `capacity` tokens, keeping what is stored."""
        old_slots, old_capacity = self.slots, self.capacity
        self.slots, self.capacity = slots, capacity

        def grown(old: Tensor) -> Tensor:
            new = old.new_zeros(slots, capacity, *old.shape[2:])
            new[:old_slots, :old_capacity] = old
            return new

        for layer in self._rows:
            if layer.keys is not None and layer.values is not None:
                layer.keys = grown(layer.keys)
                layer.values = grown(layer.values)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one row to another."""
        for stored in self._stored():
            stored[target, :length].copy_(stored[source, :length])

    def swap(self, one: int, other: int, length: int) -> None:
        """Exchange the first `length` tokens of two rows."""
        for stored in self._stored():
            kept = stored[one, :length].clone()
            stored[one, :length] = stored[other, :length]
            stored[other, :length] = kept

    def clear(self) -> None:
        """Forget everything, so that not even a NaN of earlier weights is left behind."""
        for stored in self._stored():
            stored.zero_()

    def _stored(self) -> list[Tensor]:
        return [
            stored
            for layer in self._rows
            for stored in (layer.keys, layer.values)
            if stored is not None
        ]


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
