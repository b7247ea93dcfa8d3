"""Output for people: progress, and the remaining time."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from tuner.encoding import displayable, show_all
from tuner.runs.directory import write_atomically
from tuner.runs.result import curve, duration
from tuner.tasks.datasets import told_apart
from tuner.traces import Call, Outcome, Trace

# Progress in a notebook: one output of the cell, which is updated.


LINES = 200
"""Number of latest lines that are shown."""
SECONDS = 0.2
"""Minimum seconds between two updates for a finished rollout."""


class CellOutput:
    """A bar for the run and one for the step's rollouts, the curve of the rewards, and the lines.

    Args:
        total_steps: Length of the run.
    """

    def __init__(self, total_steps: int) -> None:
        from IPython.display import HTML, display

        self._html: Any = HTML
        self._handle: Any = display(HTML(""), display_id=True)
        self._total = total_steps
        self._step, self._note = 0, ""
        self._what, self._done, self._count, self._of = "", 0, 0, ""
        self._lines: list[str] = []
        self._rewards: list[float] = []
        self._updated = 0.0

    def say(self, line: str) -> None:
        self._lines.append(line)
        self._update()

    def begin(self, what: str, count: int, *, done: int, note: str, of: str) -> None:
        """Rollouts start; `done` steps are complete."""
        self._step, self._note = done, note
        self._what, self._done, self._count, self._of = what, 0, count, of
        self._update()

    def rollout_done(self) -> None:
        self._done += 1
        if time.monotonic() - self._updated > SECONDS:
            self._update()

    def step_done(self, step: int, reward: float | None) -> None:
        self._step = step
        if step and reward is not None:
            self._rewards.append(reward)

    def _update(self) -> None:
        bars = f"{_bar(self._step, self._total)} steps {escape(self._note)}"
        if self._count:
            what = escape(f"{self._of}, {self._what}")
            bars += f"<br>{_bar(self._done, self._count)} {what}"
        lines = escape("\n".join(self._lines[-LINES:]))
        scrolled = f"<pre style='max-height:24em;overflow:auto;white-space:pre-wrap'>{lines}</pre>"
        self._handle.update(self._html(f"<div>{bars}</div>{curve(self._rewards)}{scrolled}"))
        self._updated = time.monotonic()


def _bar(done: int, total: int) -> str:
    return f"<progress value='{done}' max='{total}'></progress> {done}/{total}"


# Metrics that some algorithms have in place of a reward, or in addition.
_SHOWN = {
    "train/kl_teacher": "KL to teacher",
    "train/accuracy": "accuracy",
    "train/reward_margin": "margin",
    # Of recorded rollouts, as shares.
    "train/effective_tokens": "effective tokens",
    "train/effective_rollouts": "rollouts",
    "held_out/loss": "held-out loss",
    "held_out/accuracy": "held-out accuracy",
    "held_out/reward": "held-out reward (estimated)",
}


class ConsoleMonitor:
    """A line per step. A terminal also shows a bar for the run and one for the step's rollouts,
    and a notebook shows everything as one output.

    Args:
        total_steps: Length of the run.
        console: The output; the process's standard output by default. From now on it shows U+FFFD
            or a question mark for what its encoding lacks.
    """

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        show_all(self._console.file)
        self._cell = CellOutput(total_steps) if self._console.is_jupyter else None
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
        self._told = {Outcome.COMPLETED, Outcome.REJECTED}

    def __enter__(self) -> ConsoleMonitor:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, text: str) -> None:
        if self._cell is None:
            self._console.print(text, markup=False)
        else:
            self._cell.say(displayable(text))

    def note(self, sentence: str) -> None:
        """Show a sentence on lines of at most `COLUMNS`, all but the first indented."""
        self.say("\n".join(_lines(sentence.split(), between=" ")))

    def begin(self, what: str, count: int, *, step: int, of: str = "rollouts") -> None:
        """Rollouts start, of a training step or an evaluation; or a step on recorded rows."""
        if self._run is None:
            self._run = self._progress.add_task("run", total=self._total, note="")
            self._rollouts = self._progress.add_task(what, total=count, note=of)
        assert self._rollouts is not None
        self._progress.update(self._run, completed=max(0, step - 1), note=self._left(step - 1))
        self._progress.reset(self._rollouts, total=count, description=what, note=of)
        if self._cell is not None:
            note = self._left(step - 1)
            self._cell.begin(what, count, done=max(0, step - 1), note=note, of=of)

    def rollout_done(self, trace: Trace | None = None) -> None:
        """A rollout has ended. For each way of failing, the first rollout without a reward is
        reported.

        Args:
            trace: Its trace, if available.
        """
        if self._rollouts is not None:
            self._progress.advance(self._rollouts)
        if self._cell is not None:
            self._cell.rollout_done()
        if trace is None or trace.outcome in self._told:
            return
        self._told.add(trace.outcome)
        self.note(
            f"rollout {trace.id} has no reward, {trace.outcome.value}: {trace.error}; further ones "
            "are counted in each step's line"
        )

    def samples(self, traces: Sequence[Trace], step: int) -> None:
        """Show the best, a middle and the worst rollout of a step, shortened."""
        rewarded = [t for t in traces if t.final and t.reward is not None and t.calls]
        rewarded.sort(key=lambda trace: trace.reward or 0.0, reverse=True)
        if not rewarded:
            return
        places = {len(rewarded) // 2: "middle", len(rewarded) - 1: "worst", 0: "best"}
        self.say(f"sample rollouts of step {step}:")
        chosen = [(rewarded[place], which) for place, which in sorted(places.items())]
        tasks = _tasks([trace for trace, _ in chosen])
        for (trace, which), task in zip(chosen, tasks, strict=True):
            self.say(f"  {which}, reward {trace.reward:.3g}")
            self._fields([*task, *_conversation(trace)])

    def before_and_after(self, before: Sequence[Trace], after: Sequence[Trace]) -> None:
        """Show the task of an evaluation set whose reward rose most, in its first and last rollout.

        Args:
            before, after: Rollouts of the first and the last evaluation of the set.
        """
        first = {trace.id: trace for trace in before if trace.final and trace.calls}
        pairs = [
            (first[id_], trace)
            for trace in after
            if trace.final and (id_ := replace(trace.id, step=0)) in first
        ]
        risen = [pair for pair in pairs if _rise(*pair) > 0]
        if not risen:
            return
        pair = max(risen, key=lambda pair: _rise(*pair))
        self.say("the held-out task whose reward rose most:")
        self._fields(_tasks(pair[:1])[0])
        for when, trace in zip(("before", "after"), pair, strict=True):
            self.say(f"  {when} training, reward {trace.reward:.3g}")
            self._fields(_conversation(trace))

    def _fields(self, fields: Sequence[tuple[str, str]]) -> None:
        """Labels and texts, each on one line of at most `COLUMNS`."""
        for label, text in fields:
            start = f"    {label:<{LABEL}}  "
            self.say(f"{start}{_short(text, COLUMNS - len(start))}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the step's line, and further ones where it would be longer than `COLUMNS`."""
        # The rates of a step whose rollouts were all recorded before are not those of the run.
        measured = "tokens_per_second" in metrics
        parts = [f"step {step}/{self._total}"] if step else ["before training:"]
        if "reward/mean" in metrics:
            parts.append(f"reward {metrics['reward/mean']:.3f}")
        for name, value in metrics.items():
            if name.startswith("role/") and name.endswith("/reward"):
                parts.append(f"{name.split('/')[1]} {value:.3f}")
        parts += _evaluations(metrics, "held-out" if step else "held-out reward")
        parts += [f"{name} {metrics[key]:.3f}" for key, name in _SHOWN.items() if key in metrics]
        if "rows/trained" in metrics:
            parts.append(f"loss {metrics['train/loss']:.4g}")
        if step:
            parts += _failures(metrics)
            if measured:
                self._seconds.append(metrics["time/step"])
                if "calls/completion_tokens" in metrics:
                    parts.append(f"{metrics['calls/completion_tokens']:.0f} tokens/call")
                parts.append(f"{metrics['tokens_per_second']:.0f} tokens/s")
                parts.append(f"{metrics['time/step']:.1f} s")
                parts.append(self._left(step))
            else:
                parts.append("(rollouts as recorded)")
        if self._cell is not None:
            self._cell.step_done(step, metrics.get("reward/mean"))
        for line in _lines([part for part in parts if part]):
            self.say(line)

    def close(self) -> None:
        self._progress.stop()

    def _left(self, done: int) -> str:
        if not self._seconds or done >= self._total:
            return ""
        # The mean of recent steps: evaluations count too, and occur only in some steps.
        seconds = statistics.fmean(self._seconds[-20:]) * (self._total - done)
        left = f"{seconds / 60:.0f} min" if 60 <= seconds < 3600 else duration(seconds)
        return f"{left} left"


