"""Running workflows and judges: chat models, groups, limits, outcomes, worker processes."""

from tuner.rollouts.groups import Rollouts, StepPlan, collect
from tuner.rollouts.runner import RolloutRunner, RolloutSettings

__all__ = ["RolloutRunner", "RolloutSettings", "Rollouts", "StepPlan", "collect"]
