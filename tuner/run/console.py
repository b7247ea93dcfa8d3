"""What people see: progress with time left while it runs, a table at the end."""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from tuner.result import TuneResult
from tuner.traces import Outcome

_PARTS = ("generation", "agent", "judge", "training", "sync")
# What some algorithms have in place of a reward.
_SHOWN = {
    "train/kl_teacher": "KL to teacher",
    "train/accuracy": "accuracy",
    "train/reward_margin": "margin",
}


class ConsoleMonitor:
    """A line per step; on a terminal also a bar for the run and one for the step's rollouts.

    Args:
        total_steps: Length of the run.
        console: Where to write; the process's standard output by default.
    """

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._total = total_steps
        self._seconds: list[float] = []
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._run: TaskID | None = None
        self._rollouts: TaskID | None = None

    def __enter__(self) -> ConsoleMonitor:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def begin(self, what: str, count: int, *, step: int, of: str = "rollouts") -> None:
        """Rollouts start, of a training step or of an evaluation, or a step on recorded rows."""
        if self._run is None:
            self._run = self._progress.add_task("run", total=self._total, note="")
            self._rollouts = self._progress.add_task(what, total=count, note=of)
        assert self._rollouts is not None
        self._progress.update(self._run, completed=max(0, step - 1), note=self._left(step - 1))
        self._progress.reset(self._rollouts, total=count, description=what, note=of)

    def rollout_done(self) -> None:
        if self._rollouts is not None:
            self._progress.advance(self._rollouts)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the step's line."""
        parts = [f"step {step}/{self._total}"] if step else ["start"]
        if "reward/mean" in metrics:
            parts.append(f"reward {metrics['reward/mean']:.3f}")
        parts += _evaluations(metrics)
        parts += [f"{name} {metrics[key]:.3f}" for key, name in _SHOWN.items() if key in metrics]
        if "rows/trained" in metrics:
            parts.append(f"loss {metrics['train/loss']:.4g}")
        if step:
            self._seconds.append(metrics["time/step"])
            if "calls/completion_tokens" in metrics:
                parts.append(f"{metrics['calls/completion_tokens']:.0f} tokens/call")
            parts.append(f"{metrics['tokens_per_second']:.0f} tokens/s")
            parts.append(f"{metrics['time/step']:.1f} s ({_split(metrics)})")
            parts += _failures(metrics)
            parts.append(self._left(step))
        self.say("  ".join(part for part in parts if part))

    def close(self) -> None:
        self._progress.stop()

    def _left(self, done: int) -> str:
        if not self._seconds or done >= self._total:
            return ""
        # The mean of recent steps: evaluations come with some steps only and count too.
        seconds = statistics.fmean(self._seconds[-20:]) * (self._total - done)
        return f"{_duration(seconds)} left"


def result_table(result: TuneResult) -> str:
    """The end of a run as a table: accuracy before and after, rewards, tokens, time, paths."""
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
    table.add_row("time", _duration(result.seconds))
    if result.checkpoint is not None:
        table.add_row("checkpoint", str(result.checkpoint))
    table.add_row("traces", str(result.traces))
    report = result.run_dir / "report.html"
    if report.exists():
        table.add_row("report", str(report))
    if result.tensorboard is not None:
        table.add_row("TensorBoard", f"tensorboard --logdir {result.tensorboard}")
    console = Console(file=io.StringIO(), width=100, highlight=False)
    console.print(table)
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue().rstrip()


def thin(values: list[float], limit: int) -> list[float]:
    """At most `limit` of `values`, evenly spread, first and last among them."""
    if len(values) <= limit:
        return values
    return [values[round(i * (len(values) - 1) / (limit - 1))] for i in range(limit)]


def _evaluations(metrics: Mapping[str, float]) -> list[str]:
    parts = []
    for name, value in metrics.items():
        if name.startswith("eval/") and name.endswith("/reward"):
            parts.append(f"{name.removeprefix('eval/').removesuffix('/reward')} {value:.3f}")
        elif name.startswith("eval/") and name.endswith("/failed") and value:
            what = name.removeprefix("eval/").removesuffix("/failed")
            parts.append(f"{what}: {value:.0f} failed")
    return parts


def _failures(metrics: Mapping[str, float]) -> list[str]:
    """Rollouts that gave no reward, by how they ended."""
    outcomes = sorted(outcome for outcome in Outcome if outcome is not Outcome.COMPLETED)
    counts = {name: metrics.get(f"rollouts/{name}", 0) for name in outcomes}
    return [f"{count:.0f} {name}" for name, count in counts.items() if count]


def _split(metrics: Mapping[str, float]) -> str:
    seconds = {part: metrics[f"time/{part}"] for part in _PARTS if f"time/{part}" in metrics}
    total = sum(seconds.values()) or 1.0
    return ", ".join(f"{part} {spent / total:.0%}" for part, spent in seconds.items())


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
