"""Checking and calling workflows and judges."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tuner.errors import ConfigError, DatasetError, FunctionError
from tuner.tasks.functions import (
    JudgeOutput,
    WorkflowOutput,
    as_judge_output,
    as_workflow_output,
    call_judge,
    call_workflow,
    check_judge_function,
    check_workflow_function,
)
from tuner.tasks.loading import load_function, without_collection


async def workflow(task, model):
    return WorkflowOutput(response=(task["question"], model))


async def call(func: Any, task: dict[str, Any] | None = None) -> WorkflowOutput:
    return await call_workflow(
        func,
        task=task or {"question": "q"},
        model="m",
        auxiliary_models={"a": 1},
        logger="log",
    )


async def score(func: Any) -> JudgeOutput:
    return await call_judge(func, task={}, response="r", auxiliary_models={"a": 1}, logger="log")


class Agent:
    """An object that is called."""

    async def __call__(self, task, model, *, extra=3):
        return WorkflowOutput(response=extra)

    async def method(self, task, model, auxiliary_models):
        return WorkflowOutput(response=auxiliary_models)


def plain(task, model):
    return WorkflowOutput(response=threading.current_thread().name)


async def with_more(task, model, style, **rest):
    return WorkflowOutput(response=(style, sorted(rest)))


@pytest.mark.parametrize(
    ("func", "response"),
    [
        (workflow, ("q", "m")),
        (Agent(), 3),
        (Agent().method, {"a": 1}),
        (plain, "tuner-function"),
        (functools.partial(with_more, style="x"), ("x", ["auxiliary_models", "logger"])),
        (lambda task, model: workflow(task, model), ("q", "m")),
        (lambda **everything: WorkflowOutput(response=sorted(everything)),
         ["auxiliary_models", "logger", "model", "task"]),
    ],
    ids=["async", "object", "method", "plain", "partial", "lambda", "kwargs"],
)  # fmt: skip
async def test_functions_of_every_kind_are_called_with_what_they_take(func, response):
    check_workflow_function(func)
    assert (await call(func)).response == response


async def test_plain_functions_run_at_the_same_time():
    together = threading.Barrier(20, timeout=120)

    def waits(task, model):
        together.wait()
        return WorkflowOutput()

    await asyncio.gather(*(call(waits) for _ in range(20)))


async def test_error_of_a_plain_function_reaches_the_caller():
    def breaks(task, model):
        raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        await call(breaks)


def missing_model(task, auxiliary_models): ...
def unknown_parameter(task, model, prompt): ...
def positional(*args): ...
def positional_only(task, /, model): ...
def generator(task, model):
    yield 1


@pytest.mark.parametrize(
    ("func", "text"),
    [
        (missing_model, "parameter model is missing"),
        (unknown_parameter, "nothing is passed for prompt"),
        (positional, "parameter task, model is missing; *args never receives anything"),
        (positional_only, "task is positional-only"),
        (generator, "it yields"),
        (Agent, "it is a class"),
        ("run_agent", "not a function"),
    ],
)
def test_wrong_parameters_name_function_place_and_expectation(func, text):
    with pytest.raises(FunctionError) as caught:
        check_workflow_function(func)
    message = str(caught.value)
    assert text in message
    assert "async def workflow(task, model, auxiliary_models (optional)" in message
    if callable(func) and not isinstance(func, type):
        assert f"{func.__name__} ({__file__}:" in message
        assert "found:" in message


def test_judge_needs_task_and_response():
    check_judge_function(lambda task, response, logger: None)
    with pytest.raises(FunctionError, match="parameter response is missing"):
        check_judge_function(lambda task, answer=None: None)


class Message:
    """Like AgentScope's."""

    def get_text_content(self):
        return "said"


MESSAGE = Message()


