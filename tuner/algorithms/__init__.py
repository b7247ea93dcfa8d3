"""Pure tensor functions: advantages, policy losses, KL, aggregation; the table of algorithms."""

from tuner.algorithms.advantages import (
    call_normalized,
    group_normalized,
    group_std,
    leave_one_out,
    mirror_descent,
    shifted_mean,
    whitened_returns,
)
from tuner.algorithms.aggregation import AGGREGATIONS, Aggregation, row_weights
from tuner.algorithms.kl import KL_ESTIMATORS
from tuner.algorithms.losses import PolicyLoss, ppo_clip

__all__ = [
    "AGGREGATIONS",
    "KL_ESTIMATORS",
    "Aggregation",
    "PolicyLoss",
    "call_normalized",
    "group_normalized",
    "group_std",
    "leave_one_out",
    "mirror_descent",
    "ppo_clip",
    "row_weights",
    "shifted_mean",
    "whitened_returns",
]
