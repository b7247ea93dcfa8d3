"""Recorded data and teachers in the configuration: what the algorithm decides, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.config import load_config
from tuner.config.algorithms import ALGORITHMS, DistillAdvantage, DPOLoss
from tuner.errors import ConfigError
from tuner.runs.stack import for_trainer, rollout_settings, selection

BUFFER = "buffer.trainer_input.experience_buffer"
TEACHER = "explorer.auxiliary_models=[{name: big, model_path: org/big}]"
# What an algorithm cannot be loaded without.
PROMPT = "tuner.algorithm.prompt=Be brief."
NEEDED = {"on_policy_distill": [TEACHER], "prompt_distill": [PROMPT]}


def load(algorithm, *overrides):
    needed = NEEDED.get(algorithm, [])
    return load_config(overrides=[f"algorithm.algorithm_type={algorithm}", *needed, *overrides])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_mode_follows_the_algorithm(name):
    assert load(name).mode == ("train" if name in ("sft", "dpo") else "both")
    assert load(name, "mode=null").mode == load(name).mode
    assert load(name, "tuner.history={}").mode == "train"


HISTORY = "tuner.history.sources=[run]"


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ("mode=both", "only mode train uses: set mode to train"),
        ("mode=explore", "only mode train uses: set mode to train"),
        (f"{BUFFER}.path=rows.jsonl", "in known formats: remove one of them"),
        (f"{BUFFER}.format.prompt_key=x", "in known formats: remove one of them"),
        ("tuner.branching={}", "mode train makes no rollouts: remove it"),
        ("synchronizer.sync_offset=1", "mode train makes no rollouts: remove it"),
        ("tuner.history.min_reward=2", "min_reward is 2.0, above max_reward 1.0"),
    ],
)
def test_settings_that_recorded_rollouts_have_no_use_for_are_refused(overrides, text):
    with pytest.raises(ConfigError) as error:
        load("multi_step_grpo", HISTORY, "tuner.history.max_reward=1", overrides)
    assert text in str(error.value)


def test_recorded_rollouts_are_found_from_the_folder_of_the_file(tmp_path):
    (tmp_path / "config.yaml").write_text("tuner: {history: {sources: [runs/a, ../b.jsonl]}}")
    section = load_config(tmp_path / "config.yaml").tuner.history
    assert section.sources == (str(tmp_path / "runs/a"), str(tmp_path.parent / "b.jsonl"))
    given = load_config(tmp_path / "config.yaml", overrides=["tuner.history.sources=[c.jsonl]"])
    assert given.tuner.history.sources == (str(Path.cwd() / "c.jsonl"),)


def test_what_only_rollouts_read_is_no_matter_where_they_are_recorded():
    """One file may say how to explore, and how to learn from that."""
    config = load(
        "grpo",
        HISTORY,
        "algorithm.repeat_times=1",
        "buffer.explorer_input.taskset.path=org/tasks",
        "tuner.workflow=m:f",
    )
    assert config.mode == "train"


@pytest.mark.parametrize(
    ("algorithm", "overrides", "text"),
    [
        ("sft", "mode=both", "set mode to train"),
        ("grpo", "mode=train", "set mode to both"),
        ("sft", f"{BUFFER}.storage_type=sql", "recorded data is read from files"),
        ("grpo", f"{BUFFER}.storage_type=file", "rollouts are trained as they come"),
        ("sft", f"{BUFFER}.format.chosen_key=x", "does not use it"),
        ("dpo", f"{BUFFER}.format.response_key=x", "does not use it"),
        ("dpo", f"{BUFFER}.format.chat_template=x", "set model.custom_chat_template"),
        ("dpo", f"{BUFFER}.format.mesages_key=x", "did you mean"),
        ("dpo", f"{BUFFER}.format.image_key=x", "only text models"),
        ("sft", f"{BUFFER}.replay_buffer.enable=true", "old rollouts"),
        ("sft", "algorithm.advantage_fn=grpo", "does not support"),
        ("sft", "algorithm.kl_loss_fn=k2", "does not support"),
        ("dpo", "algorithm.kl_loss_fn=k1", "policy_loss_fn_args.beta is what keeps dpo"),
        ("dpo", "algorithm.policy_loss_fn=sft", "does not support"),
        ("dpo", "algorithm.loss_agg_mode=token-mean", "does not support"),
        ("sft", "algorithm.loss_agg_mode=seq-mean-token-sum-norm", "max_response_tokens"),
        ("sft", "algorithm.policy_loss_fn_args.beta=1", "set algorithm.policy_loss_fn to dpo"),
        ("dpo", "algorithm.policy_loss_fn_args.label_smoothing=0.5", "less than 0.5"),
        ("sft", "tuner.algorithm.updates=2", "does not use it"),
        ("sft", "tuner.on_failure=abort", "does not use it"),
        ("sft", "buffer.explorer_input.taskset.path=a/b", f"set {BUFFER}.path instead"),
        ("sft", "buffer.train_batch_size=64", "set only buffer.batch_size"),
        ("grpo", "algorithm.advantage_fn=none", "set algorithm.algorithm_type to sft or dpo"),
        ("grpo", "algorithm.policy_loss_fn=dpo", "set algorithm.algorithm_type to dpo"),
        ("grpo", "algorithm.repeat_times=1", "set it to 2 or more"),
        ("grpo", "tuner.algorithm.teacher=big", "has no teacher"),
        ("on_policy_distill", "explorer.auxiliary_models=[]", "needs a teacher"),
        ("on_policy_distill", "tuner.algorithm.teacher=small", "explorer.auxiliary_models has big"),
        ("on_policy_distill", "tuner.algorithm.reward_scale=2", "affects rewards"),
        ("on_policy_distill", "tuner.algorithm.dynamic_sampling=true", "affects rewards"),
        ("on_policy_distill", "tuner.on_failure={penalize: 0}", "affects rewards"),
        ("on_policy_distill", "algorithm.kl_penalty_fn=k1", "affects rewards"),
        ("on_policy_distill", "algorithm.advantage_fn_args.kl_coef=0", "greater than 0"),
        ("on_policy_distill", "tuner.algorithm.prompt=x", "does not use a prompt"),
        ("grpo", "tuner.algorithm.prompt_teacher=policy", "does not use a prompt"),
        ("sft", "tuner.algorithm.prompt=x", "does not use it"),
        ("prompt_distill", "tuner.algorithm.prompt=null", "needs the system prompt"),
        ("prompt_distill", "tuner.algorithm.prompt=''", "at least 1 character"),
        ("prompt_distill", "tuner.algorithm.prompt_teacher=x", "'start' or 'policy'"),
        ("prompt_distill", "tuner.algorithm.teacher=big", "has no teacher"),
        ("prompt_distill", "tuner.algorithm.reward_scale=2", "affects rewards"),
        ("prompt_distill", "tuner.algorithm.turn_discount=0.9", "does not credit calls"),
        ("prompt_distill", "mode=train", "trains on its own rollouts"),
        ("sft", "mode=explore", "makes no rollouts: set mode to train"),
        ("grpo", "tuner.history.held_out=1", "less than 1"),
        ("grpo", "tuner.history.best=2", "algorithm_type grpo does not use it"),
        ("dpo", "tuner.history.best=2", "algorithm_type dpo does not use it"),
        ("sft", "tuner.history.min_gap=0.5", "algorithm_type sft does not use it"),
        ("sft", "tuner.history.min_effective_samples=0", "algorithm_type sft does not use it"),
        ("grpo", "tuner.history.after=soon", "is not a time: write"),
    ],
)
def test_settings_that_the_source_of_data_has_no_use_for_are_refused(algorithm, overrides, text):
    with pytest.raises(ConfigError) as error:
        load(algorithm, overrides)
    assert text in str(error.value)
    assert overrides.partition("=")[0].removesuffix(".teacher") in str(error.value)


def test_trinitys_files_for_recorded_data_are_read(tmp_path):
    path = tmp_path / "dpo.yaml"
    path.write_text(
        "mode: train\n"
        "algorithm:\n"
        "  algorithm_type: dpo\n"
        "  policy_loss_fn_args: {beta: 0.2, label_smoothing: 0.1}\n"
        "model: {model_path: org/name}\n"
        "buffer:\n"
        "  total_epochs: 2\n"
        "  batch_size: 64\n"
        "  train_batch_size: 64\n"
        "  trainer_input:\n"
        "    experience_buffer:\n"
        "      name: human\n"
        "      storage_type: file\n"
        "      path: pairs.jsonl\n"
        "      split: train\n"
        "      format: {prompt_type: plaintext, prompt_key: p, chosen_key: a, rejected_key: b}\n"
        "synchronizer: {sync_method: checkpoint}\n"
    )
    config = load_config(path)
    buffer = config.buffer.trainer_input.experience_buffer
    assert buffer.path == str(tmp_path / "pairs.jsonl")
    assert (buffer.format.prompt_key, buffer.format.chosen_key) == ("p", "a")
    settings = for_trainer(config, 10, 64)
    assert settings.algorithm.policy_loss == DPOLoss(beta=0.2, label_smoothing=0.1)
    assert settings.uses_reference


@pytest.mark.parametrize("name", ["on_policy_distill", "prompt_distill"])
def test_a_teacher_needs_neither_a_group_nor_a_reward(name):
    config = load(name, "algorithm.repeat_times=1")
    chosen = selection(config)
    assert not chosen.needs_group
    assert not chosen.needs_reward
    assert not rollout_settings(config).needs_reward
    settings = for_trainer(config, 10, 64)
    assert settings.algorithm.advantage == DistillAdvantage(kl_coef=1.0)
    assert not settings.algorithm.kl_in_loss
    # The start reads the prompt.
    assert settings.uses_reference == (name == "prompt_distill")
    assert not for_trainer(
        load("prompt_distill", "tuner.algorithm.prompt_teacher=policy"), 10, 64
    ).uses_reference
    for other in ("grpo", "sft"):
        assert rollout_settings(load(other)).needs_reward
    assert selection(load("grpo")).needs_group
