"""Results: that of `tune()`, which is also written to `result.json` in the run directory, and
that of a check."""

from __future__ import annotations

import io
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field


@dataclass(frozen=True)
class Verdict:
    """The findings of `tuner check`, on one page; `ready` is whether the run can start."""

    ready: bool
    text: str

    @staticmethod
    def of(ready: bool, sections: Iterable[Iterable[str]]) -> Verdict:
        return Verdict(ready, "\n\n".join("\n".join(section) for section in sections))


class TokenCounts(BaseModel):
    """Where every sampled token went: `sampled == trained + sum(dropped.values())`."""

    sampled: int = 0
    trained: int = 0
    dropped: dict[str, int] = Field(default_factory=dict)


class EarlyEnd(BaseModel):
    """A run that ended before its last step, because nothing was left to learn.

    Attributes:
        step: The last step.
        planned_steps: The planned number of steps.
        patience: `tuner.signal_patience`.
        reason: The observed reason.
    """

    step: int
    planned_steps: int
    patience: int
    reason: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.reason}"


class TuneResult(BaseModel):
    """A finished run.

    Attributes:
        status: "completed"; a run that fails raises instead.
        steps: Updates of the weights.
        ended_early: Why the run took fewer steps than it was to have, or None.
        eval_before: Mean reward on each evaluation set before the first step.
        eval_after: The same after the last step.
        rewards: Mean training reward of each step.
        history: The metrics of each step, as in `metrics.jsonl`; not in `result.json`.
        outcomes: How many rollouts ended in which way, training only.
        tokens: Where every sampled training token went; of recorded data the tokens of the
            completions.
        rows: Of recorded data how many rows or recorded rollouts are used, and how many are left
            out by which reason; empty for rollouts of the run's own.
        seconds: Wall time of the run, interrupted parts not counted.
        run_dir: The run directory; the paths below lie in it.
        checkpoint: Hugging Face folder of the last weights; None where nothing was trained.
        traces: Folder of the recorded traces.
        tensorboard: Folder of TensorBoard's files, or None when not logged there.
    """

    status: Literal["completed"] = "completed"
    steps: int
    ended_early: EarlyEnd | None = None
    eval_before: dict[str, float]
    eval_after: dict[str, float]
    rewards: list[float] = Field(repr=False)
    history: list[dict[str, float]] = Field(default_factory=list, exclude=True, repr=False)
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

    def _repr_html_(self) -> str:
        """The table and the curve of the rewards, as a notebook shows them."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th>"
            f"<td style='text-align:left'>{escape(text)}</td></tr>"
            for name, text in (*_numbers(self), *_paths(self))
        )
        return (
            f"<table><caption>{escape(_title(self))}</caption>{rows}</table>{curve(self.rewards)}"
        )


def result_table(result: TuneResult) -> str:
    """The end of a run as a table: accuracy before and after, rewards, tokens, time, paths."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=_title(result), show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in _numbers(result):
        table.add_row(name, text)
    if len(result.rewards) > 2:
        table.add_row("curve", plot(result.rewards))
    output = io.StringIO()
    Console(file=output, width=100, highlight=False).print(table)
    # Outside the table, where no border and no line break keeps a path from being copied.
    paths = [f"{name:<12} {text}" for name, text in _paths(result)]
    return "\n".join([output.getvalue().rstrip(), *paths])


def _title(result: TuneResult) -> str:
    return f"{result.run_dir.name}: {counted(result.steps, 'step')}"


def _numbers(result: TuneResult) -> Iterator[tuple[str, str]]:
    """The figures that the end of a run shows, as names and texts."""
    if result.ended_early is not None:
        yield "ended early", str(result.ended_early)
    for name, after in result.eval_after.items():
        before, evaluated = result.eval_before.get(name), _evaluations(result, name)
        text = _with_interval(after, name, evaluated[-1:])
        if before is not None:
            text = f"{_with_interval(before, name, evaluated[:1])} -> {text}"
        yield f"held-out reward ({name})", text
    if result.rewards:
        shown = thin(result.rewards, 20)
        few = f"{len(shown)} of {len(result.rewards)} steps"
        what = "reward per step" if len(shown) == len(result.rewards) else f"reward, {few}"
        yield what, " ".join(f"{reward:.2f}" for reward in shown)
    if result.rows:
        yield "rows", ", ".join(f"{n} {name}" for name, n in result.rows.items())
    else:
        yield "rollouts", ", ".join(f"{n} {name}" for name, n in result.outcomes.items())
    losses = [row["train/loss"] for row in result.history if "train/loss" in row]
    if result.rows and losses:
        yield "loss", f"{losses[0]:.4g} -> {losses[-1]:.4g}"
    for name in ("loss", "reward"):
        aside = [row[f"held_out/{name}"] for row in result.history if f"held_out/{name}" in row]
        if aside:
            yield f"held-out {name}, of recorded data", f"{aside[0]:.4g} -> {aside[-1]:.4g}"
    tokens = result.tokens
    dropped = ", ".join(f"{count} dropped ({reason})" for reason, count in tokens.dropped.items())
    counted = f"{tokens.sampled} sampled = {tokens.trained} trained + {dropped or '0 dropped'}"
    all_of_rows = result.rows and not tokens.dropped
    yield "tokens", f"{tokens.trained} trained" if all_of_rows else counted
    yield "time", f"{duration(result.seconds)}{_shares(result)}"


