"""Where the candidates of a selection stand: who is best, by how much, and how sure that is."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

from pydantic import BaseModel

from tuner.commands.scores import table_console
from tuner.prompts.model_candidates import ModelCandidate
from tuner.prompts.trials import Spent
from tuner.run.estimates import Estimate, estimate
from tuner.traces import Trace

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(eq=False)
class Tried:
    """A candidate with its rollouts so far.

    Attributes:
        candidate: Which.
        penalty: Reward of a rollout that gives none (`tuner.on_failure`); None leaves it out.
        rounds: It was in so many.
        traces: Every attempt.
    """

    candidate: ModelCandidate
    penalty: float | None
    rounds: int = 0
    traces: list[Trace] = field(default_factory=list)

    @property
    def final(self) -> list[Trace]:
        """Its rollouts."""
        return [trace for trace in self.traces if trace.final]

    @property
    def rewards(self) -> dict[int, float]:
        """By the number of the task; without those that have none."""
        found = {t.id.task: self.penalty if t.reward is None else t.reward for t in self.final}
        return {task: reward for task, reward in found.items() if reward is not None}

    @property
    def mean(self) -> float:
        """Of its rewards; below every other where there is none."""
        return fmean(self.rewards.values()) if self.rewards else float("-inf")

    @property
    def first_error(self) -> str | None:
        """How the first rollout failed that did."""
        failed = (f"{t.outcome.value}: {t.error}" for t in self.final if t.reward is None)
        return next(failed, None)

    def summary(self) -> str:
        """One line for people."""
        reward = estimate(list(self.rewards.values()))
        failed = len(self.final) - len(self.rewards)
        return (
            f"{self.candidate.name}: {'no reward' if reward is None else reward.text()} on "
            f"{len(self.final)} tasks" + (f", {failed} failed" if failed else "")
        )

    def against(self, other: Tried) -> Estimate | None:
        """Its reward less another's, task by task; None without a common one."""
        theirs = other.rewards
        pairs = [(mine, theirs[task]) for task, mine in self.rewards.items() if task in theirs]
        return estimate([mine - other for mine, other in pairs])

    def worse_than(self, other: Tried) -> bool:
        """Whether the interval of the difference says so, or nothing of it was rewarded."""
        found = self.against(other)
        return not self.rewards or (found is not None and found.high is not None and found.high < 0)

    def standing(self, best: Tried) -> Standing:
        """Where it stands beside the best, which it may be itself."""
        behind = None if self is best else self.against(best)
        return Standing(
            name=self.candidate.name,
            reward=estimate(list(self.rewards.values())),
            against_the_best=behind,
            tied=behind is not None and not self.worse_than(best),
            rollouts=len(self.final),
            failed=dict(Counter(t.outcome.value for t in self.final if t.reward is None)),
            first_error=self.first_error,
            calls=fmean(len(trace.calls) for trace in self.final),
            averages=self._averages(),
            cost=self._cost(),
        )

    def _averages(self) -> dict[str, float]:
        """Of each metric of the rollouts that were rewarded, over those that have it."""
        found = defaultdict[str, list[float]](list)
        for trace in self.final:
            if trace.reward is not None:
                for name, value in trace.metrics.items():
                    found[name].append(value)
        return {name: fmean(values) for name, values in found.items()}

    def _cost(self) -> float | None:
        if self.candidate.prices is None:
            return None
        spent = Spent()
        for trace in self.traces:
            spent.add(trace.usage, self.candidate.prices)
        return spent.cost / len(self.final)


