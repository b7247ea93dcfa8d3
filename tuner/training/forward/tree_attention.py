"""Attention over a token tree, exact, and without the square of the tree as a mask.

Node q of a tree in depth-first order attends to its ancestors and itself: `k <= q < end[k]`, in a
layer with a sliding window only to those of the last `window` depths. On a CPU this is computed in
blocks of nodes (`tree_blocks`): with the keys that all nodes of a block attend to, with the rest,
and of both, by their log-sum-exps L, the output over all keys:

    output = w * output_shared + (1 - w) * output_rest        w = sigmoid(L_shared - L_rest)

It reaches the model as an attention mask: a `TreeMask` stands where a 4-D mask would be, is carried
through transformers' code as it is, and takes over when `scaled_dot_product_attention` meets it.
Nothing of the model or its configuration is changed, so an engine can serve it as before.

On CUDA the same rule is a FlexAttention block mask. FlexAttention cuts queries and keys into tiles
and skips those where nothing is attended to; where everything is, it does not ask the rule.
`create_block_mask` finds out by asking for every pair of nodes; in a tree the ends of the subtrees
of a tile tell (`flex_mask`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tuner.engines.transfer import to_device
from tuner.engines.transformers.cascade import flash, joined
from tuner.errors import TrainingError
from tuner.traces.tree import IntArray, TokenTree
from tuner.training.forward import kernels
from tuner.training.forward.tree_blocks import Block, Keys, blocks_of

TILE = 128
"""Queries and keys of a tile, FlexAttention's own choice."""


def flex_mask(tree: TokenTree, window: int | None, device: torch.device, rule: Any) -> Any:
    """The `BlockMask` of all N nodes.

    A key k is attended to by one of the queries [first, last) behind it where `end[k] > first`, by
    all of them where `end[k] >= last`: so of a tile of keys the least and the largest `end` tell.
    Its depths likewise tell of the window, with tiles among those "in part" of which nothing is
    attended to.

    Args:
        window: A query sees the last `window` depths up to its own; None is all of them.
        rule: For tiles that are attended to in part: whether a query attends to a key.
    """
    from torch.nn.attention.flex_attention import BlockMask

    count = tree.unique_tokens
    first_T = np.arange(0, count, TILE)
    least, largest = np.minimum.reduceat, np.maximum.reduceat
    before = np.tri(len(first_T), k=-1, dtype=bool)
    some = before & (largest(tree.end, first_T) > first_T[:, None])
    # A query that is not there attends to nothing, so the last tile is whole for none.
    wholly = before & (least(tree.end, first_T) >= (first_T + TILE)[:, None])
    if window is not None:
        highest_T, deepest_T = least(tree.depth, first_T), largest(tree.depth, first_T)
        some &= highest_T[:, None] - deepest_T < window
        wholly &= deepest_T[:, None] - highest_T < window
    some |= np.eye(len(first_T), dtype=bool)
    # Of one tile torch would compile a kernel apart.
    more = max(0, 2 - len(first_T))
    partial, full = (np.pad(tiles, (0, more)) for tiles in (some & ~wholly, wholly))
    return BlockMask(
        (count, count),
        *_ordered(partial, device),
        *_ordered(full, device),
        *_ordered(partial.T, device),
        *_ordered(full.T, device),
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=rule,
    )


