"""Per-token estimates of KL(policy || reference) from the sampled token's two log-probs.

Names and formulas after Schulman, "Approximating KL Divergence" (2020), as Trinity-RFT uses them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

KLEstimator = Callable[[Tensor, Tensor], Tensor]


def k1(logp_T: Tensor, ref_logp_T: Tensor) -> Tensor:
    """`logp - ref`, shape [T]: unbiased, may be negative."""
    return logp_T - ref_logp_T


def k2(logp_T: Tensor, ref_logp_T: Tensor) -> Tensor:
    """`(logp - ref)^2 / 2`, shape [T]: its gradient is the KL's (on-policy)."""
    return (logp_T - ref_logp_T) ** 2 / 2


def k3(logp_T: Tensor, ref_logp_T: Tensor) -> Tensor:
    """`exp(ref - logp) - (ref - logp) - 1`, shape [T]: unbiased and never negative."""
    difference_T = (ref_logp_T - logp_T).clamp(-20, 20)
    return difference_T.exp() - difference_T - 1


def absolute(logp_T: Tensor, ref_logp_T: Tensor) -> Tensor:
    """`|logp - ref|`, shape [T]."""
    return (logp_T - ref_logp_T).abs()


KL_ESTIMATORS: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}
