"""Ready reward functions and judges, and how to run any in a process with a time limit."""

from tuner.errors import RewardError, RewardTimeout
from tuner.rewards.answers import exact_match, f1, has_form, normalized
from tuner.rewards.math import final_answer, math_equal
from tuner.rewards.model_judges import llm_judge, ruler
from tuner.rewards.process import in_process

__all__ = [
    "RewardError",
    "RewardTimeout",
    "exact_match",
    "f1",
    "final_answer",
    "has_form",
    "in_process",
    "llm_judge",
    "math_equal",
    "normalized",
    "ruler",
]
