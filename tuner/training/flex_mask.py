"""FlexAttention's block mask of a token tree, from the tree and not from its square.

FlexAttention cuts queries and keys into tiles and skips those where nothing is attended to; where
everything is, it does not ask the rule. `create_block_mask` finds out by asking for every pair of
nodes. In a tree the keys that a tile of queries attends to are known: the ancestors of its first
node, and the tile itself (`tree_attention`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tuner.engines.transfer import to_device
from tuner.traces.tree import TokenTree

TILE = 128
"""Queries and keys of a tile, FlexAttention's own choice."""


def flex_mask(tree: TokenTree, window: int | None, device: torch.device, rule: Any) -> Any:
    """The `BlockMask` of all N nodes.

    Args:
        window: A query sees the last `window` depths up to its own; None is all of them.
        rule: For tiles that are attended to in part: whether a query attends to a key.
    """
    from torch.nn.attention.flex_attention import BlockMask

    count = tree.unique_tokens
    tiles = -(-count // TILE)
    partial, full = (np.zeros((tiles, tiles), dtype=bool) for _ in range(2))
    for tile in range(tiles):
        partial[tile], full[tile] = _attended(tree, window, tile * TILE)
    return BlockMask.from_kv_blocks(
        *_ordered(partial, device),
        *_ordered(full, device),
        BLOCK_SIZE=TILE,
        mask_mod=rule,
        seq_lengths=(count, count),
    )


def _attended(tree: TokenTree, window: int | None, first: int) -> tuple[Any, Any]:
    """For the queries from `first` on: which tiles of keys they attend to in part, and wholly.

    With a window a tile may be among those in part of which nothing is attended to.
    """
    count = tree.unique_tokens
    last = min(first + TILE, count)
    seen = np.zeros(count, dtype=bool)
    seen[first:last] = True
    before = tree.end[:first] > first
    always = before & (tree.end[:first] >= last)
    if window is not None:
        depth = tree.depth[first:last]
        before &= depth.min() - tree.depth[:first] < window
        always &= depth.max() - tree.depth[:first] < window
    seen[:first] = before
    starts = np.arange(0, count, TILE)
    some = np.logical_or.reduceat(seen, starts)
    # The keys before a tile of queries are whole tiles; that of its own is causal.
    wholly = np.zeros(len(starts), dtype=bool)
    if last - first == TILE:
        wholly[: first // TILE] = always.reshape(-1, TILE).all(axis=1)
    return some & ~wholly, wholly


def _ordered(chosen: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tiles each row has, [1, 1, Q], and their indices first in each row, [1, 1, Q, K]."""
    order = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    counts = chosen.sum(axis=1).astype(np.int32)
    return to_device(counts, device)[None, None], to_device(order, device)[None, None]
