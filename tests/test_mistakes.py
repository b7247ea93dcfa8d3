"""Typical mistakes. Each ends at once in one error that names the place and the fix.

Everything but the mistake is right: a run that would take its two steps and end. Asserted are the
error's class (for a command the exit code), what it must name (key, file and line, value) and the
fix (setting, command, value). The wording is free.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
import traceback
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
from tuner.errors import (
    ConfigError,
    DatasetError,
    FunctionError,
    MissingDependencyError,
    ModelLoadError,
    TrainingError,
    TunerError,
    debugging,
)
from tuner.rewards import math_equal
from tuner.tasks.functions import MissingFieldError

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

    def filled(self, tokens: Tokens) -> tuple[str, ...]:
        """Tokens with this place's folder and model filled in."""
        found = (tokens,) if isinstance(tokens, str) else tokens
        places = {"{folder}": str(self.folder), "{model}": str(self.model)}
        for name, place in places.items():
            found = tuple(token.replace(name, place) for token in found)
        return found

    def command_of(self, program: str, workflow: str) -> None:
        """`tuner run` with a configuration that names a workflow in `main.py`, which has this."""
        self.file(program, "main.py")
        self.command("run", str(self.file(f"tuner: {{workflow: '{workflow}'}}\n")))


Act = Callable[[Place], object]
Tokens = str | tuple[str, ...]
"""Whole words that an error contains; `a|b` is either, {folder} and {model} those of `Place`."""


@dataclass(frozen=True)
class Mistake:
    """A mistake and the error that it must end in.

    Attributes:
        act: Makes the mistake.
        error: Class of the error; for a command its exit code.
        names: Tokens that name the place. One that is listed twice must occur twice.
        fix: Tokens of the remedy; the occurrences that `names` has used do not count.
        given: The quoted override, which is cut out first: quoting it names nothing.
    """

    act: Act
    error: type[TunerError] | int
    names: Tokens
    fix: Tokens
    given: str = ""


MISTAKES: dict[str, Mistake] = {}
POSITIVE = "greater than 0|above 0|more than 0|positive"
AT_LEAST_1 = "greater than or equal to 1|at least 1|1 or more|positive"
NOT_THERE = "not exist|no such|no file|missing|not found"


def without(said: str, tokens: Tokens) -> tuple[str, list[str]]:
    """A text with the first occurrence of each token cut out, and the tokens that it lacks."""
    missing = []
    for token in (tokens,) if isinstance(tokens, str) else tokens:
        words = [re.escape(word) for word in token.split("|")]
        words = [rf"(?<![\w.]){w}" if re.match(r"\w", w) else w for w in words]
        words = [rf"{w}(?!\w)" if re.search(r"\w$", w) else w for w in words]
        if found := re.search("|".join(words), said):
            said = said[: found.start()] + "\0" + said[found.end() :]
        else:
            missing.append(token)
    return said, missing


def mistake(error: type[TunerError] | int, names: Tokens, fix: Tokens) -> Callable[[Act], Act]:
    """Register the decorated function as a mistake that ends in such an error."""

    def note(act: Act) -> Act:
        MISTAKES[act.__name__] = Mistake(act, error, names, fix)
        return act

    return note


def of_settings(
    override: str, names: Tokens, fix: Tokens, error: type[TunerError] = ConfigError
) -> None:
    MISTAKES[override] = Mistake(
        lambda at: at.train(*override.split()), error, names, fix, given=repr(override)
    )


def of_workflow(
    wrong: Any, names: Tokens, fix: Tokens, error: type[TunerError] = FunctionError
) -> None:
    MISTAKES[f"workflow {wrong.__name__}"] = Mistake(
        lambda at: at.train(workflow=wrong), error, names, fix
    )


def of_judge(
    wrong: Any, names: Tokens, fix: Tokens, error: type[TunerError] = FunctionError
) -> None:
    MISTAKES[f"judge {wrong.__name__}"] = Mistake(
        lambda at: at.train(judge=wrong), error, names, fix
    )


# Functions that cannot be called.


