"""One selection of a model, from its candidates to where they stand."""

from __future__ import annotations

import gc
import hashlib
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from tuner.config import RemoteModel
from tuner.config.keys import located, require_model_libraries
from tuner.config.schema import Penalize
from tuner.errors import ConfigError, TrainingError
from tuner.gateway import SamplingDefaults
from tuner.rollouts import Rollouts
from tuner.rollouts.groups import Wanted
from tuner.rollouts.observed import is_chat_model, name_of, observed, session_of
from tuner.runs.console import ConsoleMonitor
from tuner.runs.directory import RunDirectory, write_atomically
from tuner.runs.estimates import Estimate, estimate
from tuner.runs.record import fingerprint_of_weights
from tuner.tasks.functions import WorkflowOutput, call_workflow, response_text
from tuner.tasks.settings import TunerModelConfig
from tuner.tools.evaluate import Candidate, find_candidate, table_console, with_weights
from tuner.tools.trials import (
    SELECTION,
    CandidateLog,
    Contender,
    Prices,
    Spent,
    elsewhere,
    served_here,
)
from tuner.traces import RolloutId, Trace, TraceStore, Usage
from tuner.tune import Run

if TYPE_CHECKING:
    from rich.table import Table


# What `select_model()` chooses among: each candidate with a name, a price, and a way to ask it.


_KINDS = (
    "a chat model of AgentScope, a RemoteModel(base_url=..., model_name=...), a "
    "TunerModelConfig(model_path=..., max_model_len=...), or the path of a model, a checkpoint or "
    "a run"
)


@dataclass(frozen=True)
class ModelCandidate:
    """One of the models.

    Attributes:
        name: What people call it; no other has it.
        given: What the user gave, and gets back.
        identity: What tells it from others, when a selection goes on another day.
        run: The configuration that it is run with, and the rows.
        open: Whom rollouts are asked of, for as long as it is open.
        prices: Of its tokens; None where they are not known.
    """

    name: str
    given: Any
    identity: Mapping[str, Any]
    run: Run
    open: Callable[[Run], AbstractAsyncContextManager[Contender]]
    prices: Prices | None = None


def model_candidates(
    given: Sequence[Any],
    run: Run,
    prepared: Callable[[TunerModelConfig], Run],
    prices: Mapping[str, Prices],
) -> list[ModelCandidate]:
    """The candidates in the order in which they are given.

    Args:
        given: What the user calls models.
        run: The configuration, and the rows.
        prepared: The same with a model in place of the file's.
        prices: By name; they win over a `RemoteModel`'s own.

    Raises:
        ConfigError: There are fewer than two, one is there twice or is nothing that can be asked,
            or a price is for none of them or is no price.
        TunerError: A path is nothing that can be loaded.
    """
    if isinstance(given, str | Path) or len(given) < 2:
        raise ConfigError(
            f"candidate_models is {given!r:.80}: give a list of two models or more, each of them "
            f"{_KINDS}"
        )
    found = _distinct([_candidate(one, run, prepared) for one in given])
    for name, price in prices.items():
        if not isinstance(price, Sequence) or len(price) != 2:
            raise ConfigError(
                f"prices[{name!r}] is {price!r:.40}: give money for a million tokens read, and "
                "for a million written, as in (0.5, 1.5)"
            )
    called = [_priced_as(one) for one in found]
    if unknown := prices.keys() - called - {one.name for one in found}:
        raise ConfigError(
            f"prices has {', '.join(sorted(unknown))}, and the candidates are {', '.join(called)}"
        )
    return [
        replace(one, prices=prices.get(one.name, prices.get(name, one.prices)))
        for one, name in zip(found, called, strict=True)
    ]


def _candidate(given: Any, run: Run, prepared: Callable[[TunerModelConfig], Run]) -> ModelCandidate:
    if is_chat_model(given):
        return ModelCandidate(name_of(given), given, _chat_identity(given), run, _asked(given))
    if isinstance(given, RemoteModel):
        given.api_key(f"candidate_models: {given.model_name}")  # before anybody is asked
        name, identity = given.model_name, given.model_dump(include={"base_url", "model_name"})
        prices = None if given.cost(0, 0) is None else given.prices
        return ModelCandidate(name, given, identity, run, partial(elsewhere, remote=given), prices)
    if isinstance(given, TunerModelConfig):
        of_model = prepared(given)
        said = given.model_dump(mode="json", exclude_unset=True)
        return _weights(given, find_candidate(of_model.config.model.model_path), of_model, said)
    if isinstance(given, str | Path):
        return _weights(given, find_candidate(given), run, {})
    raise ConfigError(f"a candidate is {given!r:.80} ({type(given).__name__}); pass {_KINDS}")


