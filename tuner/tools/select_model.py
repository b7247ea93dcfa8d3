"""`select_model()`: evaluate models on the same tasks and return the best, with its uncertainty."""

from __future__ import annotations

import gc
import hashlib
import inspect
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from tuner.config import RemoteModel
from tuner.config.keys import located, require_model_libraries
from tuner.config.schema import Penalize
from tuner.config.source import without_secrets
from tuner.encoding import model_json
from tuner.errors import ConfigError, TrainingError
from tuner.gateway import SamplingDefaults
from tuner.rollouts.observed import is_chat_model, name_of, observed, session_of
from tuner.runs.console import ConsoleMonitor
from tuner.runs.directory import RunDirectory, write_atomically
from tuner.runs.estimates import Estimate, estimate, paired
from tuner.tasks.datasets import Task
from tuner.tasks.functions import (
    JUDGE,
    JudgeOutput,
    OwnFrames,
    WorkflowOutput,
    WrongReturnError,
    as_judge_output,
    call_function,
    call_workflow,
    check_function,
    check_workflow_function,
    names,
    response_text,
)
from tuner.tasks.loading import require_nothing_loads
from tuner.tasks.settings import TunerModelConfig
from tuner.tools.candidates import (
    SELECTION,
    Candidate,
    CandidateLog,
    CandidateTrials,
    Contender,
    Prices,
    SearchCost,
    elsewhere,
    find_candidate,
    served_here,
    with_weights,
)
from tuner.tools.evaluate import table_text
from tuner.tools.tune_prompt import check_judges_alone, rows_of
from tuner.traces import RolloutId, Trace, TraceStore, Usage
from tuner.tune import RunPlan, prepare_evaluation

if TYPE_CHECKING:
    from rich.table import Table


async def select_model(
    *,
    workflow_func: Callable[..., Any],
    judge_func: Callable[..., Any] | None = None,
    train_dataset: Any = None,
    candidate_models: Sequence[Any] = (),
    max_threads: int = 2,
    early_stopping: bool = False,
    prices: Mapping[str, Prices] | None = None,
    auxiliary_models: Mapping[str, TunerModelConfig | RemoteModel | Mapping[str, Any]]
    | None = None,
    project_name: str | None = None,
    experiment_name: str | None = None,
    config_path: str | Path | None = None,
    overrides: Sequence[str] = (),
) -> tuple[Any, dict[str, float]]:
    """Try models on the same tasks, and choose the one with the best mean reward.

    Candidates are tried one after the other; a locally served one is loaded for its turn and
    unloaded afterwards. The run directory has every rollout as a trace, for `tuner view`, and the
    results of all candidates in `result.json`. An interrupted selection resumes when it is called
    again with the same `experiment_name`, also with further candidates.

    Args:
        workflow_func: Runs the agent on one task, as for `tune()`. It gets the candidate: a chat
            model of AgentScope as an object of the same class, any other as in `tune()`.
        judge_func: Scores the response, as for `tune()`. If it has a parameter `metrics`, it gets
            there the workflow's metrics with "execution_time" (seconds), "input_tokens",
            "output_tokens" and "total_tokens" of the candidate. If it calls its task `_task`, as
            AgentScope's own judges do, its response is `{"response": ..., "metrics": {...}}`.
            None: the workflow gives the reward.
        train_dataset: A `DatasetConfig`, a `datasets.Dataset`, a list of dicts or a path;
            `total_steps` is the number of rows to use.
        candidate_models: Two or more, each a chat model of AgentScope, a `RemoteModel`, a
            `TunerModelConfig`, or the path of a model, a checkpoint or a run.
        max_threads: Maximum of concurrent rollouts.
        early_stopping: Try all on some tasks, then the remaining ones on twice as many, and so on.
            A candidate is dropped if the interval of its difference to the best is below 0.
        prices: Prices by `model_name` of models without their own: for a million input tokens, and
            for a million output tokens.
        auxiliary_models, project_name, experiment_name, config_path, overrides: As for `tune()`.

    Returns:
        The best candidate as it was given, and its metrics: the mean of each metric of judge and
        workflow as "<name>_avg", including "execution_time_avg", "input_tokens_avg",
        "output_tokens_avg", "total_tokens_avg"; "reward", and its interval "reward_low" and
        "reward_high"; "tied" (number of candidates that these tasks cannot distinguish from it);
        "rollouts", "failed" and "failed_<outcome>"; "cost_avg" of a task if prices are known.

    Raises:
        FunctionError: A function cannot be called, or returned the wrong type.
        ConfigError: A setting is unknown, of the wrong type or in conflict; there are fewer than
            two candidates.
        DatasetError: The dataset is missing or empty.
        TunerError: A candidate's path cannot be loaded.
        TrainingError: No rollout of any candidate got a reward, or an engine failed.
    """
    require_nothing_loads("select_model()")
    check_workflow_function(workflow_func)
    check_judges_alone(judge_func)
    if max_threads < 1:
        raise ConfigError(f"max_threads is {max_threads}: give at least one rollout at a time")
    judge, tasks = _judge(judge_func), rows_of(train_dataset, "train_dataset")
    prepare = partial(
        prepare_evaluation,
        workflow_func,
        judge,
        eval_dataset={SELECTION: tasks},
        auxiliary_models=auxiliary_models,
        project_name=project_name,
        experiment_name=experiment_name,
        config_path=config_path,
        overrides=overrides,
    )
    run = prepare()
    # These import PyTorch, so only after the checks.
    from tuner.loop import deterministic_torch
    from tuner.runs.record import open_directory

    candidates = model_candidates(
        candidate_models, run, lambda model: prepare(model=model), prices or {}
    )
    with (
        OwnFrames(),
        open_directory(run.config, run.eval_tasks) as directory,
        deterministic_torch(run.config.tuner.deterministic),
    ):
        rounds = rounds_of(len(tasks), run.config.tuner.seed) if early_stopping else None
        selection = ModelSelection(
            workflow=workflow_func,
            run=run,
            tried=[CandidateRecord(one, penalty_of(run)) for one in candidates],
            rounds=rounds or [range(len(tasks))],
            max_running=1 if run.config.tuner.deterministic else max_threads,
            directory=directory,
        )
        found = await selection.result()
    return selection.given(found.candidates[0].name), found.metrics()


