"""What was given to `tune()`, as settings of the configuration file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from tuner.algorithm import AlgorithmConfig
from tuner.config import RemoteModel, load_config
from tuner.config.backend import chosen_backend, trinity_mode
from tuner.data.dataset import DatasetConfig
from tuner.errors import ConfigError
from tuner.functions.calling import check_judge_function, check_workflow_function, unwrapped
from tuner.functions.loading import FILE_MODULE
from tuner.model import TunerModelConfig

# What AgentScope's tune() starts from when it gets no file; the rest is in the schema.
WITHOUT_FILE = {
    "explorer.runner_per_model": 16,
    "explorer.max_timeout": 3600,
    "trainer.save_interval": 100,
}


class Given(TypedDict, total=False):
    """The arguments of `tune()` that have names; it says what each is."""

    eval_dataset: Any
    model: TunerModelConfig | None
    auxiliary_models: Mapping[str, TunerModelConfig | RemoteModel | Mapping[str, Any]] | None
    algorithm: AlgorithmConfig | None
    project_name: str | None
    experiment_name: str | None
    monitor_type: str | Sequence[str] | None
    config_path: str | Path | None
    backend: str | None
    overrides: Sequence[str]


def settings_of(
    workflow_func: Callable[..., Any] | None,
    judge_func: Callable[..., Any] | None = None,
    train_dataset: Any = None,
    **given: Unpack[Given],
) -> dict[str, Any]:
    """What was given to `tune()`, as nested settings of the file; the functions are checked.

    Raises:
        FunctionError: A function cannot be called with what it would get.
        ConfigError: An object has a setting that is of no use.
    """
    if workflow_func is not None:
        check_workflow_function(workflow_func)
    if judge_func is not None:
        check_judge_function(judge_func)
    config_path, overrides = given.get("config_path"), given.get("overrides", ())
    algorithm, model = given.get("algorithm"), given.get("model")
    monitor = given.get("monitor_type")
    settings: dict[str, Any] = {} if config_path is not None else dict(WITHOUT_FILE)
    if algorithm is not None:
        settings |= algorithm.settings()
    if model is not None:
        settings |= model.policy_settings()
    settings |= _eval_settings(given.get("eval_dataset"))
    settings |= _auxiliary_settings(given.get("auxiliary_models") or {})
    named = {
        "project": given.get("project_name"),
        "name": given.get("experiment_name"),
        "monitor.monitor_type": [monitor] if isinstance(monitor, str) else monitor,
        "tuner.backend": given.get("backend"),
    }
    settings |= {key: value for key, value in named.items() if value is not None}
    settings["tuner.workflow"] = None if workflow_func is None else _reference(workflow_func)
    settings["tuner.judge"] = None if judge_func is None else _reference(judge_func)
    if train_dataset is not None:
        # Where a dataset belongs depends on the algorithm, which the file or an override may name.
        so_far = _nested(settings)
        if chosen_backend(config_path, so_far, overrides) == "local":
            mode: str = load_config(config_path, settings=so_far, overrides=overrides).mode
        else:
            mode = trinity_mode(config_path, so_far, overrides)
        settings |= _train_settings(train_dataset, source_key(mode))
    return _nested(settings)


def source_key(mode: str) -> str:
    """Where the configuration says what is trained on."""
    if mode == "train":
        return "buffer.trainer_input.experience_buffer"
    return "buffer.explorer_input.taskset"


def _train_settings(dataset: Any, section: str) -> dict[str, Any]:
    settings = {f"{section}.{key}": value for key, value in _location(dataset).items()}
    fields: frozenset[str] = getattr(dataset, "model_fields_set", frozenset())
    if "total_epochs" in fields:
        # Steps from the file would win over these epochs.
        settings |= {"buffer.total_epochs": dataset.total_epochs, "buffer.total_steps": None}
    if "total_steps" in fields:
        settings["buffer.total_steps"] = dataset.total_steps
    return settings


def _eval_settings(dataset: Any) -> dict[str, Any]:
    if dataset is None:
        return {}
    named = dataset if is_by_name(dataset) else {"": dataset}
    for one in named.values():
        for field in ("total_epochs", "total_steps"):
            if field in getattr(one, "model_fields_set", frozenset()):
                raise ConfigError(
                    f"eval_dataset: {field} is set, but an evaluation goes through its rows once; "
                    "remove it"
                )
    return {
        "buffer.explorer_input.eval_tasksets": {name: _location(one) for name, one in named.items()}
    }


def _location(dataset: Any) -> dict[str, Any]:
    """Where a dataset is, as settings of a taskset; nowhere for rows in memory."""
    if isinstance(dataset, (str, Path)):
        dataset = DatasetConfig(path=str(dataset))
    if hasattr(dataset, "path") and hasattr(dataset, "split"):
        return {"path": dataset.path, "split": dataset.split, "subset_name": dataset.name}
    return {"path": None, "subset_name": None}


def is_by_name(dataset: Any) -> bool:
    return isinstance(dataset, dict)


def _auxiliary_settings(models: Mapping[str, Any]) -> dict[str, Any]:
    served: dict[str, Any] = {}
    remote: dict[str, Any] = {}
    for name, model in models.items():
        if isinstance(model, TunerModelConfig):
            served[name] = model.auxiliary_settings()
        elif isinstance(model, RemoteModel):
            remote[name] = model.model_dump()
        elif isinstance(model, Mapping):
            remote[name] = dict(model)
        else:
            raise ConfigError(
                f"auxiliary_models[{name!r}] is {model!r:.80} ({type(model).__name__}); pass a "
                "TunerModelConfig, or a RemoteModel(base_url=..., model_name=...)"
            )
    settings: dict[str, Any] = {}
    if served:
        settings["explorer.auxiliary_models"] = served
    if remote:
        settings["tuner.auxiliary_models"] = remote
    return settings


def _reference(func: Callable[..., Any]) -> str | None:
    """How a configuration names a function, or None for one that a file cannot name."""
    inner = unwrapped(func)
    name = getattr(inner, "__qualname__", "")
    if inner is not func or not name.isidentifier():
        return None
    if inner.__module__ != "__main__" and not inner.__module__.startswith(FILE_MODULE):
        return f"{inner.__module__}:{name}"
    file = inspect.getsourcefile(inner)
    return f"{file}:{name}" if file is not None and Path(file).suffix == ".py" else None


def _nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in dotted.items():
        node = tree
        *sections, last = key.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return tree
