"""One forward pass over the token tree of rows, and where a batch is cut into trees.

In lexicographic order rows with a common prefix are neighbours, and a row adds to the tree what
follows the prefix that it shares with the row before it. Cutting between two rows makes the second
tree repeat that prefix, once more through every layer and with its attention:

    row 1   s s s s a a a          tree of rows 1 to 3: 7 + 4 + 2 nodes
    row 2   s s s s b b b b        cut here: the next tree repeats s s s s
    row 3   s s s s b b b b c c    cut here: it repeats s s s s b b b b

The cheapest cuts are found by dynamic programming over the sorted rows.

Every distinct prefix of the rows goes through the model once, at the position id of its depth, and
attends to its ancestors (`TreeAttention`). A sampled token's log-prob is read at the node before
it, so only these nodes' hidden states are multiplied with the vocabulary:

    rows     1 2 [3]   1 2 3 4 [5]   1 2 [6]       nodes through the layers   1 2 3 4 5 6
                                                   rows of logits             of 3, 5 and 6

Tokens that are the same node sampled with the same settings share one row of logits, and each call
still has its own log-prob.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tuner.engines.grammar import Grammars, to_device
from tuner.engines.transformers.cascade import flash
from tuner.engines.transformers.model_shape import head_width, layer_configs
from tuner.engines.transformers.passes import causal_model
from tuner.engines.transformers.vision import decoder_inputs, vision_of
from tuner.errors import TrainingError
from tuner.traces.tree import HasIds, IntArray, TokenTree, sequence_keys
from tuner.training.batch import Row
from tuner.training.forward import kernels
from tuner.training.forward.head import (
    OutputHead,
    TokenLogprobs,
    TokenTargets,
    body,
    logprobs_in_parts,
)
from tuner.training.forward.varlen import FLEX_TILE, TILE, RunMask, RunsChoice, TreeRuns

# Cutting attention over a token tree into products of a few queries with the keys they share.
#
# Node q of a tree in depth-first order attends to its ancestors and itself: `k <= q < end[k]`, in a
# layer with a sliding window only to those of the last `window` depths. The nodes are processed in
# blocks [first, last) of consecutive ones. An ancestor of any of them that is before the block is
# also an ancestor of its first node, so the keys of a block are these few and the block itself.
# Those
# that all nodes of the block attend to need no mask:
#
#                            shared      rest                                      x  a key
#     keys of block 2        x x . . . . x x x . . . . | x x x x                   .  other branches
#     nodes                  0 1 2 3 4 5 6 7 8 9 ...   | first ... last - 1
#
# A long run of nodes without branches, which is most of a conversation, is a block of its own: it
# attends to everything before it on its path, and to itself causally, so it needs no mask, and
# computes no pair more than its paths have. Runs that follow the same path, the answers to one
# question, are one block: together they attend to the path, each to itself. Shorter runs are
# combined into blocks.


BLOCKS = 64, 256
"""Minimum and maximum number of nodes of a block of short runs (the maximum with long paths): few
enough to add little to the paths, enough to be worth copying their keys. A longer run is a block.
"""

RUNS = 16
"""Keys in at most this many runs of consecutive nodes are copied by run, others one by one."""


class Siblings(NamedTuple):
    """`number` runs of equal length, one after the other in the nodes [start, stop)."""

    start: int
    stop: int
    number: int

    def rows(self, states_N: Tensor) -> Tensor:
        """A view of these nodes: [1, heads, N, ...] -> [number, heads, length of a run, ...]"""
        _, heads, _, *rest = states_N.shape
        _, of_head, of_node, *of_rest = states_N.stride()
        length = (self.stop - self.start) // self.number
        return states_N.as_strided(
            (self.number, heads, length, *rest),
            (length * of_node, of_head, of_node, *of_rest),
            states_N.storage_offset() + self.start * of_node,
        )


@dataclass(frozen=True)
class Keys:
    """K nodes of a tree, in order, to which the nodes of a block attend.

    Attributes:
        node_K: Their indices.
        attended: Wholly: by all nodes of the block. Causally: they are the block itself, and each
            of its nodes attends to its own run up to itself. In part: with a mask.
        runs: The nodes as runs of consecutive ones, if there are few.
        siblings: The runs that attend causally; those of equal length that follow each other are
            computed at once.
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
        """Add the gradient [1, heads, K, width] of the selected nodes to that of all nodes."""
        if self.runs is None:
            gradient.index_add_(2, self.node_K, part.to(gradient.dtype))
            return
        widths = [run.stop - run.start for run in self.runs]
        parts = part.split(widths, 2) if len(widths) > 1 else (part,)
        for run, own in zip(self.runs, parts, strict=True):
            gradient[:, :, run].add_(own)


