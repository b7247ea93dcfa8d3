"""What people do wrong. Each ends in one sentence that names the place and the mend, at once.

Everything but the mistake is right: a run that would take its two steps and end.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from tuner import (
    AlgorithmConfig,
    Dataset,
    JudgeOutput,
    RemoteModel,
    TunerModelConfig,
    WorkflowOutput,
    cli,
    tune,
)
from tuner.errors import TunerError
from tuner.rewards import math_equal

pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")

SECONDS = 5.0
"""Of the processor, at most, once everything is imported."""
ROWS = [{"question": f"What is {n} + 2?"} for n in range(4)]
USER = [{"role": "user", "content": "hi"}]


async def workflow(task, model):
    answer = await model([{"role": "user", "content": task["question"]}])
    return WorkflowOutput(response=answer.content or "")


async def judge(task, response):
    return JudgeOutput(reward=float(len(response) % 7))


@dataclass
class Place:
    """A folder for files and runs, and a model."""

    folder: Path
    model: Path

    def train(
        self,
        *overrides: str,
        workflow: Any = workflow,
        judge: Any = judge,
        rows: Any = ROWS,
        **given: Any,
    ) -> None:
        tune(
            workflow,
            judge,
            rows,
            overrides=[
                f"model.model_path={self.model}",
                f"checkpoint_root_dir={self.folder / 'runs'}",
                "model.max_response_tokens=4",
                "buffer.batch_size=2",
                "buffer.total_steps=2",
                "algorithm.repeat_times=2",
                "explorer.max_retry_times=0",
                *overrides,
            ],
            **given,
        )

    def file(self, text: str, name: str = "config.yaml") -> Path:
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return path

    def command(self, *arguments: str) -> None:
        """As from a shell."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["tuner", *arguments])
            cli.main()

    def command_of(self, program: str, workflow: str) -> None:
        """`tuner run` with a configuration that names a workflow in `main.py`, which has this."""
        self.file(program, "main.py")
        self.command("run", str(self.file(f"tuner: {{workflow: '{workflow}'}}\n")))


Act = Callable[[Place], object]
MISTAKES: dict[str, tuple[Act, str, str]] = {}


def mistake(place: str, mend: str) -> Callable[[Act], Act]:
    """The decorated function makes a mistake, whose error has both texts in it."""

    def note(act: Act) -> Act:
        MISTAKES[act.__name__] = act, place, mend
        return act

    return note


def of_settings(override: str, place: str, mend: str) -> None:
    MISTAKES[override] = (lambda at: at.train(*override.split())), place, mend


def of_workflow(wrong: Any, place: str, mend: str) -> None:
    MISTAKES[f"workflow {wrong.__name__}"] = (lambda at: at.train(workflow=wrong)), place, mend


def of_judge(wrong: Any, place: str, mend: str) -> None:
    MISTAKES[f"judge {wrong.__name__}"] = (lambda at: at.train(judge=wrong)), place, mend


# Functions that cannot be called.


async def without_model(task): ...


async def without_task(prompt, model): ...


async def with_a_parameter_too_many(task, model, tools): ...


async def by_position(*arguments): ...


async def yields(task, model):
    yield WorkflowOutput(reward=1.0)


class NotAnInstance:
    async def __call__(self, task, model): ...


of_workflow(without_model, "without_model", "parameter model is missing")
of_workflow(without_task, "parameter task is missing", "expected: async def workflow(task, model")
of_workflow(with_a_parameter_too_many, "nothing is passed for tools", "give it a default")
of_workflow(by_position, "*arguments never receives anything", "passed by name")
of_workflow(yields, "yields", "must return")
of_workflow(NotAnInstance, "it is a class", "pass an instance")
of_judge(workflow, "workflow", "expected: async def judge(task, response")


@mistake("'main.py:workflow' (str)", "expected: async def workflow")
def a_name_for_a_workflow(at):
    at.train(workflow="main.py:workflow")


@mistake("coroutine", "without calling it")
def a_workflow_that_is_called(at):
    called = workflow({}, None)
    try:
        at.train(workflow=called)
    finally:
        called.close()


