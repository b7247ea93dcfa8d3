"""AgentScope 2.x's own chat models, watched, and chosen among. Real HTTP."""

import pytest
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from pydantic import BaseModel

from tests.integration.agentscope2.agents import agent_of
from tests.kit.chat_server import chat_server
from tuner import JudgeOutput, WorkflowOutput, select_model
from tuner.gateway.relay import Relay
from tuner.rollouts.observed import observed
from tuner.traces import Usage


@pytest.fixture
async def session():
    gateway = Relay(None, "none")
    yield gateway.open_session("r")
    await gateway.aclose()


def chat_model(server, name="m", **settings):
    return OpenAIChatModel(
        credential=OpenAICredential(api_key="k", base_url=server.base_url),
        model=name,
        max_retries=0,
        **settings,
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agents_call_is_recorded(session, stream):
    with chat_server(lambda body: "some words in pieces") as server:
        model = chat_model(
            server, stream=stream, parameters=OpenAIChatModel.Parameters(temperature=0.3)
        )
        watched = observed(model, session)
        assert type(watched).__name__ == "OpenAIChatModel"
        reply = await agent_of(watched).reply(UserMsg(name="user", content="hi"))
    assert reply.get_text_content() == "some words in pieces"
    (call,) = session.seal()
    assert call.response["content"] == "some words in pieces"
    assert (call.usage, call.streamed) == (Usage(7, 4), stream)
    assert call.sampling.temperature == 0.3
    assert call.messages[-1]["role"] == "user"


async def test_structured_output_is_recorded(session):
    class Answer(BaseModel):
        number: int

    arguments = {"name": "generate_structured_output", "arguments": '{"number": 4}'}
    call = {"id": "t", "type": "function", "function": arguments}
    with chat_server(lambda body: {"content": "", "tool_calls": [call]}) as server:
        watched = observed(chat_model(server, stream=False), session)
        found = await watched.generate_structured_output(
            [UserMsg(name="user", content="2 + 2?")], Answer
        )
    assert found.content == {"number": 4}
    (call,) = session.seal()
    assert call.response["content"] == '{"number": 4}'
    assert call.usage.input_tokens == 7


async def test_the_better_model_is_selected(tmp_path):
    async def workflow(task, model):
        reply = await agent_of(model).reply(UserMsg(name="user", content=task["question"]))
        return WorkflowOutput(response=reply)

    async def judge(task, response):
        return JudgeOutput(reward=float(response.get_text_content() == "ja"))

    with chat_server(lambda body: "ja" if body["model"] == "good" else "nein") as server:
        models = [chat_model(server, name) for name in ("bad", "good")]
        best, metrics = await select_model(
            workflow_func=workflow,
            judge_func=judge,
            train_dataset=[{"question": "hm?"}, {"question": "so?"}],
            candidate_models=models,
            overrides=[f"checkpoint_root_dir={tmp_path}"],
        )
    assert best is models[1]
    assert (metrics["reward"], metrics["total_tokens_avg"]) == (1.0, 8.0)