async def without_model(task): ...


async def without_task(prompt, model): ...


async def with_a_parameter_too_many(task, model, tools): ...


async def by_position(*arguments): ...


async def yields(task, model):
    yield WorkflowOutput(reward=1.0)


class NotAnInstance:
    async def __call__(self, task, model): ...


WANTED = "def workflow(task, model"
of_workflow(without_model, ("without_model", "model"), WANTED)
of_workflow(without_task, ("without_task", "task"), WANTED)
of_workflow(
    with_a_parameter_too_many, ("with_a_parameter_too_many", "tools", "tools"), ("default", WANTED)
)
of_workflow(
    by_position, ("by_position", "*arguments", "*arguments"), ("by name|by keyword|keyword", WANTED)
)
of_workflow(yields, ("yields", "yields|generator"), ("return", WANTED))
of_workflow(NotAnInstance, ("NotAnInstance", "class"), ("instance", WANTED))
of_judge(workflow, ("workflow", "response"), "def judge(task, response")


@mistake(FunctionError, ("'main.py:workflow'", "str"), WANTED)
def a_name_for_a_workflow(at):
    at.train(workflow="main.py:workflow")


@mistake(FunctionError, ("workflow", "coroutine"), ("itself|without calling", WANTED))
def a_workflow_that_is_called(at):
    called = workflow({}, None)
    try:
        at.train(workflow=called)
    finally:
        called.close()


# Functions that return something else.


async def returns_nothing(task, model):
    await model(USER)


async def returns_a_pair(task, model):
    await model(USER)
    return "r", 1.0


async def returns_a_text(task, model):
    return (await model(USER)).content


async def returns_no_reward(task, model):
    await model(USER)
    return WorkflowOutput(response="r")


async def gives_a_text_as_reward(task, response):
    return JudgeOutput(reward="good")


async def forgets_the_reward(task, response):
    return JudgeOutput()


async def gives_a_word(task, response):
    return "yes"


async def misspells_a_field(task, response):
    return JudgeOutput(reward=1.0, metric={})


async def gives_what_is_not_finite(task, response):
    return JudgeOutput(reward=float("nan"))


of_workflow(returns_nothing, ("returns_nothing", "None"), ("WorkflowOutput", "return"))
of_workflow(returns_a_pair, ("returns_a_pair", "('r', 1.0)", "tuple"), "WorkflowOutput")
of_workflow(returns_a_text, ("returns_a_text", "list"), "WorkflowOutput")
of_judge(gives_a_text_as_reward, ("JudgeOutput", "reward", "'good'"), "number")
of_judge(forgets_the_reward, ("JudgeOutput", "reward"), "needs|missing|must")
of_judge(gives_a_word, ("gives_a_word", "'yes'", "str"), "JudgeOutput")
of_judge(misspells_a_field, ("JudgeOutput", "'metric'"), ("reward", "metrics"))
of_judge(gives_what_is_not_finite, ("judge", "reward", "nan"), "finite", TrainingError)


@mistake(FunctionError, "reward=None", ("reward", "judge_func"))
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


of_workflow(forgets_await, ("'coroutine'", "'content'"), "await", TrainingError)
of_workflow(calls_an_async_model_in_a_thread, ("'coroutine'", "'content'"), "await", TrainingError)
of_workflow(runs_a_loop_in_a_loop, "asyncio.run()", "await", TrainingError)
of_workflow(never_asks, ("workflow", "never|not", "model"), "train", TrainingError)
of_workflow(asks_for_another_field, "'prompt'", "question", MissingFieldError)
of_workflow(asks_for_another_model, ("model", "'gpt-4o'"), "{model}", TrainingError)
of_workflow(asks_with_another_key, ("key", "session"), ("api_key", "base_url"), TrainingError)
of_workflow(asks_with_a_text, ("messages", "string"), "array", TrainingError)
of_workflow(asks_as_nobody, ("messages[0].role", "human"), ("user", "assistant"), TrainingError)
of_workflow(asks_for_no_tokens, ("max_tokens", "0"), AT_LEAST_1, TrainingError)
of_workflow(asks_too_much, ("tokens", "256"), ("model.max_model_len", "shorten"), TrainingError)


