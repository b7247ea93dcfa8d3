"""The example trains a tiny model in real containers."""

import pytest

from tests.examples.conftest import main
from tests.integration.harbor.conftest import TASKS

__all__ = ["main"]
EXAMPLE = TASKS.parent


@pytest.mark.nightly  # 100 containers, in 4 minutes
def test_a_tiny_model_learns_to_use_two_tools(main, tmp_path):
    result = main.main([f"checkpoint_root_dir={tmp_path}"])
    assert set(result.outcomes) == {"completed"}
    assert max(result.rewards[-3:]) >= result.rewards[0] + 0.3


def test_the_run_of_the_example_begins(main, tmp_path):
    few = ("algorithm.repeat_times=2", "buffer.total_steps=1", "model.max_response_tokens=128")
    result = main.main([f"checkpoint_root_dir={tmp_path}", *few])
    assert result.outcomes == {"completed": 2}
