"""`tune()` up to the backend: what reaches it, in which form, and what is refused before."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tuner.tune as _  # noqa: F401  (the module must not replace the function)
from tuner import (
    AlgorithmConfig,
    Dataset,
    JudgeOutput,
    RemoteModel,
    TunerModelConfig,
    WorkflowOutput,
    tune,
)
from tuner.cli import app
from tuner.config import RunConfig
from tuner.errors import ConfigError, DatasetError, FunctionError
from tuner.tune import leave_report

ROWS = [{"question": str(i)} for i in range(40)]


async def workflow(task, model):
    return WorkflowOutput(reward=1.0)


async def judge(task, response):
    return JudgeOutput(reward=1.0)


class Backend:
    """Stands in for the local backend: remembers what it was given."""

    def __init__(self) -> None:
        self.config = RunConfig()
        self.given: dict[str, Any] = {}

    def run_local(self, config: RunConfig, **given: Any) -> str:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        self.config, self.given = config, given
        return "result"


@pytest.fixture
def backend(monkeypatch) -> Backend:
    stand_in = Backend()
    monkeypatch.setitem(sys.modules, "tuner.loop", stand_in)
    return stand_in


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text("model: {model_path: org/name}\n" + text)
        return path

    return write


MODEL = TunerModelConfig(model_path="org/name", max_model_len=100)


def test_three_things_by_position_are_enough(backend):
    assert tune(workflow, judge, ROWS, model=MODEL) == "result"
    assert backend.given == {
        "workflow": workflow,
        "judge": judge,
        "train_tasks": ROWS,
        "eval_tasks": {},
        "history": None,
        "report": leave_report,
    }
    assert backend.config.name.startswith("Experiment-2")
    assert backend.config.concurrent_rollouts == 64
    assert backend.config.trainer.save_interval == 100
    assert backend.config.algorithm.repeat_times == 8


async def test_works_inside_a_running_event_loop(backend):
    assert tune(workflow, judge, ROWS, model=MODEL) == "result"
    with pytest.raises(DatasetError):
        tune(workflow, judge, [], model=MODEL)


def test_only_fields_that_were_set_override_the_file(backend, write):
    path = write(
        "name: mine\nalgorithm: {repeat_times: 4, optimizer: {lr: 0.5}}\n"
        "buffer: {batch_size: 2}\ntrainer: {save_interval: 7}\nexplorer: {eval_interval: 9}\n"
    )
    tune(workflow, judge, ROWS, config_path=path, algorithm=AlgorithmConfig(learning_rate=0.25))
    config = backend.config
    assert (config.algorithm.optimizer.lr, config.algorithm.repeat_times) == (0.25, 4)
    assert (config.buffer.batch_size, config.trainer.save_interval) == (2, 7)
    assert (config.explorer.eval_interval, config.name) == (9, "mine")
    assert config.concurrent_rollouts == 8


def test_every_field_of_the_objects_reaches_the_configuration(backend):
    tune(
        workflow,
        judge,
        ROWS,
        model=TunerModelConfig(
            model_path="org/other",
            max_model_len=77,
            temperature=0.5,
            top_p=0.9,
            max_tokens=33,
            enable_thinking=False,
            tensor_parallel_size=1,
            inference_engine_num=1,
            tool_call_parser="hermes",
            reasoning_parser="deepseek_r1",
        ),
        algorithm=AlgorithmConfig(
            algorithm_type="multi_step_grpo",
            learning_rate=0.1,
            group_size=3,
            batch_size=5,
            save_interval_steps=6,
            eval_interval_steps=7,
        ),
        project_name="p",
        experiment_name="e",
        monitor_type="wandb",
        backend="local",
        overrides=["algorithm.repeat_times=2"],
    )
    config, model = backend.config, backend.config.model
    assert (model.model_path, model.max_model_len) == ("org/other", 77)
    assert (model.temperature, model.top_p, model.max_response_tokens) == (0.5, 0.9, 33)
    assert model.enable_thinking is False
    assert config.algorithm.optimizer.lr == 0.1
    assert config.algorithm.repeat_times == 2  # the override
    assert config.buffer.batch_size == 5
    assert (config.trainer.save_interval, config.explorer.eval_interval) == (6, 7)
    assert (config.project, config.name) == ("p", "e")
    assert (config.monitor.monitor_type, config.tuner.backend) == (("wandb",), "local")


def test_objects_ask_for_nothing_that_one_machine_cannot_do(backend):
    for field, text in [
        ("inference_engine_num", "engine_num is 2, but the engine over transformers"),
        ("tensor_parallel_size", "tensor_parallel_size is 2"),
    ]:
        model = TunerModelConfig(model_path="a/b", max_model_len=9, **{field: 2})
        with pytest.raises(ConfigError, match=text):
            tune(workflow, judge, ROWS, model=model)
    model = TunerModelConfig(model_path="a/b", max_model_len=9, tinker_config={"rank": 3})
    with pytest.raises(ConfigError, match="the local backend does not use Tinker"):
        tune(workflow, judge, ROWS, model=model, backend="local")
    with pytest.raises(ConfigError, match="tinker_config is 3"):
        tune(workflow, judge, ROWS, model=model.model_copy(update={"tinker_config": 3}))
    with pytest.raises(ConfigError, match="set for an auxiliary model"):
        tune(workflow, judge, ROWS, model=MODEL, auxiliary_models={"other": model})
    with pytest.raises(ConfigError, match=r"AlgorithmConfig\.lr is unknown"):
        AlgorithmConfig(lr=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"set in Python: tuner.backend is 'slurm'"):
        tune(workflow, judge, ROWS, model=MODEL, backend="slurm")


def test_dataset_given_in_python_replaces_the_files(backend, write, tmp_path):
    data = tmp_path / "mine"
    data.mkdir()
    for split in ("train", "test"):
        (data / f"{split}.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    path = write(
        "buffer: {batch_size: 2, total_steps: 9, explorer_input: {"
        "taskset: {path: other, subset_name: main, split: dev, data_selector: {seed: 3}}, "
        "eval_tasksets: [{name: held_out, path: other, rollout_args: {temperature: 0.3}}]}}"
    )
    tune(
        workflow,
        train_dataset=Dataset(path=str(data), total_epochs=3),
        eval_dataset=Dataset(path=str(data), split="test"),
        config_path=path,
    )
    inputs = backend.config.buffer.explorer_input
    assert (inputs.taskset.path, inputs.taskset.split) == (str(data), "train")
    assert (inputs.taskset.subset_name, inputs.taskset.data_selector.seed) == (None, 3)
    assert (backend.config.buffer.total_epochs, backend.config.buffer.total_steps) == (3, None)
    assert [(one.name, one.rollout_args.temperature) for one in inputs.eval_tasksets] == [
        ("held_out", 0.3)
    ]
    assert backend.given["eval_tasks"] == {"held_out": ROWS}
    assert backend.given["judge"] is None


def test_evaluation_sets_by_name_and_in_memory(backend, write):
    tune(workflow, judge, ROWS, eval_dataset={"a": ROWS[:1], "b": ROWS[:2]}, model=MODEL)
    assert backend.given["eval_tasks"] == {"a": ROWS[:1], "b": ROWS[:2]}
    names = [one.name for one in backend.config.buffer.explorer_input.eval_tasksets]
    assert names == ["a", "b"]
    tune(workflow, judge, ROWS, eval_dataset=ROWS[:3], config_path=write(""), overrides=[])
    assert backend.given["eval_tasks"] == {"eval": ROWS[:3]}
    with pytest.raises(ConfigError, match="eval_dataset: total_epochs is set"):
        tune(workflow, judge, ROWS, eval_dataset=Dataset(path="x", total_epochs=2), model=MODEL)


def test_overrides_choose_the_dataset_even_over_python(backend, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"a": 2}')
    path = tmp_path / "rows.jsonl"
    overrides = [f"buffer.explorer_input.taskset.path={path}", "buffer.batch_size=2"]
    tune(workflow, judge, ROWS, model=MODEL, overrides=overrides)
    assert backend.given["train_tasks"] == [{"a": 1}, {"a": 2}]


def test_auxiliary_models_are_added_by_name(backend, write):
    path = write(
        "explorer: {auxiliary_models: ["
        "{name: big, model_path: a/b, tool_call_parser: null}, {name: small, model_path: c/d}]}"
    )
    tune(
        workflow,
        judge,
        ROWS,
        config_path=path,
        auxiliary_models={
            "big": TunerModelConfig(model_path="e/f", max_model_len=9, max_tokens=5, temperature=0),
            "new": TunerModelConfig(model_path="g/h", max_model_len=9),
            "far": RemoteModel(base_url="http://host/v1", model_name="m"),
            "farther": {"base_url": "https://host/v1", "model_name": "n", "api_key_env": "KEY"},
        },
        overrides=["buffer.batch_size=4"],
    )
    big, small, new = backend.config.explorer.auxiliary_models
    assert (big.name, big.model_path, big.tool_call_parser) == ("big", "e/f", None)
    assert (big.max_response_tokens, big.temperature) == (5, 0)
    assert (small.name, new.name) == ("small", "new")
    assert backend.config.tuner.auxiliary_models["far"].model_name == "m"
    assert backend.config.tuner.auxiliary_models["farther"].api_key_env == "KEY"
    with pytest.raises(ConfigError, match="pass a TunerModelConfig"):
        tune(workflow, judge, ROWS, model=MODEL, auxiliary_models={"x": "gpt"})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"tuner.auxiliary_models.x.url; did you mean .*base_url"):
        tune(workflow, judge, ROWS, model=MODEL, auxiliary_models={"x": {"url": "http://a"}})


def test_functions_and_data_are_checked_before_anything_else(backend):
    with pytest.raises(FunctionError, match="parameter model is missing"):
        tune(lambda task: None, config_path="nowhere.yaml")
    with pytest.raises(FunctionError, match="cannot be used as a judge"):
        tune(workflow, workflow, ROWS)
    with pytest.raises(DatasetError, match="pass train_dataset, or set"):
        tune(workflow, judge, model=MODEL)
    with pytest.raises(DatasetError, match="has 3 rows but batch_size is 32"):
        tune(workflow, judge, ROWS[:3], model=MODEL)
    assert backend.given == {}


def test_no_model_is_said(backend, monkeypatch, tmp_path):
    from tuner.tune import with_default_model

    monkeypatch.setattr(sys.modules["tuner.tune"], "TINY_MODEL", tmp_path)
    with pytest.raises(ConfigError, match=r"no model is named: set model\.model_path"):
        with_default_model(RunConfig())
    (tmp_path / "config.json").write_text("{}")
    assert with_default_model(RunConfig()).model.model_path == str(tmp_path)


def test_import_is_fast_and_light():
    code = (
        "import time; t = time.process_time(); import tuner; t = time.process_time() - t\n"
        "import sys\n"
        "heavy = {'torch', 'transformers', 'agentscope', 'datasets', 'openai', 'pydantic'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "from tuner import tune, Dataset, AlgorithmConfig, JudgeOutput, RemoteModel\n"
        "assert not {'torch', 'transformers', 'agentscope', 'datasets'} & set(sys.modules)\n"
        "print(t)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 0.3


@pytest.mark.long
def test_the_first_rollout_waits_for_no_import_that_it_does_not_need(tmp_path):
    code = (
        "import os, sys; from tuner import tune\n"
        "def workflow(task, model):\n"
        "    unused = {'datasets', 'pandas', 'peft', 'scipy', 'sklearn'}\n"
        "    os.write(1, f'{unused & set(sys.modules)}\\n'.encode())\n"
        "    os._exit(0)\n"
        "tune(workflow, lambda task, response: 0.0, [{'a': 1}], overrides=[\n"
        f"    'checkpoint_root_dir={tmp_path}', 'buffer.batch_size=1'])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.endswith("set()\n"), run


def test_command_line_names_functions_in_the_file(backend, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(
        "from tuner import WorkflowOutput\n"
        "def run(task, model):\n    return WorkflowOutput(reward=1)\n"
    )
    (tmp_path / "train.jsonl").write_text('{"a": 1}\n{"a": 2}')
    (tmp_path / "config.yaml").write_text(
        "model: {model_path: a/b}\ntuner: {workflow: 'agent.py:run'}\n"
        "buffer: {batch_size: 2, explorer_input: {taskset: {path: train.jsonl}}}"
    )
    result = CliRunner().invoke(app, ["run", "config.yaml", "buffer.batch_size=1"])
    assert (result.exit_code, result.stdout) == (0, "result\n"), result.exception
    assert backend.given["workflow"].__name__ == "run"
    assert backend.config.buffer.batch_size == 1
    assert backend.config.tuner.workflow == f"{tmp_path / 'agent.py'}:run"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "nowhere.yaml"], "ConfigError: configuration file 'nowhere.yaml' does not exist"),
        (["run", "config.yaml", "a.b"], "ConfigError: override 'a.b' has no '='"),
        (["check", "config.yaml"], "tuner.workflow is not set"),
    ],
)
def test_command_line_errors_are_short_and_exit_with_2(tmp_path, arguments, text):
    (tmp_path / "config.yaml").write_text("project: x")
    run = subprocess.run(
        [sys.executable, "-m", "tuner.cli", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": ""},
    )
    assert run.returncode == 2
    assert text in run.stderr
    assert "Traceback" not in run.stderr


async def workflow_of_agentscope(task, model):
    from agentscope.message import Msg

    return Msg("a", "b", "assistant")


def test_runs_are_in_a_folder_of_agentscopes_name_only_if_it_is_used(backend, write):
    for func, given, project in [
        (workflow, {}, "runs"),
        (workflow_of_agentscope, {}, "AgentScope"),
        (workflow_of_agentscope, {"project_name": "mine"}, "mine"),
        # `tuner serve`, which has a file alone, finds the run.
        (workflow_of_agentscope, {"config_path": write("")}, "runs"),
    ]:
        tune(func, judge, ROWS, **{"model": MODEL, **given})
        assert backend.config.project == project
