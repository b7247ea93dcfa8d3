"""What `tune()` returns, also written to the run directory as `result.json`; and a check's."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field


@dataclass(frozen=True)
class Verdict:
    """What `tuner check` found, on one page; `ready` is whether the run can begin."""

    ready: bool
    text: str

    @staticmethod
    def of(ready: bool, sections: Iterable[Iterable[str]]) -> Verdict:
        """The page of these sections of lines."""
        return Verdict(ready, "\n\n".join("\n".join(section) for section in sections))


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
        return result_table(self)


def result_table(result: TuneResult) -> str:
    """The end of a run as a table: accuracy before and after, rewards, tokens, time, paths."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result.run_dir.name}: {result.steps} steps", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, after in result.eval_after.items():
        before = result.eval_before.get(name)
        text = f"{after:.3f}" if before is None else f"{before:.3f} -> {after:.3f}"
        table.add_row(f"held-out reward ({name})", text)
    if result.rewards:
        shown = thin(result.rewards, 20)
        few = f"{len(shown)} of {len(result.rewards)} steps"
        what = "reward per step" if len(shown) == len(result.rewards) else f"reward, {few}"
        table.add_row(what, " ".join(f"{reward:.2f}" for reward in shown))
    if result.rows:
        table.add_row("rows", ", ".join(f"{n} {name}" for name, n in result.rows.items()))
    else:
        table.add_row("rollouts", ", ".join(f"{n} {name}" for name, n in result.outcomes.items()))
    losses = [row["train/loss"] for row in result.history if "train/loss" in row]
    if result.rows and losses:
        table.add_row("loss", f"{losses[0]:.4g} -> {losses[-1]:.4g}")
    tokens = result.tokens
    dropped = ", ".join(f"{count} dropped ({reason})" for reason, count in tokens.dropped.items())
    counted = f"{tokens.sampled} sampled = {tokens.trained} trained + {dropped or '0 dropped'}"
    table.add_row("tokens", f"{tokens.trained} trained" if result.rows else counted)
    table.add_row("time", duration(result.seconds))
    if result.checkpoint is not None:
        table.add_row("checkpoint", str(result.checkpoint))
    table.add_row("traces", str(result.traces))
    report = result.run_dir / "report.html"
    if report.exists():
        table.add_row("report", str(report))
    if result.tensorboard is not None:
        table.add_row("TensorBoard", f"tensorboard --logdir {result.tensorboard}")
    output = io.StringIO()
    Console(file=output, width=100, highlight=False).print(table)
    return output.getvalue().rstrip()


def thin(values: list[float], limit: int) -> list[float]:
    """At most `limit` of `values`, evenly spread, first and last among them."""
    if len(values) <= limit:
        return values
    return [values[round(i * (len(values) - 1) / (limit - 1))] for i in range(limit)]


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