PARTS = ("generation", "agent", "judge", "training", "sync", "evaluation")
"""Parts of the seconds of a step, `time/<part>`."""


def _shares(result: TuneResult) -> str:
    """`: generation 62%, ...`, the parts of the time of all steps; empty if it was not measured."""
    spent = {part: sum(row.get(f"time/{part}", 0.0) for row in result.history) for part in PARTS}
    whole = max(result.seconds, sum(spent.values()))
    shown = [f"{part} {time / whole:.0%}" for part, time in spent.items() if time > 0.005 * whole]
    return f": {', '.join(shown)}" if shown else ""


def _paths(result: TuneResult) -> Iterator[tuple[str, str]]:
    """Message about a run that ended: what is kept, and the command that shows it."""
    if result.checkpoint is not None:
        yield "checkpoint", str(result.checkpoint)
    yield "traces", str(result.traces)
    report = result.run_dir / "report.html"
    if report.exists():
        yield "report", str(report)
    if result.tensorboard is not None:
        yield "TensorBoard", f"tensorboard --logdir {shlex.quote(str(result.tensorboard))}"
    yield "next:", f"tuner view {shlex.quote(str(result.run_dir))}"


def _evaluations(result: TuneResult, name: str) -> list[dict[str, float]]:
    return [row for row in result.history if f"eval/{name}/reward" in row]


def _with_interval(reward: float, name: str, evaluated: list[dict[str, float]]) -> str:
    """`0.130 [0.070, 0.200]`, with the 95% interval of an evaluation's mean where it has one."""
    ends = [row.get(f"eval/{name}/reward_{end}") for row in evaluated for end in ("low", "high")]
    shown = ", ".join(f"{end:.3f}" for end in ends if end is not None)
    return f"{reward:.3f} [{shown}]" if shown else f"{reward:.3f}"


def plot(rewards: list[float], columns: int = 60, lines: int = 4) -> str:
    """Rewards over steps in blocks, with the highest and the lowest beside the first and the last
    of the lines.

    Args:
        columns: At most; several steps may share one, and one step have several.
    """
    values = thin(rewards, columns)
    low, high = min(values), max(values)
    wide = columns // len(values)
    eighths = [1 + round((value - low) / ((high - low) or 1) * (8 * lines - 1)) for value in values]
    drawn = [
        "".join(_BLOCKS[max(0, min(8, top - 8 * line))] * wide for top in eighths)
        for line in reversed(range(lines))
    ]
    drawn[0] += f" {high:.2f}"
    drawn[-1] += f" {low:.2f}"
    return "\n".join(drawn)


_BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH, HEIGHT, MARGIN = 480, 120, 4


def curve(rewards: list[float]) -> str:
    """Rewards over steps as inline SVG, with the lowest and the highest; empty below two steps."""
    values = thin(rewards, WIDTH)
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    across = (WIDTH - 2 * MARGIN) / (len(values) - 1)
    up = (HEIGHT - 2 * MARGIN) / (high - low or 1.0)
    points = " ".join(
        f"{MARGIN + i * across:.1f},{HEIGHT - MARGIN - (value - low) * up:.1f}"
        for i, value in enumerate(values)
    )
    return (
        f"<figure style='margin:8px 0'><svg viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' "
        f"role='img' aria-label='reward per step'><polyline points='{points}' fill='none' "
        f"stroke='#2563eb' stroke-width='2'/></svg><figcaption>reward, {low:.3g} to {high:.3g}, "
        f"{len(rewards)} steps</figcaption></figure>"
    )


def thin(values: list[float], limit: int) -> list[float]:
    """At most `limit` of `values`, evenly spread, first and last among them."""
    if len(values) <= limit:
        return values
    return [values[round(i * (len(values) - 1) / (limit - 1))] for i in range(limit)]


def counted(count: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
