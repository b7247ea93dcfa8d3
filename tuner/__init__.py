"""Train the model inside an agent.

The names here are imported when they are first used, so that `import tuner` is fast and needs
neither PyTorch nor an agent framework.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.chat_models import require_agentscope1, require_agentscope2
    from tuner.config import RemoteModel, RunConfig
    from tuner.data.dataset import Dataset, DatasetConfig
    from tuner.errors import (
        ConfigError,
        ContextLengthError,
        DatasetError,
        FunctionError,
        MissingDependencyError,
        ModelLoadError,
        TrainingError,
        TunerError,
    )
    from tuner.functions.calling import check_judge_function, check_workflow_function
    from tuner.functions.outputs import JudgeOutput, JudgeType, WorkflowOutput, WorkflowType
    from tuner.result import TuneResult
    from tuner.settings import AlgorithmConfig, TunerModelConfig
    from tuner.tune import tune

    # The class depends on what is installed, so type checkers cannot see it.
    TrinityChatModel = Any

_MODULES = {
    "AlgorithmConfig": "tuner.settings",
    "ConfigError": "tuner.errors",
    "ContextLengthError": "tuner.errors",
    "Dataset": "tuner.data.dataset",
    "DatasetConfig": "tuner.data.dataset",
    "DatasetError": "tuner.errors",
    "FunctionError": "tuner.errors",
    "JudgeOutput": "tuner.functions.outputs",
    "JudgeType": "tuner.functions.outputs",
    "MissingDependencyError": "tuner.errors",
    "ModelLoadError": "tuner.errors",
    "RemoteModel": "tuner.config",
    "RunConfig": "tuner.config",
    "TrainingError": "tuner.errors",
    "TuneResult": "tuner.result",
    "TunerError": "tuner.errors",
    "TunerModelConfig": "tuner.settings",
    "WorkflowOutput": "tuner.functions.outputs",
    "WorkflowType": "tuner.functions.outputs",
    "check_judge_function": "tuner.functions.calling",
    "check_workflow_function": "tuner.functions.calling",
    "require_agentscope1": "tuner.chat_models",
    "require_agentscope2": "tuner.chat_models",
    "tune": "tuner.tune",
}

__all__ = [
    "AlgorithmConfig",
    "ConfigError",
    "ContextLengthError",
    "Dataset",
    "DatasetConfig",
    "DatasetError",
    "FunctionError",
    "JudgeOutput",
    "JudgeType",
    "MissingDependencyError",
    "ModelLoadError",
    "RemoteModel",
    "RunConfig",
    "TrainingError",
    "TrinityChatModel",
    "TuneResult",
    "TunerError",
    "TunerModelConfig",
    "WorkflowOutput",
    "WorkflowType",
    "check_judge_function",
    "check_workflow_function",
    "require_agentscope1",
    "require_agentscope2",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name == "TrinityChatModel":
        from tuner.chat_models import trinity_chat_model_class

        value: Any = trinity_chat_model_class()
    elif name in _MODULES:
        value = getattr(import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module 'tuner' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `tuner.tune` the function when the module `tuner.tune` is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "tune" and isinstance(value, ModuleType):
            value = value.tune
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
