"""These tests need agent frameworks, in an environment of their own: `make test-frameworks`."""

from __future__ import annotations

import importlib.util

from tests.gateway.doors import door

__all__ = ["door"]

_NEEDS = {
    "test_docs.py": ("agents", "langchain_openai", "smolagents"),
    "test_langgraph.py": ("langchain", "langchain_openai", "langgraph"),
    "test_mipro.py": ("dspy", "optuna"),
    "test_openai_agents.py": ("agents",),
    "test_smolagents.py": ("smolagents",),
}

collect_ignore = [
    file
    for file, packages in _NEEDS.items()
    if any(importlib.util.find_spec(package) is None for package in packages)
]
