"""Environments in other formats, each as the workflow, judge and dataset of `tune()`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tuner.runs.environment import CLASSES, Environment, brought

if TYPE_CHECKING:
    from tuner.environments.areal_environments import Areal
    from tuner.environments.gymnasium_environments import Gymnasium
    from tuner.environments.harbor_tasks import Harbor, Terminal, TerminalAgent
    from tuner.environments.mixture import Mixture
    from tuner.environments.openenv import OpenEnv, ToolCall
    from tuner.environments.program import Program, ProgramOutput
    from tuner.environments.reasoning_gym_sets import ReasoningGym
    from tuner.environments.textarena_games import TextArena
    from tuner.environments.trl import TRL
    from tuner.environments.verifiers_environments import Verifiers

# Imported on first use: a file is read without PyTorch.
_MODULE_OF = {
    "ProgramOutput": "tuner.environments.program",
    "Terminal": "tuner.environments.harbor_tasks",
    "TerminalAgent": "tuner.environments.harbor_tasks",
    "ToolCall": "tuner.environments.openenv",
    **{name: module for module, _, name in (one.partition(":") for one in CLASSES.values())},
}

__all__ = [
    "TRL",
    "Areal",
    "Environment",
    "Gymnasium",
    "Harbor",
    "Mixture",
    "OpenEnv",
    "Program",
    "ProgramOutput",
    "ReasoningGym",
    "Terminal",
    "TerminalAgent",
    "TextArena",
    "ToolCall",
    "Verifiers",
    "brought",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tuner.environments' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
