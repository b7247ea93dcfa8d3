"""What calls lead to: their returns along the tree of a rollout's calls, and PPO's advantages.

Which call goes on from which is read from token ids (`tuner.traces.successors`) among the calls
that are trained. A leaf ends the episode and gains the rollout's reward; a call with a reward of
its own gains that as well, where it ends. So the last calls of a sub-agent and of the main agent
both gain what the rollout gained. Where the workflow said what each call gained (`Row.gained`),
that counts alone. Where a mask cut a call into several rows, they are one call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tuner.algorithms import gae, turn_returns, whitened
from tuner.traces import successors
from tuner.training.batch import Batch
from tuner.training.settings import TrainerSettings


def call_returns(
    batch: Batch, discount: float, penalties: Sequence[Tensor] | None = None
) -> Tensor:
    """`G = own reward + [leaf] rollout's reward + discount * mean of G over what goes on from it`.

    Args:
        discount: From one call to the next (`tuner.algorithm.turn_discount`).
        penalties: What each token is charged, [T_row] for each row; a call pays for its own.

    Returns:
        One for each row, shape [N], float64.
    """
    after = _successors(batch)
    gained_N = _gained(batch, after)
    if penalties is not None:
        gained_N = gained_N - torch.stack([charge_T.sum() for charge_T in penalties])
    within_N = _continued(batch, after)
    return turn_returns(gained_N, after, [1.0 if within else discount for within in within_N])


def critic_advantages(
    batch: Batch,
    settings: TrainerSettings,
    values: Sequence[Tensor],
    penalties: Sequence[Tensor] | None = None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """PPO's advantages, whitened over all tokens of the step, and the returns for the critic.

    Args:
        values: Of the state in which each token was sampled, [T_row] for each row.
        penalties: What each token is charged.

    Returns:
        N tensors [T_row] each, float64.
    """
    after = _successors(batch)
    rewards = []
    for row, gained in enumerate(_gained(batch, after).tolist()):
        length = len(batch.rows[row].completion_ids)
        rewards_T = torch.zeros(length, dtype=torch.float64)
        rewards_T[-1] = gained
        rewards.append(rewards_T if penalties is None else rewards_T - penalties[row])
    advantages, returns = gae(rewards, values, after, gamma=settings.gamma, lam=settings.lam)
    return whitened(advantages), returns


def _successors(batch: Batch) -> tuple[tuple[int, ...], ...]:
    return successors(batch.rows, [row.rollout for row in batch.rows])


def _gained(batch: Batch, after: Sequence[Sequence[int]]) -> Tensor:
    """What each row gains where it ends, shape [N], float64."""
    rewards_R = batch.rewards_R.tolist()
    gained: list[float] = []
    for row, follow, within in zip(batch.rows, after, _continued(batch, after), strict=True):
        own = row.reward or 0.0 if row.gained is None else row.gained
        ends = row.gained is None and not follow
        gained.append((0.0 if within else own) + (rewards_R[row.rollout] if ends else 0.0))
    return torch.tensor(gained, dtype=torch.float64)


def _continued(batch: Batch, after: Sequence[Sequence[int]]) -> list[bool]:
    """Whether a row is a part of a call that a mask cut, and the rest of that call goes on."""
    call_N = batch.call_N.tolist()
    return [
        any(call_N[follower] == call for follower in follow)
        for call, follow in zip(call_N, after, strict=True)
    ]
