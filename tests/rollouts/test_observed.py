"""AgentScope 1.x's own chat models, watched: what they say is in the session. Real HTTP."""

import json

import openai
import pytest

from tests.kit.chat_server import Refusal, chat_server
from tuner.gateway import SessionLimits
from tuner.gateway.relay import ELSEWHERE, Relay
from tuner.gateway.request_error import RequestError
from tuner.rollouts.observed import is_chat_model, observed, session_of
from tuner.traces import Usage

pytest.importorskip("agentscope.agent")

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg, TextBlock
from agentscope.model import ChatModelBase, ChatResponse, OpenAIChatModel
from agentscope.tool import Toolkit, ToolResponse

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL_CALL = {
    "content": "",
    "tool_calls": [
        {
            "id": "t1",
            "type": "function",
            "index": 0,
            "function": {"name": "add", "arguments": '{"a": 2,  "b": 40}'},
        }
    ],
}


@pytest.fixture
async def session():
    gateway = Relay(None, "none")
    yield gateway.open_session("r", limits=SessionLimits(calls=3))
    await gateway.aclose()


@pytest.fixture
async def chat_model():
    made = []

    def make(server, **settings):
        client = {"base_url": server.base_url, "max_retries": 0}
        made.append(OpenAIChatModel("m", api_key="k", client_kwargs=client, **settings))
        return made[-1]

    yield make
    for model in made:
        await model.client.close()


def add(a: int, b: int) -> ToolResponse:
    """Add two integers.

    Args:
        a (int): first
        b (int): second
    """
    return ToolResponse(content=[TextBlock(type="text", text=str(a + b))])


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_calls_a_tool_and_each_call_is_recorded(session, chat_model, stream):
    def answer(body):
        return "It is 42." if body["messages"][-1]["role"] == "tool" else TOOL_CALL

    toolkit = Toolkit()
    toolkit.register_tool_function(add)
    with chat_server(answer) as server:
        model = chat_model(server, stream=stream, generate_kwargs={"temperature": 0.3})
        watched = observed(model, session)
        agent = ReActAgent(
            name="solver",
            sys_prompt="You solve problems.",
            model=watched,
            formatter=OpenAIChatFormatter(),
            toolkit=toolkit,
        )
        reply = await agent(Msg("user", "2 + 40?", "user"))
    assert reply.get_text_content() == "It is 42."
    first, second = session.seal()
    assert first.finish_reason == "tool_calls"
    (called,) = first.response["tool_calls"]
    assert (called["id"], called["function"]["name"]) == ("t1", "add")
    assert json.loads(called["function"]["arguments"]) == {"a": 2, "b": 40}
    assert [tool["function"]["name"] for tool in first.tools] == ["add"]
    assert first.sampling.temperature == 0.3
    assert second.response == {"role": "assistant", "content": "It is 42."}
    assert second.messages[-1]["role"] == "tool"
    assert second.usage == Usage(7, 3)
    assert (second.invalid, second.streamed) == (ELSEWHERE, stream)
    assert session.in_flight.seconds > 0


async def test_the_users_own_object_is_not_changed(session, chat_model):
    with chat_server(lambda body: "ho") as server:
        model = chat_model(server, stream=False)
        before = dict(vars(model))
        watched = observed(model, session)
        assert isinstance(watched, type(model))
        assert type(watched).__name__ == "OpenAIChatModel"
        assert watched.client is model.client
        assert vars(model) == before
        assert session_of(watched) is session
        await model(MESSAGES)
    assert session.calls == ()
    assert is_chat_model(model)
    assert not is_chat_model(session)


async def test_a_stream_that_is_left_is_recorded_as_undelivered(session, chat_model):
    with chat_server(lambda body: "some words in pieces") as server:
        stream = await observed(chat_model(server), session)(MESSAGES)
        await anext(stream)
        (call,) = session.seal()
        await stream.aclose()
    assert call.undelivered
    assert call.finish_reason == "abandoned"
    assert call.response["content"] in "some words in pieces"


class Plain(ChatModelBase):
    """Streams two answers, and looks at the session meanwhile."""

    def __init__(self, session):
        super().__init__("plain", True)
        self.looked_at, self.running = session, []

    async def __call__(self, messages):
        async def stream():
            for text in ("It", "It is"):
                self.running.append(len(self.looked_at.in_flight.tasks))
                yield ChatResponse(content=[TextBlock(type="text", text=text)])

        return stream()


async def test_a_stream_is_in_flight_while_it_is_waited_for_and_not_between(session):
    watched = observed(Plain(session), session)
    async for _ in await watched(MESSAGES):
        watched.running.append(len(session.in_flight.tasks))
    assert watched.running == [1, 0, 1, 0]
    (call,) = session.seal()
    assert call.response["content"] == "It is"
    assert call.usage == Usage()  # it does not say


async def test_limits_and_the_end_of_a_rollout_hold(session, chat_model):
    with chat_server(lambda body: "ho") as server:
        watched = observed(chat_model(server, stream=False), session)
        for _ in range(3):
            await watched(MESSAGES)
        with pytest.raises(RequestError, match="may ask for 3"):
            await watched(MESSAGES)
        assert len(session.seal()) == 3
        with pytest.raises(RequestError, match="has ended"):
            await watched(MESSAGES)
        assert len(server.requests) == 3


async def test_what_the_api_says_reaches_the_workflow(session, chat_model):
    def refuse(body):
        raise Refusal(400, "no such voice")

    with chat_server(refuse) as server, pytest.raises(openai.BadRequestError, match="voice"):
        await observed(chat_model(server), session)(MESSAGES)
    assert session.seal() == ()