@pytest.mark.parametrize(
    ("value", "reward", "response"),
    [
        ("an answer", None, "an answer"),
        (MESSAGE, None, MESSAGE),
        (None, None, None),  # the content of an answer without text
        (0.5, 0.5, 0.5),
        (7, 7.0, 7),
        (True, 1.0, True),
        (np.float32(0.25), 0.25, np.float32(0.25)),
        ({"response": [1], "reward": 0}, 0.0, [1]),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_workflow_may_return_a_plain_value(value, reward, response):
    output = await call(lambda task, model: value)
    assert (output.reward, output.response) == (reward, response)


@pytest.mark.parametrize(
    ("value", "reward"), [(1, 1.0), (False, 0.0), (np.bool_(True), 1.0), ({"reward": 0.5}, 0.5)]
)
async def test_a_judge_may_return_a_plain_value(value, reward):
    assert await score(lambda task, response: value) == JudgeOutput(reward=reward)


async def forgot_to_return(task, model):
    await asyncio.sleep(0)
    if not task:
        return


@pytest.mark.parametrize(
    ("func", "value", "text"),
    [
        (
            workflow,
            b"said",
            "returned b'said' .bytes.; a workflow returns WorkflowOutput, or a ",
        ),
        (workflow, [1.0], "returned .1.0. .list."),
        (
            workflow,
            {"rewrd": 1},
            "returned {'rewrd': 1} .dict.; .* no field 'rewrd' .*reward",
        ),
        (workflow, {"reward": "1"}, "reward is '1' .str., expected a number"),
        (workflow, JudgeOutput(reward=1), "a workflow returns WorkflowOutput"),
        (forgot_to_return, None, "is a return statement missing"),
    ],
)
def test_wrong_return_type_names_function_and_value(func, value, text):
    with pytest.raises(FunctionError, match=text) as caught:
        as_workflow_output(value, func)
    assert f"{func.__name__} ({__file__}:" in str(caught.value)


def test_agentscopes_outputs_are_taken():
    theirs = type("WorkflowOutput", (SimpleNamespace,), {})
    output = as_workflow_output(theirs(reward=1, response="x", metrics=None), workflow)
    assert output == WorkflowOutput(reward=1, response="x")
    theirs = type("JudgeOutput", (SimpleNamespace,), {})
    assert as_judge_output(theirs(reward=1, metrics={"a": 2}), workflow).metrics == {"a": 2}
    with pytest.raises(FunctionError, match=r"returned .* it needs a reward"):
        as_judge_output(theirs(reward=None, metrics=None), workflow)


async def test_judge_without_reward_and_wrong_judge_have_their_own_messages():
    with pytest.raises(FunctionError, match="it needs a reward: a judge must score"):
        JudgeOutput(reward=None)  # type: ignore[arg-type]
    with pytest.raises(FunctionError, match=r"returned '1.0' \(str\); a judge returns JudgeOutput"):
        await score(lambda task, response: "1.0")
    assert (await score(lambda task, response: JudgeOutput(reward=True))).reward == 1.0


def test_unknown_fields_of_an_output_are_refused():
    with pytest.raises(FunctionError, match=r"no field 'rewards'"):
        WorkflowOutput(rewards=1)  # type: ignore[call-arg]
    with pytest.raises(FunctionError, match=r"metrics.a is 'x' \(str\), expected a number"):
        JudgeOutput(reward=1, metrics={"a": "x"})  # type: ignore[dict-item]


async def test_missing_field_of_a_row_is_named_with_the_fields_there_are():
    with pytest.raises(
        FunctionError,
        match=rf"^workflow \({__file__}:\d+\): .*no field 'question'; .* are: problem, answer$",
    ) as caught:
        await call(workflow, {"problem": "p", "answer": "a"})
    assert isinstance(caught.value, DatasetError)
    assert isinstance(caught.value, KeyError)


def test_functions_are_loaded_from_modules_and_files(tmp_path, monkeypatch):
    file = tmp_path / "my_agent.py"
    file.write_text("import neighbour\nasync def run(task, model): ...\nx = 1\n")
    (tmp_path / "neighbour.py").write_text("")
    monkeypatch.syspath_prepend("")
    function = load_function(f"{file}:run", setting="tuner.workflow")
    assert function is load_function(f"{file}:run", setting="tuner.workflow")
    assert load_function("json:dumps", setting="s").__name__ == "dumps"
    for reference, text in [
        ("json", "write package.module:function"),
        ("no_such_module:f", "importing no_such_module failed"),
        (f"{tmp_path}/none.py:f", "there is no file"),
        (f"{file}:walk", "has no function 'walk'"),
        (f"{file}:x", "'x' in .* is not a function"),
    ]:
        with pytest.raises(ConfigError, match=text):
            load_function(reference, setting="tuner.workflow")


def test_a_script_that_trains_when_it_is_imported_is_told_to_put_the_guard(tmp_path):
    file = tmp_path / "main.py"
    text = "from tuner import tune\ndef run(task): ...\n"
    file.write_text(f"{text}tune(run, run, [{{}}])\n")
    with pytest.raises(ConfigError, match=r"main\.py calls tune\(\) .*if __name__ == \"__main__"):
        load_function(f"{file}:run", setting="tuner.workflow")
    guarded = tmp_path / "guarded.py"
    guarded.write_text(f"{text}if __name__ == '__main__':\n    tune(run, run, [{{}}])\n")
    assert load_function(f"{guarded}:run", setting="tuner.workflow")


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_again_after_imports_if_it_was_before(enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        with contextlib.suppress(ImportError), without_collection():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
