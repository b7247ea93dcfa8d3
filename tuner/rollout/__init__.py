"""Running workflows and judges: groups, limits, retries, outcomes."""

from tuner.rollout.groups import Rollouts, StepPlan, collect
from tuner.rollout.runner import RolloutRunner, RolloutSettings

__all__ = ["RolloutRunner", "RolloutSettings", "Rollouts", "StepPlan", "collect"]
