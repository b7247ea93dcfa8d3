"""Ready reward functions, and how to run any in a process of its own with a time limit."""

from tuner.errors import RewardError, RewardTimeout
from tuner.rewards.answers import exact_match, f1, has_form, normalized
from tuner.rewards.math import final_answer, math_equal
from tuner.rewards.process import in_process

__all__ = [
    "RewardError",
    "RewardTimeout",
    "exact_match",
    "f1",
    "final_answer",
    "has_form",
    "in_process",
    "math_equal",
    "normalized",
]