def _ordered(chosen: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tiles each row has, [1, 1, Q], and their indices first in each row, [1, 1, Q, K]."""
    order = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    counts = chosen.sum(axis=1).astype(np.int32)
    return to_device(counts, device)[None, None], to_device(order, device)[None, None]


KEPT_MASKS = 1 << 28
"""Bytes of block masks that are kept from one layer to the next; others are made again."""


class TreeAttention:
    """Which nodes of one tree attend to which, for one kind of layer.

    Args:
        tree: N nodes.
        window: A query sees the last `window` depths up to its own; None is all of them.
        device: Of the model.
    """

    def __init__(self, tree: TokenTree, window: int | None, device: torch.device) -> None:
        self._tree = tree
        self._window = window
        self._device = device
        self._end_N = self._tensor(tree.end)
        self._depth_N = self._tensor(tree.depth)
        self._masks: dict[int, Tensor] = {}
        self._room = KEPT_MASKS

    def mask(self) -> TreeMask:
        """What stands for this in place of a mask."""
        count = self._tree.unique_tokens
        # One number seen as many: models look at the shape of a mask, and at no number of this.
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
        """What is added to the scores of those keys of a block that are attended to in part,
        shape [1, 1, last - first, K]; None for others."""
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
        """One additive mask for all nodes, shape [1, 1, N, N]: for attention that is not sdpa."""
        count = self._tree.unique_tokens
        allowed = self.allowed(0, count, torch.arange(count, device=self._device))
        return _additive(allowed, dtype)[None, None]

    @cached_property
    def blocks(self) -> list[Block]:
        """What is computed at once."""
        return list(blocks_of(self._tree, self._window, self._device))

    def _tensor(self, array: IntArray) -> Tensor:
        return to_device(array, self._device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention of all nodes: [1, heads, N, width] each -> [1, heads, N, width]."""
        if query.is_cuda:
            return self.flex(query, key, value, scale, compiled=True)
        result: Tensor = _BlockAttention.apply(query, key, value, self, scale)  # type: ignore[no-untyped-call]
        return result

    def flex(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, *, compiled: bool
    ) -> Tensor:
        """The same through FlexAttention, whose kernel is made by `torch.compile`."""
        from torch.nn.attention.flex_attention import flex_attention

        attention: Any = kernels.kernel_of(flex_attention) if compiled else flex_attention
        result: Tensor = attention(query, key, value, block_mask=self._block_mask, scale=scale)
        return result

    @cached_property
    def _block_mask(self) -> Any:
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


# Called by layers that are compiled; what it needs compiled it compiles itself.
@torch.compiler.disable  # type: ignore[untyped-decorator]
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
    """What stands in for torch's function of this name when its mask is a `TreeMask`."""
    if attn_mask is None or attn_mask.attention is None or dropout_p or is_causal:
        raise TrainingError(
            "the model's attention changes the mask that it is given, uses dropout or asks for "
            "causal attention on top; it cannot be trained on a token tree"
        )
    if enable_gqa and key.shape[1] != query.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # The kernels take one width: latent attention (DeepSeek's) has wider keys than values. Those of
    # FlexAttention take none below 16.
    of_value = value.shape[-1]
    width = max(query.shape[-1], of_value, 16 if query.is_cuda else 0)
    query, key, value = (
        states if states.shape[-1] == width else F.pad(states, (0, width - states.shape[-1]))
        for states in (query, key, value)
    )
    return attn_mask.attention.attend(query, key, value, scale)[..., :of_value]


_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class _BlockAttention(torch.autograd.Function):
    """torch's CPU kernel, block by block; keys of a block are gathered again in the backward pass
    and not kept, and their gradients are added in place."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, attention: TreeAttention, scale: float
    ) -> Tensor:
        _, heads, count, width = query.shape
        result = query.new_empty(1, count, heads, width).transpose(1, 2)
        sums = []
        for block in attention.blocks:
            nodes = slice(block.first, block.last)
            output, logsumexp = _join(
                _causally(query, key, value, keys, scale)
                if keys.attended == "causally"
                else flash(
                    query[:, :, nodes],
                    keys.select(key),
                    keys.select(value),
                    attn_mask=attention.mask_of(block, keys, query.dtype),
                    scale=scale,
                )
                for keys in block.keys
            )
            result[:, :, nodes] = output
            sums.append(logsumexp)
        ctx.save_for_backward(query, key, value, result, *sums)
        ctx.attention, ctx.scale = attention, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, *sums = ctx.saved_tensors
        attention: TreeAttention = ctx.attention
        # A shared prefix adds up the parts of every block behind it, too many for bfloat16.
        exact = torch.promote_types(key.dtype, torch.float32)
        of_query, of_key, of_value = (
            torch.zeros_like(states, dtype=exact) for states in (query, key, value)
        )
        for block, logsumexp in zip(attention.blocks, sums, strict=True):
            nodes = slice(block.first, block.last)
            # Output and log-sum-exp of all keys make this the gradient of these keys' part.
            for keys in block.keys:
                if keys.attended == "causally":
                    states = gradient, query, key, value, result
                    for part, *found in _causally_backward(states, logsumexp, keys, ctx.scale):
                        for total, own in zip((of_query, of_key, of_value), found, strict=True):
                            total[:, :, part] += own
                    continue
                query_part, key_part, value_part = _flash_backward(
                    gradient[:, :, nodes],
                    query[:, :, nodes],
                    keys.select(key),
                    keys.select(value),
                    result[:, :, nodes],
                    logsumexp,
                    0.0,
                    False,
                    attn_mask=attention.mask_of(block, keys, query.dtype),
                    scale=ctx.scale,
                )
                of_query[:, :, nodes] += query_part
                keys.add(of_key, key_part)
                keys.add(of_value, value_part)
        dtype = key.dtype
        return of_query.to(dtype), of_key.to(dtype), of_value.to(dtype), None, None


def _causally(
    query: Tensor, key: Tensor, value: Tensor, keys: Keys, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [1, heads, B, width] of runs that attend to themselves, and its log-sum-exps."""
    outputs, sums = [], []
    for siblings in keys.siblings:
        output, logsumexp = flash(
            siblings.rows(query),
            siblings.rows(key),
            siblings.rows(value),
            is_causal=True,
            scale=scale,
        )
        outputs.append(siblings.joined(output))
        sums.append(siblings.joined(logsumexp))
    if len(outputs) == 1:
        return outputs[0], sums[0]
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def _causally_backward(
    states: tuple[Tensor, ...], logsumexp: Tensor, keys: Keys, scale: float
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Nodes, and the gradients of their queries, keys and values."""
    first = keys.siblings[0].start
    for siblings in keys.siblings:
        part = slice(siblings.start, siblings.stop)
        gradient, query, key, value, result = (siblings.rows(each) for each in states)
        own = siblings._replace(start=part.start - first, stop=part.stop - first)
        found = _flash_backward(
            gradient, query, key, value, result, own.rows(logsumexp), 0.0, True, scale=scale
        )
        of_query, of_key, of_value = (siblings.joined(each) for each in found)
        yield part, of_query, of_key, of_value


def _join(parts: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Outputs [1, heads, B, width] over several keys and their log-sum-exps [1, heads, B] as those
    over all of them."""
    (output, total), *others = parts
    for other, sums in others:
        output, total = joined(output, total, other, sums)
    return output, total
