"""The search agent learns to look things up, as a script and as a notebook."""

import json
from pathlib import Path

import nbformat
import pytest

from docs.notebooks import executed, for_people
from tests.examples.notebooks import check_stored

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[2] / "examples" / "search_agent"


def test_the_reward_rises_in_a_short_run(main, tmp_path):
    asked = (EXAMPLE / "data" / "test.jsonl").read_text().splitlines()[:60]
    (tmp_path / "asked.jsonl").write_text("\n".join(asked))
    config, run_dir = main.configured(
        [
            f"fileroot={tmp_path}",
            f"eval_dataset={tmp_path / 'asked.jsonl'}",
            "steps=3",
            "train_dataset.batch_size=6",
            "actor.optimizer.lr=1e-3",
            "actor.optimizer.lr_scheduler_type=constant",
        ]
    )
    result = main.train(config, run_dir)
    assert result.after > result.before + 0.2
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in metrics] == list(range(1, 4))
    assert max(one["stale_fraction"] for one in metrics) > 0  # sampled while training
    assert (run_dir / "checkpoint" / "model.safetensors").is_file()


def test_a_retrieval_server_that_is_gone_fails_rollouts_and_training_goes_on(main, tmp_path):
    import agent
    import retrieval

    from tuner.areal import FinetuneSpec, GRPOConfig, PPOActor, RolloutEngine

    config = GRPOConfig(fileroot=str(tmp_path), seed=3)
    config.actor.path = str(EXAMPLE.parents[1] / "models" / "tiny_search")
    actor, rollout = PPOActor(config.actor), RolloutEngine(config.rollout)
    actor.initialize(None, FinetuneSpec(1, 8, 4))
    rollout.initialize()
    rows = [json.loads(line) for line in (EXAMPLE / "data" / "train.jsonl").open()][:4]
    with retrieval.serving(retrieval.BM25Index(retrieval.read_corpus())) as server:
        workflow = agent.SearchAgentWorkflow(
            config.gconfig.new(max_new_tokens=48),
            rollout.tokenizer,
            server,
            max_turns=3,
            max_tokens=400,
        )
        rollout.rollout_batch(rows, workflow, group_size=4)
    # Who guesses needs no server; who searches now fails, without a reward of 0.
    batch = rollout.rollout_batch(rows, workflow, group_size=4)
    outcomes = batch.account.outcomes
    assert outcomes["workflow_error"] > 0
    assert "ConnectError" in batch.account.errors[0]
    assert len(batch["rewards"]) <= outcomes["completed"] < 16
    actor.compute_advantages(batch)
    actor.ppo_update(batch)
    actor.update_weights()
    config.actor.run.close()


def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    notebook = nbformat.read(EXAMPLE / "search_agent.ipynb", as_version=4)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    folder = f'        "fileroot={tmp_path}",\n        "trial_name=notebook",'
    first.source = first.source.replace('        "trial_name=notebook",', folder)
    executed(EXAMPLE / "search_agent.ipynb", notebook)
    last = next(c for c in reversed(notebook.cells) if "held-out F1" in str(c.get("outputs")))
    before, after = last.outputs[0].text.split(": ")[1].split(" -> ")
    assert float(after) > float(before) + 0.1
    check_stored(EXAMPLE / "search_agent.ipynb", for_people(notebook, tmp_path))
