"""Whatever a run trains, it goes on from the checkpoint before a damaged one, on its own model."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._pytree import tree_leaves

from tests.kit import async_runs, runs
from tests.loop.test_lora import NEW
from tests.loop.test_ppo import PPO
from tests.loop.test_resume import flip, tune
from tuner.errors import ConfigError
from tuner.runs.directory import TRAINER_STATE, RunDirectory

KINDS = {
    "ahead": (async_runs, ("buffer.total_steps=4",)),
    "adapter": (runs, (NEW, "buffer.total_steps=4")),
    "critic": (runs, PPO),
}


def state(checkpoint):
    """Weights, optimizers, and the critic where there is one."""
    (weights,) = checkpoint.glob("*.safetensors")
    saved = torch.load(checkpoint / TRAINER_STATE, weights_only=True)
    return [
        leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf
        for leaf in tree_leaves([load_file(weights), saved])
    ]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "overrides"), KINDS.values(), ids=KINDS)
def test_a_damaged_checkpoint_is_passed_over_and_another_model_is_not_taken(
    random_model_path, tmp_path, capsys, kind, overrides
):
    model = tmp_path / "model"
    shutil.copytree(random_model_path, model)
    config = kind.config(model, tmp_path, *overrides, "trainer.save_interval=1")
    straight = tune(config, workflow=kind.workflow)
    # As it was after a kill, before the last checkpoint.
    directory = RunDirectory(straight.run_dir)
    *_, before, damaged, last = directory.checkpoint_steps()
    wanted = state(straight.checkpoint)
    traces = {path: path.read_bytes() for path in straight.traces.iterdir()}
    directory.result.unlink()
    shutil.rmtree(directory.checkpoint(last))
    flip(directory.checkpoint(damaged) / TRAINER_STATE)

    flip(model / "model.safetensors")
    with pytest.raises(ConfigError, match=r"the weights at model\.model_path have changed"):
        tune(config, workflow=kind.workflow)
    assert directory.checkpoint(damaged).exists()  # nothing was done to it
    flip(model / "model.safetensors")

    capsys.readouterr()
    result = tune(config, workflow=kind.workflow)
    assert f"resuming after step {before}" in " ".join(capsys.readouterr().out.split())
    assert state(result.checkpoint) == wanted, "not the same bits"
    assert (result.rewards, result.tokens) == (straight.rewards, straight.tokens)
    assert {path: path.read_bytes() for path in result.traces.iterdir()} == traces
