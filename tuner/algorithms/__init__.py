"""Pure tensor functions: advantages, policy losses, KL."""

from tuner.algorithms.advantages import call_normalized, group_normalized, group_std
from tuner.algorithms.kl import KL_ESTIMATORS
from tuner.algorithms.losses import PolicyLoss, ppo_clip

__all__ = [
    "KL_ESTIMATORS",
    "PolicyLoss",
    "call_normalized",
    "group_normalized",
    "group_std",
    "ppo_clip",
]