# Functions that return something else.


async def returns_nothing(task, model):
    await model(USER)


async def returns_a_number(task, model):
    await model(USER)
    return 1.0


async def returns_a_text(task, model):
    return (await model(USER)).content


async def returns_no_reward(task, model):
    await model(USER)
    return WorkflowOutput(response="r")


async def gives_a_text_as_reward(task, response):
    return JudgeOutput(reward="good")


async def forgets_the_reward(task, response):
    return JudgeOutput()


async def gives_a_truth(task, response):
    return response == "4"


async def misspells_a_field(task, response):
    return JudgeOutput(reward=1.0, metric={})


async def gives_what_is_not_finite(task, response):
    return JudgeOutput(reward=float("nan"))


of_workflow(returns_nothing, "returns_nothing", "is a return statement missing?")
of_workflow(returns_a_number, "returns_a_number", "write WorkflowOutput(reward=1.0)")
of_workflow(returns_a_text, "returns_a_text", "a workflow returns WorkflowOutput")
of_judge(gives_a_text_as_reward, "reward is 'good'", "expected a number")
of_judge(forgets_the_reward, "JudgeOutput", "it needs a reward")
of_judge(gives_a_truth, "gives_a_truth", "write JudgeOutput(reward=False)")
of_judge(misspells_a_field, "no field 'metric'", "fields: reward, metrics")
of_judge(gives_what_is_not_finite, "reward nan", "must be a finite number")


@mistake("reward=None", "set `reward` in the workflow or pass judge_func")
def neither_a_reward_nor_a_judge(at):
    at.train(workflow=returns_no_reward, judge=None)


# Functions that fail, always.


async def forgets_await(task, model):
    return WorkflowOutput(response=model(USER).content)


def calls_an_async_model_in_a_thread(task, model):
    return WorkflowOutput(response=model(USER).content)


async def runs_a_loop_in_a_loop(task, model):
    return WorkflowOutput(response=asyncio.run(workflow(task, model)))


async def never_asks(task, model):
    return WorkflowOutput(response="4")


async def asks_for_another_field(task, model):
    return WorkflowOutput(
        response=(await model([{"role": "user", "content": task["prompt"]}])).content
    )


async def asks_for_another_model(task, model):
    await model.client.chat.completions.create(model="gpt-4o", messages=USER)


async def asks_with_another_key(task, model):
    async with openai.AsyncOpenAI(base_url=model.base_url, api_key="sk-mine") as client:
        await client.chat.completions.create(model=model.model_name, messages=USER)


async def asks_with_a_text(task, model):
    await model.client.chat.completions.create(model=model.model_name, messages="hi")


async def asks_as_nobody(task, model):
    await model([{"role": "human", "content": "hi"}])


async def asks_for_no_tokens(task, model):
    await model(USER, max_tokens=0)


async def asks_too_much(task, model):
    await model([{"role": "user", "content": "long " * 500}])


async def waits_for_a_tool(task, model):
    await asyncio.Event().wait()


of_workflow(
    forgets_await, "'coroutine' object has no attribute 'content'", "is an `await` missing?"
)
of_workflow(
    calls_an_async_model_in_a_thread,
    "'coroutine' object has no attribute 'content'",
    "is an `await` missing?",
)
of_workflow(runs_a_loop_in_a_loop, "asyncio.run() cannot be called", "`await` the coroutine")
of_workflow(never_asks, "never called `model`", "nothing to train")
of_workflow(asks_for_another_field, "no field 'prompt'", "are: question")
of_workflow(asks_for_another_model, "model is 'gpt-4o'", "this key's model is")
of_workflow(asks_with_another_key, "belongs to no open session", "use the api_key and base_url")
of_workflow(asks_with_a_text, "messages must be an array", "not a string")
of_workflow(asks_as_nobody, "human", "user")
of_workflow(asks_for_no_tokens, "max_tokens", "at least 1")
of_workflow(asks_too_much, "tokens", "max_model_len")