@mistake(TrainingError, "0.05", "explorer.max_timeout")
def a_limit_that_nothing_keeps(at):
    at.train("explorer.max_timeout=0.05", workflow=waits_for_a_tool)


# No signal.


async def is_always_right(task, response):
    return JudgeOutput(reward=1.0)


@mistake(
    TrainingError,
    ("same reward|equal rewards", "1"),
    ("algorithm.repeat_times", "model.temperature"),
)
def a_judge_that_is_always_content(at):
    at.train("tuner.signal_patience=2", judge=is_always_right)


@mistake(
    TrainingError,
    ("of 4 calls", "cut off|truncated"),
    ("model.max_response_tokens", "1", "raise|increase|higher"),
)
def answers_that_are_cut_off(at):
    at.train("tuner.signal_patience=2", "model.max_response_tokens=1", judge=is_always_right)


# Settings.

of_settings("buffer.batchsize=2", "buffer.batchsize", "buffer.batch_size")
of_settings("algorithm.optimizer.lr=fast", ("algorithm.optimizer.lr", "'fast'"), "number")
of_settings("algorithm.optimizer.lr=-1", ("algorithm.optimizer.lr", "-1"), POSITIVE)
of_settings("algorithm.algorithm_type=grop", ("algorithm.algorithm_type", "'grop'"), "grpo")
of_settings("algorithm.repeat_times=1", ("algorithm.repeat_times", "1"), "2")
of_settings(
    "monitor.monitor_type=tensorbord", ("monitor.monitor_type", "'tensorbord'"), "tensorboard"
)
of_settings(
    "buffer.batch_size=32",
    ("batch_size", "4", "32"),
    ("lower|smaller|reduce", "buffer.batch_size"),
    DatasetError,
)
of_settings("buffer.total_steps=0", ("buffer.total_steps", "0"), AT_LEAST_1)
of_settings("model.max_model_len=4096", ("model.max_model_len", "4096"), "256")
of_settings(
    "model.max_response_tokens=256",
    ("model.max_response_tokens", "256", "256"),
    "lower|smaller|reduce",
)
of_settings("model.temperature=-1", ("model.temperature", "-1"), POSITIVE)
of_settings("tuner.backend=ray", ("tuner.backend", "'ray'"), "trinity")
of_settings("tuner.dtype=fp16", ("tuner.dtype", "'fp16'"), "float32")
of_settings("tuner.device=cuda", ("tuner.device", "cuda"), "cpu", ModelLoadError)
of_settings("name=../../x", ("name", "'../../x'"), "folder")
of_settings(
    "model.model_path=./models/mine",
    ("model.model_path", "models/mine"),
    ("folder", "Hugging Face"),
    ModelLoadError,
)
of_settings(
    "explorer.rollout_model.engine_type=vlllm",
    ("explorer.rollout_model.engine_type", "'vlllm'"),
    "vllm",
)
of_settings(
    "synchronizer.sync_offset=-1",
    ("synchronizer.sync_offset", "-1"),
    "greater than or equal to 0|at least 0|0 or more",
)
of_settings(
    "cluster.gpu_per_node=8",
    ("tuner.backend", "cluster"),
    ("pip install", "[trinity]", "tuner.backend", "local"),
    MissingDependencyError,
)


@mistake(ConfigError, "'buffer.batch_size'", "key=value")
def an_override_without_a_value(at):
    at.train("buffer.batch_size")


@mistake(ConfigError, "AlgorithmConfig.lr", "learning_rate")
def an_unknown_field_of_algorithm(at):
    at.train(algorithm=AlgorithmConfig(lr=1e-5))


@mistake(ConfigError, ("AlgorithmConfig.learning_rate", "'fast'"), "number")
def a_text_for_a_number(at):
    at.train(algorithm=AlgorithmConfig(learning_rate="fast"))


