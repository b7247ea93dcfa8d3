"""Runs on rollouts that were recorded before: each algorithm learns, and every token is counted."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.kit.agents import answer
from tests.kit.examples import grid
from tests.loop.test_recorded import TEST, TINY_MATH, problems, solve
from tuner import AlgorithmConfig, TunerModelConfig, WorkflowOutput, tune
from tuner.cli import app
from tuner.config.algorithms import ALGORITHMS
from tuner.errors import ConfigError, DatasetError, FunctionError, TrainingError
from tuner.runs.directory import RunDirectory
from tuner.runs.result import TuneResult
from tuner.traces import read_traces
from tuner.training.trainer import PolicyTrainer

MODEL = TunerModelConfig(model_path=str(TINY_MATH), max_model_len=512, max_tokens=96)
TRAIN = [{"question": q, "answer": a} for q, _, a in problems("train", 48)]


def overrides(root, *more):
    return [f"checkpoint_root_dir={root}", "monitor.monitor_type=[]", *more]


@pytest.fixture(scope="module")
def explored(tmp_path_factory) -> TuneResult:
    """Rollouts of the model as it is, eight of each task, and nothing trained."""
    root = tmp_path_factory.mktemp("explored")
    return tune(
        solve,
        train_dataset=TRAIN,
        model=MODEL,
        algorithm=AlgorithmConfig(batch_size=16, group_size=8),
        overrides=overrides(root, "mode=explore", "name=explored"),
    )


def recorded(result):
    return [one for path in sorted(result.traces.glob("step_*")) for one in read_traces(path)]


def sampled(result):
    return sum(trace.sampled_tokens for trace in recorded(result))


@pytest.mark.long
def test_explore_records_rollouts_of_the_model_as_it_is(explored):
    assert explored.steps == 0
    assert explored.checkpoint is None
    assert explored.outcomes == {"completed": 384}
    assert explored.tokens.trained == 0
    assert explored.tokens.sampled == sampled(explored) == sum(explored.tokens.dropped.values())
    assert set(explored.tokens.dropped) == {"explored"}
    assert not any((explored.run_dir / "checkpoints").iterdir())
    assert not any(name.startswith("train/") for row in explored.history for name in row)
    assert {v for one in recorded(explored) for call in one.calls for v in call.versions} == {0}
    assert 0.3 < sum(explored.rewards) / 3 < 0.6


LEARN = {
    "sft": (
        AlgorithmConfig(algorithm_type="sft", batch_size=16, learning_rate=1e-3),
        ["tuner.history.best=4", "tuner.history.min_reward=1", "buffer.total_steps=10"],
    ),
    "dpo": (
        AlgorithmConfig(algorithm_type="dpo", batch_size=16, learning_rate=3e-4),
        ["tuner.history.pairs=all", "buffer.total_steps=10"],
    ),
    "multi_step_grpo": (
        AlgorithmConfig(batch_size=16, learning_rate=5e-4),
        ["buffer.total_steps=10"],
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LEARN)
def test_an_algorithm_learns_without_a_new_rollout(explored, name, tmp_path):
    algorithm, settings = LEARN[name]
    result = tune(
        solve,
        eval_dataset=TEST,
        model=MODEL,
        algorithm=algorithm,
        experiment_name=name,
        overrides=overrides(
            tmp_path,
            f"tuner.history.sources=[{explored.run_dir}]",
            "tuner.history.held_out=0.15",
            *settings,
        ),
    )
    print(name, result.eval_before, result.eval_after, result.tokens, result.rows)
    for row in result.history:
        print({k: v for k, v in row.items() if "held" in k or "effective" in k or "loss" in k})
    assert result.eval_after["eval"] >= result.eval_before["eval"] + 0.2
    assert result.outcomes == {}
    assert {path.name[:4] for path in result.traces.glob("*.jsonl")} == {"eval"}
    tokens = result.tokens
    assert tokens.sampled == tokens.trained + sum(tokens.dropped.values())
    assert "held_out/loss" in result.history[0] or "held_out/reward" in result.history[0]


# On a random model: what is said, refused and kept ----------------------------------------------


@pytest.fixture(scope="module")
def small(random_model_path, tmp_path_factory) -> TuneResult:
    """A short run that was trained itself, of a random model."""
    root = tmp_path_factory.mktemp("small")
    return tune(
        letters,
        train_dataset=[{"question": f"task {n}"} for n in range(6)],
        model=TunerModelConfig(model_path=str(random_model_path), max_model_len=200, max_tokens=5),
        algorithm=AlgorithmConfig(batch_size=3, group_size=4, learning_rate=1e-3),
        experiment_name="run",
        overrides=overrides(root, "buffer.total_steps=4", "tuner.deterministic=true"),
    )


async def letters(task, model):
    text = await answer(model, task["question"])
    return WorkflowOutput(response=text, reward=sum(map(ord, text)) % 7 / 7)


def start(small, root, *more, algorithm="multi_step_grpo", lr=0.01, **given):
    return tune(
        model=TunerModelConfig(model_path=str(small_model(small)), max_model_len=200, max_tokens=5),
        algorithm=AlgorithmConfig(algorithm_type=algorithm, batch_size=2, learning_rate=lr),
        experiment_name="again",
        overrides=overrides(root, "buffer.total_steps=6", "tuner.deterministic=true", *more),
        **given,
    )


def small_model(small):
    return RunDirectory(small.run_dir).stored_config()["model"]["model_path"]


def of(small):
    return f"tuner.history.sources=[{small.run_dir}]"


def weights(result):
    return load_file(result.checkpoint / "model.safetensors")


ANY = "tuner.history.min_effective_samples=0"


@pytest.mark.long
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("algorithm", ["multi_step_grpo", "sft"])
def test_every_token_of_the_traces_is_trained_or_has_a_reason(small, tmp_path, steps, algorithm):
    """Six tasks in steps of two: no group is taken twice, and of one step four are not."""
    limit = [] if algorithm == "sft" else [ANY]
    length = f"buffer.total_steps={steps}"
    result = start(small, tmp_path, of(small), *limit, length, algorithm=algorithm)
    tokens = result.tokens
    assert tokens.sampled == sampled(small)
    assert tokens.sampled == tokens.trained + sum(tokens.dropped.values())
    assert sum(result.rows.values()) == len(recorded(small)) == 48
    each = 1 if algorithm == "sft" else 8
    assert result.rows["used"] == 2 * steps * each
    assert result.rows.get("not_taken", 0) == (6 - 2 * steps) * each
    text = str(result)
    assert f"{result.rows['used']} used" in text
    assert "sampled =" in text or "trained" in text


def test_a_filter_is_counted_in_the_result(small, tmp_path, capsys):
    result = start(small, tmp_path, of(small), ANY, "tuner.history.max_step=2")
    assert result.rows["other_step"] == 24
    later = [one for one in recorded(small) if one.id.step > 2]
    assert result.tokens.dropped["other_step"] == sum(one.sampled_tokens for one in later)
    printed = " ".join(capsys.readouterr().out.split())
    assert "dropped: 24 other_step (docs/recorded_data.md)" in printed


@pytest.mark.long
def test_the_run_stops_where_the_tokens_are_worth_too_little(small, tmp_path):
    first = "tuner.history.max_step=1"  # of the weights that it begins with
    with pytest.raises(TrainingError, match=r"are worth only .*min_effective_samples"):
        start(small, tmp_path, of(small), first, "tuner.history.min_effective_samples=0.999")
    directory = RunDirectory(tmp_path / "runs" / "again")
    (kept,) = directory.checkpoint_steps()  # what was learned until then
    assert kept >= 1
    history = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    assert history[-1]["step"] == kept
    assert history[0]["train/effective_tokens"] == pytest.approx(1, abs=1e-3)
    # It goes on from there once less is asked for.
    result = start(small, tmp_path, of(small), first, ANY)
    assert result.steps == 6


@pytest.mark.long
def test_an_interrupted_run_ends_with_the_same_weights(small, tmp_path, monkeypatch):
    given = of(small), ANY, "trainer.save_interval=2", "tuner.history.held_out=0.2"
    straight = start(small, tmp_path / "straight", *given)
    saved, save = [], PolicyTrainer.save

    def interrupted(trainer, path):
        saved.append(path)
        if len(saved) == 2:
            raise KeyboardInterrupt
        save(trainer, path)

    with monkeypatch.context() as patched:
        patched.setattr(PolicyTrainer, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            start(small, tmp_path / "killed", *given)
    again = start(small, tmp_path / "killed", *given)
    expected, found = weights(straight), weights(again)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert again.rows == straight.rows


@grid(
    "algorithm",
    sorted(set(ALGORITHMS) - {"on_policy_distill", "prompt_distill", "multi_step_grpo"}),
    quick=4,
)
def test_every_algorithm_that_learns_from_rewards_can_use_them(small, tmp_path, algorithm):
    given = [] if algorithm in ("sft", "dpo") else [ANY]
    result = start(small, tmp_path, of(small), *given, "buffer.total_steps=2", algorithm=algorithm)
    assert result.steps == 2
    assert result.tokens.sampled == result.tokens.trained + sum(result.tokens.dropped.values())


def test_a_teacher_says_what_the_recorded_tokens_were_worth(small, tmp_path):
    """The teacher is the model itself, so that there is nothing to learn before it has moved."""
    path = small_model(small)
    result = start(
        small,
        tmp_path,
        of(small),
        ANY,
        "buffer.total_steps=1",
        algorithm="on_policy_distill",
        auxiliary_models={"expert": TunerModelConfig(model_path=str(path), max_model_len=200)},
    )
    # Not of the weights that sampled, which had moved.
    assert abs(result.history[-1]["train/kl_teacher"]) < 1e-6
    assert result.rows == {"used": 16, "not_taken": 32}  # groups of equal rewards, too


def test_rollouts_in_memory_are_learned_from(small, tmp_path):
    result = start(small, tmp_path, ANY, train_dataset=recorded(small))
    assert result.rows["used"] > 0
    assert result.tokens.trained > 0


def test_what_cannot_be_learned_from_is_refused_by_name(small, tmp_path, random_model_path):
    log = tmp_path / "log.jsonl"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    log.write_text(json.dumps({"messages": talk}))
    logs = f"tuner.history.sources=[{log}]"
    with pytest.raises(ConfigError, match=r"log.jsonl, line 1 has no tokens, but .* grpo needs"):
        start(small, tmp_path, logs, algorithm="grpo")
    with pytest.raises(DatasetError, match="it is one conversation, but the algorithm needs pairs"):
        start(small, tmp_path, logs, algorithm="dpo")
    with pytest.raises(DatasetError, match=r"\d tasks have rollouts to compare but batch_size is"):
        start(small, tmp_path, of(small), "buffer.batch_size=20")
    with pytest.raises(DatasetError, match=r"recorded call has the token id .* another model"):
        tune(
            model=MODEL.model_copy(update={"model_path": str(random_model_path)}),
            train_dataset=[with_token(one) for one in recorded(small)],
            algorithm=AlgorithmConfig(batch_size=2),
            overrides=overrides(tmp_path, "model.max_model_len=200"),
        )
    with pytest.raises(DatasetError, match=r"a recorded answer is .* this model decodes"):
        start(small, tmp_path, train_dataset=[of_other_words(one) for one in recorded(small)])
    with pytest.raises(FunctionError, match="no workflow to evaluate with"):
        start(small, tmp_path, of(small), eval_dataset=TEST)


def with_token(one, token=100_000):
    calls = [replace(call, prompt_ids=(token, *call.prompt_ids)) for call in one.calls]
    return replace(one, calls=tuple(calls))


def of_other_words(one):
    """As the ids of a tokenizer read for which they mean something else."""
    said = {"role": "assistant", "content": "other words"}
    return replace(one, calls=tuple(replace(call, response=said) for call in one.calls))


def test_logs_without_tokens_are_imitated(random_model_path, tmp_path):
    log = tmp_path / "log.jsonl"
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"{n}?"},
                {"role": "assistant", "content": f"{n}!"},
            ]
        }
        for n in range(30)
    ]
    log.write_text("\n".join(map(json.dumps, lines)))
    result = tune(
        model=TunerModelConfig(model_path=str(random_model_path), max_model_len=200),
        algorithm=AlgorithmConfig(algorithm_type="sft", batch_size=4, learning_rate=0.01),
        overrides=overrides(
            tmp_path, f"tuner.history.sources=[{log}]", "tuner.history.held_out=0.2"
        ),
    )
    losses = [row["held_out/loss"] for row in result.history if "held_out/loss" in row]
    assert losses[-1] < losses[0]
    assert result.rows["held_out"] > 0
    assert sum(result.rows.values()) == 30


# The command ------------------------------------------------------------------------------------


@pytest.fixture
def file(small, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        f"name: run\ncheckpoint_root_dir: {small.run_dir.parents[1]}\n"
        f"model: {{model_path: {small_model(small)}, max_model_len: 200}}\n"
        "buffer: {batch_size: 2, total_steps: 2, explorer_input: {taskset: {path: nowhere/x}}}\n"
        "monitor: {monitor_type: []}\n"
    )
    return path


def invoked(*arguments):
    return CliRunner().invoke(app, [str(one) for one in arguments])


def test_the_command_trains_on_a_run(small, file, tmp_path):
    result = invoked("train", small.run_dir, "--config", file, "name=next", ANY)
    assert result.exit_code == 0, result.output
    assert "recorded rollouts of 6 tasks are trained" in result.output
    assert re.search(r"step 2/2  effective tokens 0\.\d+  rollouts [01]\.\d+  ", result.output)
    stored = json.loads((small.run_dir.parent / "next" / "result.json").read_text())
    assert stored["steps"] == 2
    assert stored["rows"]["used"] > 0


def test_the_run_that_is_learned_from_is_not_gone_on_with(small, file):
    result = invoked("train", small.run_dir, "--config", file, ANY)
    assert isinstance(result.exception, ConfigError)
    assert "mode was 'both' and is 'train'" in str(result.exception)
    assert "another `name`" in str(result.exception)


@pytest.mark.parametrize(
    ("algorithm", "texts"),
    [
        (
            "multi_step_grpo",
            ["used, of 6 tasks", "EFFECTIVE SAMPLE SIZE", "of 16 rollouts", "READY"],
        ),
        (
            "sft",
            [
                "4  used",
                "2  not_taken",
                "42  not_best_of_task",
                "tokens that are not trained: ",
                "READY: 6",
            ],
        ),
    ],
)
def test_check_says_what_is_used_and_what_it_is_worth(small, file, algorithm, texts):
    limit = [] if algorithm == "sft" else [ANY]
    settings = [f"algorithm.algorithm_type={algorithm}", of(small), *limit]
    result = invoked("check", file, "name=checked", *settings)
    assert result.exit_code == 0, result.output
    for text in texts:
        assert text in result.output
    assert not (small.run_dir.parent / "checked").exists()


def test_check_says_that_too_little_is_left(small, file):
    settings = of(small), "tuner.history.min_effective_samples=1"
    result = invoked("check", file, "name=checked", *settings)
    assert result.exit_code == 1
    assert "NOT READY: the effective sample size of the tokens is below" in result.output


def test_exploring_stops_where_no_rollout_comes_to_its_end(random_model_path, tmp_path):
    async def fails(task, model):
        raise RuntimeError("no such tool")

    with pytest.raises(TrainingError, match=r"8 of 8 rollouts of the last step failed.*such tool"):
        tune(
            fails,
            train_dataset=[{"question": "x"}] * 4,
            model=TunerModelConfig(model_path=str(random_model_path), max_model_len=200),
            algorithm=AlgorithmConfig(batch_size=2, group_size=4),
            overrides=overrides(tmp_path, "mode=explore", "explorer.max_retry_times=0"),
        )


@pytest.mark.usefixtures("ctrl_c")
def test_explored_rollouts_are_taken_up_after_an_interruption(random_model_path, tmp_path):
    """Nothing is sampled twice, and the result is there once."""
    asked = []

    async def counting(task, model):
        asked.append(task)
        if len(asked) == 15:
            signal.raise_signal(signal.SIGINT)
        return await letters(task, model)

    def explore():
        return tune(
            counting,
            train_dataset=[{"question": f"task {n}"} for n in range(6)],
            model=TunerModelConfig(
                model_path=str(random_model_path), max_model_len=200, max_tokens=5
            ),
            algorithm=AlgorithmConfig(batch_size=2, group_size=4),
            experiment_name="explored",
            overrides=overrides(tmp_path, "mode=explore", "explorer.runner_per_model=1"),
        )

    with pytest.raises(KeyboardInterrupt):
        explore()
    result = explore()
    assert result.outcomes == {"completed": 24}
    assert 24 <= len(asked) - 1 <= 28
    assert [row["step"] for row in result.history] == [1, 2, 3]
    explore()
    assert len(asked) - 1 <= 28
