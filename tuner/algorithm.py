"""`AlgorithmConfig`: the settings of the algorithm that are changed most, as in AgentScope 1.x."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from tuner.data.dataset import PublicSettings

# Field -> key in the configuration.
_KEYS = {
    "algorithm_type": "algorithm.algorithm_type",
    "learning_rate": "algorithm.optimizer.lr",
    "group_size": "algorithm.repeat_times",
    "batch_size": "buffer.batch_size",
    "save_interval_steps": "trainer.save_interval",
    "eval_interval_steps": "explorer.eval_interval",
}


class AlgorithmConfig(PublicSettings):
    """How to train. Only fields that are given override the file."""

    algorithm_type: str = Field(default="multi_step_grpo", description="The algorithm.")
    learning_rate: float = Field(default=1e-6, gt=0, description="Learning rate.")
    group_size: int = Field(default=8, ge=1, description="Rollouts of one task in one step.")
    batch_size: int = Field(default=32, ge=1, description="Tasks in one step.")
    save_interval_steps: int = Field(default=100, ge=0, description="Steps between checkpoints.")
    eval_interval_steps: int = Field(default=100, ge=0, description="Steps between evaluations.")

    def settings(self) -> dict[str, Any]:
        """What was given, by dotted key."""
        return {key: getattr(self, name) for name, key in _KEYS.items() if self._is_given(name)}

    def _is_given(self, name: str) -> bool:
        return name in self.model_fields_set
