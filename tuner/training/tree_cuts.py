"""Where the rows of a batch are cut into micro-batches, each of which becomes one token tree.

In lexicographic order rows that share a prefix are neighbours, and a row adds to the tree what is
behind the prefix that it shares with the row before it. Cutting between two rows makes the second
tree repeat that prefix, once more through every layer and with its attention:

    row 1   s s s s a a a          tree of rows 1 to 3: 7 + 4 + 2 nodes
    row 2   s s s s b b b b        cut here: the next tree repeats s s s s
    row 3   s s s s b b b b c c    cut here: it repeats s s s s b b b b

The cuts that cost least are found by dynamic programming over the sorted rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from transformers import PreTrainedModel

from tuner.traces.tree import HasIds, sequence_keys

_PASS_TOKENS = 64.0
"""A pass over few tokens takes about as long as one over this many."""


@dataclass(frozen=True)
class PassCost:
    """What a pass over a tree costs, in units of one token through the layers without attention.

    Attributes:
        pair: One query attending to one key, in all layers.
        dense: Whether every node is compared with every other (a full mask), and not just with its
            ancestors.
    """

    pair: float
    dense: bool = False

    @staticmethod
    def of(model: PreTrainedModel, *, dense: bool = False) -> PassCost:
        """From the sizes of a model: multiplications of attention over those of the weights."""
        config = model.config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        embeddings = {
            id(module.weight)
            for module in (model.get_input_embeddings(), model.get_output_embeddings())
            if isinstance(getattr(module, "weight", None), torch.Tensor)
        }
        weights = sum(p.numel() for p in model.parameters() if id(p) not in embeddings)
        return PassCost(2 * config.num_hidden_layers * heads * width / weights, dense)

    def __call__(self, tokens: int, pairs: int) -> float:
        """One pass over a tree of so many nodes, with so many pairs of a node and its ancestor."""
        return _PASS_TOKENS + tokens + self.pair * (tokens**2 if self.dense else pairs)

    def cheapest_tokens(self) -> int:
        """At how many tokens of a dense pass one of them costs least."""
        return max(1, round(math.sqrt(_PASS_TOKENS / self.pair)))


def tree_cuts(rows: Sequence[HasIds], max_tokens: int, cost: PassCost) -> list[list[int]]:
    """Cut row indices into micro-batches whose trees have at most `max_tokens` nodes each.

    Args:
        rows: Prompt and completion ids of each.
        max_tokens: Nodes of one tree; a row longer than that is a micro-batch of its own.
        cost: Of one pass.

    Returns:
        Row indices, in lexicographic order of their ids, cut where the passes cost least in all.
    """
    keys = sequence_keys(rows)
    order = sorted(range(len(rows)), key=lambda i: (keys[i], i))
    length = [len(keys[i]) // 4 for i in order]
    shared = [0] + [_shared(keys[a], keys[b]) for a, b in pairwise(order)]
    best = [0.0]  # least cost of the first i rows
    begin = [0]  # where the last micro-batch of these begins
    for stop in range(1, len(order) + 1):
        least, at = float("inf"), stop - 1
        # Nodes and pairs of the tree of rows [start, stop): with `start` going back, that row adds
        # what is before the prefix which the row behind it shares with it.
        tokens = pairs = 0
        behind = 0  # of row `start + 1`, what row `start` now gives
        for start in range(stop - 1, -1, -1):
            tokens += length[start] - behind
            pairs += _pairs(length[start]) - _pairs(behind)
            if tokens > max_tokens and start < stop - 1:
                break
            total = best[start] + cost(tokens, pairs)
            if total < least:
                least, at = total, start
            behind = shared[start]
        best.append(least)
        begin.append(at)
    cuts: list[list[int]] = []
    stop = len(order)
    while stop:
        cuts.append(order[begin[stop] : stop])
        stop = begin[stop]
    return cuts[::-1]


def _pairs(length: int) -> int:
    """Pairs of a node and an ancestor or itself on a path of so many nodes."""
    return length * (length + 1) // 2


def _shared(one: bytes, other: bytes) -> int:
    """Ids at the start of both keys."""
    width = min(len(one), len(other)) // 4
    ids = (np.frombuffer(key, dtype=">u4", count=width) for key in (one, other))
    differs = np.flatnonzero(np.not_equal(*ids))
    return int(differs[0]) if len(differs) else width
