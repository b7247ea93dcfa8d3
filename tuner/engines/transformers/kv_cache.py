"""Keys and values of many requests.

A cache that transformers models write to, with a row for each request. One layer's keys (likewise
values) are one tensor [slots, capacity, kv_heads, head_dim]; row r, place t holds token t of the
request in row r. First tokens that several requests share are stored once, as a `Prefix`; row and
place then count from behind it. The part of a long request that exceeds the others is also stored
as a prefix, since all rows have the same capacity. A forward pass computes new tokens for the
contiguous rows [first, last) and attends to the first `kv_length` places of each:

         prefixes     place 0 ............ kv_length ... capacity      one place more, never read
                  ┌ row first  k k k k k N . . . . .  |                  k computed before
    s s s s s s s ┤     ...    k k N N N N N N . . .  |                  N written by this pass
                  └ row last-1 k k k k k k k k k k N  |                  . masked

The model gets a view of that block and not a copy, except for recorded prompts (`graphs`). With
prefixes it gets neither: attention reads everything from here (`cascade`). In memory the tokens of
one head are adjacent, as attention reads them: for 64 rows of 100 to 228 tokens the kernel takes
0.53 times as long as with adjacent heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(eq=False)
class Prefix:
    """Tokens [start, end) of one or several rows, behind those of `parent`, stored once.

    Attributes:
        parent: The prefix before it; None at the beginning.
        keys, values: For each layer, shape [1, kv_heads, end - start, head_dim].
    """

    parent: Prefix | None
    start: int
    end: int
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def stored(self) -> tuple[int, int]:
        """Address of its memory, and the number of tokens there; parts that were split share it."""
        states = self.keys[0]
        memory = states.untyped_storage()
        return memory.data_ptr(), memory.nbytes() // states[:, :, 0].nbytes

    def split(self, at: int) -> Prefix:
        """Cut in two; this object keeps the part from `at` on, the new parent is returned."""
        length = at - self.start
        before = [[states[:, :, :length] for states in all_] for all_ in (self.keys, self.values)]
        self.keys, self.values = (
            [states[:, :, length:] for states in all_] for all_ in (self.keys, self.values)
        )
        self.parent = Prefix(self.parent, self.start, at, *before)
        self.start = at
        return self.parent

    def with_parent(self) -> Prefix:
        """Join with the parent, which must be part of no other prefix."""
        assert self.parent is not None
        before, own = (self.parent.keys, self.parent.values), (self.keys, self.values)
        states = (
            [torch.cat(layer, dim=2) for layer in zip(*parts, strict=True)]
            for parts in zip(before, own, strict=True)
        )
        return Prefix(self.parent.parent, self.parent.start, self.end, *states)


@dataclass(frozen=True)
class Level:
    """Prefixes of which each row has at most one.

    Attributes:
        rows: The rows that have one, in the order of `parts`; None for all rows in order.
        parts: [first, last) of those rows, and their prefix.
    """

    rows: Tensor | None
    parts: tuple[tuple[int, int, Prefix], ...]


@dataclass(frozen=True)
class Placement:
    """Where the tokens of one forward pass are stored.

    Attributes:
        rows: Rows of the pass: consecutive ones, of which the model gets a view, or any indices,
            which are copied.
        kv_length: Number of positions attended to.
        target: For every written token its place `row * width + position`, shape [N].
        source: Index of each of those tokens in the flattened input [m * C], shape [N]; None if the
            input has no padding.
        own: For each input token its place in its row, shape [m, C]. None if the model computes
            attention itself, over a view of the rows with a mask; rows have no prefixes then.
        levels: The prefixes of the rows.
        tokens: Number of tokens that products are computed for in a deterministic engine, which the
            written ones are padded to; 0 in others.
        shift: See `Vision.shifts`, shape [m, C]; None if no image shifts a token.
        every: Whether logits after every written token are computed, not only of the last column.
    """

    rows: slice | Tensor
    kv_length: int
    target: Tensor
    source: Tensor | None
    own: Tensor | None = None
    levels: Sequence[Level] = ()
    tokens: int = 0
    shift: Tensor | None = None
    every: bool = False


class SlotLayer(CacheLayerMixin):
    """One layer's rows; shape and dtype are those of the first keys and values written."""

    is_sliding = False

    def __init__(self, store: SlotCache, place: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._store = store
        self.place = place

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Not needed: the first `update` allocates."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new states [m, kv_heads, C, head_dim]; return the block to attend to, or the
        given states if attention reads from here."""
        place = self._store.placement
        self.write(*(self._flat(states, place) for states in (key_states, value_states)))
        if place.own is None:
            return self.attended(place)
        self._store.written = self
        return key_states, value_states

    @staticmethod
    def _flat(states: Tensor, place: Placement) -> Tensor:
        flat = states.transpose(1, 2).flatten(0, 1)
        return flat if place.source is None else flat.index_select(0, place.source)

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Store the new tokens' states, shape [N, kv_heads, head_dim]."""
        if self.keys is None or self.values is None:
            self.keys, self.values = self._store.zeros(keys), self._store.zeros(values)
            self.is_initialized = True
        self.keys.index_put_(self._store.places, keys)
        self.values.index_put_(self._store.places, values)

    def attended(self, place: Placement) -> tuple[Tensor, Tensor]:
        """Keys and values of the pass's rows, shape [m, kv_heads, kv_length, head_dim]."""
        assert self.keys is not None
        assert self.values is not None
        rows, length = place.rows, place.kv_length
        return self.keys[rows, :length].transpose(1, 2), self.values[rows, :length].transpose(1, 2)

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # Used only when a model makes its own mask; ours is always given.
        raise RuntimeError("a slot cache needs an explicit attention mask")


_NOWHERE = Placement(slice(0, 0), 0, torch.empty(0, dtype=torch.long), None)
_TOGETHER = 16
"""Number of layers whose keys or values share one block of memory: enough that moving a row takes
few operations, few enough that growing needs little extra memory."""


class SlotCache(Cache):
    """All layers' rows; nothing is allocated ahead of need."""

    places: tuple[Tensor, Tensor]
    """Row and place of every token that the pass writes, shape [N] each."""
    written: SlotLayer
    """The layer written last, if attention reads keys and values from here."""

    def __init__(self, layers: int, slots: int, capacity: int) -> None:
        self.slots = slots
        self.capacity = capacity
        self.rows = [SlotLayer(self, place) for place in range(layers)]
        self._blocks: list[Tensor] = []
        super().__init__(layers=list(self.rows))

    @property
    def placement(self) -> Placement:
        """Placement of the pass's tokens."""
        return self._placement

    @placement.setter
    def placement(self, placement: Placement) -> None:
        self._placement = placement
        self.places = placement.target // self.width, placement.target % self.width

    @property
    def width(self) -> int:
        """Places of a row: its capacity, plus one for padding tokens."""
        return self.capacity + 1

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token in one layer; 0 before the first write."""
        states = self.rows[0].keys
        return 0 if states is None else 2 * states[0, 0].nbytes

    @property
    def together(self) -> bool:
        """Whether storage is in few blocks; `grow` makes it so, also without a change of size."""
        return bool(self._blocks) or not self._stored()

    def grow(self, slots: int, capacity: int) -> None:
        """Store `slots` rows of `capacity` tokens, more or fewer than now, keeping what is in
        these."""
        old_slots, old_capacity = min(self.slots, slots), min(self.capacity, capacity)
        self.slots, self.capacity = slots, capacity
        self._blocks = []
        for layers in self._stored():
            old = getattr(*layers[0])
            block = self.zeros(old, len(layers))
            for new, (layer, name) in zip(block, layers, strict=True):
                new[:old_slots, :old_capacity] = getattr(layer, name)[:old_slots, :old_capacity]
                setattr(layer, name, new)
            self._blocks.append(block)

    def zeros(self, states: Tensor, *layers: int) -> Tensor:
        """Storage for keys or values like `states` [..., kv_heads, head_dim]: [*layers, slots,
        width, kv_heads, head_dim]. Zeros, because a masked place takes part in attention with
        weight 0, and 0 * NaN is NaN."""
        heads, head_dim = states.shape[-2:]
        shape = (*layers, self.slots, heads, self.width, head_dim)
        return states.new_zeros(shape).transpose(-3, -2)

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

    def seal(self, row: int, parent: Prefix | None, length: int, behind: int) -> Prefix:
        """Move the first `length` tokens of a row into a new shared prefix; the `behind` tokens
        after them move to the front of the row."""
        start = parent.end if parent is not None else 0
        keys, values = (
            [
                getattr(layer, name)[row, :length]
                .transpose(0, 1)
                .clone(memory_format=torch.contiguous_format)[None]
                for layer in self.rows
            ]
            for name in ("keys", "values")
        )
        for block in self._parts():
            block[:, row, :behind] = block[:, row, length : length + behind].clone()
        return Prefix(parent, start, start + length, keys, values)

    def unseal(self, prefix: Prefix, row: int, length: int) -> None:
        """Copy the first `length` tokens of a prefix to the beginning of a row."""
        for layer, keys, values in zip(self.rows, prefix.keys, prefix.values, strict=True):
            assert layer.keys is not None
            assert layer.values is not None
            layer.keys[row, :length] = keys[0, :, :length].transpose(0, 1)
            layer.values[row, :length] = values[0, :, :length].transpose(0, 1)

    def clear(self) -> None:
        """Clear everything, so that not even a NaN of earlier weights remains."""
        for block in self._parts():
            block.zero_()

    def release(self, slots: int, capacity: int) -> None:
        """Clear everything and release its memory."""
        self.slots, self.capacity = slots, capacity
        self._blocks = []
        self.placement = _NOWHERE
        for layer in self.rows:
            layer.keys = layer.values = None

    def _parts(self) -> list[Tensor]:
        """All storage, shape [layers, slots, width, kv_heads, head_dim] each."""
        return self._blocks or [
            getattr(layer, name)[None] for layers in self._stored() for layer, name in layers
        ]

    def _stored(self) -> list[list[tuple[SlotLayer, str]]]:
        """Stored keys and values, grouped by shape and dtype."""
        alike: dict[Any, list[tuple[SlotLayer, str]]] = {}
        for layer in self.rows:
            for name in ("keys", "values"):
                states = getattr(layer, name)
                if states is not None:
                    alike.setdefault((states.shape, states.dtype), []).append((layer, name))
        return [
            layers[at : at + _TOGETHER]
            for layers in alike.values()
            for at in range(0, len(layers), _TOGETHER)
        ]
