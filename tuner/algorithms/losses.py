"""Policy losses: one value for each sampled token, before aggregation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# exp(20) is 5e8: beyond it the ratio is clipped anyway and only its overflow would matter.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyLoss:
    """Per-token loss and what was clipped, each of shape [T]."""

    loss_T: Tensor
    ratio_T: Tensor
    clipped_T: Tensor


def ppo_clip(
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> PolicyLoss:
    """PPO's clipped surrogate with dual clip.

    With `r = exp(logp - old_logp)`:

        L = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)
        L = min(L, -clip_ratio_c A)   where A < 0

    Source: PPO (arXiv 1707.06347) eq. 7; dual clip (arXiv 1912.09729) eq. 5.

    Args:
        logp_T: Log-probs of the sampled tokens under the current policy.
        old_logp_T: Log-probs under the policy that sampled them; no gradient.
        advantages_T: Advantage of each token's rollout.
        clip_low: How far the ratio may fall below 1.
        clip_high: How far it may rise above 1.
        clip_ratio_c: Bound on the ratio where the advantage is negative; above 1.

    Returns:
        Loss, ratio, and whether the clip cut the token's gradient.
    """
    log_ratio_T = (logp_T - old_logp_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_T = log_ratio_T.exp()
    plain_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1 - clip_low, 1 + clip_high)
    surrogate_T = torch.maximum(plain_T, clipped_T)
    bound_T = -advantages_T * clip_ratio_c
    dual = (advantages_T < 0) & (surrogate_T > bound_T)
    loss_T = torch.where(dual, bound_T, surrogate_T)
    return PolicyLoss(loss_T, ratio_T.detach(), (clipped_T > plain_T) | dual)
