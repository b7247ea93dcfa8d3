"""Advantages from the rewards of a group of rollouts.

`R` is the number of rollouts in a batch. Rewards belong to rollouts, not to calls: however many
calls a rollout made, it counts once in its group's mean and standard deviation.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_normalized(
    rewards_R: Tensor,
    group_R: Tensor,
    *,
    epsilon: float = 1e-6,
    std_over_batch: bool = False,
) -> Tensor:
    """`A_i = (r_i - mean(group)) / (std(group) + epsilon)`, GRPO's outcome advantage.

    Source: DeepSeekMath (arXiv 2402.03300) eq. 3; unbiased standard deviation, as
    Trinity-RFT's `step_wise_grpo` computes it.

    Args:
        rewards_R: One reward for each rollout.
        group_R: Group index (0 ..) of each rollout.
        epsilon: Added to the standard deviation.
        std_over_batch: Divide by the standard deviation of all rewards of the batch instead of
            the group's own (`std_cal_level: batch`; LitePPO, arXiv 2508.08221).

    Returns:
        Advantages, shape [R], in the dtype of `rewards_R`.

    Raises:
        ValueError: A group has fewer than two rollouts, so it has no baseline.
    """
    groups = int(group_R.max()) + 1 if len(group_R) else 0
    zeros_G = rewards_R.new_zeros(groups)
    count_G = zeros_G.index_add(0, group_R, torch.ones_like(rewards_R))
    if bool((count_G == 1).any()):
        raise ValueError("a group of one rollout has no baseline; drop it before")
    mean_G = zeros_G.index_add(0, group_R, rewards_R) / count_G.clamp(min=1)
    centered_R = rewards_R - mean_G[group_R]
    if std_over_batch:
        std_R = rewards_R.std().expand_as(rewards_R)
    else:
        variance_G = zeros_G.index_add(0, group_R, centered_R**2) / (count_G - 1).clamp(min=1)
        std_R = variance_G.sqrt()[group_R]
    return centered_R / (std_R + epsilon)


def call_normalized(
    rewards_C: Tensor,
    rollout_C: Tensor,
    peers_C: Tensor,
    *,
    epsilon: float = 1e-6,
) -> Tensor:
    """Advantages of calls that have rewards of their own, against the calls they are compared with.

    `A_c = (r_c - mean(peers)) / (std(peers) + epsilon)`. Each rollout counts once in mean and
    standard deviation, with the mean reward of its calls, so a rollout that makes many calls
    weighs no more than another. With one call a rollout this is `group_normalized`.

    Args:
        rewards_C: One reward for each call.
        rollout_C: Index of each call's rollout.
        peers_C: Index (0 ..) of the set of calls that each is compared with.
        epsilon: Added to the standard deviation.

    Returns:
        Advantages, shape [C], in the dtype of `rewards_C`.

    Raises:
        ValueError: A set has calls of fewer than two rollouts, so it has no baseline.
    """
    pairs, cell_C = torch.stack([peers_C, rollout_C]).unique(dim=1, return_inverse=True)
    zeros_P = rewards_C.new_zeros(pairs.shape[1])
    count_P = zeros_P.index_add(0, cell_C, torch.ones_like(rewards_C))
    means_P = zeros_P.index_add(0, cell_C, rewards_C) / count_P
    sets = int(peers_C.max()) + 1
    rollouts_S = rewards_C.new_zeros(sets).index_add(0, pairs[0], torch.ones_like(means_P))
    if bool((rollouts_S == 1).any()):
        raise ValueError("calls of one rollout have no baseline; drop them before")
    mean_S = rewards_C.new_zeros(sets).index_add(0, pairs[0], means_P) / rollouts_S.clamp(min=1)
    squares_P = (means_P - mean_S[pairs[0]]) ** 2
    variance_S = rewards_C.new_zeros(sets).index_add(0, pairs[0], squares_P)
    std_S = (variance_S / (rollouts_S - 1).clamp(min=1)).sqrt()
    return (rewards_C - mean_S[peers_C]) / (std_S[peers_C] + epsilon)


def group_std(rewards_R: Tensor, group_R: Tensor) -> Tensor:
    """Unbiased standard deviation of each group's rewards, shape [G]."""
    return torch.stack([rewards_R[group_R == g].std() for g in range(int(group_R.max()) + 1)])
