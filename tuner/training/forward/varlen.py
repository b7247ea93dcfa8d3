"""Attention over a token tree on a GPU in two calls of flash attention for many sequences.

A run is a number of consecutive nodes without branches. Each node attends to its own run up to
itself, and to all of its path, the runs above it. The answers to one question follow one path: runs
beside each other with the same path are the queries of one sequence, its keys a copy of the path.

    nodes         [ run 0 ][ run 1 ][ run 2 ][ run 3 ]     runs 1 and 2 answer run 0,
                                                           run 3 follows run 0 and run 2
    own run       queries [ 0 ][ 1 ][ 2 ][ 3 ]             causal
                  keys    [ 0 ][ 1 ][ 2 ][ 3 ]
    path          queries [ 0 ][ 1   2 ][ 3 ]
                  keys    [   ][   0   ][ 0   2 ]          copied

The outputs of both are joined by their log-sum-exps, and the gradient is the sum of the two calls'
gradients given the joined output and log-sum-exps.

FlexAttention (`tree_pass`) copies nothing, but computes whole tiles where it needs a part, and each
takes more time. Which one takes less time for a tree is estimated by counting tiles and copies.
Neither the calls nor the estimate have been measured on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tuner.engines.grammar import to_device
from tuner.engines.transformers.cascade import joined
from tuner.traces.tree import IntArray, TokenTree

RunsChoice = Literal["never", "cheaper", "always"]
"""For which trees attention takes the two calls."""
DEVICES = ("cuda",)
DTYPES = (torch.float16, torch.bfloat16)
"""Devices and types for which there is a kernel of flash attention."""
TILE = 128
"""Queries and keys of a tile of both kernels."""
FLEX_TILE = 1.2
"""Time of a tile of FlexAttention, forward and backward, beside one of flash attention's. A guess
until both are measured, as the next."""
COPIED_KEYS = 64
"""Number of keys whose copies, with their values and gradients, take as long as a tile."""


@dataclass(frozen=True)
class TreeRuns:
    """The R runs of a tree and the S groups of them that follow one path.

    Attributes:
        start_R: First node of each run, shape [R + 1]; the last is the number of nodes.
        first_S: First run of each group, shape [S + 1].
        path_S: Number of nodes of each path, shape [S].
    """

    start_R: IntArray
    first_S: IntArray
    path_S: IntArray

    @classmethod
    def of(cls, tree: TokenTree) -> TreeRuns:
        # A node and the next have the same end if the next is its only child.
        starts = np.concatenate(([0], np.flatnonzero(np.diff(tree.end)) + 1))
        first_S = np.concatenate(([0], np.flatnonzero(np.diff(tree.parent[starts])) + 1))
        path_S = tree.depth[starts[first_S]]
        return cls(np.append(starts, tree.unique_tokens), np.append(first_S, len(starts)), path_S)

    @property
    def query_S(self) -> IntArray:
        """First query of each group, shape [S + 1]."""
        return self.start_R[self.first_S]

    @property
    def cost(self) -> float:
        """Time of both calls, in tiles of flash attention."""
        own_R, query_S, path_S = (
            -(-lengths // TILE)
            for lengths in (np.diff(self.start_R), np.diff(self.query_S), self.path_S)
        )
        tiles = (own_R * (own_R + 1) // 2).sum() + (query_S * path_S).sum()
        return float(tiles + self.path_S.sum() / COPIED_KEYS)

    def paths(self, tree: TokenTree) -> IntArray:
        """The nodes of all paths, one path after the other, each from its last run to its first."""
        run_of = np.repeat(np.arange(len(self.start_R) - 1), np.diff(self.start_R))
        parts: list[IntArray] = []
        for first in self.query_S[:-1]:
            node = tree.parent[first]
            while node >= 0:
                start = self.start_R[run_of[node]]
                parts.append(np.arange(start, node + 1))
                node = tree.parent[start]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


class RunMask(BlockMask):
    """The two calls over a tree, in the place of a block mask, which models hand to the attention
    without looking at it.

    Attributes:
        run_R: The runs' bounds, shape [R + 1]; int32, as all bounds.
        query_S: The bounds of the queries of each group, shape [S + 1].
        key_S: The bounds of the keys of each group, shape [S + 1].
        path_P: The nodes of all paths, shape [P].
        root_N: Whether a node has no path, shape [N].
        longest: Number of nodes of the longest run, group and path.
    """

    def __init__(self, tree: TokenTree, runs: TreeRuns, device: torch.device) -> None:
        self.seq_lengths = (tree.unique_tokens, tree.unique_tokens)
        bounds = (runs.start_R, runs.query_S, np.append(0, runs.path_S.cumsum()))
        self.run_R, self.query_S, self.key_S = (
            to_device(each.astype(np.int32), device) for each in bounds
        )
        self.path_P = to_device(runs.paths(tree), device)
        groups = np.diff(runs.query_S)
        self.root_N = to_device(np.repeat(runs.path_S == 0, groups), device)
        self.longest = [int(np.diff(each).max()) for each in bounds]

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, 1, *self.seq_lengths)

    def __repr__(self) -> str:
        return f"RunMask(shape={self.shape}, runs={len(self.run_R) - 1}, paths={len(self.path_P)})"

    __str__ = __repr__

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention of all nodes, with one or more heads of queries for each of keys and values:
        [1, heads, N, width] each -> [1, heads, N, width]."""
        states = (each[0].transpose(0, 1) for each in (query, key, value))
        bounds = (self.run_R, self.query_S, self.key_S, self.path_P, self.root_N, self.longest)
        result: Tensor = _attention(*states, *bounds, scale)[0]
        return result.transpose(0, 1)[None]


