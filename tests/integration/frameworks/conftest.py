"""These tests need agent frameworks, in an environment of their own: `make test-frameworks`."""

import importlib.util

_NEEDS = {"test_openai_agents.py": "agents"}

collect_ignore = [
    file for file, package in _NEEDS.items() if importlib.util.find_spec(package) is None
]
