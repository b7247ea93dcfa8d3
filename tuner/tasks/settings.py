"""The Python settings objects of `tune()`, and the conversion of its arguments to configuration
keys."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from pydantic import BaseModel, Field

from tuner.config import RemoteModel
from tuner.errors import ConfigError
from tuner.tasks.datasets import DatasetConfig, PublicSettings
from tuner.tasks.functions import unwrapped, uses_agentscope
from tuner.tasks.loading import FILE_MODULE
from tuner.traces import Trace

# Field -> key in the configuration.
_POLICY_KEYS = {
    "model_path": "model.model_path",
    "max_model_len": "model.max_model_len",
    "temperature": "model.temperature",
    "top_p": "model.top_p",
    "max_tokens": "model.max_response_tokens",
    "enable_thinking": "model.enable_thinking",
    "tensor_parallel_size": "explorer.rollout_model.tensor_parallel_size",
    "inference_engine_num": "explorer.rollout_model.engine_num",
    "tool_call_parser": "explorer.rollout_model.tool_call_parser",
    "reasoning_parser": "explorer.rollout_model.reasoning_parser",
}
_AUXILIARY_NAMES = {"max_tokens": "max_response_tokens", "inference_engine_num": "engine_num"}
_ALGORITHM_KEYS = {
    "algorithm_type": "algorithm.algorithm_type",
    "learning_rate": "algorithm.optimizer.lr",
    "group_size": "algorithm.repeat_times",
    "batch_size": "buffer.batch_size",
    "save_interval_steps": "trainer.save_interval",
    "eval_interval_steps": "explorer.eval_interval",
}
# Defaults of AgentScope's tune() without a file, if they differ from the schema's or Trinity-RFT's.
WITHOUT_FILE = {
    "explorer.runner_per_model": "auto",
    "explorer.max_timeout": 3600,
    "trainer.save_interval": 100,
}


class TunerModelConfig(PublicSettings):
    """A model: the policy or an auxiliary model. Only fields that are set override the file."""

    model_path: str = Field(
        min_length=1, description="Folder, Hub name, GGUF file or `package:NAME` of the model."
    )
    max_model_len: int = Field(ge=2, description="Maximum tokens of prompt and answer together.")
    temperature: float = Field(default=1.0, ge=0, description="Sampling temperature.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus mass.")
    max_tokens: int = Field(default=8192, ge=1, description="Maximum tokens of an answer.")
    enable_thinking: bool | None = Field(
        default=None,
        description="Passed to the chat template; None leaves the choice to the template.",
    )
    tensor_parallel_size: int = Field(default=1, description="1 on one machine.")
    inference_engine_num: int = Field(default=1, description="1 on one machine.")
    tool_call_parser: str = Field(default="hermes", description="Reads tool calls.")
    reasoning_parser: str = Field(default="deepseek_r1", description="Reads `<think>`.")
    tinker_config: Any = Field(
        default=None,
        description="A TinkerConfig (ours, AgentScope's or Trinity-RFT's) or an equivalent "
        "mapping: Tinker's service samples and trains (backend trinity).",
    )

    def policy_settings(self) -> dict[str, Any]:
        """Fields that were set for the trained model, by dotted key.

        Raises:
            ConfigError: `tinker_config` has the wrong type.
        """
        given = {_POLICY_KEYS[name]: getattr(self, name) for name in self._given()}
        if self.tinker_config is not None:
            tinker = {**_as_mapping(self.tinker_config), "enable": True}
            given |= {f"model.tinker.{name}": value for name, value in tinker.items()}
        return given

    def auxiliary_settings(self) -> dict[str, Any]:
        """Fields that were set, by key of `explorer.auxiliary_models[]`.

        Raises:
            ConfigError: `tinker_config` was set.
        """
        if self.tinker_config is not None:
            raise ConfigError(
                "TunerModelConfig.tinker_config is set for an auxiliary model: Tinker also "
                "samples auxiliary models if it trains the policy; remove it here"
            )
        return {_AUXILIARY_NAMES.get(name, name): getattr(self, name) for name in self._given()}

    def _given(self) -> list[str]:
        return [name for name in _POLICY_KEYS if name in self.model_fields_set]


class TinkerConfig(PublicSettings):
    """`TunerModelConfig.tinker_config`: the adapter trained by Tinker's service, as in
    AgentScope."""

    rank: int = Field(default=16, ge=1, description="Rank of the adapter.")
    seed: int | None = Field(default=None, description="Seed of initial weights; None: random.")
    train_mlp: bool = Field(default=True, description="Whether to adapt the MLP layers.")
    train_attn: bool = Field(default=True, description="Whether to adapt the attention layers.")
    train_unembed: bool = Field(default=True, description="Whether to adapt the unembedding.")
    base_url: str | None = Field(default=None, description="URL of the service; None: Tinker's.")


def _as_mapping(given: Any) -> dict[str, Any]:
    if isinstance(given, BaseModel):
        return given.model_dump()
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        return dataclasses.asdict(given)
    if isinstance(given, Mapping):
        return dict(given)
    raise ConfigError(
        f"TunerModelConfig.tinker_config is {given!r:.60}: give a TinkerConfig, or a "
        "mapping with rank, seed, train_mlp, train_attn, train_unembed, base_url"
    )


class AlgorithmConfig(PublicSettings):
    """How to train. Only fields that are set override the file."""

    algorithm_type: str = Field(default="multi_step_grpo", description="The algorithm.")
    learning_rate: float = Field(default=1e-6, gt=0, description="Learning rate.")
    group_size: int = Field(default=8, ge=1, description="Rollouts per task in a step.")
    batch_size: int = Field(default=32, ge=1, description="Tasks per step.")
    save_interval_steps: int = Field(default=100, ge=0, description="Steps between checkpoints.")
    eval_interval_steps: int = Field(default=100, ge=0, description="Steps between evaluations.")

    def settings(self) -> dict[str, Any]:
        """Fields that were set, by dotted key."""
        return {
            key: getattr(self, name)
            for name, key in _ALGORITHM_KEYS.items()
            if name in self.model_fields_set
        }


class PromptTuneConfig(PublicSettings):
    """Settings of a prompt search; the first six are AgentScope's. A file cannot set them."""

    lm_model_name: str = Field(
        default="dashscope/qwen-plus",
        min_length=1,
        description="Model that proposes prompts: `provider/model`; its key is in the provider's "
        "environment variable ([providers](../../prompts.md#who-reflects)).",
    )
    optimization_level: Literal["light", "medium", "heavy"] | None = Field(
        default="light",
        description="Number of rollouts of the search, unless limited by a `max_` field.",
    )
    eval_display_progress: bool = Field(default=True, description="Show progress.")
    eval_display_table: int = Field(
        default=5, ge=0, description="Rows of the evaluation set to show at the end."
    )
    eval_num_threads: int = Field(default=16, ge=1, description="Maximum concurrent rollouts.")
    compare_performance: bool = Field(
        default=True,
        description="Evaluate the initial prompt too, and report the gain.",
    )
    optimizer: Literal["gepa", "mipro"] = Field(
        default="gepa",
        description="`gepa` reflects on traces and feedback; `mipro` is DSPy's MIPROv2, limited to "
        "instructions (extra `dspy`).",
    )
    reflection_model: RemoteModel | None = Field(
        default=None, description="Model that proposes prompts, by URL, instead of `lm_model_name`."
    )
    max_rollouts: int | None = Field(default=None, ge=1, description="Maximum rollouts.")
    max_tokens: int | None = Field(
        default=None, ge=1, description="Maximum input and output tokens of both models."
    )
    max_cost: float | None = Field(
        default=None,
        gt=0,
        description="Maximum cost of the search, by the prices of its `RemoteModel`s.",
    )
    minibatch_size: int = Field(
        default=3,
        ge=1,
        description="Rollouts per reflection; a new prompt is tried on the same tasks, and on the "
        "others if it is better there.",
    )
    failure_score: float = Field(
        default=0.0,
        allow_inf_nan=False,
        description="Score of a rollout without a reward; these rollouts are counted separately.",
    )
    perfect_score: float | None = Field(
        default=None, description="Tasks with this reward are not used for reflection."
    )
    seed: int = Field(default=0, description="Seed of the search and its rollouts.")


