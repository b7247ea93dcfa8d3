"""What `tune(environment=...)` does with an environment, whoever wrote it."""

from __future__ import annotations

import json
import pickle
import shutil
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from typer.testing import CliRunner

from tuner import TunerModelConfig, WorkflowOutput, evaluate, rebase, tune
from tuner.cli import app
from tuner.config.load import load_config
from tuner.config.schema import KINDS
from tuner.environments import Areal, Environment, Gymnasium
from tuner.errors import (
    ConfigError,
    DatasetError,
    FunctionError,
    MissingDependencyError,
    TrainingError,
    TunerError,
)
from tuner.runs.environment import CLASSES, brought, from_settings
from tuner.tasks.functions import JudgeOutput
from tuner.tasks.loading import load_named
from tuner.traces import TraceStore
from tuner.tune import prepare

ROWS = [{"question": f"train {i}"} for i in range(6)]
HELD_OUT = [{"question": f"held out {i}"} for i in range(2)]
SETTINGS = (
    "algorithm.repeat_times=2",
    "buffer.batch_size=2",
    "buffer.total_steps=2",
    "explorer.eval_interval=2",
    "trainer.save_interval=1",
    "model.max_response_tokens=4",
    "tuner.signal_patience=9",
)


class Letters(Environment):
    """Rewards letters; counts how often it is opened and closed."""

    train_dataset = ROWS
    eval_dataset = HELD_OUT

    def __init__(self, *, letter: str = "e", fails: bool = False) -> None:
        self.letter, self.fails = letter, fails
        self.closed: list[bool] = []
        self.open = False

    async def workflow(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        self.open = True
        if self.fails:
            raise ValueError("the environment broke")
        messages = [{"role": "user", "content": task["question"]}]
        completion = await model.client.chat.completions.create(
            model=model.model_name, messages=messages
        )
        return WorkflowOutput(response=completion.choices[0].message.content or "")

    async def judge(self, task: dict[str, Any], response: str) -> JudgeOutput:
        return JudgeOutput(reward=response.count(self.letter) + len(response) % 7)

    async def close(self) -> None:
        self.closed.append(self.open)
        self.open = False


def made() -> Letters:
    return Letters(letter="a")


instance = Letters(letter="z")
HERE = Path(__file__)


@pytest.fixture
def settings(random_model_path, tmp_path):
    return {
        "model": TunerModelConfig(model_path=str(random_model_path), max_model_len=200),
        "experiment_name": "run",
        "overrides": [*SETTINGS, f"checkpoint_root_dir={tmp_path}"],
    }


def test_an_environment_trains_by_its_own_functions_and_data(settings):
    environment = Letters()
    result = tune(environment=environment, **settings)
    assert result.steps == 2
    assert set(result.eval_after) == {"eval"}
    traces = TraceStore(result.run_dir / "traces").read("train", 1)
    assert {trace.task["question"] for trace in traces} <= {row["question"] for row in ROWS}
    assert environment.closed == [True]


def test_a_dataset_that_the_caller_gives_wins(settings):
    own = [{"question": f"mine {i}"} for i in range(4)]
    run = prepare(environment=Letters(), **settings)
    assert list(run.train_tasks) == ROWS
    assert run.eval_tasks == {"eval": HELD_OUT}
    run = prepare(None, None, own, environment=Letters(), eval_dataset={"mine": own}, **settings)
    assert list(run.train_tasks) == own
    assert run.eval_tasks == {"mine": own}


def test_a_dataset_that_the_file_names_wins(settings, tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"question": "x"}) + "\n" for _ in "ab")
    )
    file = tmp_path / "config.yaml"
    file.write_text(
        "buffer:\n  explorer_input:\n    taskset: {path: rows.jsonl}\n"
        "    eval_tasksets: [{name: named, path: rows.jsonl}]\n"
    )
    run = prepare(environment=Letters(), config_path=file, **settings)
    assert [row["question"] for row in run.train_tasks] == ["x", "x"]
    assert list(run.eval_tasks) == ["named"]


