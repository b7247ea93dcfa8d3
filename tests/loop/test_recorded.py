"""Runs on recorded data and with a teacher: they learn, they resume, they account for every row."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.kit import forked, recorded_runs
from tests.kit.agents import answer
from tests.loop.test_resume import without_times
from tuner import AlgorithmConfig, TunerModelConfig, WorkflowOutput, tune
from tuner.cli import app
from tuner.errors import ConfigError, DatasetError, FunctionError
from tuner.runs.result import TuneResult
from tuner.traces import read_traces
from tuner.training.trainer import PolicyTrainer

REPOSITORY = Path(__file__).parents[2]
TINY_MATH = REPOSITORY / "models" / "tiny_math"
EQUATION = re.compile(r"<<(\d+)([-+*/])(\d+)=(\d+)>>")
SYSTEM = {"role": "system", "content": "You are a helpful math problem solving agent."}


def problems(split, count):
    """Questions, worked-out equations and answers of the shipped problems."""
    lines = (REPOSITORY / f"examples/gsm8k/data/{split}.jsonl").read_text().splitlines()[:count]
    found = []
    for row in map(json.loads, lines):
        steps = EQUATION.findall(row["answer"])
        work = "\n".join(f"{one} {sign} {other} = {value}" for one, sign, other, value in steps)
        found.append((row["question"], work, row["answer"].rpartition("#### ")[2]))
    return found


def prompt(question):
    return [SYSTEM, {"role": "user", "content": question}]


def worked(work, answer):
    content = f"The answer is {answer}."
    return {"role": "assistant", "reasoning_content": work, "content": content}


async def solve(task, model):
    text = await answer(model, prompt(task["question"]))
    return WorkflowOutput(response=text, reward=float(f"is {task['answer']}." in text))


async def only_solve(task, model):
    """The same without a reward."""
    return WorkflowOutput(response=(await solve(task, model)).response)


TEST = [{"question": q, "answer": a} for q, _, a in problems("test", 24)]


def overrides(root, steps, *more):
    return [
        f"checkpoint_root_dir={root}",
        f"buffer.total_steps={steps}",
        "model.max_model_len=512",
        "model.max_response_tokens=96",
        "monitor.monitor_type=[]",
        "tuner.signal_patience=1",
        *more,
    ]


MODEL = TunerModelConfig(model_path=str(TINY_MATH), max_model_len=512)


@pytest.fixture(scope="module")
def imitated(tmp_path_factory) -> TuneResult:
    """SFT on worked answers, evaluated with a workflow."""
    rows = [
        {"messages": [*prompt(question), worked(work, answer)]}
        for question, work, answer in problems("train", 96)
    ]
    return tune(
        solve,
        train_dataset=rows,
        eval_dataset=TEST,
        model=MODEL,
        algorithm=AlgorithmConfig(algorithm_type="sft", batch_size=16, learning_rate=1e-3),
        overrides=overrides(tmp_path_factory.mktemp("sft"), 6),
    )


def series(result, name):
    return [row[f"train/{name}"] for row in result.history if f"train/{name}" in row]


@pytest.mark.long
def test_sft_makes_the_data_likely_and_raises_the_held_out_reward(imitated):
    loss = series(imitated, "loss")
    assert loss[-1] < loss[0] / 2
    assert imitated.eval_before["eval"] < 0.6
    assert imitated.eval_after["eval"] > 0.8
    assert imitated.rows == {"used": 96}
    assert imitated.outcomes == {}
    assert imitated.tokens.trained == imitated.tokens.sampled > 0
    assert imitated.rewards == []


@pytest.mark.long
def test_a_run_on_recorded_data_leaves_what_every_run_leaves(imitated):
    stored = json.loads((imitated.run_dir / "result.json").read_text())
    assert TuneResult.model_validate(stored) == imitated.model_copy(update={"history": []})
    assert imitated.checkpoint.name == "step_000006"
    assert (imitated.run_dir / "report.html").stat().st_size > 10_000
    assert [row["step"] for row in imitated.history] == list(range(7))
    assert all(row["rows/trained"] == 16 for row in imitated.history[1:])
    text = str(imitated)
    for part in ("96 used", "loss", "trained", "->"):
        assert part in text
    assert "rollouts" not in text


@pytest.mark.long
def test_dpo_raises_margin_and_accuracy(tmp_path):
    rows = [
        {
            "messages": prompt(question),
            "chosen": worked(work, answer),
            "rejected": {"role": "assistant", "content": f"The answer is {answer}."},
        }
        for question, work, answer in problems("train", 24)
    ]
    result = tune(
        train_dataset=rows,
        model=MODEL,
        algorithm=AlgorithmConfig(algorithm_type="dpo", batch_size=8, learning_rate=3e-4),
        overrides=overrides(tmp_path, 6, "trainer.max_token_len_per_gpu=1024"),
    )
    assert series(result, "loss")[0] == pytest.approx(0.6931, abs=1e-3)
    assert series(result, "accuracy")[0] < 0.9
    assert series(result, "reward_margin")[0] == pytest.approx(0, abs=1e-4)
    assert series(result, "accuracy")[-1] == 1
    assert series(result, "reward_margin")[-1] > 0.1
    assert series(result, "loss")[-1] < 0.65


@pytest.mark.long
def test_distillation_brings_the_student_to_the_teacher_without_a_reward(imitated, tmp_path):
    """Groups of one rollout, no judge, no reward; the teacher is what SFT made."""
    result = tune(
        only_solve,
        train_dataset=[{"question": q, "answer": a} for q, _, a in problems("train", 48)],
        model=MODEL,
        auxiliary_models={
            "expert": TunerModelConfig(model_path=str(imitated.checkpoint), max_model_len=512)
        },
        algorithm=AlgorithmConfig(
            algorithm_type="on_policy_distill", group_size=1, batch_size=24, learning_rate=5e-4
        ),
        overrides=overrides(tmp_path, 6),
    )
    distance = series(result, "kl_teacher")
    assert len(distance) == 6
    assert distance[0] > 0.05
    assert distance[-1] < distance[0] / 2
    assert result.outcomes == {"completed": 144}
    assert result.tokens.dropped == {}
    assert result.tokens.sampled == result.tokens.trained > 0
    assert result.rewards == []
    assert all(trace.reward is None for trace in read_traces(result.traces / "step_000001.jsonl"))


def test_a_teacher_of_another_vocabulary_is_refused(random_model_path, tmp_path):
    with pytest.raises(
        ConfigError, match=r"the teacher 'expert' has a different vocabulary.*token 256 "
    ):
        tune(
            only_solve,
            train_dataset=TEST,
            model=MODEL,
            auxiliary_models={
                "expert": TunerModelConfig(model_path=str(random_model_path), max_model_len=128)
            },
            algorithm=AlgorithmConfig(algorithm_type="on_policy_distill", batch_size=2),
            overrides=overrides(tmp_path, 1),
        )


def test_rewards_are_still_reported_where_there_are_some(random_model_path, tmp_path):
    """The teacher is the student: there is nothing to learn, and that is no reason to stop."""

    async def workflow(task, model):
        return WorkflowOutput(reward=0.25, response=(await solve(task, model)).response)

    model = TunerModelConfig(model_path=str(random_model_path), max_model_len=200, max_tokens=5)
    result = tune(
        workflow,
        train_dataset=TEST,
        model=model,
        auxiliary_models={"expert": model},
        algorithm=AlgorithmConfig(algorithm_type="on_policy_distill", batch_size=2, group_size=2),
        overrides=[
            f"checkpoint_root_dir={tmp_path}",
            "buffer.total_steps=2",
            "tuner.signal_patience=1",
        ],
    )
    assert result.rewards == [0.25, 0.25]
    assert abs(series(result, "kl_teacher")[0]) < 1e-5
    assert "groups/zero_variance" not in result.history[-1]


# What goes in -----------------------------------------------------------------------------------


PAIR = {"prompt": "x", "chosen": "a", "rejected": "b"}


def refused(error, *args, algorithm="sft", **given):
    with pytest.raises(error) as found:
        tune(*args, algorithm=AlgorithmConfig(algorithm_type=algorithm, batch_size=1), **given)
    return str(found.value)


def test_only_recorded_data_does_without_a_workflow():
    text = refused(FunctionError, train_dataset=[PAIR], algorithm="grpo")
    assert "algorithm.algorithm_type grpo trains on its rollouts: pass workflow_func" in text
    text = refused(FunctionError, train_dataset=[PAIR], eval_dataset=TEST, algorithm="dpo")
    assert "no workflow to evaluate with" in text
    text = refused(FunctionError, None, recorded_runs.judge, [PAIR], algorithm="dpo")
    assert "without a workflow to judge" in text
    text = refused(DatasetError, algorithm="dpo")
    assert "set buffer.trainer_input.experience_buffer.path" in text


def test_rows_left_out_are_said_and_counted(random_model_path, tmp_path, capsys):
    rows = [
        {"prompt": "x", "response": "y"},
        {"prompt": "x" * 400, "response": "y"},
        {"prompt": "y", "response": "z"},
    ]
    given = {
        "train_dataset": rows,
        "model": TunerModelConfig(model_path=str(random_model_path), max_model_len=200),
        "overrides": [f"checkpoint_root_dir={tmp_path}", "monitor.monitor_type=[]"],
    }
    result = tune(algorithm=AlgorithmConfig(algorithm_type="sft", batch_size=2), **given)
    assert result.rows == {"used": 2, "too_long": 1}
    assert result.steps == 1  # an epoch is of the rows that are used
    assert "2 of 3 rows are trained; dropped: 1 too_long" in capsys.readouterr().out
    with pytest.raises(DatasetError, match="2 of 3 rows can be trained but batch_size is 3"):
        tune(algorithm=AlgorithmConfig(algorithm_type="sft", batch_size=3), **given)


@pytest.fixture
def file(random_model_path, tmp_path):
    (tmp_path / "pairs.jsonl").write_text((json.dumps(PAIR) + "\n") * 4)
    path = tmp_path / "config.yaml"
    path.write_text(
        "mode: train\nname: r\nalgorithm: {algorithm_type: dpo}\ncheckpoint_root_dir: runs\n"
        f"model: {{model_path: {random_model_path}}}\n"
        "buffer: {batch_size: 2, trainer_input: {experience_buffer: {path: pairs.jsonl}}}\n"
    )
    return path


def test_command_line_runs_a_file_without_functions(file):
    result = CliRunner().invoke(app, ["run", str(file)])
    assert result.exit_code == 0, result.output
    assert "step 2/2" in result.output
    assert "margin" in result.output
    assert (file.parent / "runs/runs/r/result.json").exists()


def test_check_shows_what_is_trained_and_writes_nothing(file):
    result = CliRunner().invoke(app, ["check", str(file)])
    assert result.exit_code == 0, result.output
    for text in (
        "4  used",
        "8  assistant turns are trained",
        "its first turn of the chosen answer",
        "its first turn of the rejected answer",
        "2 steps x 2 rows = 4 rows",
        "READY: 4 rows can be trained",
    ):
        assert text in result.output
    assert not (file.parent / "runs").exists()


# Going on after a kill --------------------------------------------------------------------------


def weights(result):
    return load_file(result.checkpoint / "model.safetensors")


@pytest.mark.long
def test_a_killed_run_ends_with_the_same_weights(random_model_path, tmp_path):
    straight = recorded_runs.start(random_model_path, tmp_path / "straight", "dpo")
    arguments = random_model_path, tmp_path / "killed", "dpo"
    assert forked.run(recorded_runs.killed, *arguments) == -signal.SIGKILL
    check_the_same(
        recorded_runs.start(random_model_path, tmp_path / "killed", "dpo"), straight, tmp_path
    )


def test_an_interrupted_run_says_so_and_ends_with_the_same_weights(
    random_model_path, tmp_path, monkeypatch
):
    straight = recorded_runs.start(random_model_path, tmp_path / "straight", "sft")
    saved, save = [], PolicyTrainer.save

    def interrupted(trainer, path):
        saved.append(path)
        if len(saved) == 2:
            raise KeyboardInterrupt
        save(trainer, path)

    with monkeypatch.context() as patched:
        patched.setattr(PolicyTrainer, "save", interrupted)
        with pytest.raises(KeyboardInterrupt) as error:
            recorded_runs.start(random_model_path, tmp_path / "killed", "sft")
    assert "report.html" in error.value.__notes__[0]
    check_the_same(
        recorded_runs.start(random_model_path, tmp_path / "killed", "sft"), straight, tmp_path
    )


def check_the_same(again, straight, root):
    assert (root / "killed/runs/run/checkpoints/step_000002").is_dir()
    expected, found = weights(straight), weights(again)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert without_times(again.history) == without_times(straight.history)
    assert again.rows == straight.rows == {"used": 7}


def test_another_dataset_does_not_go_on_with_the_run(random_model_path, tmp_path):
    recorded_runs.start(random_model_path, tmp_path, "sft")
    with pytest.raises(ConfigError, match="the rows of dataset 'train' have changed"):
        recorded_runs.start(random_model_path, tmp_path, "sft", rows=recorded_runs.ROWS[1:])