@mistake(ConfigError, "TunerModelConfig.max_model_len", "missing|required|set it")
def a_model_without_its_length(at):
    at.train(model=TunerModelConfig(model_path="x"))


@mistake(
    ConfigError, ("auxiliary_models", "'helper'", "'gpt-4o'"), ("TunerModelConfig", "RemoteModel")
)
def an_auxiliary_model_by_its_name(at):
    at.train(auxiliary_models={"helper": "gpt-4o"})


@mistake(ConfigError, ("NO_SUCH_KEY", "environment variable"), ("set", "api_key_env"))
def a_key_that_is_not_in_the_environment(at):
    remote = RemoteModel(
        base_url="http://127.0.0.1:1/v1", model_name="m", api_key_env="NO_SUCH_KEY"
    )
    at.train(auxiliary_models={"helper": remote})


@mistake(ConfigError, ("config_path", "dict"), ("path", "YAML"))
def a_configuration_that_is_a_dict(at):
    at.train(config_path={"name": "x"})


@mistake(ConfigError, ("{folder}/nowhere.yaml", NOT_THERE), "{folder}")
def a_configuration_that_is_not_there(at):
    at.train(config_path=at.folder / "nowhere.yaml")


@mistake(ConfigError, "{folder}/config.yaml:2", "spaces")
def a_tab_in_yaml(at):
    at.train(config_path=at.file("model:\n\tmodel_path: x\n"))


@mistake(ConfigError, "{folder}/config.yaml", ("keys|mapping", "project:"))
def yaml_that_is_a_list(at):
    at.train(config_path=at.file("- model\n"))


@mistake(
    ConfigError,
    ("{folder}/config.yaml:1", "explorer.bench_on_latest_checkpoint", "True"),
    ("false", "remove"),
)
def a_key_of_another_program(at):
    at.train(config_path=at.file("explorer: {bench_on_latest_checkpoint: true}\n"))


# Data.


@mistake(DatasetError, ("train_dataset", "row 0", "'What is 2 + 2?'"), "dict")
def rows_that_are_texts(at):
    at.train(rows=["What is 2 + 2?"] * 4)


@mistake(DatasetError, ("train_dataset", "empty"), "one row")
def no_rows(at):
    at.train(rows=[])


@mistake(DatasetError, ("train_dataset", "dict"), "list of dicts")
def one_row_for_many(at):
    at.train(rows={"question": "What is 2 + 2?"})


@mistake(
    DatasetError,
    ("train_dataset", "{folder}/train.jsonl", NOT_THERE),
    "{folder}/train.jsonl",
)
def data_that_is_not_there(at):
    at.train(rows=str(at.folder / "train.jsonl"))


@mistake(DatasetError, ("train_dataset", "{folder}/train.jsonl:2"), "valid JSON")
def a_line_that_is_no_json(at):
    at.train(rows=str(at.file('{"question": "a"}\n{"question": \n', "train.jsonl")))


@mistake(DatasetError, ("train_dataset", "{folder}", "split", "'training'"), "train")
def a_split_that_is_not_there(at):
    at.file(json.dumps(ROWS[0]) + "\n", "train.jsonl")
    at.train(rows=Dataset(path=str(at.folder), split="training"))


@mistake(
    DatasetError,
    ("column", "'prompt'"),
    ("buffer.trainer_input.experience_buffer.format.prompt_key", "question"),
)
def rows_without_messages(at):
    at.train("algorithm.algorithm_type=sft", workflow=None, judge=None)


@mistake(
    DatasetError,
    ("column", "'rejected'"),
    ("buffer.trainer_input.experience_buffer.format.rejected_key", "chosen"),
)
def pairs_of_which_one_is_missing(at):
    rows = [{"prompt": USER, "chosen": [{"role": "assistant", "content": "a"}]}] * 4
    at.train("algorithm.algorithm_type=dpo", workflow=None, judge=None, rows=rows)


@mistake(DatasetError, ("eval_dataset", "{folder}/test.jsonl", NOT_THERE), "{folder}/test.jsonl")
def an_evaluation_set_that_is_not_there(at):
    at.train(eval_dataset=str(at.folder / "test.jsonl"))


