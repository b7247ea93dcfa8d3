"""`tune()`: check the functions, resolve the configuration, read the data, run a backend."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from tuner.config import RemoteModel, RunConfig
from tuner.config.keys import require_model_libraries
from tuner.config.load import Layers, checked, read_layers
from tuner.errors import ConfigError, DatasetError, FunctionError, system_faults
from tuner.runs.directory import outside_event_loop
from tuner.tasks.datasets import Task
from tuner.tasks.functions import (
    OwnFrames,
    check_judge_function,
    check_settings,
    check_workflow_function,
    judges_groups,
    names,
    where,
)
from tuner.tasks.loading import require_nothing_loads, without_collection
from tuner.tasks.selection import evaluation_tasks, training_tasks
from tuner.tasks.settings import (
    AlgorithmConfig,
    TuneArguments,
    TunerModelConfig,
    location,
    settings_of,
)

if TYPE_CHECKING:
    from tuner.runs.directory import RunDirectory
    from tuner.runs.environment import Parts
    from tuner.runs.history import History
    from tuner.runs.result import TuneResult

logger = logging.getLogger("tuner")

_PACKAGE = Path(__file__).resolve().parent
# Inside the package in an installed wheel, next to it in a checkout.
TINY_MODEL = (_PACKAGE if (_PACKAGE / "models").is_dir() else _PACKAGE.parent) / "models/tiny_math"


@dataclass(frozen=True)
class RunPlan:
    """Everything a backend needs, checked.

    Attributes:
        config: The effective configuration.
        workflow, judge: The user's functions; the workflow is None if no rollouts are made.
        train_tasks: Tasks, or with `mode: train` rows of recorded data.
        eval_tasks: Rows of each evaluation set, by its name in the configuration.
        history: With `tuner.history`, the recorded rollouts that replace `train_tasks`.
    """

    config: RunConfig
    workflow: Callable[..., Any] | None
    judge: Callable[..., Any] | None
    train_tasks: Sequence[Task]
    eval_tasks: dict[str, Sequence[Task]]
    history: History | None = None


@OwnFrames()
@system_faults()
def tune(
    workflow_func: Callable[..., Any] | None = None,
    judge_func: Callable[..., Any] | None = None,
    train_dataset: Any = None,
    *,
    environment: Any = None,
    eval_dataset: Any = None,
    model: TunerModelConfig | None = None,
    auxiliary_models: Mapping[str, TunerModelConfig | RemoteModel | Mapping[str, Any]]
    | None = None,
    algorithm: AlgorithmConfig | None = None,
    project_name: str | None = None,
    experiment_name: str | None = None,
    monitor_type: str | Sequence[str] | None = None,
    config_path: str | Path | None = None,
    backend: str | None = None,
    overrides: Sequence[str] = (),
) -> TuneResult:
    """Train the model inside an agent.

    Arguments take precedence over the file, and `overrides` over both; a field that is not set
    changes nothing. Also works inside a running event loop, as in a notebook.

    Args:
        workflow_func: Runs the agent on one task: `(task, model, auxiliary_models, logger)`, the
            last two optional; returns a `WorkflowOutput`, or a plain value: a text, a number, a
            message or a dict. May be None only if recorded data is trained (sft, dpo,
            `tuner.history`), and then serves evaluations.
        judge_func: Scores the response: `(task, response, auxiliary_models, logger)`, the last two
            optional; returns a `JudgeOutput` or a number. None: the workflow gives the reward.
        train_dataset: A `Dataset`, a `datasets.Dataset`, a list of dicts or a path. None: the
            file's `buffer.explorer_input.taskset`, or for recorded data its
            `buffer.trainer_input.experience_buffer`. A list of `tuner.traces.Trace` is trained on
            without new rollouts, as with `tuner.history`.
        environment: Replaces these three: a `tuner.environments.Environment`, or an object of a
            supported library. A dataset passed here or named by the file takes precedence over the
            environment's. It is closed when the run ends, also after an error.
        eval_dataset: One dataset or a dict of them by name; replaces the file's. One dataset is
            named "eval", or like the only one in the file.
        model: The model to train. None: the file's, else the tiny model included with tuner.
        auxiliary_models: Frozen models by name: a `TunerModelConfig` to serve here, or a
            `RemoteModel` (or its fields as a dict) behind an OpenAI-compatible URL.
        algorithm: Settings of the algorithm.
        project_name: Folder of related runs.
        experiment_name: Name of the run; an interrupted run of this name is resumed.
        monitor_type: tensorboard, wandb, mlflow, swanlab, or several.
        config_path: YAML file with Trinity-RFT's keys.
        backend: "auto", "local" or "trinity".
        overrides: `key=value` strings with the file's keys, as on the command line.

    Returns:
        Rewards before and after, counts of events, and the paths of the results.

    Raises:
        FunctionError: A function cannot be called, or returned the wrong type.
        ConfigError: A setting is unknown, unsupported, of the wrong type or in conflict.
        DatasetError: A dataset is missing, empty or smaller than one batch.
        TrainingError: Training failed; the message is the diagnosis.
    """
    require_nothing_loads()
    given: TuneArguments = {
        "environment": environment,
        "eval_dataset": eval_dataset,
        "model": model,
        "auxiliary_models": auxiliary_models,
        "algorithm": algorithm,
        "project_name": project_name,
        "experiment_name": experiment_name,
        "monitor_type": monitor_type,
        "config_path": config_path,
        "backend": backend,
        "overrides": overrides,
    }
    with _parts(workflow_func, judge_func, train_dataset, given).closing() as parts:
        return _tuned(parts)


def _parts(workflow: Any, judge: Any, train_dataset: Any, given: TuneArguments) -> Parts:
    from tuner.runs.environment import parts_of

    return parts_of(workflow, judge, train_dataset, given)


def _tuned(parts: Parts) -> TuneResult:
    layers = _resolved(parts)
    if layers.backend == "trinity":
        from tuner.trinity.launch import run_trinity

        return outside_event_loop(
            lambda: run_trinity(
                layers,
                workflow=parts.workflow,
                judge=parts.judge,
                train_dataset=parts.train_dataset,
                eval_dataset=parts.given.get("eval_dataset"),
                report=leave_report,
            )
        )
    run = _prepared(layers, parts)
    with without_collection():
        from tuner.loop import run_local

    return outside_event_loop(lambda: run_local(**vars(run), report=leave_report))


def leave_report(directory: RunDirectory, stopped: str | None) -> Path | None:
    """Write `report.html` after the run has ended; errors are only logged.

    Args:
        directory: The run directory.
        stopped: Why the run stopped early, or None.
    """
    from tuner.tools.viewer import write_report

    try:
        return write_report(directory.path, stopped=stopped)
    except Exception as error:
        logger.warning(
            "report.html was not written: %s: %s; `tuner view %s --report` tries again",
            type(error).__name__,
            error,
            directory.path,
        )
        return None


@system_faults()
def prepare(
    workflow_func: Callable[..., Any] | None = None,
    judge_func: Callable[..., Any] | None = None,
    train_dataset: Any = None,
    **given: Unpack[TuneArguments],
) -> RunPlan:
    """Do everything that `tune()` does before the local backend starts: check, resolve, read.

    Takes and raises the same as `tune()`; a configuration for another backend is a ConfigError.
    """
    parts = _parts(workflow_func, judge_func, train_dataset, given)
    with parts.closing(unless_well=True):
        layers = _resolved(parts)
        if layers.backend == "trinity":
            raise ConfigError(
                "this configuration is for Trinity-RFT on Ray, and prepare() is for the local "
                "backend: set tuner.backend to local, or use `tuner check`, which supports both"
            )
        return _prepared(layers, parts)


@system_faults()
def prepare_evaluation(
    workflow_func: Callable[..., Any] | None = None,
    judge_func: Callable[..., Any] | None = None,
    **given: Unpack[TuneArguments],
) -> RunPlan:
    """Prepare an evaluation, like `prepare()` without training data.

    Raises DatasetError if there is nothing to evaluate on.
    """
    parts = _parts(workflow_func, judge_func, None, given)
    with parts.closing(unless_well=True):
        return evaluation_of(parts)


def evaluation_of(parts: Parts) -> RunPlan:
    """Prepare an evaluation from parts; see `prepare_evaluation()`."""
    layers = _resolved(replace(parts, train_dataset=None))
    if layers.backend == "trinity":
        raise ConfigError(
            "this configuration is for Trinity-RFT on Ray, and evaluations run on the local "
            "backend: set tuner.backend to local, or evaluate on Ray with `mode: bench`"
        )
    config = with_default_model(checked(layers))
    require_model_libraries(config)
    if parts.workflow is None:
        raise FunctionError("no workflow to evaluate with: pass workflow_func")
    check_settings(parts.workflow, config)
    _check_feedback(config, parts.workflow, parts.judge)
    tasks = evaluation_tasks(config, parts.given.get("eval_dataset"))
    if not tasks:
        raise DatasetError(
            "nothing to evaluate on: pass eval_dataset, or set buffer.explorer_input.eval_tasksets"
        )
    return RunPlan(config, parts.workflow, parts.judge, [], tasks)


def _resolved(parts: Parts) -> Layers:
    """Check the functions, and combine arguments, file and overrides into a configuration."""
    train, given = parts.train_dataset, parts.given
    if parts.workflow is not None:
        check_workflow_function(parts.workflow)
    if parts.judge is not None:
        check_judge_function(parts.judge)
    # If the file names an environment, its judge is not stored as well.
    named = parts.environment is not None and parts.environment.named
    return read_layers(
        given.get("config_path"),
        settings_of(parts.workflow, None if named else parts.judge, train, **given),
        given.get("overrides", ()),
        train=None if train is None else location(train),
    )


def _prepared(layers: Layers, parts: Parts) -> RunPlan:
    workflow, judge, train_dataset = parts.workflow, parts.judge, parts.train_dataset
    config = with_default_model(checked(layers))
    require_model_libraries(config)
    _check_functions_are_there(config, workflow, judge, brought=parts.environment is not None)
    check_settings(workflow, config)
    _check_feedback(config, workflow, judge)
    history, section = None, config.tuner.history
    if section is None:
        train_tasks = training_tasks(config, train_dataset)
    else:
        from tuner.runs.history import read_history

        train_tasks, history = [], read_history(section, train_dataset)
    tasks = evaluation_tasks(config, parts.given.get("eval_dataset"))
    return RunPlan(config, workflow, judge, train_tasks, tasks, history)


def _check_functions_are_there(
    config: RunConfig,
    workflow: Callable[..., Any] | None,
    judge: Callable[..., Any] | None,
    *,
    brought: bool,
) -> None:
    """Raise FunctionError if a workflow is needed but missing, or there are two.

    `brought` is True if an environment provides the functions.
    """
    named = config.tuner.environment
    if workflow is not None and named is not None and config.tuner.agent is None and not brought:
        raise FunctionError(
            "workflow_func is given, but the file's tuner.environment has another workflow: omit "
            "workflow_func, or set tuner.environment to null"
        )
    if workflow is not None:
        return
    if config.mode != "train":
        raise FunctionError(
            f"no workflow is given, but algorithm.algorithm_type {config.algorithm.algorithm_type} "
            "trains on its rollouts: pass workflow_func, or set algorithm_type to sft or dpo to "
            "train on recorded data"
        )
    if config.buffer.explorer_input.eval_tasksets:
        raise FunctionError(
            "there are evaluation sets (eval_dataset, buffer.explorer_input.eval_tasksets) but no "
            "workflow to evaluate with: pass workflow_func, or remove them"
        )
    if judge is not None:
        raise FunctionError("a judge is given without a workflow to judge: pass workflow_func too")


def _check_feedback(
    config: RunConfig, workflow: Callable[..., Any] | None, judge: Callable[..., Any] | None
) -> None:
    """Raise FunctionError if `tuner.feedback_attempts` is set but not usable."""
    attempts = config.tuner.feedback_attempts
    if not attempts or workflow is None:
        return
    found = f"tuner.feedback_attempts is {attempts}"
    if judge is None or judges_groups(judge):
        alone = "there is no judge" if judge is None else "the judge takes whole groups"
        raise FunctionError(
            f"{found}, but {alone}: pass a judge of single responses that returns "
            "JudgeOutput(feedback=...), or remove the setting"
        )
    if not names(workflow, "feedback"):
        raise FunctionError(
            f"{found}, but {where(workflow)} takes no feedback: add the parameter `feedback` (None "
            "in the first attempt), or remove the setting"
        )


def with_default_model(config: RunConfig) -> RunConfig:
    """The configuration, with tuner's tiny model if it names none.

    Raises ConfigError if the tiny model is missing.
    """
    if config.model.model_path:
        return config
    if not (TINY_MODEL / "config.json").is_file():
        raise ConfigError(
            "no model is named: set model.model_path (TunerModelConfig.model_path) to the folder "
            "or Hub name of a causal language model"
        )
    model = config.model.model_copy(update={"model_path": str(TINY_MODEL)})
    return config.model_copy(update={"model": model})
