"""Three policies: which sampled a token, which the step began with, which is being trained.

PPO's clip holds the current policy near the one that a step began with, the *proximal* policy.
Where the token was sampled by another (older weights, another engine), the *behaviour* policy, the
loss is weighted by `w = proximal / behaviour` (decoupled PPO, arXiv 2110.00641; AReaL, arXiv
2505.24298). All of shape [T]; none has a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tuner.algorithms.losses import MAX_LOG_RATIO


def importance_weight(proximal_T: Tensor, behaviour_T: Tensor) -> Tensor:
    """`w = exp(proximal - behaviour)` from log-probs, not yet bounded."""
    return (proximal_T - behaviour_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncated(weight_T: Tensor, cap: float) -> Tensor:
    """`min(w, cap)`: truncated importance sampling, biased a little and bounded.

    Source: Ionides (2008); for the mismatch of engine and trainer Yao et al. (2025).
    """
    return weight_T.clamp(max=cap)


def accepted(weight_T: Tensor, low: float, high: float) -> Tensor:
    """1 where `low <= w <= high`, else 0: tokens too far from what is trained are left out."""
    return ((weight_T >= low) & (weight_T <= high)).to(weight_T)


def log_linear(behaviour_T: Tensor, current_T: Tensor, staleness_T: Tensor) -> Tensor:
    """The proximal policy's log-probs without a forward pass of its own.

    With s the steps between the behaviour and the proximal policy, `alpha = s / (s + 1)`:

        proximal = behaviour + alpha * (current - behaviour)

    The current policy is one step after the proximal one. For s = 0 it is the recorded log-prob.

    Source: AReaL's `prox_logp_method: loglinear`.
    """
    alpha_T = staleness_T.clamp(min=0).to(behaviour_T)
    alpha_T = alpha_T / (alpha_T + 1)
    return torch.lerp(behaviour_T, current_T.detach().to(behaviour_T), alpha_T)
