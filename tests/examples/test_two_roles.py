"""A solver and a checker learn with adapters of their own, and with one for both."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_roles"
SMALL = ("buffer.total_steps=3", "explorer.eval_interval=0", "model.model_path=models/tiny_math")


@pytest.mark.parametrize("options", [(), ("--shared",)])
def test_both_roles_learn(main, options, tmp_path):
    result = main.main([*options, *SMALL, f"checkpoint_root_dir={tmp_path}"])
    assert result.rewards[-1] >= result.rewards[0] + 0.15
    last = result.history[-1]
    if not options:
        for role in ("solver", "checker"):
            assert last[f"role/{role}/reward"] >= result.history[1][f"role/{role}/reward"]
            assert (result.checkpoint / role / "adapter_model.safetensors").exists()