class Standing(BaseModel):
    """What a candidate came to.

    Attributes:
        reward: Mean over the tasks; None where every rollout failed.
        against_the_best: Its reward less that of the best, on the tasks where both have one; None
            for the best.
        tied: Whether these tasks cannot tell it from the best: the interval of that holds 0.
        rollouts: How many it was tried with; fewer than there are tasks where it was let go early.
        failed: Those without a reward, by outcome.
        first_error: How the first of them ended.
        calls: Of a rollout, on average, as far as they are seen.
        averages: Of each metric, of the rollouts that were rewarded.
        cost: Of a rollout, on average, with its retries; None without prices.
    """

    name: str
    reward: Estimate | None
    against_the_best: Estimate | None
    tied: bool
    rollouts: int
    failed: dict[str, int]
    first_error: str | None
    calls: float
    averages: dict[str, float]
    cost: float | None


class Standings(BaseModel):
    """All candidates, the best first; `result.json` holds it.

    Attributes:
        tasks: Rows that there are.
        candidates: Those that were tried on more rows before those that were let go.
    """

    tasks: int
    candidates: list[Standing]

    @property
    def tied(self) -> list[Standing]:
        """Those that cannot be told from the best."""
        return [one for one in self.candidates if one.tied]

    def doubts(self) -> Iterator[str]:
        """What speaks against taking the best for the best, a sentence each."""
        best = self.candidates[0]
        for one in self.tied:
            assert one.against_the_best is not None, "it was compared"
            yield (
                f"{one.name} cannot be told from {best.name} on these tasks: "
                f"{one.against_the_best.text('+.3f')}; more tasks might tell"
            )
        if failed := sum(best.failed.values()):
            yield f"{failed} of {best.rollouts} rollouts of {best.name} have no reward"
        for one in self.candidates:
            if not one.calls:
                yield f"no call of {one.name} was seen: what it takes is not known"

    def metrics(self) -> dict[str, float]:
        """The best's, as `select_model()` returns them."""
        best, reward = self.candidates[0], self.candidates[0].reward
        assert reward is not None, "the best has a score"
        found: dict[str, float | None] = {
            **{f"{name}_avg": value for name, value in best.averages.items()},
            "reward": reward.mean,
            "reward_low": reward.low,
            "reward_high": reward.high,
            "tied": len(self.tied),
            "rollouts": best.rollouts,
            "failed": sum(best.failed.values()),
            **{f"failed_{outcome}": count for outcome, count in best.failed.items()},
            "cost_avg": best.cost,
        }
        return {name: value for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        console = table_console(120)
        console.print(self._table())
        return "\n".join(line.rstrip() for line in console.export_text().splitlines())

    def _table(self) -> Table:
        from rich.table import Table

        table = Table(
            title=f"{self.tasks} tasks, the best first; seconds, tokens and cost of one",
            title_justify="left",
        )
        rows = {one.name: dict(_cells(one)) for one in self.candidates}
        columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
        table.add_column("model", overflow="fold")
        for column in columns:
            table.add_column(column, no_wrap=column in ("reward", "against the best"))
        for name, cells in rows.items():
            table.add_row(name, *(cells.get(column, "-") for column in columns))
        return table


def _cells(one: Standing) -> Iterator[tuple[str, str]]:
    yield "reward", "-" if one.reward is None else one.reward.text()
    behind = one.against_the_best
    yield "against the best", "" if behind is None else behind.text("+.3f")
    yield "rollouts", str(one.rollouts)
    failed = ", ".join(f"{count} {outcome}" for outcome, count in one.failed.items())
    yield "failed", failed or "0"
    for name, shown in _SHOWN.items():
        if name in one.averages:
            yield shown, f"{one.averages[name]:.3g}"
    if one.cost is not None:
        yield "cost", f"{one.cost:.3g}"


_SHOWN = {
    "execution_time": "seconds",
    "input_tokens": "read",
    "output_tokens": "written",
}


def standings(tried: Sequence[Tried], tasks: int) -> Standings:
    """Where all stand: by the rounds that they were in, then by their means; the first of equals
    is the one that was given first."""
    order = sorted(tried, key=lambda one: (one.rounds, one.mean), reverse=True)
    return Standings(tasks=tasks, candidates=[one.standing(order[0]) for one in order])
