"""Ready-made reward functions and judges, and running functions in a process with a time limit."""

from tuner.errors import RewardError, RewardTimeout
from tuner.rewards.code_judges import code_in, code_judge, pytest_judge
from tuner.rewards.judges import (
    exact_judge,
    exact_match,
    f1,
    f1_judge,
    final_answer,
    form_judge,
    has_form,
    math_equal,
    math_judge,
    normalized,
    rouge_judge,
    schema_judge,
    weighted,
)
from tuner.rewards.model_judges import llm_judge, ruler
from tuner.rewards.process import in_process
from tuner.rewards.sandbox import Limits

__all__ = [
    "Limits",
    "RewardError",
    "RewardTimeout",
    "code_in",
    "code_judge",
    "exact_judge",
    "exact_match",
    "f1",
    "f1_judge",
    "final_answer",
    "form_judge",
    "has_form",
    "in_process",
    "llm_judge",
    "math_equal",
    "math_judge",
    "normalized",
    "pytest_judge",
    "rouge_judge",
    "ruler",
    "schema_judge",
    "weighted",
]
