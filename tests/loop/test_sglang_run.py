"""A run whose answers come from an SGLang server: the stand-in for one, with the tiny model."""

import json

import pytest

from tests.engines.sglang_rig import ROOT, StandIn
from tests.kit.agents import answer
from tuner import JudgeOutput, WorkflowOutput, tune

KEY = "sesame"


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("TUNER_ENGINE_KEY", KEY)
    made = StandIn(ROOT / "models" / "tiny_math", KEY)
    yield made
    made.stop()


async def workflow(task, model):
    return WorkflowOutput(response=await answer(model, task["question"]))


async def judge(task, response):
    return JudgeOutput(reward=sum(map(ord, response)) % 17 / 17)


@pytest.mark.long
def test_two_steps_through_sglang_train_the_very_tokens_that_it_sampled(server, tmp_path):
    """Weights go through the disk; what was recorded agrees with what the trainer recomputes."""
    result = tune(
        workflow,
        judge,
        [{"question": f"{n} + 1 = ?"} for n in range(8)],
        overrides=[
            "explorer.rollout_model.engine_type=sglang",
            f"tuner.engine.urls=[{server.url}]",
            f"checkpoint_root_dir={tmp_path}",
            "buffer.batch_size=4",
            "buffer.total_steps=2",
            "algorithm.repeat_times=4",
            "algorithm.optimizer.lr=0.001",
            "model.max_model_len=256",
            "model.max_response_tokens=8",
            "model.top_p=0.95",
        ],
    )
    assert result.steps == 2
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").open()]
    trained = [row for row in rows if "tokens/trained" in row]
    assert len(trained) == 2
    for row in trained:
        dropped = sum(v for k, v in row.items() if k.startswith("tokens/dropped/"))
        assert row["tokens/sampled"] == row["tokens/trained"] + dropped > 0
        assert row["rollouts/completed"] == 16
    versions = [
        {
            version
            for line in (result.run_dir / "traces" / f"step_{step:06d}.jsonl").open()
            for call in json.loads(line)["calls"]
            for version in call["versions"]
        }
        for step in (1, 2)
    ]
    assert versions == [{0}, {1}]
    assert all(row["train/logprob_mismatch_max"] < 1e-4 for row in trained)