@mistake("explorer.max_timeout", "0.05 s")
def a_limit_that_nothing_keeps(at):
    at.train("explorer.max_timeout=0.05", workflow=waits_for_a_tool)


# No signal.


async def is_always_right(task, response):
    return JudgeOutput(reward=1.0)


@mistake("the same reward, 1", "Raising algorithm.repeat_times or model.temperature")
def a_judge_that_is_always_content(at):
    at.train("tuner.signal_patience=2", judge=is_always_right)


@mistake("of 4 calls were cut off at the token limit", "model.max_response_tokens")
def answers_that_are_cut_off(at):
    at.train("tuner.signal_patience=2", "model.max_response_tokens=1", judge=is_always_right)


# Settings.

of_settings("buffer.batchsize=2", "buffer.batchsize", "did you mean buffer.batch_size")
of_settings("algorithm.optimizer.lr=fast", "algorithm.optimizer.lr", "number")
of_settings("algorithm.optimizer.lr=-1", "algorithm.optimizer.lr", "greater than 0")
of_settings("algorithm.algorithm_type=grop", "algorithm.algorithm_type", "grpo")
of_settings("algorithm.repeat_times=1", "algorithm.repeat_times", "2")
of_settings("monitor.monitor_type=tensorbord", "monitor.monitor_type", "tensorboard")
of_settings("buffer.batch_size", "buffer.batch_size", "key=value")
of_settings("buffer.batch_size=32", "batch_size is 32", "lower buffer.batch_size")
of_settings("buffer.total_steps=0", "buffer.total_steps", "greater than or equal to 1")
of_settings("model.max_model_len=4096", "model.max_model_len = 4096", "256 positions")
of_settings("model.max_response_tokens=256", "model.max_response_tokens = 256", "lower it")
of_settings("model.temperature=-1", "model.temperature", "greater than 0")
of_settings("tuner.backend=ray", "tuner.backend", "trinity")
of_settings("tuner.dtype=fp16", "tuner.dtype", "float32")
of_settings("tuner.device=cuda", "tuner.device", "use 'cpu'")
of_settings("name=../../x", "name is", "give a name of one folder")
of_settings(
    "model.model_path=./models/mine", "models/mine", "give the folder of a Hugging Face model"
)
of_settings("explorer.rollout_model.engine_type=vlllm", "engine_type", "vllm")
of_settings("synchronizer.sync_offset=-1", "synchronizer.sync_offset", "greater than or equal to 0")
of_settings("cluster.gpu_per_node=8", "cluster", "tuner.backend")


@mistake("AlgorithmConfig.lr is unknown", "learning_rate")
def an_unknown_field_of_algorithm(at):
    at.train(algorithm=AlgorithmConfig(lr=1e-5))


@mistake("AlgorithmConfig.learning_rate", "number")
def a_text_for_a_number(at):
    at.train(algorithm=AlgorithmConfig(learning_rate="fast"))


@mistake("TunerModelConfig.max_model_len", "missing")
def a_model_without_its_length(at):
    at.train(model=TunerModelConfig(model_path="x"))


@mistake("auxiliary_models", "pass a TunerModelConfig")
def an_auxiliary_model_by_its_name(at):
    at.train(auxiliary_models={"helper": "gpt-4o"})


@mistake("NO_SUCH_KEY", "set it")
def a_key_that_is_not_in_the_environment(at):
    remote = RemoteModel(
        base_url="http://127.0.0.1:1/v1", model_name="m", api_key_env="NO_SUCH_KEY"
    )
    at.train(auxiliary_models={"helper": remote})


@mistake("config_path", "pass the path of a YAML file")
def a_configuration_that_is_a_dict(at):
    at.train(config_path={"name": "x"})


@mistake("nowhere.yaml", "does not exist (looked in")
def a_configuration_that_is_not_there(at):
    at.train(config_path=at.folder / "nowhere.yaml")


@mistake("config.yaml:2", "indent with spaces")
def a_tab_in_yaml(at):
    at.train(config_path=at.file("model:\n\tmodel_path: x\n"))


@mistake("config.yaml", "expected keys such as")
def yaml_that_is_a_list(at):
    at.train(config_path=at.file("- model\n"))


