"""Flash attention for sequences of any length, on a CPU: PyTorch has kernels for GPUs alone.

With the conventions of the GPU's: sequences are given by their bounds, log-sum-exps are [heads, N],
and a query without keys has zeros and an infinite sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.library import Library


def _sequences(
    query: Tensor, key: Tensor, bounds_q: Tensor, bounds_k: Tensor, causal: bool, scale: float
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Queries and keys of each sequence, and their scores [heads, queries, keys]."""
    assert bounds_q.dtype == bounds_k.dtype == torch.int32
    each = query.shape[1] // key.shape[1]
    for of_q, of_k in zip(pairwise(bounds_q.tolist()), pairwise(bounds_k.tolist()), strict=True):
        queries, keys = slice(*of_q), slice(*of_k)
        repeated = key[keys].repeat_interleave(each, 1)
        scores = torch.einsum("qhw,khw->hqk", query[queries], repeated).float() * scale
        if causal:
            scores += torch.full(scores.shape[1:], -torch.inf).triu(1)
        yield queries, keys, scores


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    most_q: int,
    most_k: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float,
    **_: Any,
) -> tuple[Tensor, ...]:
    if query.shape[-1] % 8:
        raise RuntimeError("head_size should be a multiple of 8")
    assert most_q >= bounds_q.diff().max()
    assert most_k >= bounds_k.diff().max()
    result = torch.zeros_like(query)
    total = torch.full((query.shape[1], query.shape[0]), torch.inf)
    each = query.shape[1] // key.shape[1]
    for queries, keys, scores in _sequences(query, key, bounds_q, bounds_k, causal, scale):
        if scores.shape[2]:
            values = value[keys].repeat_interleave(each, 1).float()
            result[queries] = torch.einsum("hqk,khw->qhw", scores.softmax(-1), values).to(
                query.dtype
            )
            total[:, queries] = scores.logsumexp(-1)
    empty = torch.empty(0)
    return result, total, empty, empty, empty


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    total: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    most_q: int,
    most_k: int,
    dropout: float,
    causal: bool,
    *_: Any,
    scale: float,
) -> tuple[Tensor, ...]:
    assert total.is_contiguous()
    of_query, of_key, of_value = (
        torch.zeros_like(states).float() for states in (query, key, value)
    )
    each = query.shape[1] // key.shape[1]
    delta = (gradient.float() * result.float()).sum(-1).T[..., None]
    for queries, keys, scores in _sequences(query, key, bounds_q, bounds_k, causal, scale):
        if not scores.shape[2]:
            continue
        key_states, values = (
            states[keys].repeat_interleave(each, 1).float() for states in (key, value)
        )
        share = (scores - total[:, queries, None]).exp()
        of_share = torch.einsum("qhw,khw->hqk", gradient[queries].float(), values)
        of_scores = share * (of_share - delta[:, queries]) * scale
        of_query[queries] = torch.einsum("hqk,khw->qhw", of_scores, key_states)
        for whole, part in (
            (of_key, torch.einsum("hqk,qhw->khw", of_scores, query[queries].float())),
            (of_value, torch.einsum("hqk,qhw->khw", share, gradient[queries].float())),
        ):
            whole[keys] = part.unflatten(1, (-1, each)).sum(2)
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


@cache
def register() -> Library:
    """Register them for this process."""
    library = Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _forward, "CPU")
    library.impl("_flash_attention_backward", _backward, "CPU")
    return library