@dataclass(frozen=True)
class Block:
    """Nodes [first, last), and the keys that any of them attends to: first the rest, with the block
    itself, then those shared by all, if there are any."""

    first: int
    last: int
    keys: tuple[Keys, ...]


@dataclass(frozen=True)
class _Cut:
    """Nodes [first, last), the earlier nodes that any attends to, and which of those all attend
    to."""

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
    """Bounds of the blocks: long runs without branches alone, short ones combined."""
    count = tree.unique_tokens
    size = BLOCKS[0] if tree.depth.mean() < BLOCKS[1] else BLOCKS[1]
    # A node and the next have the same end if the next is its only child.
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


# Exact attention over a token tree, without a mask of quadratic size.
#
# Node q of a tree in depth-first order attends to its ancestors and itself: `k <= q < end[k]`, in a
# layer with a sliding window only to those of the last `window` depths. On a CPU this is computed
# in blocks of nodes (`blocks_of`): with the keys that all nodes of a block attend to, and with the
# rest;
# the two outputs are combined by their log-sum-exps L:
#
#     output = w * output_shared + (1 - w) * output_rest        w = sigmoid(L_shared - L_rest)
#
# It reaches the model as an attention mask: a `TreeMask` takes the place of a 4-D mask, passes
# unchanged through transformers' code, and takes over when `scaled_dot_product_attention` receives
# it. Nothing of the model or its configuration changes, so an engine can serve it at the same time.
#
# On CUDA the same rule is a FlexAttention block mask. FlexAttention cuts queries and keys into
# tiles, skips empty tiles, and does not evaluate the rule in full ones. `create_block_mask`
# classifies tiles by evaluating the rule for every pair of nodes; in a tree the ends of the
# subtrees of a tile are enough (`flex_mask`). Two calls of flash attention take its
# place where they cost less (`varlen`).


FLEX_DEVICES = ("cuda",)
"""Devices on which FlexAttention has a backward pass."""


def flex_mask(tree: TokenTree, window: int | None, device: torch.device, rule: Any) -> Any:
    """The `BlockMask` of all N nodes.

    A key k is attended to by one of the queries [first, last) after it if `end[k] > first`, by all
    of them if `end[k] >= last`: so the smallest and largest `end` of a tile of keys decide. Its
    depths decide likewise for the window, and some tiles marked "in part" may be empty.

    Args:
        window: A query sees the last `window` depths up to its own; None is all of them.
        rule: For partial tiles: whether a query attends to a key.
    """
    some, wholly = _tiles(tree, window)
    # torch would compile a separate kernel for a single tile.
    more = max(0, 2 - len(some))
    partial, full = (np.pad(tiles, (0, more)) for tiles in (some & ~wholly, wholly))
    count = tree.unique_tokens
    return BlockMask(
        (count, count),
        *_ordered(partial, device),
        *_ordered(full, device),
        *_ordered(partial.T, device),
        *_ordered(full.T, device),
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=rule,
    )


def _tiles(tree: TokenTree, window: int | None) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """For each tile of queries and of keys, shape [T, T]: whether some, and whether all of its
    queries attend to some, or all, of its keys."""
    first_T = np.arange(0, tree.unique_tokens, TILE)
    least, largest = np.minimum.reduceat, np.maximum.reduceat
    before = np.tri(len(first_T), k=-1, dtype=bool)
    some = before & (largest(tree.end, first_T) > first_T[:, None])
    # Padding queries attend to nothing, so no tile is full for the last row of tiles.
    wholly = before & (least(tree.end, first_T) >= (first_T + TILE)[:, None])
    if window is not None:
        highest_T, deepest_T = least(tree.depth, first_T), largest(tree.depth, first_T)
        some &= highest_T[:, None] - deepest_T < window
        wholly &= deepest_T[:, None] - highest_T < window
    some |= np.eye(len(first_T), dtype=bool)
    return some, wholly


