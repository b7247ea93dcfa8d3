"""`tune_prompt()`: search for the prompt with which a workflow's rollouts are rewarded best."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from tuner.config import RemoteModel
from tuner.errors import ConfigError, FunctionError, MissingDependencyError, pip_install
from tuner.runs.directory import outside_event_loop
from tuner.tasks.datasets import DatasetConfig, Task, load_tasks
from tuner.tasks.functions import check_function, judges_groups, where
from tuner.tasks.loading import require_nothing_loads
from tuner.tasks.settings import PromptTuneConfig, TunerModelConfig
from tuner.tools.trials import COMPONENT, HELD_OUT, SEARCH, WORKFLOW, Prompted, remote_named
from tuner.tune import prepare_evaluation

GEPAS = ("minibatch_size", "perfect_score")
"""Settings that MIPROv2 has no use for."""


def tune_prompt(
    workflow_func: Callable[..., Any] | None = None,
    judge_func: Callable[..., Any] | None = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    init_system_prompt: str | Mapping[str, str] = "",
    config: PromptTuneConfig | None = None,
    *,
    workflow: Callable[..., Any] | None = None,
    model: TunerModelConfig | RemoteModel | None = None,
    auxiliary_models: Mapping[str, TunerModelConfig | RemoteModel | Mapping[str, Any]]
    | None = None,
    project_name: str | None = None,
    experiment_name: str | None = None,
    config_path: Any = None,
    overrides: Sequence[str] = (),
) -> Any:
    """Search for a better system prompt, or for several texts together; no weights change.

    The run directory has every rollout as a trace, every reflection, the candidates and a page. A
    search that was interrupted goes on where it stopped when it is called again with the same
    `experiment_name`. Also works inside a running event loop.

    Args:
        workflow_func: Runs the agent on one task: `(task, system_prompt)` with a model of its own,
            or `(task, model, system_prompt)`; `auxiliary_models` and `logger` are optional. Async
            or plain.
        judge_func: Scores the response, as for `tune()`; its feedback is reflected on. None: the
            workflow gives the reward.
        train_dataset: A `DatasetConfig`, a `datasets.Dataset`, a list of dicts or a path. One half
            is reflected on, the other decides which prompt is better; `total_steps` is how many of
            its rows are taken.
        eval_dataset: Rows that the search never sees, for what was gained; None: nothing is said.
        init_system_prompt: The text to begin with; or texts by the names of components, and the
            workflow gets a dict.
        config: How to search, and how long.
        workflow: AgentScope's name of `workflow_func`.
        model: Who makes the rollouts of a workflow that takes `model`: a model to be served here,
            or a `RemoteModel`. None: the file's, else the tiny model that comes with tuner.
        auxiliary_models, project_name, experiment_name, config_path, overrides: As for `tune()`.

    Returns:
        The best prompt found, a text or a dict as it was given, and metrics: "eval_before",
        "eval_after" and "valset_improvement" (percent) with an evaluation set and
        `compare_performance`; "search_before", "search_after", "rollouts", "failed", "reflections",
        "input_tokens", "output_tokens", "cost" and "seconds".

    Raises:
        FunctionError: A function cannot be called or returned something of the wrong type.
        ConfigError: A setting is unknown, unsupported, of the wrong type or in conflict.
        MissingDependencyError: The optimizer is `mipro`, and the extra `dspy` is not installed.
        DatasetError: A dataset is missing or empty.
        TrainingError: No rollout of the first prompt came to a reward, an engine or the reflecting
            model failed.
    """
    require_nothing_loads("tune_prompt()")
    given = _function(workflow_func, workflow)
    settings = config or PromptTuneConfig()
    if settings.optimizer == "mipro":
        _check_mipro(settings)
    texts = _texts(init_system_prompt)
    check_judges_alone(judge_func)
    own_model = _brings_its_model(given, model)
    proposer = settings.reflection_model or remote_named(settings.lm_model_name)
    proposer.api_key("PromptTuneConfig.reflection_model")
    _check_budget(settings, [proposer, *([model] if isinstance(model, RemoteModel) else [])])
    tasks = {SEARCH: rows_of(train_dataset, "train_dataset")}
    if eval_dataset is not None:
        tasks[HELD_OUT] = rows_of(eval_dataset, "eval_dataset")
    run = prepare_evaluation(
        Prompted(given, init_system_prompt if isinstance(init_system_prompt, str) else texts),
        judge_func,
        eval_dataset=tasks,
        model=model if isinstance(model, TunerModelConfig) else None,
        auxiliary_models=auxiliary_models,
        project_name=project_name,
        experiment_name=experiment_name,
        config_path=config_path,
        overrides=[*overrides, f"tuner.seed={settings.seed}"],
    )
    from tuner.tools.prompt_search import Search

    search = Search(
        run=run,
        workflow=given,
        settings=settings,
        first=texts,
        single=isinstance(init_system_prompt, str),
        model=model if isinstance(model, RemoteModel) else None,
        own_model=own_model,
        temperature=model.temperature
        if isinstance(model, TunerModelConfig) and "temperature" in model.model_fields_set
        else None,
        proposer=proposer,
    )
    return outside_event_loop(search.result)


def _function(
    workflow_func: Callable[..., Any] | None, workflow: Callable[..., Any] | None
) -> Callable[..., Any]:
    if workflow_func is not None and workflow is not None:
        raise FunctionError("workflow and workflow_func are two names of one argument: give one")
    given = workflow_func if workflow is None else workflow
    if given is None:
        raise FunctionError(f"there is no workflow: pass workflow_func, {WORKFLOW}")
    check_function(given, WORKFLOW)
    return given


def _check_mipro(settings: PromptTuneConfig) -> None:
    """Refuse what MIPROv2 cannot do, before anything is asked or run.

    Raises:
        ConfigError: A setting is given that MIPROv2 has no use for.
        MissingDependencyError: DSPy or Optuna is not installed, or in a version that does not work.
    """
    if given := [name for name in GEPAS if name in settings.model_fields_set]:
        raise ConfigError(
            f"PromptTuneConfig.{given[0]} is set, and optimizer='mipro' does not reflect on single "
            "tasks: remove it, or leave optimizer at 'gepa'"
        )
    try:
        import_module("dspy.lm15")
        import_module("optuna")  # MIPROv2 looks for it when rollouts were paid for
    except ImportError as error:
        raise MissingDependencyError(
            f"optimizer='mipro' is DSPy's and needs it and Optuna: {error}; {pip_install('dspy')}, "
            "or leave optimizer at 'gepa'"
        ) from error


def _texts(init: Any) -> dict[str, str]:
    """The texts to begin with, by component.

    Raises:
        ConfigError: One of them is no text, or empty.
    """
    texts = {COMPONENT: init} if isinstance(init, str) else init
    if not isinstance(texts, Mapping) or not texts:
        raise ConfigError(
            f"init_system_prompt is {init!r:.60} ({type(init).__name__}); pass a text, or a dict "
            "of texts by the names of components"
        )
    for name, text in texts.items():
        if not isinstance(name, str) or not isinstance(text, str) or not text.strip():
            of = "" if isinstance(init, str) else f"[{name!r}]"
            raise ConfigError(
                f"init_system_prompt{of} is {text!r:.60}; pass the text that the search begins with"
            )
    return dict(texts)


def _brings_its_model(workflow: Callable[..., Any], model: Any) -> bool:
    """Whether a workflow takes no `model`; raises ConfigError where one is given nevertheless."""
    if model is not None and not isinstance(model, TunerModelConfig | RemoteModel):
        raise ConfigError(
            f"model is {model!r:.80} ({type(model).__name__}); pass a TunerModelConfig, or a "
            "RemoteModel(base_url=..., model_name=...)"
        )
    parameters = inspect.signature(workflow).parameters
    takes = "model" in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    if model is not None and not takes:
        raise ConfigError(
            "model is given, but the workflow takes none: name it `(task, model, system_prompt)`, "
            "or leave `model` out"
        )
    return not takes


def check_judges_alone(judge_func: Callable[..., Any] | None) -> None:
    """
    Raises:
        FunctionError: A judge wants groups, and candidates are compared.
    """
    if judge_func is not None and judges_groups(judge_func):
        raise FunctionError(
            f"{where(judge_func)} judges groups, and what it gives depends on who else is in one: "
            "a search compares rollouts that are made apart, so give a judge that takes `response`"
        )


def rows_of(dataset: Any, role: str) -> list[Task]:
    """The rows of a dataset, of which `total_steps` says how many are taken."""
    if dataset is None:
        raise ConfigError(f"there are no tasks: pass {role}")
    fields: frozenset[str] = getattr(dataset, "model_fields_set", frozenset())
    if "total_epochs" in fields:
        raise ConfigError(
            f"{role}: total_epochs is set, and nothing is gone through in epochs here; remove it"
        )
    limit = dataset.total_steps if "total_steps" in fields else None
    if isinstance(dataset, DatasetConfig) or not fields:
        return list(load_tasks(dataset, role=role)[:limit])
    # AgentScope's own class of this name.
    same = DatasetConfig(path=dataset.path, name=dataset.name, split=dataset.split)
    return list(load_tasks(same, role=role)[:limit])


def _check_budget(settings: PromptTuneConfig, models: Sequence[RemoteModel]) -> None:
    """
    Raises:
        ConfigError: Nothing says how long the search is, or nothing says what it costs.
    """
    limits = (settings.max_rollouts, settings.max_tokens, settings.max_cost)
    if settings.optimization_level is None and limits == (None, None, None):
        raise ConfigError(
            "PromptTuneConfig.optimization_level is None, and nothing else says how long the "
            "search is: set max_rollouts, max_tokens or max_cost"
        )
    unpriced = [model.model_name for model in models if not any(model.prices)]
    if settings.max_cost is not None and unpriced:
        raise ConfigError(
            f"PromptTuneConfig.max_cost is set, and {unpriced[0]} has no prices: set input_price "
            "and output_price of its RemoteModel, money for a million tokens"
        )