def test_the_only_evaluation_set_of_the_file_is_that_of_the_environment(settings, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("buffer: {explorer_input: {eval_tasksets: [{name: mine, split: x}]}}\n")
    run = prepare(environment=Letters(), config_path=file, **settings)
    assert run.eval_tasks == {"mine": HELD_OUT}


def test_recorded_data_is_not_the_environments_tasks(settings, tmp_path):
    settings["overrides"] += ["algorithm.algorithm_type=sft"]
    with pytest.raises(DatasetError, match="nothing to train on"):
        prepare(environment=Letters(), **settings)


def test_an_environment_stands_alone(settings):
    with pytest.raises(FunctionError, match="environment and judge_func are given"):
        tune(judge_func=Letters().judge, environment=Letters(), **settings)
    with pytest.raises(FunctionError, match="environment and workflow_func are given"):
        evaluate(Letters().workflow, environment=Letters())


@pytest.mark.parametrize("given", [3, "letters", Letters, object()])
def test_what_is_no_environment_is_refused_with_what_would_be(given):
    with pytest.raises(FunctionError, match=r"environment is .* pass a tuner\.environments"):
        tune(environment=given)


def test_it_is_closed_where_the_run_fails(settings):
    environment = Letters(fails=True)
    settings["overrides"] += ["tuner.on_failure=abort"]
    with pytest.raises(TrainingError, match="the environment broke"):
        tune(environment=environment, **settings)
    assert environment.closed == [True]


def test_it_is_closed_where_the_run_does_not_begin(settings):
    environment = Letters()
    with pytest.raises(ConfigError, match="nonsense"):
        tune(environment=environment, **{**settings, "overrides": ["nonsense=1"]})
    assert environment.closed == [False]


def test_it_is_closed_where_an_evaluation_does_not_begin(settings, tmp_path):
    del settings["experiment_name"]
    for wrong in ({"limit": 0}, {"candidates": [tmp_path / "nowhere"]}, {"k": 3, "temperature": 0}):
        environment = Letters()
        with pytest.raises(TunerError):
            evaluate(environment=environment, **wrong, **settings)
        assert environment.closed == [False]
    environment = Letters()
    with pytest.raises(ConfigError, match="nonsense"):
        prepare(environment=environment, **{**settings, "overrides": ["nonsense=1"]})
    assert environment.closed == [False]
    prepare(environment=environment, **settings)
    assert environment.closed == [False]  # whoever prepares goes on with it


def test_a_close_that_fails_is_said_and_the_result_is_there(settings, caplog):
    class Stuck(Letters):
        async def close(self):
            raise OSError("the door is stuck")

    assert tune(environment=Stuck(), **settings).steps == 2
    assert "was not closed: OSError: the door is stuck" in caplog.text


def test_each_candidate_of_an_evaluation_finds_it_open(settings, random_model_path, tmp_path):
    environment = Letters()
    copy = tmp_path / "copy"
    shutil.copytree(random_model_path, copy)
    del settings["experiment_name"]
    found = evaluate(environment=environment, candidates=[random_model_path, copy], **settings)
    assert len(found.candidates) == 2
    assert environment.closed == [True, True]


def test_the_rollouts_that_fail_are_counted_and_the_others_train(settings):
    class Sometimes(Letters):
        async def workflow(self, task, model):
            if task["question"].endswith("1"):
                raise RuntimeError("this task is broken")
            return await super().workflow(task, model)

    result = tune(environment=Sometimes(), **settings)
    assert result.outcomes["workflow_error"] >= 2
    assert result.outcomes["completed"] >= 4


@pytest.mark.parametrize(
    ("named", "letter"),
    [(f"{HERE}:made", "a"), (f"{HERE}:instance", "z"), (f"{HERE}:Letters", "e")],
)
def test_a_file_names_an_environment_or_what_makes_one(named, letter):
    environment = from_settings(named, "tuner.environment")
    assert environment.letter == letter


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (f"{HERE}:nothing", "has no environment 'nothing'"),
        (f"{HERE.parent}/nowhere.py:made", "there is no file"),
        ("made", "write package.module:environment"),
        (f"{HERE}:test_an_environment_stands_alone", "does not take the arguments none"),
        ({"kind": "gym"}, "setting is {'kind': 'gym'}: Input should be"),
        ({"kind": "gymnasium"}, "missing a required argument: 'id'"),
        ({"kind": "gymnasium", "id": "X", "turns": 3}, "unexpected keyword argument 'turns'"),
    ],
)
def test_what_a_file_cannot_name_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        from_settings(given, "the setting")