def _weights(given: Any, weights: Candidate, run: Run, said: Mapping[str, Any]) -> ModelCandidate:
    place = located(weights.path, "candidate_models")
    identity = {
        **said,
        "path": weights.path,
        "weights": None if place is None else fingerprint_of_weights(place),
    }
    served = replace(run, config=with_weights(run.config, weights))
    require_model_libraries(served.config)
    return ModelCandidate(weights.name, given, identity, served, served_here)


def _asked(model: Any) -> Callable[[Run], AbstractAsyncContextManager[Contender]]:
    return partial(elsewhere, remote=None, make_model=partial(observed, model))


def _chat_identity(model: Any) -> dict[str, Any]:
    """A chat model's class, name and, as a digest, those of its settings that are plain values."""
    plain = {
        name: value.model_dump(mode="json") if hasattr(value, "model_dump") else value
        for name, value in vars(model).items()
        if not name.endswith(("key", "credential"))
    }
    client = getattr(model, "client", None)
    plain["client"] = str(getattr(client, "base_url", ""))
    # What is no plain value says where it is in memory.
    text = json.dumps(plain, sort_keys=True, default=lambda value: type(value).__name__)
    return {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "model_name": name_of(model),
        "settings": hashlib.sha256(text.encode()).hexdigest(),
    }


def _priced_as(candidate: ModelCandidate) -> str:
    """The name that its price goes by: equal models have one price."""
    named = candidate.identity.get("model_name")
    return candidate.name if named is None else str(named)


def _distinct(candidates: Sequence[ModelCandidate]) -> list[ModelCandidate]:
    """The same, each with a name and an identity of its own.

    Raises:
        ConfigError: One is there twice.
    """
    found, names, alike = [], Counter[str](), Counter[str]()
    for number, one in enumerate(candidates):
        key = json.dumps(one.identity, sort_keys=True)
        before = [other.given for other in candidates[:number]]
        same = any(one.given is other for other in before)
        if same or (alike[key] and not is_chat_model(one.given)):
            raise ConfigError(f"the candidate {one.name} is given twice: leave one out")
        names[one.name] += 1
        alike[key] += 1
        name = one.name
        if names[name] > 1:
            name = str(one.identity.get("path") or f"{name} ({names[name]})")
        found.append(replace(one, name=name, identity={**one.identity, "number": alike[key]}))
    return found


# Where the candidates of a selection stand: who is best, by how much, and how sure that is.


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


FIRST_ROUND = 16
"""Tasks of the first round where hopeless candidates are let go; each further one has twice as
many."""


