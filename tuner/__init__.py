"""Train the model inside an agent.

Names are imported on first use, so `import tuner` is fast and needs neither PyTorch nor an agent
framework.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.config import RemoteModel, RunConfig
    from tuner.environments.trl import from_trl
    from tuner.errors import (
        ConfigError,
        ContextLengthError,
        DatasetError,
        FunctionError,
        MissingDependencyError,
        ModelLoadError,
        ServingError,
        TrainingError,
        TunerError,
    )
    from tuner.gateway.sessions import recorded
    from tuner.rewards.judges import avg_time_judge, avg_token_consumption_judge
    from tuner.rollouts.chat_models import require_agentscope1, require_agentscope2
    from tuner.runs.result import TuneResult
    from tuner.serving.client import AsyncClient, Client
    from tuner.tasks.datasets import Dataset, DatasetConfig
    from tuner.tasks.functions import (
        JudgeOutput,
        JudgeType,
        Rejected,
        WorkflowOutput,
        WorkflowType,
        check_judge_function,
        check_workflow_function,
    )
    from tuner.tasks.selection import TaskResults
    from tuner.tasks.settings import (
        AlgorithmConfig,
        PromptTuneConfig,
        TinkerConfig,
        TunerModelConfig,
    )
    from tuner.tools.evaluate import Evaluation, evaluate
    from tuner.tools.rebase import Rebase, rebase
    from tuner.tools.select_model import select_model
    from tuner.tools.tune_prompt import tune_prompt
    from tuner.tune import tune

    # The class depends on the installed packages, so type checkers cannot see it.
    TrinityChatModel = Any

_MODULES = {
    "tuner.rollouts.chat_models": ("require_agentscope1", "require_agentscope2"),
    "tuner.cli": ("__version__",),
    "tuner.tools.evaluate": ("evaluate", "Evaluation"),
    "tuner.tools.rebase": ("Rebase", "rebase"),
    "tuner.config": ("RemoteModel", "RunConfig"),
    "tuner.tasks.datasets": ("Dataset", "DatasetConfig"),
    "tuner.tasks.selection": ("TaskResults",),
    "tuner.environments.trl": ("from_trl",),
    "tuner.tasks.functions": (
        "check_judge_function",
        "check_workflow_function",
        "JudgeOutput",
        "JudgeType",
        "Rejected",
        "WorkflowOutput",
        "WorkflowType",
    ),
    "tuner.gateway.sessions": ("recorded",),
    "tuner.tools.select_model": ("select_model",),
    "tuner.tools.tune_prompt": ("tune_prompt",),
    "tuner.runs.result": ("TuneResult",),
    "tuner.rewards.judges": ("avg_time_judge", "avg_token_consumption_judge"),
    "tuner.serving.client": ("AsyncClient", "Client"),
    "tuner.tasks.settings": (
        "AlgorithmConfig",
        "PromptTuneConfig",
        "TinkerConfig",
        "TunerModelConfig",
    ),
    "tuner.tune": ("tune",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AlgorithmConfig",
    "AsyncClient",
    "Client",
    "ConfigError",
    "ContextLengthError",
    "Dataset",
    "DatasetConfig",
    "DatasetError",
    "Evaluation",
    "FunctionError",
    "JudgeOutput",
    "JudgeType",
    "MissingDependencyError",
    "ModelLoadError",
    "PromptTuneConfig",
    "Rebase",
    "Rejected",
    "RemoteModel",
    "RunConfig",
    "ServingError",
    "TaskResults",
    "TinkerConfig",
    "TrainingError",
    "TrinityChatModel",
    "TuneResult",
    "TunerError",
    "TunerModelConfig",
    "WorkflowOutput",
    "WorkflowType",
    "avg_time_judge",
    "avg_token_consumption_judge",
    "check_judge_function",
    "check_workflow_function",
    "evaluate",
    "from_trl",
    "rebase",
    "recorded",
    "require_agentscope1",
    "require_agentscope2",
    "select_model",
    "tune",
    "tune_prompt",
]


def __getattr__(name: str) -> Any:
    if name == "TrinityChatModel":
        from tuner.rollouts.chat_models import trinity_chat_model_class

        value: Any = trinity_chat_model_class()
    elif name in __all__ or name == "__version__":  # what is in no other module is an error
        value = getattr(import_module(_MODULE_OF.get(name, "tuner.errors")), name)
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
