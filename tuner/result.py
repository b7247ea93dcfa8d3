"""What `tune()` returns, also written to the run directory as `result.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field


class TokenCounts(BaseModel):
    """Where every sampled token went: `sampled == trained + sum(dropped.values())`."""

    sampled: int = 0
    trained: int = 0
    dropped: dict[str, int] = Field(default_factory=dict)


class TuneResult(BaseModel):
    """A finished run.

    Attributes:
        status: "completed"; a run that fails raises instead.
        steps: Updates of the weights.
        eval_before: Mean reward on each evaluation set before the first step.
        eval_after: The same after the last step.
        rewards: Mean training reward of each step.
        history: The metrics of each step, as in `metrics.jsonl`.
        outcomes: How many rollouts ended in which way, training only.
        tokens: Where every sampled training token went; of recorded data the tokens of the
            completions.
        rows: Of recorded data how many rows of the dataset are used, and how many are left out by
            which reason; empty for rollouts.
        seconds: Wall time of the run, interrupted parts not counted.
        run_dir: The run directory; the paths below lie in it.
        checkpoint: Hugging Face folder of the last weights; None where nothing was trained.
        traces: Folder of the recorded traces.
        tensorboard: Folder of TensorBoard's files, or None when not logged there.
    """

    status: Literal["completed"] = "completed"
    steps: int
    eval_before: dict[str, float]
    eval_after: dict[str, float]
    rewards: list[float]
    history: list[dict[str, float]]
    outcomes: dict[str, int]
    tokens: TokenCounts
    rows: dict[str, int] = Field(default_factory=dict)
    seconds: float
    run_dir: Path
    checkpoint: Path | None
    traces: Path
    tensorboard: Path | None = None

    def __str__(self) -> str:
        from tuner.run.console import result_table

        return result_table(self)