def test_a_value_that_is_none_is_refused():
    with pytest.raises(FunctionError, match="environment is"):
        from_settings(f"{HERE}:ROWS", "tuner.environment")


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"environment": {"kind": "verifers"}}, "tuner.environment.kind is 'verifers': must be"),
        ({"environment": {"type": "e"}}, "tuner.environment is set without tuner.agent"),
        ({"environment": {"type": "e", "arg": 1}}, "unknown key tuner.environment.arg"),
        ({"environment": {}}, "give either kind"),
        ({"environment": {"kind": "trl"}, "judge": "m:f"}, "tuner.judge is 'm:f', but"),
        ({"environment": "m:e", "workflow": "m:f"}, "tuner.workflow is 'm:f', but"),
        ({"environment": "m:e", "agent": {"type": "a"}}, "tuner.agent is 'a', but"),
    ],
)
def test_the_file_says_one_thing(section, said):
    with pytest.raises(ConfigError, match=said):
        load_config(settings={"tuner": section})


def test_every_kind_of_the_file_has_its_class():
    assert set(KINDS) == set(CLASSES)
    for reference in CLASSES.values():
        module, _, name = reference.partition(":")
        assert issubclass(getattr(import_module(module), name), Environment)


@pytest.mark.skipif(find_spec("harbor") is not None, reason="Harbor is installed")
def test_without_harbor_its_extra_is_named(tmp_path):
    with pytest.raises(MissingDependencyError, match=r"Python 3.12.*\[harbor\]"):
        brought(f"harbor:{tmp_path}")


