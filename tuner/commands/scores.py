"""What an evaluation found: numbers for programs, tables for people."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from pydantic import BaseModel

from tuner.run.directory import write_atomically
from tuner.run.estimates import Estimate, estimate, passes, rewards_by_task
from tuner.traces import Outcome, Trace

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


class SetScores(BaseModel):
    """What one candidate did on one evaluation set.

    Attributes:
        reward: Mean over the tasks, of the mean of each task's rollouts; None where all failed.
        pass_at: By k, the chance that one of k rollouts of a task passes.
        pass_hat: By k, the chance that all of k do.
        failed: How many rollouts have no reward, by outcome.
        calls, tokens, seconds: Of a rollout, on average: calls, sampled tokens, time in workflow
            and judge while others ran.
        wall_seconds: Time until all had ended.
        rewards: Of each task, in the order of the rows, those of its rollouts that have one.
    """

    reward: Estimate | None
    pass_at: dict[int, Estimate]
    pass_hat: dict[int, Estimate]
    failed: dict[str, int]
    calls: float
    tokens: float
    seconds: float
    wall_seconds: float
    rewards: list[list[float]]


class CandidateScores(BaseModel):
    """One candidate: what it is called, where it is, and its scores by evaluation set."""

    name: str
    path: str
    sets: dict[str, SetScores]


class EvaluationSet(BaseModel):
    """What every candidate was asked: `repeat` rollouts of each task, sampled so."""

    tasks: int
    repeat: int
    temperature: float


class Difference(BaseModel):
    """Mean reward of a candidate less that of the first, task by task; None without a common one.

    Each task is its own comparison, so what makes some tasks harder than others is not in the
    interval.
    """

    set: str
    candidate: str
    baseline: str
    reward: Estimate | None


class Evaluation(BaseModel):
    """What `tuner.evaluate()` returns, and `evaluation.json` holds.

    Attributes:
        pass_reward: A rollout has passed that has at least so much.
        sets: By name.
        candidates: In the order they were given.
        differences: Of each set, every candidate against the first.
    """

    pass_reward: float
    sets: dict[str, EvaluationSet]
    candidates: list[CandidateScores]
    differences: list[Difference]

    def __str__(self) -> str:
        console = table_console()
        console.print(*self._tables(), sep="\n\n")
        return "\n".join(line.rstrip() for line in console.export_text().splitlines())

    def write(self, folder: Path) -> None:
        """Leave `evaluation.json` and `evaluation.html`."""
        console = table_console()
        console.print(*self._tables(), sep="\n\n")
        write_atomically(folder / "evaluation.json", self.model_dump_json(indent=2))
        write_atomically(folder / "evaluation.html", console.export_html(inline_styles=True))

    def _tables(self) -> Iterator[Table]:
        from rich.table import Table

        for name, asked in self.sets.items():
            title = (
                f"{name}: {asked.tasks} tasks x {asked.repeat} rollouts, temperature "
                f"{asked.temperature:g}"
            )
            table = Table(title=title, title_justify="left")
            table.add_column()
            for candidate in self.candidates:
                table.add_column(candidate.name, overflow="fold")
            for row in _rows([candidate.sets[name] for candidate in self.candidates]):
                table.add_row(*row)
            against = {d.candidate: d.reward for d in self.differences if d.set == name}
            if against:
                table.add_section()
                shown = [_shown(against.get(c.name), "+.3f") for c in self.candidates[1:]]
                table.add_row("against the first", "", *shown)
            yield table


def table_console(width: int = 100) -> Console:
    """Keeps tables, as text or as a page."""
    from rich.console import Console

    return Console(file=io.StringIO(), record=True, width=width, highlight=False)


def _rows(scores: Sequence[SetScores]) -> Iterator[list[str]]:
    yield ["reward", *(_shown(one.reward) for one in scores)]
    for what, label in (("pass_at", "pass@"), ("pass_hat", "pass^")):
        for k in sorted({k for one in scores for k in getattr(one, what)}):
            yield [f"{label}{k}", *(_shown(getattr(one, what).get(k)) for one in scores)]
    yield [
        "without a reward",
        *(", ".join(f"{n} {kind}" for kind, n in one.failed.items()) or "0" for one in scores),
    ]
    for what in ("calls", "tokens", "seconds"):
        yield [f"{what} per rollout", *(f"{getattr(one, what):.1f}" for one in scores)]
    yield ["seconds in all", *(f"{one.wall_seconds:.1f}" for one in scores)]


def _shown(value: Estimate | None, form: str = ".3f") -> str:
    return "-" if value is None else value.text(form)


def scores_of(traces: Sequence[Trace], wall_seconds: float, pass_reward: float) -> SetScores:
    """What the rollouts of one set come to."""
    final = [trace for trace in traces if trace.final]
    rewards = list(rewards_by_task(final).values())
    repeat = max(Counter(trace.id.task for trace in final).values())
    tries = sorted({*(1 << n for n in range(repeat.bit_length())), repeat})
    at_hat = {k: passes(rewards, k, pass_reward) for k in tries}
    failed = Counter(t.outcome.value for t in final if t.outcome is not Outcome.COMPLETED)
    return SetScores(
        reward=estimate([fmean(of_task) for of_task in rewards if of_task]),
        pass_at={k: found for k, (at, _) in at_hat.items() if (found := estimate(at))},
        pass_hat={k: found for k, (_, hat) in at_hat.items() if k > 1 and (found := estimate(hat))},
        failed=dict(failed),
        calls=fmean(len(trace.calls) for trace in final),
        tokens=fmean(trace.sampled_tokens for trace in final),
        seconds=fmean(
            trace.seconds.get("workflow", 0.0) + trace.seconds.get("judge", 0.0) for trace in final
        ),
        wall_seconds=wall_seconds,
        rewards=rewards,
    )


def difference(name: str, first: CandidateScores, other: CandidateScores) -> Difference:
    pairs = zip(other.sets[name].rewards, first.sets[name].rewards, strict=True)
    return Difference(
        set=name,
        candidate=other.name,
        baseline=first.name,
        reward=estimate([fmean(new) - fmean(old) for new, old in pairs if new and old]),
    )
