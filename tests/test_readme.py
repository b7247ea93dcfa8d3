"""The README's script runs as it is printed, and learns."""

import re
from pathlib import Path

import pytest

from tests.kit import forked

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.long
def test_the_fifteen_lines_train_a_model(tmp_path):
    (script,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len([line for line in script.splitlines() if line.strip()]) <= 15
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    printed = forked.script(tmp_path / "script.py")
    rewards = [float(reward) for reward in re.findall(r"\d/12  reward ([\d.]+)", printed)]
    assert len(rewards) == 12
    assert rewards[0] < 0.3 < 0.7 < min(rewards[-2:])
    assert "sampled" in printed
    assert len(list((tmp_path / "checkpoints").glob("*/*/traces/step_*.jsonl"))) == 12