def _judge(given: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """A judge as `tune()` calls it, of what `_MeasuredWorkflow` returns."""
    if given is None:
        return None
    in_agentscope = callable(given) and names(given, "_task") and not names(given, "task")
    check_function(given, _AGENTSCOPE_JUDGE if in_agentscope else _MEASURED_JUDGE)

    @wraps(given)
    async def judge(
        task: Task, response: JudgedResponse, auxiliary_models: Any, logger: Any
    ) -> JudgeOutput:
        shared = {"auxiliary_models": auxiliary_models, "logger": logger}
        own = {"_task": task, "response": response} if in_agentscope else {"task": task, **response}
        return as_judge_output(await call_function(given, shared | own), given)

    # Callers read the signature; that of the wrapped judge may have `metrics`.
    judge.__signature__ = inspect.signature(judge, follow_wrapped=False)  # type: ignore[attr-defined]
    return judge


_MEASURED_JUDGE = replace(JUDGE, optional=(*JUDGE.optional, "metrics"))
_AGENTSCOPE_JUDGE = replace(JUDGE, required=("_task", "response"))


# The candidates of a selection, each with a name, prices, and a way to open its model.


_KINDS = (
    "a chat model of AgentScope, a RemoteModel(base_url=..., model_name=...), a "
    "TunerModelConfig(model_path=..., max_model_len=...), or the path of a model, a checkpoint or "
    "a run"
)


@dataclass(frozen=True)
class ModelCandidate:
    """A model to select from.

    Attributes:
        name: Unique.
        given: The user's object, which is returned.
        identity: Distinguishes it from others when a selection is resumed.
        run: The configuration it is run with, and the rows.
        open: Opens the model for rollouts.
        prices: Prices of its tokens, or None.
    """

    name: str
    given: Any
    identity: Mapping[str, Any]
    run: RunPlan
    open: Callable[[RunPlan], AbstractAsyncContextManager[Contender]]
    prices: Prices | None = None


def model_candidates(
    given: Sequence[Any],
    run: RunPlan,
    prepared: Callable[[TunerModelConfig], RunPlan],
    prices: Mapping[str, Prices],
) -> list[ModelCandidate]:
    """The candidates in the order given; `prices` by name take precedence over their own."""
    if isinstance(given, str | Path) or len(given) < 2:
        raise ConfigError(
            f"candidate_models is {given!r:.80}: give a list of two or more models, each of them "
            f"{_KINDS}"
        )
    found = _distinct([_candidate(one, run, prepared) for one in given])
    for name, price in prices.items():
        if not isinstance(price, Sequence) or len(price) != 2:
            raise ConfigError(
                f"prices[{name!r}] is {price!r:.40}: give the prices of a million input tokens and "
                "of a million output tokens, as in (0.5, 1.5)"
            )
    called = [_priced_as(one) for one in found]
    if unknown := prices.keys() - called - {one.name for one in found}:
        raise ConfigError(
            f"prices has {', '.join(sorted(unknown))}, but the candidates are {', '.join(called)}"
        )
    return [
        replace(one, prices=prices.get(one.name, prices.get(name, one.prices)))
        for one, name in zip(found, called, strict=True)
    ]


def _candidate(
    given: Any, run: RunPlan, prepared: Callable[[TunerModelConfig], RunPlan]
) -> ModelCandidate:
    if is_chat_model(given):
        return ModelCandidate(name_of(given), given, _chat_identity(given), run, _asked(given))
    if isinstance(given, RemoteModel):
        given.api_key(f"candidate_models: {given.model_name}")  # before any request
        name, url = given.model_name, without_secrets(given.base_url)
        identity = {"base_url": url, "model_name": name}
        prices = None if given.cost(0, 0) is None else given.prices
        return ModelCandidate(name, given, identity, run, partial(elsewhere, remote=given), prices)
    if isinstance(given, TunerModelConfig):
        of_model = prepared(given)
        said = given.model_dump(mode="json", exclude_unset=True)
        return _weights(given, find_candidate(of_model.config.model.model_path), of_model, said)
    if isinstance(given, str | Path):
        return _weights(given, find_candidate(given), run, {})
    raise ConfigError(f"a candidate is {given!r:.80} ({type(given).__name__}); pass {_KINDS}")


def _weights(
    given: Any, weights: Candidate, run: RunPlan, said: Mapping[str, Any]
) -> ModelCandidate:
    from tuner.runs.record import fingerprint_of_weights

    place = located(weights.path, "candidate_models")
    identity = {
        **said,
        "path": weights.path,
        "weights": None if place is None else fingerprint_of_weights(place),
    }
    served = replace(run, config=with_weights(run.config, weights))
    require_model_libraries(served.config)
    return ModelCandidate(weights.name, given, identity, served, served_here)


def _asked(model: Any) -> Callable[[RunPlan], AbstractAsyncContextManager[Contender]]:
    return partial(elsewhere, remote=None, make_model=partial(observed, model))


def _chat_identity(model: Any) -> dict[str, Any]:
    """A chat model's class, name, and a digest of its settings with plain values."""
    plain = {
        name: value.model_dump(mode="json") if hasattr(value, "model_dump") else value
        for name, value in vars(model).items()
        if not name.endswith(("key", "credential"))
    }
    client = getattr(model, "client", None)
    plain["client"] = str(getattr(client, "base_url", ""))
    # The repr of other values contains their address in memory.
    text = json.dumps(plain, sort_keys=True, default=lambda value: type(value).__name__)
    return {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "model_name": name_of(model),
        "settings": hashlib.sha256(text.encode()).hexdigest(),
    }


def _priced_as(candidate: ModelCandidate) -> str:
    """The name for its price: equal models have one price."""
    named = candidate.identity.get("model_name")
    return candidate.name if named is None else str(named)


def _distinct(candidates: Sequence[ModelCandidate]) -> list[ModelCandidate]:
    """The candidates with unique names and identities; rejects duplicates."""
    found, names, alike = [], Counter[str](), Counter[str]()
    for number, one in enumerate(candidates):
        key = json.dumps(one.identity, sort_keys=True)
        before = [other.given for other in candidates[:number]]
        same = any(one.given is other for other in before)
        if same or (alike[key] and not is_chat_model(one.given)):
            raise ConfigError(f"the candidate {one.name} is given twice: remove one")
        names[one.name] += 1
        alike[key] += 1
        name = one.name
        if names[name] > 1:
            name = str(one.identity.get("path") or f"{name} ({names[name]})")
        found.append(replace(one, name=name, identity={**one.identity, "number": alike[key]}))
    return found


# Results of the candidates: the best one, by how much, and how certain that is.


@dataclass(eq=False)
class CandidateRecord:
    """A candidate with its rollouts so far.

    `penalty` is the reward of a failed rollout (`tuner.on_failure`); None omits failed rollouts.
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
        """Rewards by task number; tasks without one are omitted."""
        found = {t.id.task: self.penalty if t.reward is None else t.reward for t in self.final}
        return {task: reward for task, reward in found.items() if reward is not None}

    @property
    def mean(self) -> float:
        """Mean reward; minus infinity without rewards."""
        return fmean(self.rewards.values()) if self.rewards else float("-inf")

    @property
    def first_error(self) -> str | None:
        """Error of the first failed rollout."""
        failed = (f"{t.outcome.value}: {t.error}" for t in self.final if t.reward is None)
        return next(failed, None)

    def summary(self) -> str:
        """Summary in one line."""
        reward = estimate(list(self.rewards.values()))
        failed = len(self.final) - len(self.rewards)
        return (
            f"{self.candidate.name}: {'no reward' if reward is None else reward.text()} on "
            f"{len(self.final)} tasks" + (f", {failed} failed" if failed else "")
        )

    def against(self, other: CandidateRecord) -> Estimate | None:
        """Difference in reward from another candidate, by task; None without a common task."""
        return paired(self.rewards, other.rewards)

    def worse_than(self, other: CandidateRecord) -> bool:
        """True if the interval of the difference is below 0, or it has no reward."""
        found = self.against(other)
        return not self.rewards or (found is not None and found.high is not None and found.high < 0)

    def standing(self, best: CandidateRecord) -> Standing:
        """Its result compared with the best, which may be this one."""
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
        """Mean of each metric over the rollouts that have a reward and the metric."""
        found = defaultdict[str, list[float]](list)
        for trace in self.final:
            if trace.reward is not None:
                for name, value in trace.metrics.items():
                    found[name].append(value)
        return {name: fmean(values) for name, values in found.items()}

    def _cost(self) -> float | None:
        if self.candidate.prices is None:
            return None
        spent = SearchCost()
        for trace in self.traces:
            spent.add(trace.usage, self.candidate.prices)
        return spent.cost / len(self.final)


class Standing(BaseModel):
    """Result of one candidate.

    Attributes:
        reward: Mean over the tasks; None if every rollout failed.
        against_the_best: Difference in reward from the best, on the tasks where both have one;
            None for the best.
        tied: True if the interval of that difference contains 0.
        rollouts: Fewer than the tasks if it was dropped early.
        failed: Rollouts without a reward, by outcome.
        first_error: Error of the first of them.
        calls: Mean per rollout of the recorded calls.
        averages: Mean of each metric over the rollouts with a reward.
        cost: Mean per rollout with its retries; None without prices.
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
    """All candidates, sorted by number of rows tried, then by mean; stored in `result.json`."""

    tasks: int
    candidates: list[Standing]

    @property
    def tied(self) -> list[Standing]:
        """Candidates that cannot be distinguished from the best."""
        return [one for one in self.candidates if one.tied]

    def doubts(self) -> Iterator[str]:
        """Reasons to doubt the choice of the best, one sentence each."""
        best = self.candidates[0]
        for one in self.tied:
            assert one.against_the_best is not None, "it was compared"
            yield (
                f"{one.name} cannot be distinguished from {best.name} on these tasks: "
                f"{one.against_the_best.text('+.3f')}; more tasks may decide"
            )
        if failed := sum(best.failed.values()):
            yield f"{failed} of {best.rollouts} rollouts of {best.name} have no reward"
        for one in self.candidates:
            if not one.calls:
                yield f"no call of {one.name} was recorded: its cost is unknown"

    def metrics(self) -> dict[str, float]:
        """Metrics of the best, as `select_model()` returns them."""
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
        return table_text(self._table(), width=120)

    def _table(self) -> Table:
        from rich.table import Table

        table = Table(
            title=f"{self.tasks} tasks, best first; seconds, tokens and cost are per task",
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


def standings(tried: Sequence[CandidateRecord], tasks: int) -> Standings:
    """All results, sorted by rounds completed, then by mean; ties keep the order given."""
    order = sorted(tried, key=lambda one: (one.rounds, one.mean), reverse=True)
    return Standings(tasks=tasks, candidates=[one.standing(order[0]) for one in order])


FIRST_ROUND = 16
"""Tasks of the first round after which candidates can be dropped; each further round doubles it."""


@dataclass(eq=False)
class ModelSelection:
    """One selection; each round tries the remaining candidates on further rows."""

    workflow: Callable[..., Any]
    run: RunPlan
    tried: list[CandidateRecord]
    rounds: Sequence[Sequence[int]]
    max_running: int
    directory: RunDirectory
    _monitor: ConsoleMonitor = field(default_factory=lambda: ConsoleMonitor(1), init=False)

    def __post_init__(self) -> None:
        self._trials = CandidateTrials(
            self.run.eval_tasks,
            TraceStore(self.directory.traces),
            self._monitor,
            self.max_running,
            abort_on_failure=self.run.config.tuner.on_failure == "abort",
        )
        self._log = CandidateLog(self.directory.path / "candidates.jsonl", "model")

    def given(self, name: str) -> Any:
        """The user's object for a candidate's name."""
        return next(one.candidate.given for one in self.tried if one.candidate.name == name)

    async def result(self) -> Standings:
        """All results, also written to disk and shown."""
        with self._monitor:
            await self._try_all()
            found = standings(self.tried, len(self.run.eval_tasks[SELECTION]))
            write_atomically(self.directory.result, model_json(found))
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
                    "no rollout of any candidate got a reward. "
                    + "; ".join(f"{one.candidate.name}: {one.first_error}" for one in left)
                )
            if number < len(self.rounds):
                left = [one for one in left if one is best or not self._let_go(one, best)]
            if len(left) == 1:
                return

    def _let_go(self, one: CandidateRecord, best: CandidateRecord) -> bool:
        if not one.worse_than(best):
            return False
        behind = one.against(best)
        why = one.first_error if behind is None else f"{behind.text('+.3f')} against the best"
        self._monitor.say(
            f"{one.candidate.name} is dropped after {len(one.final)} tasks: {why} "
            f"({best.candidate.name})"
        )
        return True

    async def _try(self, one: CandidateRecord, rows: Sequence[int]) -> None:
        """Try a candidate on further rows; skips loading its model if all rollouts are on disk."""
        candidate = one.candidate
        number = self._log.number({"identity": json.dumps(candidate.identity, sort_keys=True)})
        ids = [RolloutId(number, row, 0, SELECTION) for row in rows]
        known = [trace for trace in self._trials.known(SELECTION, number) if trace.id in set(ids)]
        self._monitor.begin(candidate.name, len(ids), step=1)
        if {trace.id for trace in known if trace.final} != set(ids):
            async with candidate.open(candidate.run) as contender:
                known = await self._trials.run(
                    contender,
                    ids,
                    _defaults(candidate),
                    known=known,
                    workflow=_MeasuredWorkflow(self.workflow),
                )
            gc.collect()  # reference cycles would keep the model in memory while the next one loads
        one.traces += known
        one.rounds += 1
        self._monitor.say(one.summary())


@dataclass(frozen=True)
class _MeasuredWorkflow:
    """A workflow whose response includes its metrics, as judges get it."""

    workflow: Callable[..., Any]

    async def __call__(self, model: Any, **given: Any) -> WorkflowOutput:
        began = time.perf_counter()
        try:
            output = await call_workflow(self.workflow, model=model, **given)
        except WrongReturnError as error:  # which the judge is tried on
            error.value = JudgedResponse(response=error.value, metrics={})
            raise
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
    """`{"response": ..., "metrics": ...}`; traces store only the text of the response."""

    def get_text_content(self) -> str:
        """Same method as AgentScope's messages."""
        return response_text(self["response"])


def penalty_of(run: RunPlan) -> float | None:
    """The reward of a failed rollout; None omits failed rollouts."""
    failure = run.config.tuner.on_failure
    return failure.penalize if isinstance(failure, Penalize) else None


def _defaults(candidate: ModelCandidate) -> SamplingDefaults:
    config, given = candidate.run.config, candidate.given
    arguments = config.rollout_args(config.buffer.explorer_input.eval_tasksets[0]).model_dump()
    if isinstance(given, TunerModelConfig) and "temperature" in given.model_fields_set:
        arguments["temperature"] = given.temperature
    return SamplingDefaults(**arguments)


def rounds_of(rows: int, seed: int) -> list[list[int]]:
    """Shuffled rows, cut so that each round doubles the number of rows tried."""
    order = list(range(rows))
    random.Random(seed).shuffle(order)
    ends = [FIRST_ROUND]
    while ends[-1] < rows:
        ends.append(2 * ends[-1])
    return [order[begin:end] for begin, end in pairwise([0, *ends])]
