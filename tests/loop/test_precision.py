"""A whole run in bfloat16, with checkpointed activations and its optimizer in main memory."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.kit import runs
from tuner.errors import ConfigError
from tuner.loop import run_local
from tuner.runs.directory import TRAINER_STATE

BFLOAT16 = ("tuner.dtype=bfloat16", "trainer.save_interval=0", "algorithm.optimizer.lr=1e-4")

PARTS = ("scoring", "critic", "forward", "backward", "optimizer")


def tune(model, root, *overrides):
    return run_local(
        runs.config(model, root, *BFLOAT16, *overrides),
        workflow=runs.workflow,
        judge=runs.judge,
        train_tasks=runs.TRAIN,
        eval_tasks={"held-out": runs.EVAL},
    )


@pytest.fixture(scope="module")
def straight(random_model_path, tmp_path_factory):
    return tune(random_model_path, tmp_path_factory.mktemp("straight"), "buffer.total_steps=3")


@pytest.mark.long
def test_a_run_goes_on_bit_for_bit_with_another_use_of_memory(
    random_model_path, straight, tmp_path
):
    tune(random_model_path, tmp_path, "buffer.total_steps=2")
    result = tune(
        random_model_path,
        tmp_path,
        "buffer.total_steps=3",
        "trainer.optimizer_offload=true",
        "tuner.activation_checkpointing=true",
    )
    expected = load_file(straight.checkpoint / "model.safetensors")
    found = load_file(result.checkpoint / "model.safetensors")
    assert {weights.dtype for weights in found.values()} == {torch.bfloat16}
    assert all(torch.equal(found[name], weights) for name, weights in expected.items())
    masters, wanted = (
        torch.load(run.checkpoint / TRAINER_STATE, weights_only=True)["optimizer"]["masters"]
        for run in (result, straight)
    )
    assert all(torch.equal(masters[index], weights) for index, weights in wanted.items())


def test_engine_and_trainer_agree_in_bfloat16_within_the_alarm(straight):
    rows = (straight.run_dir / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(row).get("train/logprob_mismatch_mean", 0.0) for row in rows]
    assert 0 < max(found) < 0.02


def test_every_diagnostic_is_in_every_step_of_training(straight):
    rows = (straight.run_dir / "metrics.jsonl").read_text().splitlines()[1:]
    wanted = {
        "reward/mean",
        "reward/std",
        "groups/zero_variance",
        "tokens/unique",
        "tokens/row",
        "tokens_per_second",
        "time/engine",
        "train/advantage_std",
        "train/backward_seconds",
        "train/clip_fraction",
        "train/effective_sample_size",
        "train/entropy",
        "train/forward_seconds",
        "train/grad_norm",
        "train/kl_behaviour",
        "train/kl_reference",
        "train/logprob_mismatch_max",
        "train/logprob_mismatch_mean",
        "train/optimizer_seconds",
        "train/row_tokens_per_second",
        "train/unique_tokens_per_second",
    }
    assert len(rows) == 3
    for row in rows:
        assert wanted <= json.loads(row).keys()


def test_the_seconds_of_a_step_add_up(straight):
    rows = (straight.run_dir / "metrics.jsonl").read_text().splitlines()[1:]
    for row in map(json.loads, rows):
        waited, trained = row["time/idle"], row["time/training"]
        assert row["time/generation"] + row["time/agent"] + row["time/judge"] == pytest.approx(
            waited
        )
        whole = waited + trained + row["time/sync"] + row.get("time/evaluation", 0.0)
        # The rest is a few lines of Python; it is more where the interpreter is taken away.
        assert 0 <= row["time/step"] - whole <= max(0.03 * row["time/step"], 0.5)
        parts = [row.get(f"train/{part}_seconds", 0.0) for part in PARTS]
        assert 0.5 * trained < sum(parts) <= trained
        assert 0 < row["time/engine"] < row["time/step"]


def test_a_run_does_not_go_on_in_another_precision(random_model_path, straight):
    root = straight.run_dir.parents[1]
    with pytest.raises(ConfigError, match=r"tuner\.optimizer_state was 'float32' and is '8bit'"):
        tune(random_model_path, root, "buffer.total_steps=4", "tuner.optimizer_state=8bit")
    with pytest.raises(ConfigError, match=r"tuner\.dtype was 'bfloat16' and is 'float32'"):
        tune(random_model_path, root, "buffer.total_steps=4", "tuner.dtype=float32")
