"""Policy losses, and a critic's: one value for each sampled token, before aggregation.

Everywhere `logp_T` are the log-probs of the T sampled tokens under the current policy, `old_logp_T`
those that the ratio is taken to (no gradient), `r = exp(logp - old_logp)`, and `advantages_T` the
tokens' advantages A. `sg` stops the gradient. A sequence is one call: its completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# exp(20) is 5e8: beyond it the ratio is clipped anyway and only its overflow would matter.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyLoss:
    """Per-token loss, ratio (no gradient) and whether a bound changed the gradient; [T] each."""

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


def sequence_clip(
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantages_T: Tensor,
    sequence_T: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    sequences: int | None = None,
) -> PolicyLoss:
    """GSPO: the ratio of a sequence is the geometric mean of its tokens' ratios.

        s = exp(mean_t(logp - old_logp)),  s_t = sg(s) * exp(logp_t - sg(logp_t))
        L = max(-s_t A, -clip(s_t, 1 - clip_low, 1 + clip_high) A)

    Source: GSPO (arXiv 2507.18071) eq. 5 to 7, in the token form of eq. 13 and 14, which has the
    same value and, for one advantage in a sequence, the same gradient.

    Args:
        sequence_T: Index of each token's sequence; all tokens of a sequence must be there.
        sequences: Their number, where the caller knows it; else `sequence_T` is looked at, for
            which Python waits for the device.
    """
    if sequences is None:
        sequences = int(sequence_T.max()) + 1
    zeros_N = logp_T.new_zeros(sequences)
    count_N = zeros_N.index_add(0, sequence_T, torch.ones_like(logp_T)).clamp(min=1)
    difference_T = (logp_T - old_logp_T).detach()
    mean_N = zeros_N.index_add(0, sequence_T, difference_T) / count_N
    log_ratio_T = mean_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[sequence_T]
    ratio_T = (logp_T - logp_T.detach() + log_ratio_T).exp()
    plain_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(torch.maximum(plain_T, clipped_T), ratio_T.detach(), clipped_T > plain_T)


def cispo(
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.28,
) -> PolicyLoss:
    """CISPO: `L = -sg(clip(r, 1 - clip_low, 1 + clip_high)) * A * logp`.

    The weight is clipped, never the gradient: every token teaches.

    Source: MiniMax-M1 (arXiv 2506.13585) eq. 4 and 5.
    """
    ratio_T = _ratio(logp_T, old_logp_T).detach()
    weight_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(-weight_T * advantages_T * logp_T, ratio_T, weight_T != ratio_T)


def sapo(
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantages_T: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> PolicyLoss:
    """SAPO: `L = -4 / tau * sigmoid(tau (r - 1)) * A`, a soft gate instead of a clip.

    `tau` is `tau_pos` where A > 0, else `tau_neg`. The gradient goes through the ratio, as in the
    paper, so that at r = 1 it is the policy gradient.

    Source: SAPO (arXiv 2511.20347) eq. 5 and 6. Trinity-RFT multiplies the detached gate by `logp`
    instead.
    """
    ratio_T = _ratio(logp_T, old_logp_T)
    tau_T = torch.full_like(logp_T, tau_neg).masked_fill(advantages_T > 0, tau_pos)
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1)) * 4 / tau_T
    return PolicyLoss(-gate_T * advantages_T, ratio_T.detach(), _nothing(logp_T))


def importance_sampling(logp_T: Tensor, old_logp_T: Tensor, advantages_T: Tensor) -> PolicyLoss:
    """`L = -r A`: the policy gradient (REINFORCE) with importance weights and no bound.

    Source: Williams (1992); Trinity-RFT's `importance_sampling`.
    """
    ratio_T = _ratio(logp_T, old_logp_T)
    return PolicyLoss(-ratio_T * advantages_T, ratio_T.detach(), _nothing(logp_T))


def opmd(
    logp_T: Tensor, old_logp_T: Tensor, advantages_T: Tensor, *, tau: float = 1.0
) -> PolicyLoss:
    """`L = -A logp / (1 + tau)`, whoever sampled the token; `old_logp` only for the ratio's metric.

    Source: Kimi k1.5 (arXiv 2501.12599) section 2.3.2, as Trinity-RFT simplifies it.
    """
    ratio_T = _ratio(logp_T, old_logp_T).detach()
    return PolicyLoss(-advantages_T * logp_T / (1 + tau), ratio_T, _nothing(logp_T))


def topr(
    logp_T: Tensor, old_logp_T: Tensor, advantages_T: Tensor, *, threshold: float = 0.0
) -> PolicyLoss:
    """TOPR: `L = -sg(a) A logp` with `a = min(r, 1)` where A <= threshold, else 1.

    `old_logp` is of the policy that sampled. The ratio is each token's, as Trinity-RFT has it.

    Source: TOPR (arXiv 2503.14286), where the ratio is the whole answer's.
    """
    ratio_T = _ratio(logp_T, old_logp_T).detach()
    tapered_T = advantages_T <= threshold
    weight_T = torch.where(tapered_T, ratio_T.clamp(max=1), torch.ones_like(ratio_T))
    return PolicyLoss(-weight_T * advantages_T * logp_T, ratio_T, tapered_T & (ratio_T > 1))


def likelihood(logp_T: Tensor, old_logp_T: Tensor) -> PolicyLoss:
    """`L = -logp`: the sampled tokens are imitated; `old_logp` only for the ratio's metric."""
    return PolicyLoss(-logp_T, _ratio(logp_T, old_logp_T).detach(), _nothing(logp_T))


def clipped_value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, *, clip: float
) -> tuple[Tensor, Tensor]:
    """`L = max((V - R)^2, (V' - R)^2) / 2` with `V' = clip(V, V_old - clip, V_old + clip)`.

    Source: PPO2 (openai/baselines, `ppo2/model.py`); verl's `cliprange_value`.

    Args:
        values_T: Values under the current critic.
        old_values_T: Those that returns and advantages were made with; no gradient.
        returns_T: What values are trained towards.
        clip: How far a value may leave its old one.

    Returns:
        Loss, and whether the clip cut the token's gradient; [T] each.
    """
    near_T = torch.clamp(values_T, old_values_T - clip, old_values_T + clip)
    plain_T, clipped_T = (values_T - returns_T) ** 2, (near_T - returns_T) ** 2
    return torch.maximum(plain_T, clipped_T) / 2, clipped_T > plain_T


def _ratio(logp_T: Tensor, old_logp_T: Tensor) -> Tensor:
    return (logp_T - old_logp_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _nothing(logp_T: Tensor) -> Tensor:
    return torch.zeros_like(logp_T, dtype=torch.bool)
