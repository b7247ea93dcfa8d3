"""Running workflows and judges: groups, limits, retries, outcomes."""

from tuner.rollout.collect import StepPlan, collect
from tuner.rollout.runner import RolloutRunner, RolloutSettings

__all__ = ["RolloutRunner", "RolloutSettings", "StepPlan", "collect"]