def _ordered(chosen: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of tiles of each row, [1, 1, Q], and their indices first in each row, [1, 1, Q, K]."""
    order = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    counts = chosen.sum(axis=1).astype(np.int32)
    return to_device(counts, device)[None, None], to_device(order, device)[None, None]


KEPT_MASKS = 1 << 28
"""Bytes of block masks that are kept from one layer to the next; others are recomputed."""


class TreeAttention:
    """Which nodes of one tree attend to which, for one kind of layer.

    Args:
        tree: N nodes.
        window: A query sees the last `window` depths up to its own; None is all of them.
        device: Device of the model.
        runs: Whether attention takes the two calls of `varlen`.
    """

    def __init__(
        self,
        tree: TokenTree,
        window: int | None,
        device: torch.device,
        runs: RunsChoice = "never",
    ) -> None:
        self._tree = tree
        self._choice = runs
        self._window = window
        self._device = device
        self._end_N = self._tensor(tree.end)
        self._depth_N = self._tensor(tree.depth)
        self._masks: dict[int, Tensor] = {}
        self._room = KEPT_MASKS

    def mask(self) -> TreeMask:
        """The mask that carries this object through the model's code."""
        count = self._tree.unique_tokens
        # One number expanded to the shape of a mask: models look at the shape and at no value.
        mask = torch.zeros((), device=self._device).expand(1, 1, count, count)
        stand_in = mask.as_subclass(TreeMask)
        stand_in.attention = self
        return stand_in

    def allowed(self, first: int, last: int, key_K: Tensor) -> Tensor:
        """Whether each of the nodes [first, last) attends to each key, shape [last - first, K]."""
        query_B1 = torch.arange(first, last, device=self._device)[:, None]
        allowed = (key_K <= query_B1) & (query_B1 < self._end_N[key_K])
        if self._window is not None:
            allowed &= self._depth_N[first:last, None] - self._depth_N[key_K] < self._window
        return allowed

    def mask_of(self, block: Block, keys: Keys, dtype: torch.dtype) -> Tensor | None:
        """Additive mask of a block's partially attended keys, shape [1, 1, last - first, K]; None
        for other keys."""
        if keys.attended != "in part":
            return None
        kept = self._masks.get(block.first)
        if kept is not None and kept.dtype == dtype:
            return kept
        allowed = self.allowed(block.first, block.last, keys.node_K)
        mask = _additive(allowed, dtype)[None, None]
        if kept is None and mask.nbytes <= self._room:
            self._room -= mask.nbytes
            self._masks[block.first] = mask
        return mask

    def dense(self, dtype: torch.dtype) -> Tensor:
        """One additive mask for all nodes, shape [1, 1, N, N]: for attention other than sdpa."""
        count = self._tree.unique_tokens
        allowed = self.allowed(0, count, torch.arange(count, device=self._device))
        return _additive(allowed, dtype)[None, None]

    @cached_property
    def blocks(self) -> list[Block]:
        return list(blocks_of(self._tree, self._window, self._device))

    def _tensor(self, array: IntArray) -> Tensor:
        return to_device(array, self._device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention of all nodes, with one or more heads of queries for each of keys and values:
        [1, heads, N, width] each -> [1, heads, N, width]."""
        if self.run_mask is not None:
            return self.run_mask.attend(query, key, value, scale)
        if query.is_cuda:
            return self.flex(query, key, value, scale, compiled=True)
        result: Tensor = _BlockAttention.apply(query, key, value, self, scale)  # type: ignore[no-untyped-call]
        return result

    def flex(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, *, compiled: bool
    ) -> Tensor:
        """The same through FlexAttention, whose kernel is made by `torch.compile`."""
        compute = kernels.kernel_of(_flex) if compiled else _flex
        result: Tensor = compute(query, key, value, self.block_mask, scale)
        return result

    @cached_property
    def run_mask(self) -> RunMask | None:
        """The two calls of `varlen`; None where FlexAttention costs less, or a window cuts off some
        of a path."""
        tree = self._tree
        cut = self._window is not None and self._window <= tree.depth.max()
        if self._choice == "never" or cut:
            return None
        runs = TreeRuns.of(tree)
        if self._choice == "cheaper":
            tiles = np.count_nonzero(_tiles(tree, None)[0])
            if FLEX_TILE * tiles < runs.cost:
                return None
        return RunMask(tree, runs, self._device)

    @cached_property
    def block_mask(self) -> Any:
        end_N, depth_N, window = self._end_N, self._depth_N, self._window

        def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            allowed = (key <= query) & (query < end_N[key])
            if window is not None:
                allowed = allowed & (depth_N[query] - depth_N[key] < window)
            return allowed

        return flex_mask(self._tree, window, self._device, attends)


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)


class TreeMask(Tensor):
    """A tensor that looks like a 4-D attention mask [1, 1, N, N] and holds no numbers."""

    attention: TreeAttention | None = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _scaled_dot_product_attention(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    attention: Any = flex_attention
    result: Tensor = attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)
    return result


def sdpa_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' `sdpa` attention, registered in its place: for a tree it does not repeat keys
    and values for each head of queries, as transformers does where there is a mask."""
    changes = dropout or kwargs.get("position_bias") is not None or kwargs.get("softcap")
    if changes or not isinstance(attention_mask, (TreeMask, BlockMask)):
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
        return found
    output = _attend(query, key, value, attention_mask, scaling)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register("sdpa", sdpa_attention)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: TreeMask | BlockMask, scale: float | None
) -> Tensor:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # The kernels need one width: latent attention (DeepSeek's) has wider keys than values.
    # FlexAttention needs at least 16.
    of_value = value.shape[-1]
    width = max(query.shape[-1], of_value, 16 if query.is_cuda else 0)
    query, key, value = (
        states if states.shape[-1] == width else F.pad(states, (0, width - states.shape[-1]))
        for states in (query, key, value)
    )
    result: Tensor
    if isinstance(mask, RunMask):
        result = mask.attend(query, key, value, scale)
    else:
        compute: Callable[..., Any] = _flex if isinstance(mask, BlockMask) else _carried
        result = compute(query, key, value, mask, scale)
    return result[..., :of_value]


# Called by compiled layers; it compiles what it needs itself.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _carried(query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, scale: float) -> Tensor:
    if mask.attention is None:
        raise TrainingError(_CHANGED)
    return mask.attention.attend(query, key, value, scale)


_CHANGED = (
    "the model's attention changes its mask, uses dropout or asks for causal attention in "
    "addition to the mask; it cannot be trained on a token tree"
)


def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: TreeMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Replaces torch's function of this name when its mask is a `TreeMask`."""
    if attn_mask is None or dropout_p or is_causal:
        raise TrainingError(_CHANGED)
    return _attend(query, key, value, attn_mask, scale)


_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class _BlockAttention(torch.autograd.Function):
    """torch's CPU kernel, block by block; keys of a block are gathered again in the backward pass
    and not kept, and their gradients are added in place. Everything else is a view, each made by
    one operation: for small models these calls are most of the time."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, attention: TreeAttention, scale: float
    ) -> Tensor:
        result = torch.empty_like(query)
        sums = query.new_empty(query.shape[:3], dtype=_exact(query.dtype))
        for block in attention.blocks:
            own, *shared = block.keys
            for siblings in own.siblings:
                states = (siblings.rows(each) for each in (query, key, value))
                output, total = flash(*states, is_causal=True, scale=scale)
                siblings.rows(result).copy_(output)
                siblings.rows(sums).copy_(total)
            others = shared if own.siblings else block.keys
            if not others:
                continue
            of_block, of_sums, queries = (
                each[:, :, block.first : block.last] for each in (result, sums, query)
            )
            for keys in others:
                output, total = flash(
                    queries,
                    keys.select(key),
                    keys.select(value),
                    attn_mask=attention.mask_of(block, keys, query.dtype),
                    scale=scale,
                )
                if keys is own:
                    of_block.copy_(output)
                    of_sums.copy_(total)
                else:
                    _join(of_block, of_sums, output, total)
        ctx.save_for_backward(query, key, value, result, sums)
        ctx.attention, ctx.scale = attention, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, sums = ctx.saved_tensors
        attention: TreeAttention = ctx.attention
        # A shared prefix adds up the parts of every block after it, too many for bfloat16.
        of_query, of_key, of_value = totals = tuple(
            torch.zeros_like(states, dtype=_exact(key.dtype)) for states in (query, key, value)
        )
        # Output and log-sum-exp of all keys make a set of keys' part of the gradient its own.
        for block in attention.blocks:
            for siblings in block.keys[0].siblings:
                states = (siblings.rows(each) for each in (gradient, query, key, value, result))
                found = _flash_backward(*states, siblings.rows(sums), 0.0, True, scale=ctx.scale)
                for total, part in zip(totals, found, strict=True):
                    siblings.rows(total).add_(part)
            others = [keys for keys in block.keys if not keys.siblings]
            if not others:
                continue
            gradients, queries, outputs, of_sums, of_queries = (
                each[:, :, block.first : block.last]
                for each in (gradient, query, result, sums, of_query)
            )
            for keys in others:
                query_part, key_part, value_part = _flash_backward(
                    gradients,
                    queries,
                    keys.select(key),
                    keys.select(value),
                    outputs,
                    of_sums,
                    0.0,
                    False,
                    attn_mask=attention.mask_of(block, keys, query.dtype),
                    scale=ctx.scale,
                )
                of_queries.add_(query_part)
                keys.add(of_key, key_part)
                keys.add(of_value, value_part)
        dtype = key.dtype
        return of_query.to(dtype), of_key.to(dtype), of_value.to(dtype), None, None


def _exact(dtype: torch.dtype) -> torch.dtype:
    """float32 at least; `torch.promote_types` is an operator."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _join(output: Tensor, total: Tensor, other: Tensor, sums: Tensor) -> None:
    """Add to outputs [1, heads, B, width] over some keys, in place, those over other keys, by their
    log-sum-exps [1, heads, B] (as `cascade.joined`)."""
    share = torch.sigmoid(sums - total)[..., None]
    if output.dtype == share.dtype:
        output.lerp_(other, share)
    else:
        output.copy_(output.to(share.dtype).lerp_(other.to(share.dtype), share))
    torch.logaddexp(total, sums, out=total)


# Settings that do not change what a token is sampled from.
_WITHOUT_EFFECT: dict[str, Any] = {
    "max_tokens": 1,
    "stop": (),
    "seed": 0,
    "top_logprobs": 0,
    "stop_token_ids": (),
}
PASS_TOKENS = 64.0
"""A pass over fewer tokens takes about as long as one over this many, where it was not measured."""


@dataclass(frozen=True)
class PassCost:
    """Cost of a pass over a tree, in units of one token through the layers without attention.

    Attributes:
        pair: One query attending to one key, in all layers.
        dense: Whether every node is compared with every other (a full mask), not only with its
            ancestors.
        fixed: The pass itself, over few tokens.
        run: A row's tokens after the prefix that it shares with the row before it; proportionally
            less for runs so short that several are one block.
    """

    pair: float
    dense: bool = False
    fixed: float = PASS_TOKENS
    run: float = 0.0

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

    def __call__(self, tokens: int, pairs: int, runs: float = 0.0) -> float:
        """One pass over `tokens` tokens with `pairs` pairs of a token and one that it attends to,
        in a tree with so many runs."""
        attention = self.pair * (tokens**2 if self.dense else pairs)
        return self.fixed + tokens + attention + self.run * runs

    def cheapest_tokens(self) -> int:
        """Number of tokens of a dense pass at which the cost per token is lowest."""
        return max(1, round(math.sqrt(self.fixed / self.pair)))


def tree_cuts(rows: Sequence[HasIds], max_tokens: int, cost: PassCost) -> list[list[int]]:
    """Cut row indices into micro-batches whose trees have at most `max_tokens` nodes each.

    Args:
        rows: Prompt and completion ids of each.
        max_tokens: Nodes of one tree; a longer row is a micro-batch of its own.
        cost: Cost of one pass.

    Returns:
        Row indices, in lexicographic order of their ids, cut so that the total cost is lowest.
    """
    return cheapest_cuts(rows, max_tokens, cost)[1]


def cheapest_cuts(
    rows: Sequence[HasIds], max_tokens: int, cost: PassCost
) -> tuple[float, list[list[int]]]:
    """The same cuts, and their total cost."""
    keys = sequence_keys(rows)
    order = sorted(range(len(rows)), key=lambda i: (keys[i], i))
    length = [len(keys[i]) // 4 for i in order]
    shared = [0] + [_shared(keys[a], keys[b]) for a, b in pairwise(order)]
    best = [0.0]  # lowest cost of the first i rows
    begin = [0]  # start of their last micro-batch
    for stop in range(1, len(order) + 1):
        least, at = float("inf"), stop - 1
        # Nodes and pairs of the tree of rows [start, stop): when `start` moves back, that row adds
        # its part before the prefix that it shares with the row after it.
        tokens = pairs = 0
        runs = 0.0
        behind = 0  # of row `start + 1`, replaced by what row `start` adds
        last = 0
        for start in range(stop - 1, -1, -1):
            added = length[start] - behind
            tokens += added
            pairs += causal_pairs(length[start]) - causal_pairs(behind)
            if added != last:  # answers of one length are computed at once
                runs += min(1.0, added / BLOCKS[0])
            last = added
            if tokens > max_tokens and start < stop - 1:
                break
            total = best[start] + cost(tokens, pairs, runs)
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
    return best[-1], cuts[::-1]


def causal_pairs(length: int) -> int:
    """Pairs of a node and an ancestor or itself on a path of `length` nodes."""
    return length * (length + 1) // 2


def _shared(one: bytes, other: bytes) -> int:
    """Length of the common prefix of both keys, in ids."""
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
    runs: RunsChoice = "never",
) -> TokenLogprobs:
    """Like `completion_logprobs`, for a model whose layers attend to keys and values.

    Args:
        windows: For each kind of layer in the model its window, None for unlimited.
        runs: For which trees attention takes the two calls of `varlen`.
    """
    causal = causal_model(model)
    device = next(model.parameters()).device
    tree = TokenTree.build(rows)
    head = OutputHead(causal)
    hidden_ND = _hidden(causal, tree, windows, device, compiled=compiled, runs=runs)
    first_U, of_T = _distinct(tree, rows)
    sampled_U = TokenTargets.of(rows, head.vocabulary, grammars).take(first_U)
    predicts_U = to_device(tree.parent[tree.completion_node[first_U]], device)
    distinct = logprobs_in_parts(
        head, hidden_ND[predicts_U], sampled_U, with_entropy=with_entropy, compiled=compiled
    )
    back_T = to_device(of_T, device)
    return TokenLogprobs(distinct.logp_T[back_T], distinct.entropy_T[back_T])


def tree_states(
    model: nn.Module,
    rows: Sequence[Row],
    *,
    windows: dict[str, int | None],
    compiled: bool = False,
    runs: RunsChoice = "never",
) -> Tensor:
    """Last hidden states at the nodes before the completion tokens of `rows`, in row order, [T, D].

    Args:
        model: A transformers causal LM whose layers attend to keys and values, or one without its
            output embedding.
        rows: B calls with a prompt each.
        windows: For each kind of layer in the model its window, None for unlimited.
        runs: For which trees attention takes the two calls of `varlen`.
    """
    device = next(model.parameters()).device
    tree = TokenTree.build(rows)
    causal = causal_model(model)
    hidden_ND = _hidden(causal, tree, windows, device, compiled=compiled, runs=runs)
    return hidden_ND[to_device(tree.parent[tree.completion_node], device)]


def _hidden(
    model: PreTrainedModel,
    tree: TokenTree,
    windows: dict[str, int | None],
    device: torch.device,
    *,
    compiled: bool,
    runs: RunsChoice,
) -> Tensor:
    """Last hidden states of all nodes, shape [N, D]."""
    attention = {
        kind: TreeAttention(tree, window, device, runs) for kind, window in windows.items()
    }
    masks: dict[str, Any]
    if model.config._attn_implementation != "sdpa":
        masks = {kind: one.dense(model.dtype) for kind, one in attention.items()}
    elif compiled and device.type in FLEX_DEVICES:
        # A layer with FlexAttention is one compiled function, one with `TreeMask` is seven.
        masks = {kind: one.run_mask or one.block_mask for kind, one in attention.items()}
    else:
        masks = {kind: one.mask() for kind, one in attention.items()}
    vision, shift = vision_of(model), None
    if vision is not None:
        shift = to_device(vision.tree_shifts(tree.token, tree.end), device)[None]
    ids, depth = (to_device(values, device)[None] for values in (tree.token, tree.depth))
    output: Any = body(model)(
        **decoder_inputs(model, ids, depth, shift),
        # Models with one kind of layer take a tensor, those with several a dict.
        attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
        use_cache=False,
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def _distinct(tree: TokenTree, rows: Sequence[Row]) -> tuple[IntArray, IntArray]:
    """The U of the T completion tokens that differ in node or settings.

    Returns:
        For each of the U a token that equals it, shape [U], in order of nodes; and for each token
        which of the U it is, shape [T].
    """
    kinds: dict[tuple[object, ...], int] = {}
    kind_T: list[int] = []
    for row in rows:
        # What may follow may also depend on where the completion began.
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