class TuneArguments(TypedDict, total=False):
    """The keyword arguments of `tune()`, documented there."""

    environment: Any
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


_WANTED: dict[str, tuple[type | tuple[type, ...], str]] = {
    "model": (TunerModelConfig, "a TunerModelConfig(model_path=..., max_model_len=...)"),
    "algorithm": (AlgorithmConfig, "an AlgorithmConfig(...)"),
    "auxiliary_models": (Mapping, "a dict of models by name"),
    "config_path": ((str, Path), "the path of a YAML file"),
    "project_name": (str, "a name"),
    "experiment_name": (str, "a name"),
    "overrides": ((list, tuple), "a list of 'key=value' strings"),
}


def settings_of(
    workflow_func: Callable[..., Any] | None,
    judge_func: Callable[..., Any] | None = None,
    train_dataset: Any = None,
    **given: Unpack[TuneArguments],
) -> dict[str, Any]:
    """The arguments of `tune()` as nested settings of the file, except the location of
    `train_dataset`.

    Raises:
        ConfigError: An argument has the wrong type or an unsupported setting.
    """
    for name, (kind, wanted) in _WANTED.items():
        value = given.get(name)
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{name} is {value!r:.80} ({type(value).__name__}); pass {wanted}")
    algorithm, model = given.get("algorithm"), given.get("model")
    monitor = given.get("monitor_type")
    settings: dict[str, Any] = {}
    if given.get("config_path") is None:
        settings |= WITHOUT_FILE
        if workflow_func is not None and uses_agentscope(workflow_func):
            settings["project"] = "AgentScope"
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
    settings |= _steps(train_dataset)
    if holds_traces(train_dataset):
        settings["tuner.history"] = {}
    return _nested(settings)


