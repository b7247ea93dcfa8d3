"""Returns and advantages along the calls of a rollout.

An agent's calls go on from each other (`tuner.traces.successors`), by branches and by leaves:

    a ─┬─ b ── d        successors of a: b and c; of b: d; c, d and e are leaves
       └─ c
    e

Where several calls go on from one, what follows is their mean. All is said by indices, and sums do
not depend on their order, so the order of calls changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from statistics import fmean

import torch
from torch import Tensor


def turn_returns(
    rewards_C: Tensor, successors: Sequence[Sequence[int]], discounts: Sequence[float]
) -> Tensor:
    """`G_c = r_c + discount_c * mean of G over the calls that go on from c`.

    Args:
        rewards_C: What each call gains itself; that of a leaf includes its rollout's reward.
        successors: For each call the calls that go on from it.
        discounts: From each call to those that go on from it.

    Returns:
        Shape [C], in the dtype of `rewards_C`.
    """
    returns = rewards_C.tolist()
    for call in _backwards(successors):
        if successors[call]:
            returns[call] += discounts[call] * fmean(returns[after] for after in successors[call])
    return torch.tensor(returns, dtype=rewards_C.dtype)


def gae(
    rewards: Sequence[Tensor],
    values: Sequence[Tensor],
    successors: Sequence[Sequence[int]],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Generalised advantage estimates of single tokens, on through the calls of a rollout.

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1},   R_t = A_t + V_t

    Behind the last token of a call come the first tokens of the calls that go on from it: there V
    and A are the means of theirs, and 0 behind a leaf.

    Source: GAE (arXiv 1506.02438) eq. 11, 12 and 16.

    Args:
        rewards: What each token gains, one tensor [T_c] for each of the C calls, T_c > 0.
        values: Value of the state in which each token was sampled, likewise.
        successors: For each call the calls that go on from it.
        gamma: Discount from one token to the next.
        lam: 1 takes what was gained, 0 what the next value says.

    Returns:
        Advantages, and the returns that values are trained towards: C tensors [T_c] each, float64.
    """
    first: dict[int, tuple[float, float]] = {}  # value and advantage of a call's first token
    advantages: dict[int, Tensor] = {}
    for call in _backwards(successors):
        value = advantage = 0.0
        if successors[call]:
            value = fmean(first[after][0] for after in successors[call])
            advantage = fmean(first[after][1] for after in successors[call])
        found: list[float] = []
        steps = list(zip(rewards[call].tolist(), values[call].tolist(), strict=True))
        for r, v in reversed(steps):
            advantage = r + gamma * value - v + gamma * lam * advantage
            value = v
            found.append(advantage)
        first[call] = (value, advantage)
        advantages[call] = torch.tensor(found[::-1], dtype=torch.float64)
    in_order = tuple(advantages[call] for call in range(len(values)))
    returns = tuple(a + v.cpu().double() for a, v in zip(in_order, values, strict=True))
    return in_order, returns


def _backwards(successors: Sequence[Sequence[int]]) -> Iterator[int]:
    """Calls, each behind those that go on from it."""
    return iter(TopologicalSorter(dict(enumerate(successors))).static_order())
