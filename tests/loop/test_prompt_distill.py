"""`tuner distill-prompt`: the model does without its system prompt what it did with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.loop.test_recorded import problems
from tuner import (
    AlgorithmConfig,
    JudgeOutput,
    TunerModelConfig,
    WorkflowOutput,
    evaluate,
    tune,
)
from tuner.cli import app
from tuner.errors import ConfigError, TrainingError

TINY_PROMPT = Path(__file__).parents[2] / "models" / "tiny_prompt"
PROMPT = "Think step by step."


async def ask(task, model, head=()):
    messages = [*head, {"role": "user", "content": task["question"]}]
    answer = await model.client.chat.completions.create(model=model.model_name, messages=messages)
    return WorkflowOutput(response=answer.choices[0].message.content or "")


async def plain(task, model):
    return await ask(task, model)


async def prompted(task, model):
    return await ask(task, model, [{"role": "system", "content": PROMPT}])


async def judge(task, response):
    return JudgeOutput(reward=float(f"is {task['answer']}." in response))


@pytest.fixture
def file(tmp_path):
    """A run of an agent without a system prompt."""
    for split, count in (("train", 400), ("test", 100)):
        rows = [{"question": q, "answer": a} for q, _, a in problems(split, count)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "prompt.txt").write_text(PROMPT)
    config = {
        "name": "run",
        "checkpoint_root_dir": "runs",
        "model": {
            "model_path": str(TINY_PROMPT),
            "max_model_len": 512,
            "max_response_tokens": 96,
        },
        "algorithm": {
            "repeat_times": 1,
            "optimizer": {"lr": 1e-3, "lr_scheduler_type": "linear"},
        },
        "buffer": {
            "batch_size": 32,
            "total_steps": 24,
            "explorer_input": {
                "taskset": {"path": "train.jsonl"},
                "eval_tasksets": [{"name": "test", "path": "test.jsonl"}],
            },
        },
        "explorer": {"eval_interval": 100},
        "monitor": {"monitor_type": []},
        "tuner": {"workflow": f"{__file__}:plain", "judge": f"{__file__}:judge"},
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))
    return path


def distill(file, prompt, *overrides):
    """The run's directory."""
    done = CliRunner().invoke(app, ["distill-prompt", str(file), "--prompt", prompt, *overrides])
    assert done.exit_code == 0, done.output
    return file.parent / "runs" / "runs" / "run"


def result_of(run):
    return json.loads((run / "result.json").read_text())


NIGHTLY = [pytest.param(seed, 24, 1e-3, 0.02, marks=pytest.mark.nightly) for seed in (0, 1, 2)]


@pytest.mark.long
@pytest.mark.parametrize(("seed", "steps", "lr", "apart"), [(0, 10, 3e-3, 0.1), *NIGHTLY])
def test_accuracy_without_the_prompt_becomes_that_with_it(file, seed, steps, lr, apart):
    """In few steps and long ones nearly; at night in as many as it takes."""
    with_prompt = evaluate(
        prompted,
        judge,
        [json.loads(line) for line in (file.parent / "test.jsonl").read_text().splitlines()],
        model=TunerModelConfig(model_path=str(TINY_PROMPT), max_model_len=512, max_tokens=96),
    )
    (scores,) = with_prompt.candidates[0].sets.values()
    prompt = str(file.parent / "prompt.txt")
    settings = f"tuner.seed={seed}", f"buffer.total_steps={steps}", f"algorithm.optimizer.lr={lr}"
    result = result_of(distill(file, prompt, *settings))
    assert result["eval_before"]["test"] < 0.15
    assert scores.reward.mean > 0.95
    assert result["eval_after"]["test"] >= scores.reward.mean - apart
    assert result["tokens"]["dropped"] == {}


def test_check_shows_what_the_teacher_reads(file, random_model_path):
    settings = [
        "algorithm.algorithm_type=prompt_distill",
        "tuner.algorithm.prompt=Be brief.",
        f"model.model_path={random_model_path}",
        "model.max_model_len=256",
        "model.max_response_tokens=4",
    ]
    done = CliRunner().invoke(app, ["check", str(file), *settings])
    assert "2 of 2 calls were cut off" in done.output  # a random model ends no answer
    shown = done.output.partition("PROMPT, as the teacher sees it\n")[2]
    assert shown.startswith(
        "  | <|im_start|>system\n  | Be brief.<|im_end|>\n  | <|im_start|>user\n"
    )


async def two_turns(task, model):
    """The second answer goes on from the first."""
    first = {"role": "user", "content": task["question"]}
    said = (await ask(task, model)).response
    turns = [first, {"role": "assistant", "content": said}]
    return await ask({"question": "Sure?"}, model, turns)


def small_run(model, root, *overrides, workflow=two_turns, context=256):
    return tune(
        workflow,
        train_dataset=[{"question": "a" * length} for length in (4, 8, 60, 64)],
        model=TunerModelConfig(model_path=str(model), max_model_len=context, max_tokens=6),
        algorithm=AlgorithmConfig(algorithm_type="prompt_distill", batch_size=4, group_size=2),
        experiment_name="run",
        overrides=[
            f"checkpoint_root_dir={root}",
            "tuner.algorithm.prompt=Be brief.",
            "buffer.total_steps=2",
            "monitor.monitor_type=[]",
            "tuner.signal_patience=1",
            *overrides,
        ],
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ("tuner.algorithm.prompt_teacher=policy",),
        ("model.lora_configs=[{lora_rank: 2}]",),
        ("synchronizer.sync_offset=1", "algorithm.kl_loss_fn=k2"),
    ],
    ids=["policy", "lora", "ahead"],
)
def test_every_sampled_token_is_trained_without_a_judge(random_model_path, tmp_path, overrides):
    result = small_run(random_model_path, tmp_path, *overrides)
    assert (result.steps, result.rewards) == (2, [])
    assert result.tokens.sampled == result.tokens.trained > 0
    assert all(row["train/kl_teacher"] != 0 for row in result.history)
    assert ("train/kl_reference" in result.history[0]) == ("kl_loss_fn" in str(overrides))


def test_calls_that_the_prompt_makes_too_long_are_counted(random_model_path, tmp_path):
    result = small_run(random_model_path, tmp_path, workflow=plain, context=100)
    sampled, trained, dropped = vars(result.tokens).values()
    assert set(dropped) == {"prompt_too_long"}
    assert sampled == trained + dropped["prompt_too_long"]
    assert trained > 0


def test_a_run_of_which_nothing_can_be_taught_says_so(random_model_path, tmp_path):
    async def text(task, model):
        client = model.client
        await client.completions.create(model=model.model_name, prompt=task["question"])
        return WorkflowOutput(response="", reward=1.0)

    with pytest.raises(TrainingError, match="No call of the last step could be trained"):
        small_run(random_model_path, tmp_path, workflow=text)
    with pytest.raises(ConfigError, match="leaves no room in a context of 20"):
        small_run(random_model_path, tmp_path / "other", context=20)