# Models and folders.


def of_model(name: str, names: Tokens, fix: Tokens, make: Callable[[Path], object]) -> None:
    def act(at):
        make(at.folder)
        at.train(f"model.model_path={at.folder / 'models' / 'mine'}")

    MISTAKES[name] = Mistake(act, ModelLoadError, names, fix)


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


MINE = ("model.model_path", "'{folder}/models/mine'")
of_model("a model that is a file", (*MINE, "file"), ("folder", "Hugging Face"), file)
of_model("an empty folder", (*MINE, "loaded"), "config.json", folder())
of_model("a folder without weights", (*MINE, "loaded"), "config.json", folder("config.json"))
of_model(
    "an adapter for a model",
    (*MINE, "adapter"),
    ("model.model_path", "model.lora_configs"),
    folder("adapter_config.json"),
)


@mistake(ModelLoadError, ("model.model_path", "{folder}/models/mine", NOT_THERE), "yours")
def a_model_beside_another(at):
    (at.folder / "models" / "yours").mkdir(parents=True)
    at.train("model.model_path=models/mine")


@mistake(ConfigError, ("checkpoint_root_dir", "{folder}/runs", "{folder}/runs"), "folder")
def a_root_that_is_a_file(at):
    at.train(f"checkpoint_root_dir={at.file('text', 'runs')}")


@mistake(
    ConfigError,
    ("{folder}/runs/runs/mine", "algorithm.optimizer.lr", "0.5"),
    ("name", "continue_from_checkpoint=false"),
)
def a_name_that_another_run_has(at):
    at.train("name=mine")
    at.train("name=mine", "algorithm.optimizer.lr=0.5")


# From the command line.


@mistake(cli.BAD_INPUT, ("main.py", "'work_flow'"), "tuner.workflow")
def a_function_that_is_not_there(at):
    at.command_of("def workflow(task, model): ...", "main.py:work_flow")


@mistake(
    cli.BAD_INPUT,
    ("tuner.workflow", "'main.py'"),
    ("package.module:function", "path/file.py:function"),
)
def a_file_without_a_function(at):
    at.command_of("", "main.py")


@mistake(cli.BAD_INPUT, ("tuner.workflow", "mian.py", NOT_THERE), "mian.py")
def a_file_that_is_not_there(at):
    at.command_of("", "mian.py:workflow")


@mistake(cli.BAD_INPUT, ("tuner.workflow", "main.py:1"), "NameError: name 'reutrn' is not defined")
def a_file_that_does_not_import(at):
    at.command_of("reutrn", "main.py:workflow")


@mistake(cli.BAD_INPUT, ("main.py", "tune()"), 'if __name__ == "__main__":')
def a_script_without_a_guard(at):
    at.command_of(
        "from tuner import tune\nasync def workflow(task, model): ...\ntune(workflow)",
        "main.py:workflow",
    )


@mistake(
    cli.BAD_INPUT,
    ("{folder}/config.yaml", "tuner.workflow"),
    ("package.module:function", "path/file.py:function", "tuner.environment"),
)
def no_workflow_in_the_file(at):
    at.command("run", str(at.file("name: x\n")))


@mistake(cli.BAD_INPUT, "'trian'", "tuner --help")
def a_command_that_is_misspelt(at):
    at.command("trian", "config.yaml")


@mistake(cli.BAD_INPUT, "{folder}", "<checkpoint_root_dir>/<project>/<name>")
def a_folder_that_is_no_run(at):
    at.command("view", str(at.folder), "--report")


@mistake(cli.BAD_INPUT, ("--steps", "'few'"), "3-7")
def steps_that_are_no_range(at):
    at.file("def judge(task, response): ...", "judges.py")
    at.command("replay", str(at.folder), "--judge", "judges.py:judge", "--steps", "few")


# Things of another type.


