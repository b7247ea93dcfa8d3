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


def group_std(rewards_R: Tensor, group_R: Tensor) -> Tensor:
    """Unbiased standard deviation of each group's rewards, shape [G]."""
    return torch.stack([rewards_R[group_R == g].std() for g in range(int(group_R.max()) + 1)])
