"""Several sets of tasks in one run."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.environments.test_seam import HELD_OUT, HERE, ROWS, SETTINGS, Letters
from tests.kit.agents import answer
from tuner import JudgeOutput, TunerModelConfig, WorkflowOutput, tune
from tuner.environments import Mixture
from tuner.errors import ConfigError, DatasetError, FunctionError
from tuner.traces import TraceStore
from tuner.tune import prepare

WORDS = [{"word": f"word {i}"} for i in range(20)]


async def spell(task, model):
    text = await answer(model, task["word"])
    assert "set" not in task
    return WorkflowOutput(response=text, reward=len(text) % 5)


async def strict(task, response):
    return JudgeOutput(reward=len(response) % 3)


def mixture(**given):
    words = {"workflow": spell, "train_dataset": WORDS, "eval_dataset": WORDS[:3]}
    return Mixture({"letters": Letters(), "words": words}, **given)


@pytest.fixture
def settings(random_model_path, tmp_path):
    return {
        "model": TunerModelConfig(model_path=str(random_model_path), max_model_len=200),
        "experiment_name": "run",
        "overrides": [*SETTINGS, "buffer.batch_size=4", f"checkpoint_root_dir={tmp_path}"],
    }


def drawn(result, step):
    traces = TraceStore(result.run_dir / "traces").read("train", step)
    return Counter(trace.task["set"] for trace in traces if trace.id.rollout == 0)


def metrics(result):
    return [
        json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()
    ]


def test_each_set_has_its_share_its_functions_and_its_metrics(settings):
    result = tune(environment=mixture(weights={"letters": 3, "words": 1}), **settings)
    for step in (1, 2):
        assert drawn(result, step) == {"letters": 3, "words": 1}
    rows = [row for row in metrics(result) if row["step"] > 0]
    for row in rows:
        traces = TraceStore(result.run_dir / "traces").read("train", row["step"])
        for name in ("letters", "words"):
            rewards = [trace.reward for trace in traces if trace.task["set"] == name]
            assert row[f"rollout/{name}/reward"] == pytest.approx(sum(rewards) / len(rewards))
            assert row[f"rollout/{name}/failed"] == 0
    assert {"eval/letters/reward", "eval/words/reward"} <= set(rows[-1])
    assert set(result.eval_after) == {"letters", "words"}


def test_without_weights_each_row_comes_as_often(settings):
    settings["overrides"] += ["buffer.batch_size=13", "buffer.total_steps=2"]
    result = tune(environment=mixture(), **settings)
    assert drawn(result, 1) + drawn(result, 2) == {"letters": 6, "words": 20}


@pytest.mark.long
def test_a_run_that_goes_on_draws_what_it_would_have_drawn(settings):
    settings["overrides"] += ["buffer.total_steps=3"]
    weights = {"letters": 1, "words": 1}
    whole = tune(environment=mixture(weights=weights), **{**settings, "experiment_name": "whole"})
    short = [*settings["overrides"], "buffer.total_steps=2"]
    tune(environment=mixture(weights=weights), **{**settings, "overrides": short})
    parts = tune(environment=mixture(weights=weights), **settings)

    def tasks(result):
        store = TraceStore(result.run_dir / "traces")
        return [
            sorted((t.task["set"], *t.task.values()) for t in store.read("train", step))
            for step in (1, 2, 3)
        ]

    assert tasks(parts) == tasks(whole)


def test_a_file_may_mix_too(settings, tmp_path):
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in WORDS))
    sets = {
        "letters": {"environment": f"{HERE}:made"},
        "words": {
            "workflow": f"{__file__}:spell",
            "judge": f"{__file__}:strict",
            "train_dataset": str(tmp_path / "words.jsonl"),
        },
    }
    environment = Mixture(sets, weights={"letters": 1, "words": 2}, field="which")
    run = prepare(environment=environment, **settings)
    assert Counter(row["which"] for row in run.train_tasks) == {"letters": 6, "words": 20}
    assert list(run.eval_tasks) == ["letters"]
    assert [row["question"] for row in run.eval_tasks["letters"]] == [
        row["question"] for row in HELD_OUT
    ]
    assert run.config.tuner.tasks.selector.field == "which"


def test_a_failure_in_one_set_is_counted_there(settings):
    sets = {"good": Letters(), "bad": Letters(fails=True)}
    result = tune(environment=Mixture(sets, weights={"good": 1, "bad": 1}), **settings)
    row = metrics(result)[-1]
    assert (row["rollout/good/failed"], row["rollout/bad/failed"]) == (0, 4)
    assert "rollout/bad/reward" not in row


def test_all_sets_are_closed(settings):
    sets = {"a": Letters(), "b": Letters()}
    tune(environment=Mixture(sets), **settings)
    assert [one.closed for one in sets.values()] == [[True], [True]]


def test_a_set_that_gives_no_reward_stops_the_run(settings):
    async def silent(task, model):
        await spell(task, model)
        return WorkflowOutput(response="x")

    words = {"workflow": silent, "train_dataset": WORDS}
    with pytest.raises(FunctionError, match="'words' has no judge, and its workflow gave no"):
        tune(environment=Mixture({"letters": Letters(), "words": words}), **settings)


async def of_groups(task, responses):
    return []


@pytest.mark.parametrize(
    ("sets", "weights", "error", "said"),
    [
        ({}, None, ConfigError, "must be a mapping of sets"),
        ({"a b": Letters()}, None, ConfigError, "not a name of a set"),
        ({"a": Letters()}, {"a": 0}, ConfigError, "weights has 0 for 'a'"),
        ({"a": Letters()}, {"a": 1, "b": 1}, ConfigError, "weights has 1 for 'b'"),
        ({"a": Letters(), "b": Letters()}, {"a": 1}, ConfigError, "weights lacks b"),
        ({"a": {"workflw": spell}}, None, ConfigError, "sets.a has workflw; its keys are"),
        ({"a": {}}, None, ConfigError, "give either an environment or a workflow"),
        ({"a": {"workflow": spell}}, None, DatasetError, "'a' has nothing to train on"),
        ({"a": {"environment": Letters(), "judge": strict}}, None, ConfigError, "has its own"),
        (
            {"a": {"workflow": spell, "train_dataset": [{"set": 1}]}},
            None,
            DatasetError,
            "rows have a field 'set'",
        ),
        (
            {"a": {"workflow": spell, "judge": of_groups, "train_dataset": ROWS}},
            None,
            FunctionError,
            "judge of whole groups",
        ),
    ],
)
def test_what_is_no_mixture_is_refused(sets, weights, error, said):
    with pytest.raises(error, match=said):
        Mixture(sets, weights=weights)