class _Call(NamedTuple):
    """The keys and values of one call of the kernel, and how queries attend to them."""

    key: Tensor
    value: Tensor
    of_queries: Tensor
    of_keys: Tensor
    most_queries: int
    most_keys: int
    causal: bool


def _calls(
    key: Tensor,
    value: Tensor,
    run_R: Tensor,
    query_S: Tensor,
    key_S: Tensor,
    path_P: Tensor,
    longest: list[int],
) -> Iterator[_Call]:
    run, group, path = longest
    yield _Call(key, value, run_R, run_R, run, run, True)
    if len(path_P):
        key, value = (states.index_select(0, path_P) for states in (key, value))
        yield _Call(key, value, query_S, key_S, group, path, False)


@torch.library.custom_op("tuner::run_attention", mutates_args=())
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    run_R: Tensor,
    query_S: Tensor,
    key_S: Tensor,
    path_P: Tensor,
    root_N: Tensor,
    longest: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """[N, heads, width] each -> [N, heads, width], and log-sum-exps [heads, N]."""
    result = total = torch.empty(0)
    for call in _calls(key, value, run_R, query_S, key_S, path_P, longest):
        output, sums, *_ = torch.ops.aten._flash_attention_forward(
            query, *call[:6], 0.0, call.causal, False, scale=scale
        )
        if call.causal:
            result, total = output, sums
            continue
        # The kernel gives a query without keys zeros, and an infinite sum.
        sums = sums.masked_fill(root_N, -torch.inf)
        both, total = joined(result.transpose(0, 1), total, output.transpose(0, 1), sums)
        result = both.transpose(0, 1)
    # The strides of the kernel's result are those of the queries.
    return result.to(query.dtype).contiguous(), total


@_attention.register_fake
def _(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    nodes, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty((heads, nodes), dtype=torch.float32)


@torch.library.custom_op("tuner::run_attention_backward", mutates_args=())
def _gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    total: Tensor,
    run_R: Tensor,
    query_S: Tensor,
    key_S: Tensor,
    path_P: Tensor,
    longest: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, from that of the result."""
    of_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_empty(0)
    # A shared prefix adds up the parts of every path, too many for bfloat16.
    of_query, of_key, of_value = totals = tuple(
        torch.zeros(states.shape, dtype=torch.float32, device=states.device)
        for states in (query, key, value)
    )
    for call in _calls(key, value, run_R, query_S, key_S, path_P, longest):
        # Output and log-sum-exp of all keys make this the part of the gradient of these.
        parts = torch.ops.aten._flash_attention_backward(
            gradient.contiguous(),
            query,
            call.key,
            call.value,
            result,
            total,
            *call[2:6],
            0.0,
            call.causal,
            *of_dropout,
            scale=scale,
        )
        if call.causal:
            for whole, part in zip(totals, parts, strict=True):
                whole.add_(part)
        else:
            of_query.add_(parts[0])
            of_key.index_add_(0, path_P, parts[1].float())
            of_value.index_add_(0, path_P, parts[2].float())
    dtype = query.dtype
    return of_query.to(dtype), of_key.to(dtype), of_value.to(dtype)


@_gradients.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Any:
    return tuple(states.new_empty(states.shape) for states in (query, key, value))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, run_R, query_S, key_S, path_P, _, longest, scale = inputs
    ctx.save_for_backward(query, key, value, *output, run_R, query_S, key_S, path_P)
    ctx.longest, ctx.scale = longest, scale


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = _gradients(gradient, *ctx.saved_tensors, ctx.longest, ctx.scale)
    return *found, *(None,) * 7


_attention.register_autograd(_backward, setup_context=_keep)
