"""Passes of fixed sizes, for deterministic runs.

A product of matrices computes a row with another kernel if there are other numbers of rows, so a
token's numbers depend on how many are computed together. But for a given number of rows they
depend neither on the place of the row nor on the others, and usually several numbers of rows have
one kernel. This is tried at start, bit for bit, for the model's own products on this machine:

    tokens of a pass      1    16    32    48    64   128   256
    a token's bits        a     b     b     b     c     c     b       passes of 16, 32, 48 or 256
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tuner.engines.transformers.cascade import BLOCK, LANES, levels_of, rounded
from tuner.engines.transformers.kv_cache import Placement, Prefix, SlotCache
from tuner.engines.transformers.passes import RowPass
from tuner.engines.transformers.threads import FewThreads

_SIZES = 16, 32, 48, 64, 128, 256
_MOST_DECODED = 64
"""The largest size that is tried with one token of each row."""


class _FixedProbe:
    """Rows of random keys and values, of which the first 16 are the same in every pass that is
    compared; rows share the tokens of the first block."""

    def __init__(self, row_pass: RowPass, model: PreTrainedModel, longest: int, layers: int):
        self._pass, self._threads, self._layers = row_pass, FewThreads(model), layers
        self._dice = torch.Generator().manual_seed(0)
        self.room = min(_SIZES[-1] + LANES, longest)
        self.cache = SlotCache(layers, _MOST_DECODED, rounded(self.room, LANES))
        vocabulary = model.config.get_text_config().vocab_size
        self._ids = self._random(vocabulary, _MOST_DECODED, self.room)
        self._ends = self._random(self.room, _MOST_DECODED, 1)
        self._ends[:2] = torch.tensor([[self.room - 1], [min(BLOCK, self.room - 1)]])
        self.decoded([0], _SIZES[0])  # allocates
        self._content = [
            torch.randn(block.shape, generator=self._dice).to(block)
            for block in self.cache._parts()
        ]
        for content in self._content:
            content[:, :, :BLOCK] = content[:, :1, :BLOCK]
        self._ids[:, :BLOCK] = self._ids[:1, :BLOCK]

    def _random(self, limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, generator=self._dice)

    def _computed(
        self, positions: Tensor, order: Sequence[int], size: int, leaf: Prefix | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits, and keys and values of the last layer [m, C, heads, 2 * width], of a pass over
        these positions [m, C] of the requests `order`; with its first block in `leaf` if a row has
        more."""
        leaves = [leaf if int(row[0]) >= BLOCK else None for row in positions]
        base = torch.tensor([[0 if one is None else one.end] for one in leaves])
        own = positions - base
        rows = torch.arange(len(order))[:, None].expand_as(own)
        levels = levels_of(leaves, torch.device("cpu"))
        reach = rounded(int(own.max()) + 1, LANES)
        target = (rows * self.cache.width + own).flatten()
        place = Placement(slice(0, len(order)), reach, target, None, own, levels, size)
        ids = self._ids[list(order)].gather(1, positions)
        with self._threads.computing(size):
            logits = self._pass.logits(self.cache, ids, positions, place)
        last = self.cache.rows[self._layers - 1]
        assert last.keys is not None
        assert last.values is not None
        return logits, torch.cat([last.keys[rows, own], last.values[rows, own]], dim=-1)

    def place(self, order: Sequence[int]) -> None:
        """Store the requests `order` in the first rows."""
        for block, content in zip(self.cache._parts(), self._content, strict=True):
            block[:, : len(order)] = content[:, list(order)]

    def decoded(
        self, order: Sequence[int], size: int, leaf: Prefix | None = None
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Results of the newest tokens of the requests `order`, which are stored in this order."""
        logits, written = self._computed(self._ends[list(order)], order, size, leaf)
        return {request: (logits[n], written[n]) for n, request in enumerate(order)}

    def shared(self, users: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Like `decoded` of the first requests, with the first block of all longer ones stored
        once."""
        order = range(users)
        self.place(order)
        leaf = None
        for row in order:
            if (behind := int(self._ends[row]) - BLOCK) >= 0:
                leaf = self.cache.seal(row, None, BLOCK, behind)
        return self.decoded(order, _SIZES[0], leaf)

    def mixed(self, size: int) -> list[int]:
        """The first requests among others, as many as a pass decodes, in random order."""
        others = self._random(_MOST_DECODED - _SIZES[0], size).add_(_SIZES[0]).tolist()
        order = [*range(_SIZES[0]), *others][:size]
        if size == _SIZES[0]:
            order[size // 2 :] = others[size // 2 :]
        return [order[n] for n in torch.randperm(size, generator=self._dice).tolist()]

    def prompts_agree(self, size: int, columns: int) -> bool:
        """Whether tokens of a pass over prompts get the keys and values that they get when they are
        decoded."""
        order = range(size // columns)
        self.place(order)
        first = self._random(self.room - columns + 1, len(order), 1)
        positions = first + torch.arange(columns)
        _, written = self._computed(positions, order, size)
        for _ in range(2):
            chosen = self._random(columns, len(order), 1)
            _, again = self._computed(positions.gather(1, chosen), order, _SIZES[0])
            if not torch.equal(again[:, 0], written[torch.arange(len(order)), chosen[:, 0]]):
                return False
        return True


@torch.no_grad()
def fixed_sizes(
    model: PreTrainedModel, row_pass: RowPass, longest: int
) -> tuple[tuple[int, ...], bool]:
    """Numbers of tokens for which the pass gives a token the same bits whatever else is computed.

    Args:
        longest: Maximum number of tokens of a row.

    Returns:
        The sizes, none if even passes of one size differ; and whether rows may share blocks.
    """
    if row_pass.plain is None or row_pass.plain.hooked:
        return (), False
    with row_pass.plain.shallow() as layers:
        probe = _FixedProbe(row_pass, model, longest, layers)
        first = range(_SIZES[0])
        probe.place(first)
        wanted = probe.decoded(first, _SIZES[0])

        def agrees(found: dict[int, tuple[Tensor, Tensor]]) -> bool:
            return all(
                torch.equal(one, other)
                for request in found.keys() & wanted.keys()
                for one, other in zip(found[request], wanted[request], strict=True)
            )

        def decodes(size: int) -> bool:
            order = probe.mixed(size)
            probe.place(order)
            return agrees(probe.decoded(order, size))

        if not (decodes(_SIZES[0]) and decodes(_SIZES[0])):
            return (), False
        sizes = [_SIZES[0]]
        for size in _SIZES[1:]:
            shapes = {LANES, size} if size % LANES == 0 else set()
            if (size > _MOST_DECODED or decodes(size)) and all(
                probe.prompts_agree(size, columns) for columns in shapes if columns <= probe.room
            ):
                sizes.append(size)
        return tuple(sizes), all(agrees(probe.shared(users)) for users in (16, 3, 1))
