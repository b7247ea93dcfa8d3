"""`select_model` with AgentScope's own chat models over HTTP, models elsewhere and tiny models."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.chat_server import Refusal, chat_server
from tuner import (
    ConfigError,
    JudgeOutput,
    RemoteModel,
    TrainingError,
    TunerModelConfig,
    WorkflowOutput,
    avg_time_judge,
    avg_token_consumption_judge,
    select_model,
)
from tuner.traces import read_traces

agentscope = pytest.importorskip("agentscope.model")

TASKS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(6)]
MODELS = Path(__file__).parents[2] / "models"


def right(body):
    return str(int(body["messages"][-1]["content"].split()[2]) + 1)


def by_name(**answers):
    """A server whose models answer each in its own way."""
    return chat_server(lambda body: answers[body["model"]](body))


def chat_model(server, name, **settings):
    return agentscope.OpenAIChatModel(
        name, api_key="k", client_kwargs={"base_url": server.base_url, "max_retries": 0}, **settings
    )


async def workflow(task, model):
    answer = await model([{"role": "user", "content": task["question"]}])
    if not hasattr(answer, "content"):
        async for answer in answer:
            pass
    return WorkflowOutput(response=answer.content[0]["text"])


async def judge(task, response):
    assert set(response) == {"response", "metrics"}
    found = float(response["response"] == task["answer"])
    return JudgeOutput(reward=found, metrics={"right": found})


def select(tmp_path, models, *overrides, **given):
    given = {"workflow_func": workflow, "judge_func": judge, "train_dataset": TASKS} | given
    return select_model(
        candidate_models=models,
        overrides=[
            f"checkpoint_root_dir={tmp_path}",
            "explorer.max_retry_times=0",
            *overrides,
        ],
        **given,
    )


def result_of(tmp_path):
    (file,) = tmp_path.glob("*/*/result.json")
    return json.loads(file.read_text())


@pytest.mark.parametrize("stream", [False, True])
async def test_the_better_chat_model_is_returned_with_what_it_took(tmp_path, stream):
    with by_name(bad=lambda body: "no idea at all", good=right) as server:
        bad, good = (chat_model(server, name, stream=stream) for name in ("bad", "good"))
        best, metrics = await select(tmp_path, [bad, good])
    assert best is good
    assert (metrics["reward"], metrics["right_avg"], metrics["tied"]) == (1.0, 1.0, 0)
    assert (metrics["input_tokens_avg"], metrics["output_tokens_avg"]) == (7.0, 1.0)
    assert metrics["total_tokens_avg"] == 8.0
    assert metrics["execution_time_avg"] > 0
    assert [one["name"] for one in result_of(tmp_path)["candidates"]] == ["good", "bad"]
    traces = [t for file in sorted(tmp_path.glob("*/*/traces/*")) for t in read_traces(file)]
    assert len(traces) == 12
    (call,) = traces[-1].calls
    assert call.messages == [{"role": "user", "content": traces[-1].task["question"]}]
    assert call.response["content"] == traces[-1].response == traces[-1].task["answer"]
    assert call.streamed is stream
