"""How attention over a token tree is cut into products of a few queries with the keys they share.

Node q of a tree in depth-first order attends to its ancestors and itself: `k <= q < end[k]`, in a
layer with a sliding window only to those of the last `window` depths. The nodes are taken in blocks
[first, last) of consecutive ones. An ancestor of any of them that is before the block is an
ancestor of its first node as well, so the keys of a block are these few and the block itself. Those
that all nodes of the block attend to need no mask:

                           shared      rest                                      x  a key
    keys of block 2        x x . . . . x x x . . . . | x x x x                   .  other branches
    nodes                  0 1 2 3 4 5 6 7 8 9 ...   | first ... last - 1

A long run of nodes without branches, which is most of a conversation, is a block of its own: it
attends to everything before it that is on its path, and to itself as any text does, so it needs no
mask at all, and its pairs are those of its paths and no more. Such runs that follow the same path,
the answers to one question, are one block: together they attend to the path, each to itself.
Shorter runs are taken together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tuner.engines.transfer import to_device
from tuner.traces.tree import IntArray, TokenTree

BLOCKS = 64, 256
"""Nodes of a block of short runs, at least and at most (where paths are long): few enough to add
little to the paths, enough to be worth copying their keys. A run as long is a block by itself."""

RUNS = 16
"""Keys in so many runs of consecutive nodes are copied run by run, in more one by one."""


class Siblings(NamedTuple):
    """`number` runs of equal length, one after the other in the nodes [start, stop)."""

    start: int
    stop: int
    number: int

    def rows(self, states_N: Tensor) -> Tensor:
        """[1, heads, N, ...] -> [number, heads, length of a run, ...]"""
        nodes = states_N[0, :, self.start : self.stop]
        rows: Tensor = nodes.unflatten(1, (self.number, -1)).transpose(0, 1)
        return rows

    @staticmethod
    def joined(rows: Tensor) -> Tensor:
        """The other way, of these nodes alone: -> [1, heads, stop - start, ...]"""
        return rows.transpose(0, 1).flatten(1, 2)[None]


@dataclass(frozen=True)
class Keys:
    """K nodes of a tree, in order, to which the nodes of a block attend.

    Attributes:
        node_K: Their indices.
        attended: Wholly: by all nodes of the block. Causally: they are the block itself, and each
            of its nodes attends to all of its own run up to itself. In part: to be masked.
        runs: The nodes in runs of consecutive ones, where these are few.
        siblings: The runs that attend causally, those of one length that follow each other at once.
    """

    node_K: Tensor
    attended: Literal["wholly", "causally", "in part"]
    runs: tuple[slice, ...] | None
    siblings: tuple[Siblings, ...] = ()

    def select(self, states: Tensor) -> Tensor:
        """Keys or values of these nodes: [1, heads, N, width] -> [1, heads, K, width]."""
        if self.runs is None:
            return states.index_select(2, self.node_K)
        parts = [states[:, :, run] for run in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def add(self, gradient: Tensor, part: Tensor) -> None:
        """Add the gradient [1, heads, K, width] of what `select` gave to that of all nodes."""
        if self.runs is None:
            gradient.index_add_(2, self.node_K, part.to(gradient.dtype))
            return
        widths = [run.stop - run.start for run in self.runs]
        for run, own in zip(self.runs, part.split(widths, 2), strict=True):
            gradient[:, :, run] += own


@dataclass(frozen=True)
class Block:
    """Nodes [first, last), and the keys that any of them attends to: first the rest, with the block
    itself, then those shared by all, where there are any."""

    first: int
    last: int
    keys: tuple[Keys, ...]


@dataclass(frozen=True)
class _Cut:
    """Nodes [first, last), the nodes before them that any attends to, and which of those all do."""

    first: int
    last: int
    before: IntArray
    shared: NDArray[np.bool_]
    causal: bool

    def is_beside(self, other: _Cut) -> bool:
        """Whether both are runs that follow the same path."""
        return self.causal and other.causal and np.array_equal(self.before, other.before)


def blocks_of(tree: TokenTree, window: int | None, device: torch.device) -> Iterator[Block]:
    """The blocks of a tree for layers with this window, None for unlimited, in order of nodes."""
    together: list[_Cut] = []
    for first, last in _cuts(tree, window):
        cut = _cut(tree, window, first, last)
        if together and not (window is None and cut.is_beside(together[-1])):
            yield _block(together, device)
            together = []
        together.append(cut)
    if together:
        yield _block(together, device)


def _cut(tree: TokenTree, window: int | None, first: int, last: int) -> _Cut:
    before = np.flatnonzero(tree.end[:first] > first)
    shared = tree.end[before] >= last
    # Nodes of one path without branches have the same last descendant.
    causal = bool((tree.end[first:last] == tree.end[first]).all())
    if window is not None:
        depth = tree.depth[first:last]
        # A node of the cut may be higher in the tree than the first one, and sees more.
        seen = depth.min() - tree.depth[before] < window
        before, shared = before[seen], shared[seen]
        shared &= depth.max() - tree.depth[before] < window
        causal &= last - first <= window
    return _Cut(first, last, before, shared, causal and bool(shared.all()))


def _block(cuts: list[_Cut], device: torch.device) -> Block:
    """One block of one cut, or of several runs that follow the same path."""
    first, last = cuts[0].first, cuts[-1].last
    before, shared = cuts[0].before, cuts[0].shared
    own = np.arange(first, last)
    if cuts[0].causal:
        keys = [_keys(own, "causally", device, _siblings(cuts))]
    else:
        keys = [_keys(np.concatenate((before[~shared], own)), "in part", device)]
    if shared.any():
        keys.append(_keys(before[shared], "wholly", device))
    return Block(first, last, tuple(keys))


def _siblings(runs: list[_Cut]) -> tuple[Siblings, ...]:
    siblings = []
    for _, equal in groupby(runs, key=lambda run: run.last - run.first):
        found = list(equal)
        siblings.append(Siblings(found[0].first, found[-1].last, len(found)))
    return tuple(siblings)


def _keys(
    nodes: IntArray,
    attended: Literal["wholly", "causally", "in part"],
    device: torch.device,
    siblings: tuple[Siblings, ...] = (),
) -> Keys:
    ends = np.flatnonzero(np.diff(nodes) != 1) + 1
    runs = None
    if len(ends) < RUNS:
        runs = tuple(slice(int(run[0]), int(run[-1]) + 1) for run in np.split(nodes, ends))
    return Keys(to_device(nodes, device), attended, runs, siblings)


def _cuts(tree: TokenTree, window: int | None) -> Iterator[tuple[int, int]]:
    """Where the blocks are: long runs without branches by themselves, short ones together."""
    count = tree.unique_tokens
    size = BLOCKS[0] if tree.depth.mean() < BLOCKS[1] else BLOCKS[1]
    # A node and the next have the same end where the next is its only child.
    starts = [0, *(np.flatnonzero(np.diff(tree.end)) + 1).tolist()]
    first = 0
    for start, stop in pairwise([*starts, count]):
        long = stop - start >= size
        if first < start and (long or stop - first > size):
            yield first, start
            first = start
        if long:
            step = stop - start if window is None else size
            for at in range(start, stop, step):
                yield at, min(at + step, stop)
            first = stop
    if first < count:
        yield first, count
