"""Attention over a token tree, exact, and without the square of the tree as a mask.

Node q of a tree in depth-first order attends to its ancestors and itself: `k <= q < end[k]`, in a
layer with a sliding window only to those of the last `window` depths. The nodes are taken in blocks
[first, last) of consecutive ones. An ancestor of any of them that is before the block is an
ancestor of its first node as well, so the keys of a block are these few and the block itself:

    keys of block 2        x x . . . . x x x . . . . | x x x x      x  taken     .  other branches
    nodes                  0 1 2 3 4 5 6 7 8 9 ...   | first ... last - 1

and only [last - first, keys] is computed and masked. That is little more than what the paths from
the root to each node ask for (depth + block instead of depth), however many rollouts a tree holds.

It reaches the model as an attention mask: a `TreeMask` stands where a 4-D mask would be, is carried
through transformers' code as it is, and takes over when `scaled_dot_product_attention` meets it.
Nothing of the model or its configuration is changed, so an engine can serve it as before. On CUDA
the same rule is a FlexAttention block mask; that path has not been measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tuner.engines.transfer import to_device
from tuner.errors import TrainingError
from tuner.traces.tree import IntArray, TokenTree
from tuner.training.flex_mask import flex_mask

BLOCKS = 64, 256
"""Nodes of a block, at least and at most: few enough to add little to the paths, enough for a
matrix product. A block adds half of its nodes to each path."""

RUNS = 16
"""Keys in so many runs of consecutive nodes are copied run by run, in more one by one."""

KEPT_MASKS = 1 << 28
"""Bytes of block masks that are kept from one layer to the next; others are made again."""


@dataclass(frozen=True)
class Block:
    """Nodes [first, last) and the K keys that any of them attends to, in order.

    Attributes:
        count: K.
        keys: The K in runs of consecutive nodes, where they are few, else their indices, shape [K].
        partial_P: Which of the K some node of the block does not attend to, shape [P].
        partial_node_P: The nodes that these are, shape [P].
    """

    first: int
    last: int
    count: int
    keys: tuple[slice, ...] | Tensor
    partial_P: Tensor
    partial_node_P: Tensor

    def select(self, states: Tensor) -> Tensor:
        """Keys or values of this block: [1, heads, N, width] -> [1, heads, K, width]."""
        if isinstance(self.keys, Tensor):
            return states.index_select(2, self.keys)
        runs = [states[:, :, run] for run in self.keys]
        return runs[0] if len(runs) == 1 else torch.cat(runs, 2)

    def add(self, gradient: Tensor, part: Tensor) -> None:
        """Add the gradient [1, heads, K, width] of what `select` gave to that of all nodes."""
        if isinstance(self.keys, Tensor):
            gradient.index_add_(2, self.keys, part.to(gradient.dtype))
            return
        widths = [run.stop - run.start for run in self.keys]
        for run, own in zip(self.keys, part.split(widths, 2), strict=True):
            gradient[:, :, run] += own


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

    def additive(self, block: Block, dtype: torch.dtype) -> Tensor:
        """A block's mask to be added to scores, shape [1, 1, last - first, K]."""
        kept = self._masks.get(block.first)
        if kept is not None and kept.dtype == dtype:
            return kept
        allowed = self.allowed(block.first, block.last, block.partial_node_P)
        mask = torch.zeros(1, 1, len(allowed), block.count, dtype=dtype, device=self._device)
        mask[0, 0, :, block.partial_P] = _additive(allowed, dtype)
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
        """The nodes in blocks: large ones where paths are long."""
        tree, blocks = self._tree, []
        size = BLOCKS[0] if tree.depth.mean() < BLOCKS[1] else BLOCKS[1]
        for first in range(0, tree.unique_tokens, size):
            last = min(first + size, tree.unique_tokens)
            before = np.flatnonzero(tree.end[:first] > first)
            if self._window is not None:
                # A node of the block may be higher in the tree than the first one, and sees more.
                highest = tree.depth[first:last].min()
                before = before[highest - tree.depth[before] < self._window]
            nodes = np.concatenate((before, np.arange(first, last)))
            partial = np.arange(len(nodes))
            if self._window is None:
                partial = np.flatnonzero((nodes >= first) | (tree.end[nodes] < last))
            runs = _runs(nodes)
            blocks.append(
                Block(
                    first,
                    last,
                    len(nodes),
                    runs if len(runs) <= RUNS else self._tensor(nodes),
                    self._tensor(partial),
                    self._tensor(nodes[partial]),
                )
            )
        return blocks

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

        attention: Any = _compiled_flex() if compiled else flex_attention
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


def _runs(nodes: IntArray) -> tuple[slice, ...]:
    """Rising numbers as the slices of consecutive ones."""
    ends = np.flatnonzero(np.diff(nodes) != 1) + 1
    return tuple(slice(int(run[0]), int(run[-1]) + 1) for run in np.split(nodes, ends))


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
    return attn_mask.attention.attend(
        query, key, value, query.shape[-1] ** -0.5 if scale is None else scale
    )


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
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
            output, logsumexp = _flash(
                query[:, :, block.first : block.last],
                block.select(key),
                block.select(value),
                attn_mask=attention.additive(block, query.dtype),
                scale=scale,
            )
            result[:, :, block.first : block.last] = output
            sums.append(logsumexp)
        ctx.save_for_backward(query, key, value, result, *sums)
        ctx.attention, ctx.scale = attention, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, *sums = ctx.saved_tensors
        attention: TreeAttention = ctx.attention
        of_query = torch.empty_like(query)
        # A shared prefix adds up the parts of every block behind it, too many for bfloat16.
        exact = torch.promote_types(key.dtype, torch.float32)
        of_key = torch.zeros_like(key, dtype=exact)
        of_value = torch.zeros_like(value, dtype=exact)
        for block, logsumexp in zip(attention.blocks, sums, strict=True):
            nodes = slice(block.first, block.last)
            of_query[:, :, nodes], key_part, value_part = _flash_backward(
                gradient[:, :, nodes],
                query[:, :, nodes],
                block.select(key),
                block.select(value),
                result[:, :, nodes],
                logsumexp,
                0.0,
                False,
                attn_mask=attention.additive(block, query.dtype),
                scale=ctx.scale,
            )
            block.add(of_key, key_part)
            block.add(of_value, value_part)
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None, None


_compiled: list[Any] = []


def _compiled_flex() -> Any:
    if not _compiled:
        from torch.nn.attention.flex_attention import flex_attention

        _compiled.append(torch.compile(flex_attention, dynamic=True))
    return _compiled[0]
