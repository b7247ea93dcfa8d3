"""verifiers itself: its tasksets, harness, runtime and rewards, trained with our model."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import psutil
import pytest
import verifiers.v1 as vf
from verifiers.v1.utils.paths import CACHE_DIR

from tests.environments.training import trained
from tests.examples.conftest import main
from tuner import tune
from tuner.environments import Verifiers
from tuner.errors import ConfigError
from tuner.runs.environment import brought, from_settings
from tuner.tune import prepare

__all__ = ["main"]
EXAMPLE = Path(__file__).parents[3] / "examples" / "verifiers"
HERE = {"agent": {"runtime": {"type": "subprocess"}}, "taskset": {"id": "vf_cases"}}


@pytest.fixture(autouse=True)
def cases_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def train(random_model_path, tmp_path):
    def train(environment, *overrides, **given):
        return trained(
            environment, random_model_path, tmp_path, "buffer.batch_size=1", *overrides, **given
        )

    return train


def environment(**agent):
    seat = {**HERE["agent"], **agent}
    return vf.load_environment(vf.resolve_env_config({**HERE, "agent": seat}))


def left():
    """Programs below this process, and folders of verifiers' runtimes."""
    below = psutil.Process().children(recursive=True)
    programs = [one.cmdline() for one in below if one.status() != psutil.STATUS_ZOMBIE]
    folders = [*(CACHE_DIR / "runtimes" / "subprocess").glob("*")]
    return [one for one in programs if "sleep" in " ".join(one)], folders


def test_the_example_raises_the_held_out_reward(main, tmp_path):
    result = main.main([f"checkpoint_root_dir={tmp_path}"])
    assert result.eval_after["eval"] > result.eval_before["eval"] + 0.2


def test_an_environment_of_theirs_is_given_as_it_is(train):
    traces = train(environment(), "buffer.batch_size=2")
    assert [trace.outcome for trace in traces] == ["completed"] * 4
    for trace in traces:
        long, letters = trace.metrics["reward_long"], trace.metrics["letters"]
        assert letters == len(trace.response)
        assert trace.reward == 2 * long + 0.5
        assert trace.metrics["turns"] == len(trace.calls) == 1
        assert f"long: {long:g} (weight 2)\n" in trace.feedback
        assert "stopped by: agent_completed" in trace.feedback


def test_all_turns_are_one_rollout(train):
    row = {"idx": 0, "prompt": "case", "happens": "three turns"}
    for trace in train(environment(), train_dataset=[row]):
        assert len(trace.calls) == 3
        assert trace.metrics["turns"] == 3


def test_what_stops_an_agent_early_is_in_the_feedback(train):
    row = {"idx": 0, "prompt": "case", "happens": "three turns"}
    for trace in train(environment(max_turns=2), train_dataset=[row]):
        assert len(trace.calls) == 2
        assert "stopped by: max_turns" in trace.feedback


@pytest.mark.parametrize(
    ("happens", "outcome", "said"),
    [
        ("the reward is None", "judge_error", "TaskError"),
        ("the reward is NaN", "invalid_reward", "nan"),
        ("the reward raises", "judge_error", "no reward for this"),
        ("scoring never ends", "judge_timeout", "verifiers' own time limit for scoring"),
        ("setup raises", "workflow_error", "TaskError: task setup: OSError: no room"),
        ("the program fails", "workflow_error", "out of luck"),
        ("the program never ends", "timeout", "no result within"),
    ],
)
def test_a_failure_has_its_outcome_and_leaves_nothing_behind(train, happens, outcome, said):
    before = left()
    rows = [{"idx": 90, "prompt": "bad", "happens": happens}, {"idx": 91, "prompt": "good"}]
    limits = {"scoring": 0.5} if "scoring" in happens else {}
    seconds = 5 if outcome == "timeout" else 60
    traces = train(
        environment(timeout=limits),
        "buffer.batch_size=2",
        f"explorer.max_timeout={seconds}",
        train_dataset=rows,
    )
    found = {(trace.task["prompt"], trace.outcome.value) for trace in traces}
    assert found == {("bad", outcome), ("good", "completed")}
    bad = next(trace for trace in traces if trace.task["prompt"] == "bad")
    assert said in bad.error
    assert bad.reward is None or outcome == "invalid_reward"
    assert left() == before


def test_the_keys_of_rollouts_are_nobody_elses(train):
    before = dict(os.environ)
    row = {"idx": 0, "prompt": "case", "happens": "the program looks around"}
    for trace in train(environment(), train_dataset=[row]):
        assert 'info: {"keys": false}' in trace.feedback
    assert dict(os.environ) == before


