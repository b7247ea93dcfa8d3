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
mask at all, and its pairs are those of its paths and no more. Shorter runs are taken together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tuner.engines.transfer import to_device
from tuner.traces.tree import IntArray, TokenTree

BLOCKS = 64, 256
"""Nodes of a block of short runs, at least and at most (where paths are long): few enough to add
little to the paths, enough to be worth copying their keys. A run as long is a block by itself."""

RUNS = 16
"""Keys in so many runs of consecutive nodes are copied run by run, in more one by one."""


@dataclass(frozen=True)
class Keys:
    """K nodes of a tree, in order, to which the nodes of a block attend.

    Attributes:
        node_K: Their indices.
        attended: Wholly: by all nodes of the block. Causally: they are the block itself, and each
            of its nodes attends to all up to itself. In part: to be masked.
        runs: The nodes in runs of consecutive ones, where these are few.
    """

    node_K: Tensor
    attended: Literal["wholly", "causally", "in part"]
    runs: tuple[slice, ...] | None

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


def blocks_of(tree: TokenTree, window: int | None, device: torch.device) -> Iterator[Block]:
    """The blocks of a tree for layers with this window, None for unlimited, in order of nodes."""
    for first, last in _cuts(tree, window):
        before = np.flatnonzero(tree.end[:first] > first)
        shared = tree.end[before] >= last
        causal = bool((tree.end[first:last] == tree.end[first]).all())
        if window is not None:
            depth = tree.depth[first:last]
            # A node of the block may be higher in the tree than the first one, and sees more.
            seen = depth.min() - tree.depth[before] < window
            before, shared = before[seen], shared[seen]
            shared &= depth.max() - tree.depth[before] < window
            causal &= last - first <= window
        causal &= bool(shared.all())
        rest = np.concatenate((before[~shared], np.arange(first, last)))
        keys = [_keys(rest, "causally" if causal else "in part", device)]
        if shared.any():
            keys.append(_keys(before[shared], "wholly", device))
        yield Block(first, last, tuple(keys))


def _keys(
    nodes: IntArray, attended: Literal["wholly", "causally", "in part"], device: torch.device
) -> Keys:
    ends = np.flatnonzero(np.diff(nodes) != 1) + 1
    runs = None
    if len(ends) < RUNS:
        runs = tuple(slice(int(run[0]), int(run[-1]) + 1) for run in np.split(nodes, ends))
    return Keys(to_device(nodes, device), attended, runs)


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
