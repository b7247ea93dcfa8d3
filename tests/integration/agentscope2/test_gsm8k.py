"""The example for AgentScope 2.x: the same prompts as main.py's, and it learns."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tuner import tune

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(REPOSITORY / "examples" / "gsm8k"))
    try:
        import main_agentscope2
    finally:
        sys.path.pop(0)
    return main_agentscope2


def test_the_shipped_example_learns(example, tmp_path, caplog) -> None:
    """Held-out accuracy must rise clearly in a few steps."""
    result = tune(
        example.run_react_agent,
        example.judge_function,
        config_path=REPOSITORY / "config.yaml",
        overrides=[f"checkpoint_root_dir={tmp_path}", "buffer.total_steps=6"],
    )
    before, after = result.eval_before["test"], result.eval_after["test"]
    assert 0.35 <= before <= 0.60
    assert after >= before + 0.25
    assert result.outcomes == {"completed": 6 * 16 * 8}
    assert result.tokens.sampled == result.tokens.trained
    assert max(row["train/logprob_mismatch_max"] for row in result.history[1:]) < 1e-4
    assert [r for r in caplog.records if r.name.startswith("tuner.gateway")] == []