def test_servers_of_tools_are_shared_or_the_rollouts_own_and_end(train, monkeypatch):
    # Servers are processes, which import what is installed.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    config = vf.resolve_env_config({**HERE, "taskset": {"id": "vf_tools"}})
    files = {*Path("/tmp").glob("vf-port-*")}
    traces = train(vf.load_environment(config), "buffer.batch_size=2")
    assert [trace.outcome for trace in traces] == ["completed"] * 4, traces[0].error
    found = [json.loads(trace.feedback.partition("info: ")[2]) for trace in traces]
    assert len({one["shared_process"] for one in found}) == 1
    assert len({one["own_process"] for one in found}) == 4
    for process in {number for one in found for number in one.values()}:
        assert not psutil.pid_exists(process)
    assert {*Path("/tmp").glob("vf-port-*")} <= files


def test_what_all_share_is_begun_anew_where_it_failed(train, monkeypatch):
    given = environment()
    begin, began = given.serving, []

    def serving():
        began.append(1)
        if len(began) == 1:
            raise OSError("no port is free")
        return begin()

    monkeypatch.setattr(given, "serving", serving)
    row = {"idx": 0, "prompt": "case"}
    found = train(given, "explorer.max_retry_times=1", train_dataset=[row])
    assert {trace.outcome for trace in found if trace.final} == {"completed"}
    assert "OSError: no port is free" in next(one.error for one in found if not one.final)
    assert len(began) == 2


def test_tasks_are_selected_with_their_own_words():
    found = Verifiers(
        environment(),
        train={"include": {"idx": "0:6"}, "limit": 4},
        eval={"include": {"idx": "6:"}},
    )
    assert [row["prompt"] for row in found.train_dataset] == [f"case {n}" for n in range(4)]
    assert [row["idx"] for row in found.eval_dataset] == [6, 7]
    with pytest.raises(ConfigError, match=r"the tasks of vf_cases \(train\) cannot be read"):
        Verifiers(environment(), train={"first": 3})


def test_a_file_says_it_with_the_keys_of_their_configuration():
    found = from_settings({"kind": "verifiers", **HERE, "eval": {"limit": 2}}, "tuner.environment")
    assert len(found.train_dataset) == 8
    assert len(found.eval_dataset) == 2
    assert isinstance(brought(environment()), Verifiers)
    assert len(Verifiers("vf_cases", agent=HERE["agent"]).train_dataset) == 8


def test_it_is_made_again_where_it_travels_to():
    found = Verifiers(environment())
    back = pickle.loads(pickle.dumps(found.workflow)).__self__
    assert back._env.config == found._env.config
    assert back._task(found.train_dataset[3]).data.prompt == "case 3"


def test_tasks_of_several_classes_stay_in_this_process(random_model_path, monkeypatch):
    given = environment()
    task = type(next(iter(given.taskset.load())))
    other = type("Harder", (task,), {})
    both = [kind(kind.data_type()(prompt="x"), given.taskset.config.task) for kind in (task, other)]
    monkeypatch.setattr(type(given.taskset), "load", lambda self: both)
    settings = ["buffer.batch_size=1", f"model.model_path={random_model_path}"]
    assert len(prepare(environment=Verifiers(given), overrides=settings).train_tasks) == 2
    with pytest.raises(ConfigError, match=r"tuner\.workers is 2, .* CaseTask and Harder"):
        prepare(environment=Verifiers(given), overrides=[*settings, "tuner.workers=2"])


RETRY = {"max_retries": 1}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**HERE, "agent": {**HERE["agent"], "model": "other"}}, "agent.model"),
        ({**HERE, "agent": {**HERE["agent"], "client": {"type": "eval"}}}, "agent.client"),
        ({**HERE, "agent": {**HERE["agent"], "retries": RETRY}}, "agent.retries"),
        ({**HERE, "retries": RETRY}, "set explorer.max_retry_times"),
        ({"taskset": {"id": "vf_cases"}, "id": "user-sim"}, "has the agents"),
        ({"taskset": {"id": "vf_nowhere"}}, "taskset 'vf_nowhere' not found"),
        ({"taskset": {"id": "vf_cases"}, "agnt": {}}, "verifiers cannot load"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(config, said):
    with pytest.raises(ConfigError, match=said):
        Verifiers(**config)


def test_a_taskset_alone_has_no_agent():
    taskset = vf.load_taskset(vf.resolve_env_config(HERE).taskset)
    with pytest.raises(ConfigError, match="Cases is only a taskset, without an agent"):
        tune(environment=taskset)