@mistake("config.yaml", "explorer.bench_on_latest_checkpoint")
def a_key_of_another_program(at):
    at.train(config_path=at.file("explorer: {bench_on_latest_checkpoint: true}\n"))


# Data.


@mistake("train_dataset: row 0", "every row must be a dict")
def rows_that_are_texts(at):
    at.train(rows=["What is 2 + 2?"] * 4)


@mistake("is empty", "at least one row")
def no_rows(at):
    at.train(rows=[])


@mistake("train_dataset", "list of dicts")
def one_row_for_many(at):
    at.train(rows={"question": "What is 2 + 2?"})


@mistake("train.jsonl", "does not exist")
def data_that_is_not_there(at):
    at.train(rows=str(at.folder / "train.jsonl"))


@mistake("train.jsonl:2", "not valid JSON")
def a_line_that_is_no_json(at):
    at.train(rows=str(at.file('{"question": "a"}\n{"question": \n', "train.jsonl")))


@mistake("split", "train")
def a_split_that_is_not_there(at):
    at.file(json.dumps(ROWS[0]) + "\n", "train.jsonl")
    at.train(rows=Dataset(path=str(at.folder), split="training"))


@mistake("there is no column 'prompt'", "it has: question")
def rows_without_messages(at):
    at.train("algorithm.algorithm_type=sft", workflow=None, judge=None)


@mistake("there is no column 'rejected'", "chosen")
def pairs_of_which_one_is_missing(at):
    rows = [{"prompt": USER, "chosen": [{"role": "assistant", "content": "a"}]}] * 4
    at.train("algorithm.algorithm_type=dpo", workflow=None, judge=None, rows=rows)


@mistake("eval_dataset", "does not exist")
def an_evaluation_set_that_is_not_there(at):
    at.train(eval_dataset=str(at.folder / "test.jsonl"))


# Models and folders.


def of_model(name: str, place: str, mend: str, make: Callable[[Path], object]) -> None:
    def act(at):
        make(at.folder)
        at.train(f"model.model_path={at.folder / 'models' / 'mine'}")

    MISTAKES[name] = act, place, mend


def folder(*names: str) -> Callable[[Path], object]:
    """Makes a folder with these files, which hold an empty JSON object."""

    def make(root: Path) -> None:
        (root / "models" / "mine").mkdir(parents=True)
        for name in names:
            (root / "models" / "mine" / name).write_text("{}")

    return make


def file(root: Path) -> None:
    (root / "models").mkdir()
    (root / "models" / "mine").write_text("weights")


of_model("a model that is a file", "it is a file", "give the folder", file)
of_model("an empty folder", "models/mine", "cannot be loaded", folder())
of_model("a folder without weights", "models/mine", "cannot be loaded", folder("config.json"))
of_model(
    "an adapter for a model",
    "is an adapter, not a model",
    "model.lora_configs",
    folder("adapter_config.json"),
)


@mistake("there is no such folder", "models has yours")
def a_model_beside_another(at):
    (at.folder / "models" / "yours").mkdir(parents=True)
    at.train("model.model_path=models/mine")


@mistake("checkpoint_root_dir", "give a folder that can be")
def a_root_that_is_a_file(at):
    at.train(f"checkpoint_root_dir={at.file('text', 'runs')}")


@mistake("runs/AgentScope/mine", "name")
def a_name_that_another_run_has(at):
    at.train("name=mine")
    at.train("name=mine", "algorithm.optimizer.lr=0.5")


# From the command line.


@mistake("main.py has no function 'work_flow'", "tuner.workflow")
def a_function_that_is_not_there(at):
    at.command_of("def workflow(task, model): ...", "main.py:work_flow")


@mistake("tuner.workflow", "write package.module:function or path/file.py:function")
def a_file_without_a_function(at):
    at.command_of("", "main.py")


@mistake("tuner.workflow", "there is no file")
def a_file_that_is_not_there(at):
    at.command_of("", "mian.py:workflow")