COLUMNS = 100
"""Length of the lines that are cut or broken."""
LABEL = 14
"""Width of the labels before the texts of a rollout."""
CALLS = 4
"""Number of calls of a rollout that are shown."""
CHARACTERS = 110
"""Length of a text in a sentence."""


def _lines(parts: Sequence[str], between: str = "  ") -> list[str]:
    """The parts on as few lines as possible, all but the first indented."""
    lines = [parts[0]]
    for part in parts[1:]:
        longer = f"{lines[-1]}{' ' if lines[-1].endswith(':') else between}{part}"
        if len(longer) <= COLUMNS:
            lines[-1] = longer
        else:
            lines.append(f"    {part}")
    return lines


def _short(text: str, characters: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= characters else f"{text[: characters - 3]}..."


def _tasks(traces: Sequence[Trace]) -> list[list[tuple[str, str]]]:
    """The fields of each row, shortened where they differ; `task.` tells its answer from the
    model's."""
    texts = {
        name: iter(told_apart([str(one.task[name]) for one in traces if name in one.task]))
        for name in {name for trace in traces for name in trace.task}
    }
    return [[(f"task.{name}", next(texts[name])) for name in trace.task] for trace in traces]


def _conversation(trace: Trace) -> list[tuple[str, str]]:
    """The calls of a rollout, and the tools' results."""
    shown = []
    for call, following in zip_longest(trace.calls[:CALLS], trace.calls[1:CALLS]):
        shown.append((call.role or "model", said(call)))
        shown += [("tool result", result) for result in _results(call, following)]
    if len(trace.calls) > CALLS:
        shown.append(("", f"... {len(trace.calls) - CALLS} more calls"))
    return shown


def _rise(before: Trace, after: Trace) -> float:
    if before.reward is None or after.reward is None:
        return 0.0
    return after.reward - before.reward


def _results(call: Call, following: Call | None) -> list[str]:
    """Tool results between a call and the following one, in chat completions."""
    added = [] if following is None else following.messages[len(call.messages) :]
    return [str(message.get("content")) for message in added if message.get("role") == "tool"]


def said(call: Call) -> str:
    """An answer as text, followed by its tool calls."""
    content = call.response.get("content") or ""
    parts = [content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)]
    for tool in call.response.get("tool_calls") or ():
        function = tool.get("function", {})
        parts.append(f"{function.get('name')}({function.get('arguments')})")
    ended = "cut off" if call.finish_reason == "length" else call.finish_reason
    return " ".join(filter(None, parts)) or f"(no text; {ended})"


def _evaluations(metrics: Mapping[str, float], label: str) -> list[str]:
    parts = []
    for name, value in metrics.items():
        _, _, rest = name.partition("eval/")
        of, _, what = rest.rpartition("/")
        if what == "reward":
            parts.append(f"{label} ({of}) {value:.3f}")
        elif what.startswith("pass_"):
            parts.append(f"{of} {what} {value:.3f}")
        elif rest and what == "failed" and value:
            parts.append(f"{of}: {value:.0f} failed")
    return parts


def _failures(metrics: Mapping[str, float]) -> list[str]:
    """Rollouts without a reward, by outcome."""
    outcomes = sorted(outcome for outcome in Outcome if outcome is not Outcome.COMPLETED)
    counts = {name: metrics.get(f"rollouts/{name}", 0) for name in outcomes}
    return [f"{count:.0f} {name}" for name, count in counts.items() if count]


# The metrics file, from which a run resumes.


class JsonlMonitor:
    """One line per step in `metrics.jsonl`, the record for resuming and reports.

    Args:
        path: The file; rewritten to hold only `rows`.
        rows: Lines of an interrupted run up to the step it resumes from.
    """

    def __init__(self, path: Path, rows: list[dict[str, Any]]) -> None:
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
