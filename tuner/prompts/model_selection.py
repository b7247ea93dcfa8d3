"""`select_model()`: try models on the same tasks, and say which is best and how sure that is."""

from __future__ import annotations

import gc
import inspect
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from tuner.chat_models.observed import session_of
from tuner.config import RemoteModel
from tuner.config.schema import Penalize
from tuner.data.dataset import Task
from tuner.errors import ConfigError, TrainingError
from tuner.functions.calling import (
    JUDGE,
    as_judge_output,
    call_function,
    call_workflow,
    check_function,
    check_workflow_function,
)
from tuner.functions.loading import require_nothing_loads
from tuner.functions.outputs import JudgeOutput, WorkflowOutput, response_text
from tuner.gateway import SamplingDefaults
from tuner.loop import deterministic_torch
from tuner.prompts.model_candidates import ModelCandidate, Prices, model_candidates
from tuner.prompts.standings import Standings, Tried, standings
from tuner.prompts.trials import CandidateLog
from tuner.prompts.tuning import check_judges_alone, rows_of
from tuner.rollout import Rollouts
from tuner.rollout.groups import Wanted
from tuner.run.console import ConsoleMonitor
from tuner.run.directory import RunDirectory, write_atomically
from tuner.run.record import open_directory
from tuner.settings import TunerModelConfig
from tuner.traces import RolloutId, Trace, TraceStore, Usage
from tuner.tune import Run, prepare_evaluation

SPLIT = "selection"
FIRST_ROUND = 16
"""Tasks of the first round where hopeless candidates are let go; each further one has twice as
many."""


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

    Candidates are tried one after the other; one that is served here is loaded when its turn comes
    and let go after it. The run directory has every rollout as a trace, for `tuner view`, and in
    `result.json` where every candidate stands. A selection that was interrupted goes on where it
    stopped when it is called again with the same `experiment_name`, also with further candidates.

    Args:
        workflow_func: Runs the agent on one task, as for `tune()`. It gets the candidate: a chat
            model of AgentScope as an object of its own class, any other as in `tune()`.
        judge_func: Scores `{"response": ..., "metrics": {...}}`: the workflow's response, and its
            metrics with "execution_time" (seconds), "input_tokens", "output_tokens" and
            "total_tokens" of the candidate. Otherwise as for `tune()`; `task` may be called
            `_task`. None: the workflow gives the reward.
        train_dataset: A `DatasetConfig`, a `datasets.Dataset`, a list of dicts or a path;
            `total_steps` is how many of its rows are taken.
        candidate_models: Two or more, each a chat model of AgentScope, a `RemoteModel`, a
            `TunerModelConfig`, or the path of a model, a checkpoint or a run.
        max_threads: Rollouts at the same time.
        early_stopping: Try all on some tasks, then those that are left on twice as many, and so
            on. One whose reward is lower than the best's, with the whole interval of the
            difference, is let go.
        prices: Of models without prices of their own: for a million tokens read, and written, by
            `model_name`.
        auxiliary_models, project_name, experiment_name, config_path, overrides: As for `tune()`.

    Returns:
        The best candidate as it was given, and its metrics: the mean of each of the judge's and
        workflow's as "<name>_avg", and so "execution_time_avg", "input_tokens_avg",
        "output_tokens_avg", "total_tokens_avg"; "reward", and its interval "reward_low" and
        "reward_high"; "tied" (other candidates that these tasks cannot tell from it);
        "rollouts", "failed" and "failed_<outcome>"; "cost_avg" of a task where prices are known.

    Raises:
        FunctionError: A function cannot be called or returned something of the wrong type.
        ConfigError: A setting is unknown, of the wrong type or in conflict; there are fewer than
            two candidates.
        DatasetError: The dataset is missing or empty.
        TunerError: A candidate's path is nothing that can be loaded.
        TrainingError: No rollout of any candidate came to a reward, or an engine failed.
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
        eval_dataset={SPLIT: tasks},
        auxiliary_models=auxiliary_models,
        project_name=project_name,
        experiment_name=experiment_name,
        config_path=config_path,
        overrides=overrides,
    )
    run = prepare()
    candidates = model_candidates(
        candidate_models, run, lambda model: prepare(model=model), prices or {}
    )
    with (
        open_directory(run.config, run.eval_tasks) as directory,
        deterministic_torch(run.config.tuner.deterministic),
    ):
        rounds = _rounds(len(tasks), run.config.tuner.seed) if early_stopping else None
        selection = Selection(
            workflow=workflow_func,
            run=run,
            tried=[Tried(one, _penalty(run)) for one in candidates],
            rounds=rounds or [range(len(tasks))],
            max_running=1 if run.config.tuner.deterministic else max_threads,
            directory=directory,
        )
        found = await selection.result()
    return selection.given(found.candidates[0].name), found.metrics()


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
            found = standings(self.tried, len(self.run.eval_tasks[SPLIT]))
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
        candidate, tasks = one.candidate, self.run.eval_tasks[SPLIT]
        number = self._log.number({"identity": json.dumps(candidate.identity, sort_keys=True)})
        wanted = {RolloutId(number, row, 0, SPLIT): tasks[row] for row in rows}
        known = [trace for trace in self._store.read(SPLIT, number) if trace.id in wanted]
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


def _judge(given: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """A judge as `tune()` takes it, of one whose task may be called `_task`.

    Raises:
        FunctionError: It has a `_task`, and its other parameters do not fit.
    """
    parameters = inspect.signature(given).parameters if callable(given) else {}
    if given is None or "_task" not in parameters or "task" in parameters:
        return given
    check_function(given, replace(JUDGE, required=("_task", "response")))

    async def judge(task: Task, response: Any, auxiliary_models: Any, logger: Any) -> JudgeOutput:
        arguments = {
            "_task": task,
            "response": response,
            "auxiliary_models": auxiliary_models,
            "logger": logger,
        }
        return as_judge_output(await call_function(given, arguments), given)

    return judge


def _penalty(run: Run) -> float | None:
    failure = run.config.tuner.on_failure
    return failure.penalize if isinstance(failure, Penalize) else None


def _defaults(candidate: ModelCandidate) -> SamplingDefaults:
    config, given = candidate.run.config, candidate.given
    arguments = config.rollout_args(config.buffer.explorer_input.eval_tasksets[0]).model_dump()
    if isinstance(given, TunerModelConfig) and "temperature" in given.model_fields_set:
        arguments["temperature"] = given.temperature
    return SamplingDefaults(**arguments)


def _rounds(rows: int, seed: int) -> list[list[int]]:
    """Rows in any order, cut so that each round doubles those that have been tried."""
    order = list(range(rows))
    random.Random(seed).shuffle(order)
    ends = [FIRST_ROUND]
    while ends[-1] < rows:
        ends.append(2 * ends[-1])
    return [order[begin:end] for begin, end in pairwise([0, *ends])]
