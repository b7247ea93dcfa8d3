"""Whole runs that draw their tasks by success: killed, resumed, ahead of training."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from tests.kit import async_runs, forked, runs
from tests.loop.test_resume import without_times
from tests.pages import blocks
from tuner.errors import ConfigError
from tuner.loop import run_local
from tuner.tools.rebase import rebase
from tuner.traces.store import read_traces

SELECTOR = (
    "tuner.tasks.selector.kind=success",
    "tuner.pass_reward=0.5",
    "buffer.explorer_input.taskset.data_selector.selector_type=sequential",
)


def tune(config, workflow=runs.workflow):
    return run_local(
        config,
        workflow=workflow,
        judge=runs.judge,
        train_tasks=runs.TRAIN,
        eval_tasks={"held-out": runs.EVAL},
    )


def notes(result):
    """What was drawn for each step, and the results of each."""
    drawn, results = {}, {}
    for line in (result.run_dir / "tasks.jsonl").read_text().splitlines():
        note = json.loads(line)
        if "drawn" in note:
            drawn[note["step"]] = note["drawn"]
        else:
            results[note["step"]] = note["results"]
    return drawn, results


def check_accounts(result):
    """Recorded rollouts are of the tasks that were drawn, and results are theirs."""
    drawn, results = notes(result)
    rewards = {}
    for path in sorted((result.run_dir / "traces").glob("step_*.jsonl")):
        for trace in read_traces(path):
            row = drawn[trace.id.step][trace.id.task]
            assert trace.task == runs.TRAIN[row]
            if trace.final:
                rewards.setdefault((trace.id.step, trace.id.task), []).append(trace.reward)
    batches = {step: [2 * (step - 1), 2 * step - 1] for step in results}
    if (result.run_dir / "batches.jsonl").exists():
        noted = map(json.loads, (result.run_dir / "batches.jsonl").read_text().splitlines())
        batches = {one["step"]: one["groups"] for one in noted}
    for step, visits in results.items():
        groups = [divmod(number, 2) for number in batches[step]]
        rows = [drawn[planned + 1][index] for planned, index in groups]
        found = [rewards[planned + 1, index] for planned, index in groups]
        passed = [sum(reward >= 0.5 for reward in one) for one in found]
        assert visits == [list(one) for one in zip(rows, map(len, found), passed, strict=True)]


@pytest.fixture(scope="module")
def straight(random_model_path, tmp_path_factory):
    return tune(runs.config(random_model_path, tmp_path_factory.mktemp("straight"), *SELECTOR))


@pytest.mark.long
def test_a_killed_run_draws_the_same_and_ends_with_the_same_weights(
    straight, random_model_path, tmp_path
):
    moments = ("workflow:5", "update:1", "judge:9", "log:2", "update:3", "rename:4")
    for moment in moments:
        code = forked.run(runs.main, str(random_model_path), str(tmp_path), moment, *SELECTOR)
        assert code == -signal.SIGKILL, moment
    again = tune(runs.config(random_model_path, tmp_path, *SELECTOR))
    assert notes(again) == notes(straight)
    expected, found = (load_file(r.checkpoint / "model.safetensors") for r in (straight, again))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert without_times(again.history) == without_times(straight.history)


@pytest.mark.long
def test_results_are_those_of_the_recorded_rollouts(straight):
    check_accounts(straight)
    drawn, results = notes(straight)
    assert list(drawn) == list(results) == list(range(1, 7))
    assert all("tasks/passed" in row for row in straight.history if row["step"])


def main_ahead(model, root, moment):
    """`async_runs.main` with a selector."""
    config = async_runs.config
    async_runs.config = lambda *given: config(*given, *SELECTOR)
    async_runs.main(model, root, moment)


@pytest.mark.long
@pytest.mark.parametrize("moment", ["update:4", "judge:20"])
def test_ahead_of_training_a_killed_run_keeps_what_was_drawn(moment, random_model_path, tmp_path):
    code = forked.run(main_ahead, str(random_model_path), str(tmp_path), moment)
    assert code == -signal.SIGKILL
    before = (tmp_path / "p/run/tasks.jsonl").read_text().splitlines()
    result = tune(
        async_runs.config(random_model_path, tmp_path, *SELECTOR), workflow=async_runs.workflow
    )
    after = (result.run_dir / "tasks.jsonl").read_text().splitlines()
    assert set(before) <= set(after)
    drawn, results = notes(result)
    assert list(drawn) == list(range(1, async_runs.STEPS + 1))
    assert sorted(results) == list(range(1, async_runs.STEPS + 1))
    check_accounts(result)


def test_the_function_of_the_page_draws_the_tasks_of_a_run(random_model_path, tmp_path):
    (function,) = blocks("sampling.md", "python")
    (tmp_path / "weights.py").write_text(function)
    selector = (f"tuner.tasks.selector.kind={tmp_path}/weights.py:weights", *SELECTOR[1:])
    result = tune(runs.config(random_model_path, tmp_path, *selector))
    assert result.steps == 6
    check_accounts(result)


def test_another_judge_would_have_drawn_other_tasks_so_such_a_run_is_not_rebased(straight):
    with pytest.raises(ConfigError, match=r"tuner\.tasks\.selector chose tasks by"):
        rebase(straight.run_dir, judge=runs.judge, workflow=runs.workflow)


def test_what_passes_is_the_same_in_every_part_of_a_run(straight, random_model_path):
    root = straight.run_dir.parents[1]
    with pytest.raises(ConfigError, match=r"tuner\.pass_reward was 0\.5 and is 0\.9"):
        tune(runs.config(random_model_path, root, *SELECTOR, "tuner.pass_reward=0.9"))