def test_paths_in_it_begin_at_the_file(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("tuner: {environment: {kind: gymnasium, id: X, agent: here.py:play}}\n")
    environment = load_config(file).tuner.environment
    assert environment.arguments == {"id": "X", "agent": f"{tmp_path / 'here.py'}:play"}
    file.write_text("tuner: {environment: here.py:made}\n")
    assert load_config(file).tuner.environment == f"{tmp_path / 'here.py'}:made"
    file.write_text(
        "tuner: {environment: {kind: harbor, folder: tasks, eval_folder: ../held_out}}\n"
    )
    assert load_config(file).tuner.environment.arguments == {
        "folder": str(tmp_path / "tasks"),
        "eval_folder": str(tmp_path.parent / "held_out"),
    }
    file.write_text("tuner: {environment: 'harbor:tasks'}\n")
    assert load_config(file).tuner.environment == f"harbor:{tmp_path / 'tasks'}"


@pytest.mark.long
def test_the_commands_take_it_from_the_file(random_model_path, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        f"model: {{model_path: {random_model_path}, max_model_len: 200}}\nname: run\n"
        f"checkpoint_root_dir: {tmp_path}\n"
        f"tuner: {{environment: '{HERE}:made'}}\n"
    )
    command = CliRunner()
    checked = command.invoke(app, ["check", str(file), *SETTINGS])
    assert "2 of 2 calls were cut off" in checked.output  # a random model ends no answer
    for asked in ("run", "eval"):
        result = command.invoke(app, [asked, str(file), *SETTINGS])
        assert result.exit_code == 0, f"{asked}: {result.output} {result.exception}"
    (config,) = tmp_path.glob("**/run/config.yaml")
    assert f"environment: {HERE}:made" in config.read_text()
    # It goes on with what it has.
    result = command.invoke(app, ["run", str(file), *SETTINGS, "buffer.total_steps=3"])
    assert result.exit_code == 0, result.output


def test_another_environment_is_another_run(random_model_path, tmp_path):
    file = tmp_path / "config.yaml"
    text = (
        f"model: {{model_path: {random_model_path}, max_model_len: 200}}\nname: run\n"
        f"checkpoint_root_dir: {tmp_path}\n"
    )
    for name, status in (("made", 0), ("instance", 2)):
        file.write_text(f"{text}tuner: {{environment: '{HERE}:{name}'}}\n")
        result = CliRunner().invoke(app, ["run", str(file), *SETTINGS])
        assert (result.exit_code == 0) is (status == 0), result.output


async def mended(task, response):
    return JudgeOutput(reward=-1.0 - len(response))


@pytest.mark.long
def test_a_run_whose_file_names_an_environment_is_rebased(random_model_path, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        f"model: {{model_path: {random_model_path}, max_model_len: 200}}\nname: run\nproject: p\n"
        f"checkpoint_root_dir: {tmp_path}\ntuner: {{environment: '{HERE}:made'}}\n"
    )
    result = CliRunner().invoke(app, ["run", str(file), *SETTINGS])
    assert result.exit_code == 0, result.output
    rebased = rebase(tmp_path / "p" / "run", mended, max_reused=1)
    assert rebased.result.steps == 2
    assert rebased.record.first_changed == 1
    again = rebase(tmp_path / "p" / "run", mended, max_reused=1)
    assert again.result.checkpoint == rebased.result.checkpoint
    with pytest.raises(ConfigError, match=r"tuner\.seed"):
        rebase(tmp_path / "p" / "run", mended, name="b", overrides=["tuner.seed=7"])


def test_python_wins_over_the_file(settings, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(f"tuner: {{environment: '{HERE}:made'}}\n")
    run = prepare(environment=Letters(), config_path=file, **settings)
    assert run.config.tuner.environment is None
    with pytest.raises(FunctionError, match=r"the file's tuner\.environment has another workflow"):
        prepare(Letters().workflow, None, ROWS, config_path=file, **settings)


def test_settings_that_go_with_it_give_way_to_those_that_are_set(settings, tmp_path):
    class Long(Letters):
        settings = {"explorer.max_timeout": 77, "explorer.max_retry_times": 5}  # noqa: RUF012

    file = tmp_path / "config.yaml"
    file.write_text("explorer: {max_timeout: 5}\n")
    run = prepare(environment=Long(), config_path=file, **settings)
    assert (run.config.explorer.max_timeout, run.config.explorer.max_retry_times) == (5, 5)


def test_datasets_stay_at_home_when_the_functions_travel():
    environment = Letters(letter="q")
    environment.train_dataset = ROWS * 1000
    back = pickle.loads(pickle.dumps(environment.workflow)).__self__
    assert (back.letter, back.train_dataset, back.eval_dataset) == ("q", None, None)


def test_a_library_that_is_known_brings_its_own():
    environment = Letters()
    assert brought(environment) is environment
    assert issubclass(Gymnasium, Environment)


class Agent:
    """AReaL's, of which only its shape is looked at here."""

    async def collect_trajectory(self, prompt, env, obs_queue, act_queue):
        return []


class Door:
    closed = 0

    async def reset(self, seed=None, options=None):
        return 0, {}

    async def step(self, action):
        return 0, 0.0, True, False, {}

    async def close(self):
        Door.closed += 1


async def test_a_queue_agent_comes_with_its_data_and_closes_what_is_idle():
    door = load_named(f"{HERE}:Door", setting="here")
    environment = Areal({"type": f"{HERE}:Agent"}, {"type": f"{HERE}:Door"}, train_dataset=ROWS)
    assert environment.train_dataset == ROWS
    await environment.run_ended()
    assert door.closed == 1
    with pytest.raises(ConfigError, match="only the keys type and args"):
        Areal({"typ": "a"}, {"type": "b"})


def test_a_worker_that_has_only_the_text_of_the_functions_runs_them():
    """As Trinity-RFT's workers get them: by value, in a process that has none of this."""
    environment = Letters(letter="q")
    workflow, judge = (
        cloudpickle.loads(cloudpickle.dumps(one))
        for one in (environment.workflow, environment.judge)
    )
    assert workflow.__self__.letter == judge.__self__.letter == "q"
    assert workflow.__self__ is not environment
    assert workflow.__self__.train_dataset is None


@pytest.mark.parametrize("text", ["reasoning_gym:chain_sum", "textarena:TicTacToe-v0"])
def test_a_text_names_a_kind_and_its_first_argument(monkeypatch, text):
    given: list[str] = []
    name = text.partition(":")[2]
    monkeypatch.setattr(
        "tuner.runs.environment._class_of", lambda _: lambda arg: given.append(arg) or Letters()
    )
    assert not brought(text).named
    assert from_settings(text, "tuner.environment").named
    assert given == [name, name]


@pytest.mark.parametrize("text", ["program:made", "nonsense"])
def test_other_texts_are_no_environment_in_python(text):
    with pytest.raises(FunctionError, match=r"or a text such as reasoning_gym:NAME"):
        brought(text)


def test_a_kind_without_its_argument_is_refused():
    with pytest.raises(ConfigError, match="environment is 'textarena:': expected 'textarena:' and"):
        brought("textarena:")
