"""`synchronizer.*` and what goes with it: how far collection runs ahead of training."""

from __future__ import annotations

from pydantic import Field

from tuner.config.section import Section


class SynchronizerSection(Section):
    """`synchronizer.*`"""

    sync_offset: int = Field(
        default=0,
        ge=0,
        description="Steps by which collection may run ahead of training "
        "([asynchronous](asynchronous.md)): a token is trained at most so many updates after the "
        "one whose weights sampled it. 0: collection and training take turns.",
    )


class SampleStrategyArgs(Section):
    """`algorithm.sample_strategy_args.*`"""

    max_staleness: int | None = Field(
        default=None,
        ge=0,
        description="Tokens that are older than so many updates are not trained. For "
        "staleness_control, which needs it.",
    )


class OverRolloutSection(Section):
    """`explorer.over_rollout.*`: ending the slowest groups early."""

    ratio: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of a step's tasks that need not be waited for: once all others are "
        "complete, the rollouts that are left are ended. 0: all are waited for.",
    )
    wait_after_min: float = Field(
        default=30.0, ge=0, description="Seconds that those that are left are given then."
    )
    return_partial_tasks: bool = Field(
        default=False,
        description="Train the rollouts that a task had finished, or leave its group out.",
    )