def holds_traces(dataset: Any) -> bool:
    """Whether a dataset is a list of recorded rollouts."""
    return isinstance(dataset, list | tuple) and any(isinstance(one, Trace) for one in dataset)


def _steps(dataset: Any) -> dict[str, Any]:
    """Number of steps or epochs set by a training dataset."""
    fields: frozenset[str] = getattr(dataset, "model_fields_set", frozenset())
    settings: dict[str, Any] = {}
    if "total_epochs" in fields:
        # Steps from the file would take precedence over these epochs.
        settings = {"buffer.total_epochs": dataset.total_epochs, "buffer.total_steps": None}
    if "total_steps" in fields:
        settings["buffer.total_steps"] = dataset.total_steps
    return settings


def _eval_settings(dataset: Any) -> dict[str, Any]:
    if dataset is None:
        return {}
    named = dataset if isinstance(dataset, dict) else {"": dataset}
    for one in named.values():
        for field in ("total_epochs", "total_steps"):
            if field in getattr(one, "model_fields_set", frozenset()):
                raise ConfigError(
                    f"eval_dataset: {field} is set, but an evaluation uses each row once; remove it"
                )
    return {
        "buffer.explorer_input.eval_tasksets": {name: location(one) for name, one in named.items()}
    }


def location(dataset: Any) -> dict[str, Any]:
    """Location of a dataset as settings of a taskset; empty for rows in memory."""
    if isinstance(dataset, (str, Path)):
        dataset = DatasetConfig(path=str(dataset))
    if hasattr(dataset, "path") and hasattr(dataset, "split"):
        return {"path": dataset.path, "split": dataset.split, "subset_name": dataset.name}
    return {"path": None, "subset_name": None}


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
    found = {"explorer.auxiliary_models": served, "tuner.auxiliary_models": remote}
    return {key: models for key, models in found.items() if models}


def _reference(func: Callable[..., Any]) -> str | None:
    """Name of a function for a configuration; None if a file cannot name it."""
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
