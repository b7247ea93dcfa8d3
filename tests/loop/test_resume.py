"""A killed run goes on where it stopped and ends with the very same weights."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from tests import forked
from tests.loop import runs
from tuner.errors import ConfigError, ModelLoadError
from tuner.loop import run_local
from tuner.result import TuneResult
from tuner.tune import leave_report

# In the first step's rollouts, in its update, in the second step's rollouts, before metrics are
# written, between the files of a checkpoint, and before a checkpoint gets its name.
MOMENTS = ["workflow:5", "update:1", "judge:4", "log:2", "checkpoint:1", "rename:4"]


def start(model, root, moment):
    return forked.run(runs.main, str(model), str(root), moment)


def tune(config, **functions):
    return run_local(
        config,
        workflow=functions.get("workflow", runs.workflow),
        judge=functions.get("judge", runs.judge),
        train_tasks=runs.TRAIN,
        eval_tasks={"held-out": runs.EVAL},
        report=leave_report,
    )


def weights(result: TuneResult):
    return load_file(result.checkpoint / "model.safetensors")


@pytest.fixture(scope="module")
def straight(random_model_path, tmp_path_factory):
    """A run that nobody killed."""
    return tune(runs.config(random_model_path, tmp_path_factory.mktemp("straight")))


def without_times(history):
    return [
        {
            name: value
            for name, value in row.items()
            if not name.startswith(("time/", "rollout_seconds/")) and "per_second" not in name
        }
        for row in history
    ]


def test_run_killed_at_any_moment_ends_with_the_same_weights(random_model_path, straight, tmp_path):
    for moment in MOMENTS:
        assert start(random_model_path, tmp_path, moment) == -signal.SIGKILL, moment
    result = tune(runs.config(random_model_path, tmp_path))
    expected, found = weights(straight), weights(result)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert without_times(result.history) == without_times(straight.history)
    assert result.outcomes == straight.outcomes


def test_deterministic_runs_are_equal_bit_for_bit(random_model_path, straight, tmp_path):
    again = weights(tune(runs.config(random_model_path, tmp_path)))
    assert all(torch.equal(again[name], value) for name, value in weights(straight).items())


def test_interrupted_step_is_trained_from_its_recorded_traces(random_model_path, tmp_path):
    """No rollout that ended is run again, and no finished step is lost."""
    assert start(random_model_path, tmp_path, "update:2") == -signal.SIGKILL
    traces = sorted((tmp_path / "p" / "run" / "traces").glob("step_*.jsonl"))
    assert [path.name for path in traces] == ["step_000001.jsonl", "step_000002.jsonl"]
    before = [path.read_bytes() for path in traces]
    tune(runs.config(random_model_path, tmp_path))
    assert [path.read_bytes() for path in traces] == before


def test_finished_run_is_not_run_again(straight, random_model_path):
    root = straight.run_dir.parents[1]

    async def never(task, model):
        raise AssertionError("the run is complete")

    assert tune(runs.config(random_model_path, root), workflow=never) == straight


def test_run_with_other_settings_or_data_is_refused_by_name(straight, random_model_path):
    root = straight.run_dir.parents[1]
    with pytest.raises(ConfigError, match=r"algorithm\.optimizer\.lr was 0\.01 and is 0\.5"):
        tune(runs.config(random_model_path, root, "algorithm.optimizer.lr=0.5"))
    with pytest.raises(ConfigError, match="the rows of dataset 'train' have changed"):
        run_local(
            runs.config(random_model_path, root),
            workflow=runs.workflow,
            judge=runs.judge,
            train_tasks=runs.TRAIN[1:],
            eval_tasks={"held-out": runs.EVAL},
        )


def test_start_that_failed_does_not_bind_the_next_one(random_model_path, tmp_path):
    wrong = runs.config(random_model_path, tmp_path, "model.model_path=no/such/model")
    with pytest.raises(ModelLoadError):
        tune(wrong)
    assert tune(runs.config(random_model_path, tmp_path, "buffer.total_steps=1")).steps == 1


def test_run_beside_a_finished_one_gets_a_name_of_its_own(straight, random_model_path):
    root = straight.run_dir.parents[1]
    overrides = ["continue_from_checkpoint=false", "buffer.total_steps=1"]
    result = tune(runs.config(random_model_path, root, *overrides))
    assert result.run_dir == straight.run_dir.with_name("run-2")


def test_moved_run_directory_goes_on(random_model_path, tmp_path):
    first = tune(runs.config(random_model_path, tmp_path / "a", "buffer.total_steps=1"))
    (tmp_path / "b" / "p").mkdir(parents=True)
    first.run_dir.rename(tmp_path / "b" / "p" / "moved")
    config = runs.config(random_model_path, tmp_path / "b", "name=moved", "buffer.total_steps=2")
    result = tune(config)
    assert result.steps == 2
    assert without_times(result.history)[1] == without_times(first.history)[1]


def test_longer_run_goes_on_from_the_end(random_model_path, tmp_path):
    short = tune(runs.config(random_model_path, tmp_path, "buffer.total_steps=2"))
    longer = tune(runs.config(random_model_path, tmp_path, "buffer.total_steps=4"))
    assert (short.steps, longer.steps) == (2, 4)
    assert without_times(longer.history)[1] == without_times(short.history)[1]


def test_result_is_written_and_counts_every_token(straight):
    stored = json.loads((straight.run_dir / "result.json").read_text())
    assert TuneResult.model_validate(stored) == straight
    tokens = straight.tokens
    assert tokens.sampled == tokens.trained + sum(tokens.dropped.values()) > 0
    assert straight.outcomes == {"completed": 36}
    assert straight.eval_before.keys() == straight.eval_after.keys() == {"held-out"}
    assert [row["step"] for row in straight.history] == list(range(7))
    assert straight.checkpoint.name == "step_000006"
    for path in (straight.checkpoint, straight.traces, straight.tensorboard):
        assert any(path.iterdir())
    text = str(straight)
    assert "->" in text
    assert str(tokens.sampled) in text
    # A path may be wrapped inside its cell.
    cells = "".join(line.strip("│ ").split("│")[-1].strip() for line in text.splitlines())
    assert "report.html" in cells
