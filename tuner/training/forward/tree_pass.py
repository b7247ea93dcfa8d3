"""One forward pass over the token tree of rows, and where a batch is cut into trees.

In lexicographic order rows that share a prefix are neighbours, and a row adds to the tree what is
behind the prefix that it shares with the row before it. Cutting between two rows makes the second
tree repeat that prefix, once more through every layer and with its attention:

    row 1   s s s s a a a          tree of rows 1 to 3: 7 + 4 + 2 nodes
    row 2   s s s s b b b b        cut here: the next tree repeats s s s s
    row 3   s s s s b b b b c c    cut here: it repeats s s s s b b b b

The cuts that cost least are found by dynamic programming over the sorted rows.

Every distinct prefix of the rows goes through the model once, at the position id of its depth, and
attends to its ancestors (`tree_attention`). A sampled token's log-prob is read at the node before
it, so only these nodes' hidden states meet the vocabulary:

    rows     1 2 [3]   1 2 3 4 [5]   1 2 [6]       nodes through the layers   1 2 3 4 5 6
                                                   rows of logits             of 3, 5 and 6

Tokens that are the same node sampled with the same settings share one row of logits, and each call
still has its own log-prob.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tuner.engines.grammar import Grammars
from tuner.engines.transfer import to_device
from tuner.engines.transformers.model_shape import head_width, layer_configs
from tuner.engines.transformers.weights import causal_model
from tuner.traces.tree import HasIds, IntArray, TokenTree, sequence_keys
from tuner.training.batch import Row
from tuner.training.forward.head import (
    OutputHead,
    Sampled,
    TokenLogprobs,
    body,
    logprobs_in_parts,
)
from tuner.training.forward.tree_attention import TreeAttention

# Settings that do not change what a token is sampled from.
_WITHOUT_EFFECT: dict[str, Any] = {
    "max_tokens": 1,
    "stop": (),
    "seed": 0,
    "top_logprobs": 0,
    "stop_token_ids": (),
}
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
        widths = sum(c.num_attention_heads * head_width(c) for c in layer_configs(config))
        embeddings = {
            id(module.weight)
            for module in (model.get_input_embeddings(), model.get_output_embeddings())
            if isinstance(getattr(module, "weight", None), torch.Tensor)
        }
        weights = sum(p.numel() for p in model.parameters() if id(p) not in embeddings)
        return PassCost(2 * widths / weights, dense)

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


def tree_logprobs(
    model: nn.Module,
    rows: Sequence[Row],
    *,
    windows: dict[str, int | None],
    with_entropy: bool,
    grammars: Grammars | None = None,
    compiled: bool = False,
) -> TokenLogprobs:
    """As `completion_logprobs`, of a model whose layers attend to keys and values.

    Args:
        windows: For each kind of layer in the model its window, None for unlimited.
    """
    causal = causal_model(model)
    device = next(model.parameters()).device
    tree = TokenTree.build(rows)
    head = OutputHead(causal)
    hidden_ND = _hidden(causal, tree, windows, device)
    first_U, of_T = _distinct(tree, rows)
    sampled_U = Sampled.of(rows, head.vocabulary, grammars).take(first_U)
    predicts_U = to_device(tree.parent[tree.completion_node[first_U]], device)
    distinct = logprobs_in_parts(
        head, hidden_ND[predicts_U], sampled_U, with_entropy=with_entropy, compiled=compiled
    )
    back_T = to_device(of_T, device)
    return TokenLogprobs(distinct.logp_T[back_T], distinct.entropy_T[back_T])


def tree_states(model: nn.Module, rows: Sequence[Row], *, windows: dict[str, int | None]) -> Tensor:
    """Last hidden states at the nodes before the completion tokens of `rows`, in row order, [T, D].

    Args:
        model: A transformers causal LM whose layers attend to keys and values, or one without its
            output embedding.
        rows: B calls with a prompt each.
        windows: For each kind of layer in the model its window, None for unlimited.
    """
    device = next(model.parameters()).device
    tree = TokenTree.build(rows)
    hidden_ND = _hidden(causal_model(model), tree, windows, device)
    return hidden_ND[to_device(tree.parent[tree.completion_node], device)]


def _hidden(
    model: PreTrainedModel, tree: TokenTree, windows: dict[str, int | None], device: torch.device
) -> Tensor:
    """Last hidden states of all nodes, shape [N, D]."""
    attention = {kind: TreeAttention(tree, window, device) for kind, window in windows.items()}
    dense = model.config._attn_implementation != "sdpa"
    masks = {
        kind: one.dense(model.dtype) if dense else one.mask() for kind, one in attention.items()
    }
    output: Any = body(model)(
        input_ids=to_device(tree.token, device)[None],
        position_ids=to_device(tree.depth, device)[None],
        # Models with one kind of layer take a tensor, those with several a dict.
        attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
        use_cache=False,
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def _distinct(tree: TokenTree, rows: Sequence[Row]) -> tuple[IntArray, IntArray]:
    """The U of the T completion tokens that differ in node or settings.

    Returns:
        For each of the U a token that is like it, shape [U], in order of nodes; and for each token
        which of the U it is, shape [T].
    """
    kinds: dict[tuple[object, ...], int] = {}
    kind_T: list[int] = []
    for row in rows:
        # What may follow may depend on where the completion began as well.
        start = len(row.prompt_ids) - row.begun if row.sampling.in_one_part else -1
        key = (replace(row.sampling, **_WITHOUT_EFFECT), start)
        kind = kinds.setdefault(key, len(kinds))
        if row.kept:
            kind_T += [kinds.setdefault((kind, kept), len(kinds)) for kept in row.kept]
        else:
            kind_T += [kind] * len(row.completion_ids)
    _, first_U, of_T = np.unique(
        tree.completion_node * len(kinds) + np.array(kind_T), return_index=True, return_inverse=True
    )
    return first_U, of_T