@dataclass(eq=False)
class Selection:
    """One selection, from its candidates to where they stand.

    Attributes:
        workflow: The user's.
        run: The configuration and the rows.
        tried: The candidates, with what is known of them.
        rounds: The further rows of each round.
        max_running: Rollouts at the same time.
        directory: Where all is kept.
    """

    workflow: Callable[..., Any]
    run: Run
    tried: list[Tried]
    rounds: Sequence[Sequence[int]]
    max_running: int
    directory: RunDirectory
    _monitor: ConsoleMonitor = field(default_factory=lambda: ConsoleMonitor(1), init=False)

    def __post_init__(self) -> None:
        self._store = TraceStore(self.directory.traces)
        self._log = CandidateLog(self.directory.path / "candidates.jsonl", "model")

    def given(self, name: str) -> Any:
        """The candidate of a name, as the user gave it."""
        return next(one.candidate.given for one in self.tried if one.candidate.name == name)

    async def result(self) -> Standings:
        """Where all stand in the end, which is also written and shown.

        Raises:
            TrainingError: No rollout of any candidate came to a reward, or an engine failed.
        """
        with self._monitor:
            await self._try_all()
            found = standings(self.tried, len(self.run.eval_tasks[SELECTION]))
            write_atomically(self.directory.result, found.model_dump_json(indent=2))
            for sentence in (str(found), *found.doubts()):
                self._monitor.say(sentence)
            self._monitor.say(f"chosen: {found.candidates[0].name}; {self.directory.path}")
        return found

    async def _try_all(self) -> None:
        left = list(self.tried)
        for number, rows in enumerate(self.rounds, 1):
            for one in left:
                await self._try(one, rows)
            best = max(left, key=lambda one: one.mean)
            if not best.rewards:
                raise TrainingError(
                    "no rollout of any candidate came to a reward. "
                    + "; ".join(f"{one.candidate.name}: {one.first_error}" for one in left)
                )
            if number < len(self.rounds):
                left = [one for one in left if one is best or not self._let_go(one, best)]
            if len(left) == 1:
                return

    def _let_go(self, one: Tried, best: Tried) -> bool:
        if not one.worse_than(best):
            return False
        behind = one.against(best)
        why = one.first_error if behind is None else f"{behind.text('+.3f')} against the best"
        self._monitor.say(
            f"{one.candidate.name} is let go after {len(one.final)} tasks: {why} "
            f"({best.candidate.name})"
        )
        return True

    async def _try(self, one: Tried, rows: Sequence[int]) -> None:
        """Try a candidate on further rows; what is on disk of it is not run again."""
        candidate, tasks = one.candidate, self.run.eval_tasks[SELECTION]
        number = self._log.number({"identity": json.dumps(candidate.identity, sort_keys=True)})
        wanted = {RolloutId(number, row, 0, SELECTION): tasks[row] for row in rows}
        known = [trace for trace in self._store.read(SELECTION, number) if trace.id in wanted]
        self._monitor.begin(candidate.name, len(wanted), step=1)
        if {trace.id for trace in known if trace.final} != wanted.keys():
            known = await self._run(candidate, wanted, known)
        one.traces += known
        one.rounds += 1
        self._monitor.say(one.summary())

    async def _run(
        self, candidate: ModelCandidate, wanted: Wanted, known: Sequence[Trace]
    ) -> list[Trace]:
        async with candidate.open(candidate.run) as contender:
            runner = replace(contender.runner, workflow=_Measured(self.workflow))
            traces = await Rollouts(runner, self._store, max_running=self.max_running).run(
                wanted,
                _defaults(candidate),
                known=known,
                abort_on_failure=self.run.config.tuner.on_failure == "abort",
                on_trace=lambda trace: self._monitor.rollout_done(trace) if trace.final else None,
            )
            contender.check()
        gc.collect()  # a model that is in a circle would be in the way of the next one
        return traces


@dataclass(frozen=True)
class _Measured:
    """A workflow whose response comes with what it took, as judges are given it."""

    workflow: Callable[..., Any]

    async def __call__(self, model: Any, **given: Any) -> WorkflowOutput:
        began = time.perf_counter()
        output = await call_workflow(self.workflow, model=model, **given)
        seconds = time.perf_counter() - began
        usage = sum((call.usage for call in session_of(model).calls), Usage())
        metrics = {
            **(output.metrics or {}),
            "execution_time": seconds,
            "input_tokens": float(usage.input_tokens),
            "output_tokens": float(usage.output_tokens),
            "total_tokens": float(usage.input_tokens + usage.output_tokens),
        }
        judged = JudgedResponse(response=output.response, metrics=metrics)
        return WorkflowOutput(reward=output.reward, response=judged, metrics=metrics)


class JudgedResponse(dict[str, Any]):
    """`{"response": ..., "metrics": ...}`, whose text in traces is the response's alone."""

    def get_text_content(self) -> str:
        """As AgentScope's messages have it."""
        return response_text(self["response"])


def penalty_of(run: Run) -> float | None:
    """The reward of a rollout that gives none; None leaves it out."""
    failure = run.config.tuner.on_failure
    return failure.penalize if isinstance(failure, Penalize) else None


def _defaults(candidate: ModelCandidate) -> SamplingDefaults:
    config, given = candidate.run.config, candidate.given
    arguments = config.rollout_args(config.buffer.explorer_input.eval_tasksets[0]).model_dump()
    if isinstance(given, TunerModelConfig) and "temperature" in given.model_fields_set:
        arguments["temperature"] = given.temperature
    return SamplingDefaults(**arguments)


def rounds_of(rows: int, seed: int) -> list[list[int]]:
    """Rows in any order, cut so that each round doubles those that have been tried."""
    order = list(range(rows))
    random.Random(seed).shuffle(order)
    ends = [FIRST_ROUND]
    while ends[-1] < rows:
        ends.append(2 * ends[-1])
    return [order[begin:end] for begin, end in pairwise([0, *ends])]