@mistake(ConfigError, ("model", "'Qwen/Qwen3-0.6B'", "str"), "TunerModelConfig")
def a_model_by_its_name(at):
    at.train(model="Qwen/Qwen3-0.6B")


@mistake(ConfigError, ("algorithm", "{'learning_rate': 0.1}", "dict"), "AlgorithmConfig")
def an_algorithm_that_is_a_dict(at):
    at.train(algorithm={"learning_rate": 0.1})


@mistake(ConfigError, ("overrides", "'buffer.batch_size=2'", "str"), ("list", "key=value"))
def one_override_for_many(at):
    tune(workflow, judge, ROWS, overrides="buffer.batch_size=2")


@mistake(ConfigError, ("auxiliary_models", "list"), ("dict", "name"))
def auxiliary_models_without_names(at):
    at.train(auxiliary_models=[TunerModelConfig(model_path="x", max_model_len=9)])


# Extras that are not installed.


def missing(
    library: str,
    act: Act,
    names: Tokens,
    extra: str,
    error: type[TunerError] = MissingDependencyError,
) -> None:
    def without_it(at):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, library, None)
            act(at)

    fix = ("pip install", f"[{extra}]")
    MISTAKES[f"without {library}"] = Mistake(without_it, error, names, fix)


MONITOR = "monitor.monitor_type"
missing("wandb", lambda at: at.train(f"{MONITOR}=wandb"), (MONITOR, "wandb"), "wandb")
missing("mlflow", lambda at: at.train(f"{MONITOR}=mlflow"), (MONITOR, "mlflow"), "mlflow")
missing(
    "peft", lambda at: at.train("model.lora_configs=[{}]"), ("model.lora_configs", "peft"), "lora"
)
missing(
    "bitsandbytes.optim",
    lambda at: at.train("tuner.optimizer_state=8bit"),
    ("tuner.optimizer_state", "bitsandbytes"),
    "gpu",
    ConfigError,
)
missing("math_verify", lambda at: math_equal("1/2 + x", "x"), "math-verify", "math")


@pytest.fixture
def at(tmp_path, random_model_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path, random_model_path)


@pytest.fixture(scope="module", autouse=True)
def without_a_mistake(tmp_path_factory, random_model_path):
    """Everything is imported, and trains."""
    Place(tmp_path_factory.mktemp("right"), random_model_path).train()


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_in_one_error_that_names_the_place_and_the_fix(at, name, capsys):
    one = MISTAKES[name]
    started = time.process_time()
    with pytest.raises((TunerError, SystemExit)) as caught:
        one.act(at)
    spent = time.process_time() - started
    said = str(caught.value)
    if isinstance(caught.value, SystemExit):  # what a shell shows
        assert caught.value.code == one.error
        said = capsys.readouterr().err
        assert "Traceback" not in said
    else:
        assert type(caught.value) is one.error
    left = said.replace(one.given, "") if one.given else said
    for tokens in (one.names, one.fix):
        left, not_there = without(left, at.filled(tokens))
        assert not not_there, said
    assert spent < SECONDS


def test_an_error_of_the_users_own_code_is_said_with_its_line(at, caplog):
    with pytest.raises(TunerError):
        at.train(workflow=forgets_await)
    lines = [record.getMessage() for record in caplog.records]
    said = f"forgets_await ({__file__}:{forgets_await.__code__.co_firstlineno + 1}): AttributeError"
    assert len([line for line in lines if line.startswith(said)]) == 1


def test_its_traceback_has_the_users_frames_alone(at, monkeypatch):
    def files():
        with pytest.raises(FunctionError) as caught:
            at.train(judge=misspells_a_field)
        place = f"{__file__}:{misspells_a_field.__code__.co_firstlineno + 1}"
        assert str(caught.value).startswith(f"misspells_a_field ({place}): JudgeOutput: ")
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert frames[-1].name == "misspells_a_field" or debugging()
        return {frame.filename for frame in frames}

    assert files() == {__file__}
    monkeypatch.setenv("TUNER_DEBUG", "1")
    assert any("tuner/rollouts/runner.py" in file for file in files())
