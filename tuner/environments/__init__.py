"""Environments in other people's formats, each as the workflow, judge and dataset of `tune()`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tuner.environments.seam import Environment, brought

if TYPE_CHECKING:
    from tuner.environments.episode import ToolCall
    from tuner.environments.openenv import OpenEnv
    from tuner.environments.trl import TRL

# Imported when they are asked for: a format is of no use to who has another.
_MODULE_OF = {
    "OpenEnv": "tuner.environments.openenv",
    "TRL": "tuner.environments.trl",
    "ToolCall": "tuner.environments.episode",
}

__all__ = ["TRL", "Environment", "OpenEnv", "ToolCall", "brought"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tuner.environments' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value
