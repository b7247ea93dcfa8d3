"""The code of docs/environments.md and docs/task_sets.md."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tuner
from tests.kit import forked
from tests.pages import blocks
from tuner.environments import Program

ROOT = Path(__file__).parents[3]
OPENENV, TRL, PROGRAM = blocks(
    "environments.md", "python", "tests/integration/environments/test_page.py"
)
(LEVELS,) = blocks("task_sets.md", "python", "tests/integration/environments/test_page.py")


@pytest.mark.long
def test_the_script_of_trl_trains_as_it_stands(tmp_path):
    (tmp_path / "main.py").write_text(TRL.replace("models/tiny_math", f"{ROOT}/models/tiny_math"))
    printed = forked.script(tmp_path / "main.py")
    assert "step 2/2" in printed


@pytest.mark.parametrize("script", [OPENENV, PROGRAM], ids=["openenv", "program"])
def test_the_others_are_what_tune_takes(script, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(tuner, "tune", lambda **arguments: given.append(arguments))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent").mkdir()
    exec(compile(script, "page", "exec"), {"__name__": "page"})
    if script is PROGRAM:
        assert isinstance(given[0]["environment"], Program)


def test_a_level_opens_when_the_one_below_it_passes():
    page: dict[str, Any] = {}
    exec(compile(LEVELS, "page", "exec"), page)
    tasks = [{"level": number % 3} for number in range(9)]
    for passed, opened in ((0, 0), (1, 1), (2, 2)):
        level = np.array([task["level"] for task in tasks])
        results = SimpleNamespace(tasks=tasks, visits=level <= passed, rate=(level < passed) * 0.9)
        assert page["weights"](results).tolist() == [float(one <= opened) for one in level]
