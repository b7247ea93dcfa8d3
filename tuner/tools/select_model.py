"""`select_model()`: try models on the same tasks, and say which is best and how sure that is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tuner.config import RemoteModel
from tuner.errors import ConfigError
from tuner.tasks.datasets import Task
from tuner.tasks.functions import (
    JUDGE,
    JudgeOutput,
    as_judge_output,
    call_function,
    check_function,
    check_workflow_function,
)
from tuner.tasks.loading import require_nothing_loads
from tuner.tasks.settings import TunerModelConfig
from tuner.tools.trials import SELECTION, Prices
from tuner.tools.tune_prompt import check_judges_alone, rows_of
from tuner.tune import prepare_evaluation


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
        eval_dataset={SELECTION: tasks},
        auxiliary_models=auxiliary_models,
        project_name=project_name,
        experiment_name=experiment_name,
        config_path=config_path,
        overrides=overrides,
    )
    run = prepare()
    # These import PyTorch: only once the rest is in order.
    from tuner.loop import deterministic_torch
    from tuner.runs.record import open_directory
    from tuner.tools.model_selection import (
        Selection,
        Tried,
        model_candidates,
        penalty_of,
        rounds_of,
    )

    candidates = model_candidates(
        candidate_models, run, lambda model: prepare(model=model), prices or {}
    )
    with (
        open_directory(run.config, run.eval_tasks) as directory,
        deterministic_torch(run.config.tuner.deterministic),
    ):
        rounds = rounds_of(len(tasks), run.config.tuner.seed) if early_stopping else None
        selection = Selection(
            workflow=workflow_func,
            run=run,
            tried=[Tried(one, penalty_of(run)) for one in candidates],
            rounds=rounds or [range(len(tasks))],
            max_running=1 if run.config.tuner.deterministic else max_threads,
            directory=directory,
        )
        found = await selection.result()
    return selection.given(found.candidates[0].name), found.metrics()


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
