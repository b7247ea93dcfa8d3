"""A run of PPO with its critic: it starts, is cut off, and ends as if it had not been."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from tests.kit import runs
from tests.loop.test_resume import without_times
from tuner.errors import ConfigError
from tuner.loop import run_local
from tuner.runs.directory import TRAINER_STATE
from tuner.training.trainer import PolicyTrainer

PPO = (
    "algorithm.algorithm_type=ppo",
    "algorithm.repeat_times=1",
    "algorithm.advantage_fn_args.lam=0.9",
    "buffer.total_steps=3",
    "explorer.eval_interval=0",
    "explorer.eval_on_startup=false",
    "tuner.critic.lr=0.01",
    "trainer.save_interval=1",
    "trainer.critic_warmup=1",
)


def tune(model, root, *overrides):
    return run_local(
        runs.config(model, root, *PPO, *overrides),
        workflow=runs.workflow,
        judge=runs.judge,
        train_tasks=runs.TRAIN,
        eval_tasks={"held-out": runs.EVAL},
    )


@pytest.mark.long
def test_an_interrupted_run_ends_with_the_same_policy_and_critic(
    random_model_path, tmp_path, monkeypatch
):
    """Groups of one rollout; the first step trains the critic alone."""
    straight = tune(random_model_path, tmp_path / "straight")
    saved = []

    def save(trainer, path, real=PolicyTrainer.save):
        saved.append(path)
        if len(saved) == 2:  # the policy's weights are written, the critic's are not
            raise KeyboardInterrupt
        real(trainer, path)

    with monkeypatch.context() as patch:
        patch.setattr(PolicyTrainer, "save", save)
        with pytest.raises(KeyboardInterrupt):
            tune(random_model_path, tmp_path / "cut_off")
    result = tune(random_model_path, tmp_path / "cut_off")
    expected, found = (load_file(r.checkpoint / "model.safetensors") for r in (straight, result))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    expected, found = (
        torch.load(r.checkpoint / TRAINER_STATE, weights_only=True)["critic"]["model"]
        for r in (straight, result)
    )
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert without_times(result.history) == without_times(straight.history)

    first, *later = (row for row in result.history if row["step"])
    assert "train/policy_loss" not in first
    for row in later:
        for name in ("value_loss", "value_mean", "return_mean", "critic_grad_norm", "policy_loss"):
            assert f"train/{name}" in row
    assert result.tokens.dropped == {}


def test_a_critic_may_start_from_another_model_with_the_same_tokenizer(random_model_path, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(random_model_path, other)
    torch.manual_seed(3)
    config = Qwen3Config.from_pretrained(random_model_path)
    config.num_hidden_layers, config.layer_types = 1, config.layer_types[:1]
    Qwen3ForCausalLM(config).save_pretrained(other)
    result = tune(
        random_model_path, tmp_path, f"model.critic_model_path={other}", "buffer.total_steps=1"
    )
    state = torch.load(result.checkpoint / TRAINER_STATE, weights_only=True)["critic"]["model"]
    assert any(name.startswith("layers.layers.0.") for name in state)
    assert not any(name.startswith("layers.layers.1.") for name in state)

    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["something-new"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ConfigError, match=r"model\.critic_model_path = .* different vocabulary"):
        tune(random_model_path, tmp_path / "b", f"model.critic_model_path={other}")