@mistake("main.py:1", "NameError: name 'reutrn' is not defined")
def a_file_that_does_not_import(at):
    at.command_of("reutrn", "main.py:workflow")


@mistake("main.py calls tune() when it is imported", '`if __name__ == "__main__":`')
def a_script_without_a_guard(at):
    at.command_of(
        "from tuner import tune\nasync def workflow(task, model): ...\ntune(workflow)",
        "main.py:workflow",
    )


@mistake("config.yaml: tuner.workflow is not set", "name the workflow")
def no_workflow_in_the_file(at):
    at.command("run", str(at.file("name: x\n")))


@mistake("No such command 'trian'", "tuner --help")
def a_command_that_is_misspelt(at):
    at.command("trian", "config.yaml")


@mistake("is not a run", "Give the folder <checkpoint_root_dir>/<project>/<name>")
def a_folder_that_is_no_run(at):
    at.command("view", str(at.folder), "--report")


@mistake("--steps is 'few'", "write first-last")
def steps_that_are_no_range(at):
    at.file("def judge(task, response): ...", "judges.py")
    at.command("replay", str(at.folder), "--judge", "judges.py:judge", "--steps", "few")


# Things of another type.


@mistake("model is 'Qwen/Qwen3-0.6B' (str)", "pass a TunerModelConfig")
def a_model_by_its_name(at):
    at.train(model="Qwen/Qwen3-0.6B")


@mistake("algorithm is {'learning_rate': 0.1} (dict)", "pass an AlgorithmConfig")
def an_algorithm_that_is_a_dict(at):
    at.train(algorithm={"learning_rate": 0.1})


@mistake("overrides is 'buffer.batch_size=2' (str)", "pass a list")
def one_override_for_many(at):
    tune(workflow, judge, ROWS, overrides="buffer.batch_size=2")


@mistake("auxiliary_models", "pass a dict of models by name")
def auxiliary_models_without_names(at):
    at.train(auxiliary_models=[TunerModelConfig(model_path="x", max_model_len=9)])


# Extras that are not installed.


def missing(library: str, act: Act, place: str, mend: str) -> None:
    def without(at):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, library, None)
            act(at)

    MISTAKES[f"without {library}"] = without, place, mend


missing(
    "wandb", lambda at: at.train("monitor.monitor_type=wandb"), "monitor.monitor_type", "[wandb]"
)
missing(
    "mlflow", lambda at: at.train("monitor.monitor_type=mlflow"), "monitor.monitor_type", "[mlflow]"
)
missing("peft", lambda at: at.train("model.lora_configs=[{}]"), "model.lora_configs", "[lora]")
missing(
    "bitsandbytes.optim",
    lambda at: at.train("tuner.optimizer_state=8bit"),
    "tuner.optimizer_state",
    "[gpu]",
)
missing("math_verify", lambda at: math_equal("1/2 + x", "x"), "math-verify", "[math]")


@pytest.fixture
def at(tmp_path, random_model_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path, random_model_path)


@pytest.fixture(scope="module", autouse=True)
def without_a_mistake(tmp_path_factory, random_model_path):
    """Everything is imported, and trains."""
    Place(tmp_path_factory.mktemp("right"), random_model_path).train()


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_in_one_sentence(at, name, capsys):
    act, place, mend = MISTAKES[name]
    started = time.process_time()
    with pytest.raises((TunerError, SystemExit)) as caught:
        act(at)
    spent = time.process_time() - started
    said = str(caught.value)
    if isinstance(caught.value, SystemExit):  # what a shell shows
        assert caught.value.code in (cli.FAILED, cli.BAD_INPUT)
        said = capsys.readouterr().err
        assert "Traceback" not in said
    assert place in said
    assert mend in said
    assert spent < SECONDS


def test_an_error_of_the_users_own_code_is_said_with_its_line(at, caplog):
    with pytest.raises(TunerError):
        at.train(workflow=forgets_await)
    lines = [record.getMessage() for record in caplog.records]
    said = f"forgets_await ({__file__}:{forgets_await.__code__.co_firstlineno + 1}): AttributeError"
    assert len([line for line in lines if line.startswith(said)]) == 1
