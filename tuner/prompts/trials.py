"""Rollouts of prompts: each candidate has a number, each rollout a trace, and all of it a price."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.data.dataset import Task
from tuner.errors import TunerError
from tuner.gateway import SamplingDefaults
from tuner.prompts.contenders import Contender
from tuner.prompts.prompted import Prompted, Prompts
from tuner.rollout import Rollouts
from tuner.traces import RolloutId, Trace, TraceStore, Usage
from tuner.traces.store import complete_lines, cut_torn_line

PER_PRICE = 1_000_000
"""Tokens that a price is for."""


@dataclass
class Spent:
    """What a search took so far, with what an interrupted part of it took.

    Attributes:
        rollouts: That ended, in whatever way.
        failed: Those without a reward, by outcome.
        usage: Tokens of rollouts and reflections.
        cost: By the prices that are known.
        reflections: Prompts that were asked for.
    """

    rollouts: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    usage: Usage = field(default_factory=Usage)
    cost: float = 0.0
    reflections: int = 0

    def add(self, usage: Usage, prices: tuple[float, float]) -> None:
        """Count tokens, at prices for a million of them."""
        self.usage += usage
        tokens = (usage.input_tokens, usage.output_tokens)
        self.cost += sum(n * price / PER_PRICE for n, price in zip(tokens, prices, strict=True))


class CandidateLog:
    """The candidates by number, one line each, in the order in which they were first tried.

        {"number": 2, "prompts": {"system_prompt": "..."}}

    Args:
        path: The file; what it holds is known from the beginning.
        what: What a candidate is, as a line calls it.

    Raises:
        TunerError: A line is not of this form.
    """

    def __init__(self, path: Path, what: str = "prompts") -> None:
        self._path, self._what = path, what
        self._numbers: dict[tuple[tuple[str, str], ...], int] = {}
        for number, line in complete_lines(path):
            try:
                row = json.loads(line)
                self._numbers[_key(row[what])] = int(row["number"])
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise TunerError(
                    f"{path}, line {number} is no candidate: {error!r}; give this search another "
                    "experiment_name to begin it anew"
                ) from error

    def number(self, prompts: Prompts) -> int:
        """The number of a candidate, which it keeps."""
        key = _key(prompts)
        if key not in self._numbers:
            number = max(self._numbers.values(), default=-1) + 1
            cut_torn_line(self._path)
            with self._path.open("ab") as file:
                line = json.dumps({"number": number, self._what: dict(prompts)}, ensure_ascii=False)
                file.write(line.encode(errors="backslashreplace") + b"\n")
            self._numbers[key] = number
        return self._numbers[key]


def _key(prompts: Prompts) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(prompts.items()))


@dataclass(eq=False)
class Trials:
    """Makes the rollouts of candidates, and knows those that were made before.

    The k-th time that a candidate is tried on a task is rollout k of that task, and its trace is
    stored under the candidate's number as step. So a search that is begun again with the same seed
    asks for the same rollouts, and those on disk are not run again.

    Args:
        workflow: The user's.
        contender: Whom rollouts are asked of.
        tasks: Rows of each split.
        store: Where traces are.
        log: The candidates.
        defaults: What calls that do not say are sampled with.
        max_running: Rollouts at the same time.
        single: Whether the workflow is given a text, and no dict.
        prices: Of the contender's tokens.
        on_trace: Sees every rollout that ends, known ones too.

    Attributes:
        spent: What was spent so far.
    """

    workflow: Callable[..., Any]
    contender: Contender
    tasks: Mapping[str, Sequence[Task]]
    store: TraceStore
    log: CandidateLog
    defaults: SamplingDefaults
    max_running: int
    single: bool
    prices: tuple[float, float]
    on_trace: Callable[[Trace], None]
    spent: Spent = field(default_factory=Spent)
    _tries: Counter[tuple[str, int, int]] = field(default_factory=Counter, init=False)
    _known: dict[tuple[str, int], list[Trace]] = field(default_factory=dict, init=False)

    async def run(self, prompts: Prompts, split: str, rows: Sequence[int]) -> list[Trace]:
        """One rollout of a candidate on each of these rows, in their order.

        Raises:
            FunctionError: A function returned something of the wrong type.
            TrainingError: The engine failed.
        """
        number = self.log.number(prompts)
        ids = []
        for row in rows:
            ids.append(RolloutId(number, row, self._tries[split, number, row], split))
            self._tries[split, number, row] += 1
        known = self._recorded(split, number)
        wanted = {id: self.tasks[split][id.task] for id in ids}
        given = dict(prompts)
        prompted = Prompted(self.workflow, next(iter(given.values())) if self.single else given)
        runner = replace(self.contender.runner, workflow=prompted)
        traces = await Rollouts(runner, self.store, max_running=self.max_running).run(
            wanted,
            self.defaults,
            known=[trace for trace in known if trace.id in wanted],
            on_trace=lambda trace: self.on_trace(trace) if trace.final else None,
        )
        self.contender.check()
        self._count(traces)
        final = {trace.id: trace for trace in traces if trace.final}
        return [final[id] for id in ids]

    def _recorded(self, split: str, number: int) -> list[Trace]:
        """What was on disk of a candidate when this began."""
        if (split, number) not in self._known:
            self._known[split, number] = self.store.read(split, number)
        return self._known[split, number]

    def _count(self, traces: Sequence[Trace]) -> None:
        for trace in traces:
            self.spent.add(trace.usage, self.prices)
            self.spent.cost += trace.metrics.get("judge_cost", 0.0)
            if trace.final:
                self.spent.rollouts += 1
                if trace.reward is None:
                    self.spent.failed[trace.outcome.value] += 1
