"""Content of the rows of a cache: their tokens, how many are computed, what is shared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from tuner.engines.transformers.cascade import LANES, chain, levels_of, rounded
from tuner.engines.transformers.kv_cache import Level, Prefix, SlotCache
from tuner.errors import ContextLengthError

_FIRST_SLOTS = 4
FIRST_CAPACITY = 128  # at least _WORTH_SHARING: rows take back what is not worth a prefix
_WORTH_SHARING = 96
"""Minimum number of tokens stored once for several rows. Fewer are copied: a row's own tokens are
read together with those of all other rows, and a prefix takes a separate operation in each layer.
"""
_OPERATION = 1 << 17
"""Bytes of keys and values that can be read in the time of one prefix operation."""
NO_LIMIT = 1 << 62
"""A limit that is never reached: it allows more tokens than any memory can hold."""
_LITTLE = 8192
"""Places of tokens, of all rows together, that are in proportion to any number of tokens."""
_HEADROOM = 64
"""Tokens by which every row may grow after a request was admitted, before another has to give way.
"""

Ints: TypeAlias = NDArray[np.int64]


class Rows:
    """Rows of a `SlotCache`; the first `count` hold something, each has room for `tokens`.

    Args:
        layers: Number of layers.
        max_rows: Maximum number of rows.
        max_length: Maximum number of tokens of one row.
        shares: Whether the first tokens of several rows may be stored once.
        block: Every prefix has this many tokens; 0: any number.

    Attributes:
        limit: Maximum number of tokens with memory for keys and values, those of prefixes and all
            places of rows, also empty ones.
        tokens: Shape [slots, longest]; includes those of a row's prefixes.
        length: Number of tokens of each row, [slots].
        computed: Number of tokens of each row whose keys and values are stored, [slots].
        base: How many of these are in prefixes, [slots].
        leaf: The last prefix of each row.
        adapter: Adapter that each row was computed with, None for none.
        used: When each row was last used, [slots].
    """

    def __init__(
        self, layers: int, max_rows: int, max_length: int, *, shares: bool, block: int = 0
    ) -> None:
        self._block = block
        self._max_rows = max_rows
        self._max_length = max_length
        self._shares = shares
        self.limit = NO_LIMIT
        self._first = slots, capacity = (
            min(_FIRST_SLOTS, max_rows),
            min(FIRST_CAPACITY, max_length),
        )
        self.cache = SlotCache(layers, slots, capacity)
        self.count = 0
        self.tokens: Ints = np.zeros((slots, capacity), dtype=np.int64)
        self.length, self.computed, self.base, self.used = np.zeros((4, slots), dtype=np.int64)
        self.leaf: list[Prefix | None] = [None] * slots
        self.adapter: list[str | None] = [None] * slots
        self._clock = 0

    def clear(self) -> None:
        self.count = 0
        self.base[:] = 0
        self.leaf = [None] * len(self.leaf)
        if self._shares:
            # The next prompts are computed before it is known what they share, in few rows.
            self.cache.release(*self._first)
        else:
            self.cache.clear()

    def common_prefix(self, ids: Ints, adapter: str | None) -> Ints:
        """Number of leading tokens that each row shares with `ids`: [count]. Not all need be
        computed. Rows with another adapter share none."""
        if not self.count:
            return np.zeros(0, dtype=np.int64)
        width = min(len(ids), self.tokens.shape[1])
        equal = self.tokens[: self.count, :width] == ids[:width]
        common: Ints = np.where(equal.all(axis=1), width, equal.argmin(axis=1))
        common = np.minimum(common, self.length[: self.count])
        common[[other != adapter for other in self.adapter[: self.count]]] = 0
        return common

    def levels(self, first: int, last: int) -> tuple[Level, ...]:
        """The prefixes of the rows [first, last)."""
        return levels_of(self.leaf[first:last], torch.device("cpu"))

    def touch(self, row: int) -> None:
        """Mark a row as the most recently used one."""
        self._clock += 1
        self.used[row] = self._clock

    # Content

    def begin(
        self,
        row: int,
        ids: Ints,
        source: int,
        reused: int,
        *,
        shared: bool,
        adapter: str | None = None,
    ) -> None:
        """Make `row` hold `ids`, of which `source` has the first `reused` computed, with the same
        adapter.

        Args:
            shared: Both rows will be read in the same steps, so that storing a long common part
                once pays off.
        """
        if row != source or not reused:
            self.length[row], self.leaf[row], self.base[row] = 0, None, 0
        if reused and row != source:
            worth = self._block or _WORTH_SHARING
            if shared and self._shares and reused - self.base[source] >= worth:
                self._seal(source, reused)
                self._shrink()
            self.leaf[row], self.base[row] = self.leaf[source], self.base[source]
        if reused < self.base[row]:
            self._cut(row, reused)
        elif row != source:
            self.cache.copy(source, row, reused - int(self.base[row]))
        self.tokens[row, : len(ids)] = ids
        self.adapter[row] = adapter
        self.length[row] = len(ids)
        self.computed[row] = reused

    def seal(self, row: int) -> None:
        """Turn all that is computed of a row, or every whole block of it, into prefixes."""
        if self.computed[row] > self.base[row]:
            self._seal(row, int(self.computed[row]))

    def even_out(self, last: int) -> None:
        """Turn the surplus of the longest rows in [0, last) into prefixes if a step then reads
        less: a step reads as many tokens of each row as the longest row has outside prefixes."""
        own = (self.length - self.base)[:last]
        longest_first = np.argsort(-own, kind="stable")
        operation = _OPERATION // max(1, self.cache.token_bytes)
        sealed = np.append(0, np.cumsum(own[longest_first] + operation))
        read = sealed + last * np.append(own[longest_first], 1)
        count = int(read.argmin())
        if read[0] - read[count] < max(4 * operation, read[0] // 4):
            return
        if self.allocated + int(own[longest_first[:count]].sum()) > self.limit:
            return
        for row in longest_first[:count]:
            self.seal(row)
        cache = self.cache
        if not self._in_proportion(cache.slots, cache.capacity, int(self._own().sum())):
            self._shrink()

    def _seal(self, row: int, position: int) -> None:
        """Turn the row's own tokens up to `position` into a prefix, or every whole block of them
        into one."""
        if self._block:
            for end in range(int(self.base[row]) + self._block, position + 1, self._block):
                behind = int(self.computed[row]) - end
                self.leaf[row] = self.cache.seal(row, self.leaf[row], self._block, behind)
                self.base[row] = end
            return
        length = position - int(self.base[row])
        behind = int(self.computed[row]) - position
        parent = self.leaf[row]
        prefix = self.cache.seal(row, parent, length, behind)
        # A part of a split prefix is not joined, or both copies of its tokens would be stored.
        whole = parent is not None and parent.stored[1] == parent.end - parent.start
        if whole and not any(
            parent in chain(leaf) for leaf in [*self.leaf[:row], *self.leaf[row + 1 :]]
        ):
            prefix = prefix.with_parent()
        self.leaf[row], self.base[row] = prefix, position

    def _shrink(self) -> None:
        """Release unneeded capacity behind the rows."""
        longest = int(self._own().max())
        capacity = _doubled(self._first[1], longest + 1, self._max_length)
        if 2 * capacity <= self.cache.capacity:
            self.cache.grow(self.cache.slots, capacity)

    def _cut(self, row: int, position: int) -> None:
        """Make a row whose prefixes extend further end at `position`."""
        prefix = self.leaf[row]
        while prefix is not None and prefix.start >= position:
            prefix = prefix.parent
        if prefix is not None and prefix.end > position:
            if position - prefix.start >= _WORTH_SHARING and not self._block:
                prefix = prefix.split(position)
            else:
                self.cache.unseal(prefix, row, position - prefix.start)
                prefix = prefix.parent
        self.leaf[row], self.base[row] = prefix, prefix.end if prefix is not None else 0

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        pair, exchanged = [one, other], [other, one]
        self.cache.swap(one, other, int((self.computed - self.base)[pair].max()))
        for array in (self.tokens, self.length, self.computed, self.base, self.used):
            array[pair] = array[exchanged]
        self.leaf[one], self.leaf[other] = self.leaf[other], self.leaf[one]
        self.adapter[one], self.adapter[other] = self.adapter[other], self.adapter[one]

    def move(self, row: int, target: int) -> None:
        """Move a row's content to another row."""
        self.cache.copy(row, target, int(self.computed[row] - self.base[row]))
        for array in (self.tokens, self.length, self.computed, self.base, self.used):
            array[target] = array[row]
        self.leaf[target], self.adapter[target] = self.leaf[row], self.adapter[row]

    # Capacity

    @property
    def allocated(self) -> int:
        """Number of tokens with memory for keys and values."""
        return self.cache.slots * self.cache.width + self._in_prefixes(range(self.count))

    def _in_prefixes(self, rows: Iterable[int]) -> int:
        """Number of tokens that the prefixes of some rows store."""
        seen: set[Prefix] = set()
        stored: dict[int, int] = {}
        for row in rows:
            prefix = self.leaf[row]
            while prefix is not None and prefix not in seen:
                seen.add(prefix)
                stored.update([prefix.stored])
                prefix = prefix.parent
        return sum(stored.values())

    def fits(self, slots: int, capacity: int, more: int, rows: Iterable[int]) -> bool:
        """Whether `slots` rows of a capacity, the prefixes of `rows` and prefixes of `more` tokens
        are within the limit."""
        if self.limit == NO_LIMIT:
            return True
        within = self.limit - slots * (capacity + 1) - more
        return within >= 0 and self._in_prefixes(rows) <= within

    def may_have(self, row: int, own: int, more: int | None = None) -> bool:
        """Whether a row may have `own` tokens outside prefixes: all rows have the same capacity.

        Args:
            more: Number of tokens that would have to become prefixes otherwise; default: `own`.
        """
        if min(own, self._max_length) <= self.cache.capacity:
            return True
        slots, capacity = self._grown(self.count, own)
        if not self.fits(slots, capacity, 0, range(self.count)):
            return False
        others = np.delete(self._own(), slice(row, row + 1))
        if not self._shares or self._in_proportion(slots, capacity, own + int(others.sum())):
            return True
        return not self._may_seal(own if more is None else more)

    def _may_seal(self, more: int) -> bool:
        return self.fits(self.count, self.cache.capacity, more, range(self.count))

    def may_grow(self, first: int, last: int) -> bool:
        """Make room for one token more in each of the rows [first, last).

        Returns:
            Whether there is; else a row has to give way first.
        """
        own = (self.length - self.base)[first:last] + 1
        longest = int(own.argmax())
        if min(own[longest], self._max_length) <= self.cache.capacity:
            return True
        more = int(own[own > self.cache.capacity].sum())
        if self.may_have(first + longest, int(own[longest]), more):
            return True
        if not self._shares or not self._may_seal(more):
            return False
        self.resize(self.count, more)
        return True

    def drop(self, active: int, but: int = -1) -> int | None:
        """Forget the row behind the active ones that was not used for longest, except `but`.

        Returns:
            Where the content of `but` is afterwards; None if there is no other row.
        """
        others = [row for row in range(active, self.count) if row != but]
        if not others:
            return None
        row, last = min(others, key=lambda row: int(self.used[row])), self.count - 1
        if row != last:
            self.move(last, row)
        self.leaf[last], self.base[last], self.length[last], self.computed[last] = None, 0, 0, 0
        self.count = last
        return row if but == last else but

    def resize(self, slots: int, more: int) -> bool:
        """Store `slots` rows, by doubling, or less if prefixes of `more` tokens need the memory.

        Returns:
            Whether keys and values have moved.
        """
        cache = self.cache
        room = (self.limit - self._in_prefixes(range(self.count)) - more) // cache.width
        slots = min(_doubled(cache.slots, slots, self._max_rows), max(slots, room))
        if slots == cache.slots:
            return False
        cache.grow(slots, cache.capacity)
        return True

    def needs(
        self, active: int, decoding: int, length: int, source: int, reused: int
    ) -> tuple[int, int]:
        """Capacity of rows, and the number of tokens that may become prefixes, until a request of
        `length` tokens is computed and each active row has `_HEADROOM` tokens more.

        Args:
            active, decoding: Number of active rows, and of those without a prompt to compute.
            source, reused: The row that has the first `reused` tokens of the request.
        """
        capacity, more = self.cache.capacity, 0
        base = int(self.base[source]) if reused else 0
        if reused < base:  # the prefix is cut, or its first tokens are copied
            base = max(0, reused - reused % self._block if self._block else reused - _WORTH_SHARING)
        elif reused and source < active and self._shares:
            more = reused - base
            more -= more % self._block if self._block else 0
            base += more
        headroom = _HEADROOM if active else 0
        new = length + 1 - base
        own = np.append(self._own()[:active] + headroom, new + headroom)
        own = np.minimum(own, self._max_length)
        if not self._shares or (decoding < active and new > capacity):
            capacity = min(rounded(max(capacity, int(own.max())), LANES), self._max_length)
        long = own > capacity
        return capacity, more + int(own[long].sum())

    def _grown(self, rows: int, own: int) -> tuple[int, int]:
        """Number and capacity of rows so that `rows` rows have `own` tokens each, by doubling, or
        as much as the limit allows."""
        cache, room = self.cache, self.limit
        slots = _doubled(cache.slots, rows, self._max_rows)
        capacity = _doubled(cache.capacity, own, self._max_length)
        if room < NO_LIMIT:
            room -= self._in_prefixes(range(self.count))
        if slots * (capacity + 1) > room:
            slots = max(rows, min(slots, room // (capacity + 1)))
        if slots * (capacity + 1) > room:
            least = max(own, int(self._own().max(initial=1)))
            most = (room // slots - 1) // LANES * LANES
            capacity = min(max(rounded(least, LANES), min(capacity, most)), self._max_length)
        return slots, capacity

    def _own(self) -> Ints:
        """Tokens of each row that are not in prefixes, [count]."""
        return (self.length - self.base)[: self.count]

    def _in_proportion(self, slots: int, capacity: int, held: int) -> bool:
        """Whether rows of a capacity are reasonable for `held` tokens in all."""
        # Rows of equal length never take more, since slots and capacity are doubled.
        return slots * capacity <= max(_LITTLE, 4 * held)

    def bound(self, first: int, last: int) -> bool:
        """Turn those rows of [first, last) that cannot grow by one token into prefixes.

        Returns:
            Whether there were any.
        """
        own = (self.length - self.base)[first:last] + 1
        longest = int(own.argmax())
        long = own > self.cache.capacity
        if self.may_have(first + longest, int(own[longest]), int(own[long].sum())):
            return False
        for place in np.flatnonzero(long):
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
            self.adapter += [None] * (more[0] - slots)
        cache = self.cache
        room, capacity = cache.slots, cache.capacity
        if rows > room or own > capacity:
            room, capacity = self._grown(max(rows, self.count), own)
        if (room, capacity) == (cache.slots, cache.capacity) and cache.together:
            return False
        cache.grow(room, capacity)
        return True


def no_room(tokens: int, limit: int) -> ContextLengthError:
    """The error of a request that has no room although it is alone."""
    return ContextLengthError(
        f"the request has {tokens} tokens, and the memory that is left for keys and values has "
        f"room for {limit}: lower model.max_model_len, or free memory"
    )


def _doubled(now: int, wanted: int, most: int) -> int:
    """`now`, doubled until it is at least `wanted`, at most `most`."""
    while now < min(wanted, most):
        now = min(2 * now, most)
    return now
