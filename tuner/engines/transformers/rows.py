"""What stands in the rows of a cache: which tokens, how many of them computed, what is shared."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from tuner.engines.transformers.cascade import chain, levels_of
from tuner.engines.transformers.kv_cache import Level, Prefix, SlotCache

_FIRST_SLOTS = 4
_FIRST_CAPACITY = 128  # at least _WORTH_SHARING: rows take back what is not worth a prefix
_WORTH_SHARING = 96
"""Tokens that are stored once for several rows at least. Fewer are copied: a row's own tokens are
read with those of all other rows, and a prefix takes an operation of its own in each layer."""
_OPERATION = 1 << 17
"""Bytes of keys and values that could be read while one row's prefix takes its operation."""
_LITTLE = 8192
"""Places of tokens, of all rows together, that may always be there."""

Ints: TypeAlias = NDArray[np.int64]


class Rows:
    """Rows of a `SlotCache`, of which `count` hold something; each has room for `tokens`.

    Args:
        layers: Number of layers.
        max_rows: Rows at most.
        max_length: Tokens of one row at most.
        shares: The first tokens of several rows may be stored once.

    Attributes:
        tokens: Shape [slots, longest]; also those of a row's prefixes.
        length: Tokens of each row, [slots].
        computed: Of how many the keys and values are there, [slots].
        base: How many of these are in prefixes, [slots].
        leaf: The last prefix of each row.
        used: When each was used last, [slots].
    """

    def __init__(self, layers: int, max_rows: int, max_length: int, *, shares: bool) -> None:
        self._max_rows = max_rows
        self._max_length = max_length
        self._shares = shares
        self._first = slots, capacity = (
            min(_FIRST_SLOTS, max_rows),
            min(_FIRST_CAPACITY, max_length),
        )
        self.cache = SlotCache(layers, slots, capacity)
        self.count = 0
        self.tokens: Ints = np.zeros((slots, capacity), dtype=np.int64)
        self.length, self.computed, self.base, self.used = np.zeros((4, slots), dtype=np.int64)
        self.leaf: list[Prefix | None] = [None] * slots
        self._clock = 0

    def clear(self) -> None:
        """Forget everything."""
        self.count = 0
        self.base[:] = 0
        self.leaf = [None] * len(self.leaf)
        if self._shares:
            # The prompts that come next are computed before what they share is known, in few rows.
            self.cache.release(*self._first)
        else:
            self.cache.clear()

    def common_prefix(self, ids: Ints) -> Ints:
        """Leading tokens that each row shares with `ids`: [count]. Not all need be computed."""
        if not self.count:
            return np.zeros(0, dtype=np.int64)
        width = min(len(ids), self.tokens.shape[1])
        equal = self.tokens[: self.count, :width] == ids[:width]
        common: Ints = np.where(equal.all(axis=1), width, equal.argmin(axis=1))
        return np.minimum(common, self.length[: self.count])

    def levels(self, first: int, last: int) -> tuple[Level, ...]:
        """The prefixes of the rows [first, last)."""
        return levels_of(self.leaf[first:last], torch.device("cpu"))

    def touch(self, row: int) -> None:
        """Mark a row as the most recently used one."""
        self._clock += 1
        self.used[row] = self._clock

    # Content

    def begin(self, row: int, ids: Ints, source: int, reused: int, *, shared: bool) -> None:
        """Make `row` hold `ids`, of which `source` has the first `reused` computed.

        Args:
            shared: Both rows will be read in the same steps, so that storing a long common part
                once pays.
        """
        if row != source or not reused:
            self.length[row], self.leaf[row], self.base[row] = 0, None, 0
        if reused and row != source:
            if shared and self._shares and reused - self.base[source] >= _WORTH_SHARING:
                self._seal(source, reused)
                self._shrink()
            self.leaf[row], self.base[row] = self.leaf[source], self.base[source]
        if reused < self.base[row]:
            self._cut(row, reused)
        elif row != source:
            self.cache.copy(source, row, reused - int(self.base[row]))
        self.tokens[row, : len(ids)] = ids
        self.length[row] = len(ids)
        self.computed[row] = reused

    def seal(self, row: int) -> None:
        """Make all that is computed of a row a prefix."""
        if self.computed[row] > self.base[row]:
            self._seal(row, int(self.computed[row]))

    def even_out(self, last: int) -> None:
        """Make prefixes of what the longest of the rows [0, last) have, where a step reads less
        then: of what is not in prefixes it reads as many tokens of each row as the longest has.
        """
        own = (self.length - self.base)[:last]
        longest_first = np.argsort(-own, kind="stable")
        operation = _OPERATION // max(1, self.cache.token_bytes)
        sealed = np.append(0, np.cumsum(own[longest_first] + operation))
        read = sealed + last * np.append(own[longest_first], 1)
        count = int(read.argmin())
        if read[0] - read[count] < max(4 * operation, read[0] // 4):
            return
        for row in longest_first[:count]:
            self.seal(row)
        if not self._in_proportion(self.cache.capacity, int(self._own().sum())):
            self._shrink()

    def _seal(self, row: int, position: int) -> None:
        """Make what a row has of its own up to `position` a prefix."""
        length = position - int(self.base[row])
        behind = int(self.computed[row]) - position
        parent = self.leaf[row]
        prefix = self.cache.seal(row, parent, length, behind)
        if parent is not None and not any(
            parent in chain(leaf) for leaf in [*self.leaf[:row], *self.leaf[row + 1 :]]
        ):
            prefix = prefix.with_parent()
        self.leaf[row], self.base[row] = prefix, position

    def _shrink(self) -> None:
        """Give back what of the room behind each row is not needed."""
        longest = int(self._own().max())
        capacity = _doubled(self._first[1], longest + 1, self._max_length)
        if 2 * capacity <= self.cache.capacity:
            self.cache.grow(self.cache.slots, capacity)

    def _cut(self, row: int, position: int) -> None:
        """Make a row whose prefixes go further end at `position`."""
        prefix = self.leaf[row]
        while prefix is not None and prefix.start >= position:
            prefix = prefix.parent
        if prefix is not None and prefix.end > position:
            if position - prefix.start >= _WORTH_SHARING:
                prefix = prefix.split(position)
            else:
                self.cache.unseal(prefix, row, position - prefix.start)
                prefix = prefix.parent
        self.leaf[row], self.base[row] = prefix, prefix.end if prefix is not None else 0

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows, whatever they hold."""
        pair, exchanged = [one, other], [other, one]
        self.cache.swap(one, other, int((self.computed - self.base)[pair].max()))
        for array in (self.tokens, self.length, self.computed, self.base, self.used):
            array[pair] = array[exchanged]
        self.leaf[one], self.leaf[other] = self.leaf[other], self.leaf[one]

    def move(self, row: int, target: int) -> None:
        """Put what a row holds into another."""
        self.cache.copy(row, target, int(self.computed[row] - self.base[row]))
        for array in (self.tokens, self.length, self.computed, self.base, self.used):
            array[target] = array[row]
        self.leaf[target] = self.leaf[row]

    # Room

    def may_have(self, row: int, own: int) -> bool:
        """Whether a row may have so many tokens of its own: all rows have room for as many."""
        capacity = _doubled(self.cache.capacity, own, self._max_length)
        if not self._shares or capacity == self.cache.capacity:
            return True
        others = np.delete(self._own(), slice(row, row + 1))
        return self._in_proportion(capacity, own + int(others.sum()))

    def _own(self) -> Ints:
        """Tokens of each row that are not in prefixes, [count]."""
        return (self.length - self.base)[: self.count]

    def _in_proportion(self, capacity: int, held: int) -> bool:
        """Whether room for `capacity` tokens behind each row is not much for `held` in all."""
        # Rows that are even never take more, since slots and capacity are doubled.
        return self.cache.slots * capacity <= max(_LITTLE, 4 * held)

    def bound(self, first: int, last: int) -> bool:
        """Make prefixes of those rows [first, last) that may not have one more token of their own.

        Returns:
            Whether there were any.
        """
        own = (self.length - self.base)[first:last] + 1
        longest = int(own.argmax())
        if self.may_have(first + longest, int(own[longest])):
            return False
        for place in np.flatnonzero(own > self.cache.capacity):
            self.seal(first + int(place))
        return True

    def reserve(self, rows: int, length: int, own: int) -> bool:
        """Grow, by doubling, to hold `rows` rows of `length` tokens, `own` of them not in prefixes.

        Returns:
            Whether keys and values have moved.
        """
        slots, longest = self.tokens.shape
        more = _doubled(slots, rows, self._max_rows), _doubled(longest, length, self._max_length)
        if more != (slots, longest):
            self.tokens = np.pad(self.tokens, ((0, more[0] - slots), (0, more[1] - longest)))
            self.length, self.computed, self.base, self.used = (
                np.pad(array, (0, more[0] - slots))
                for array in (self.length, self.computed, self.base, self.used)
            )
            self.leaf += [None] * (more[0] - slots)
        cache = self.cache
        room = _doubled(cache.slots, rows, self._max_rows)
        capacity = _doubled(cache.capacity, own, self._max_length)
        if (room, capacity) == (cache.slots, cache.capacity) and cache.together:
            return False
        cache.grow(room, capacity)
        return True


def _doubled(now: int, wanted: int, most: int) -> int:
    """`now`, doubled until it is enough, at most `most`."""
    while now < min(wanted, most):
        now = min(2 * now, most)
    return now
