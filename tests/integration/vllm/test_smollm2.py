"""A real pretrained model, from its package, with answers by vLLM."""

import importlib
from pathlib import Path

from tuner import tune

EXAMPLE = Path(__file__).parents[3] / "examples" / "smollm2"


def test_two_steps_with_log_probs_that_are_those_of_the_trainer(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(EXAMPLE)
    agent = importlib.import_module("main_openai")
    result = tune(
        agent.run_agent,
        agent.judge,
        config_path=agent.CONFIG,
        overrides=[
            "explorer.rollout_model.engine_type=vllm",
            "explorer.rollout_model.enforce_eager=true",
            "buffer.total_steps=2",
            "buffer.batch_size=2",
            "buffer.explorer_input.eval_tasksets=[]",
            f"checkpoint_root_dir={tmp_path}",
        ],
    )
    assert result.outcomes == {"completed": 32}
    assert result.steps == 2
    assert all(row["train/logprob_mismatch_max"] < 1e-3 for row in result.history)
