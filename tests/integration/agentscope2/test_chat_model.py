"""A real AgentScope 2.x agent on the gateway: what it gets, and what is recorded of it."""

from __future__ import annotations

import base64
import hashlib
import itertools

import openai
import pytest
from agentscope.agent import InjectionConfig, ReActConfig
from agentscope.credential import OpenAICredential
from agentscope.formatter import DeepSeekChatFormatter
from agentscope.message import (
    AssistantMsg,
    Base64Source,
    DataBlock,
    TextBlock,
    ToolCallBlock,
    ToolResultBlock,
    URLSource,
    UserMsg,
)
from agentscope.model import OpenAIChatModel
from agentscope.tool import FunctionTool
from pydantic import BaseModel

import tuner
from tests.gateway import again
from tests.gateway.drift import TERSE, continues, letters
from tests.gateway.drift import gateway_of as merging_gateway_of
from tests.integration.agentscope2.agents import CALL, add, agent_of
from tests.kit.models import png, vision_model
from tests.kit.toy import StubEngine, gateway_of, text_of, vision_gateway
from tuner.errors import MissingDependencyError
from tuner.gateway import SamplingDefaults, Session
from tuner.rollouts.agentscope1 import trinity_chat_model as trinity_chat_model_1
from tuner.rollouts.agentscope2 import trinity_chat_model
from tuner.rollouts.chat_models import (
    chat_model,
    default_kind,
    remote_chat_model,
    trinity_chat_model_class,
)
from tuner.traces import TokenTree

QUESTION = UserMsg("user", "What is 2 + 40?")


def test_what_is_installed_decides_what_the_name_means() -> None:
    assert default_kind() == "agentscope2"
    assert tuner.TrinityChatModel is trinity_chat_model_class() is trinity_chat_model()
    tuner.require_agentscope2()
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[agentscope1\]"):
        tuner.require_agentscope1()


async def test_agent_without_tools_gets_the_completion() -> None:
    async with gateway_of(StubEngine(["It is 42."])) as gateway:
        session = gateway.open_session("r")
        reply = await agent_of(chat_model(session, kind="agentscope2")).reply(QUESTION)
        assert reply.get_text_content() == "It is 42."
        (call,) = session.calls
        assert call.invalid is None
        assert text_of(call.prompt_ids) == (
            "<|im_start|>system\nYou solve problems.<|im_end|>\n"
            "<|im_start|>user\nWhat is 2 + 40?<|im_end|>\n<|im_start|>assistant\n"
        )
        assert text_of(call.completion_ids) == "It is 42.<|im_end|>"


async def test_tools_run_without_asking_and_their_results_come_back() -> None:
    async with gateway_of(StubEngine(["I add.\n" + CALL, "It is 42."])) as gateway:
        session = gateway.open_session("r")
        model = chat_model(session, kind="agentscope2")
        reply = await agent_of(model, add).reply(QUESTION)
        model.workflow_ended()
        assert reply.get_text_content() == "It is 42."
        first, second = session.calls
        assert [tool["function"]["name"] for tool in first.tools] == ["add"]
        assert first.response["tool_calls"][0]["function"]["arguments"] == '{"a": 2,  "b": 40}'
        assert "<tool_response>\n42\n</tool_response>" in text_of(second.prompt_ids)
        assert gateway.warned == set()


@pytest.mark.parametrize("written", [CALL, TERSE], ids=["spaced", "terse"])
async def test_twenty_tool_turns_are_one_path_of_sampled_ids(written: str) -> None:
    gateway = merging_gateway_of(*[letters("I add.\n" + written)] * 20, letters("It is 42."))
    session = gateway.open_session("r")
    model = chat_model(session, kind="agentscope2")
    agent = agent_of(model, add, react_config=ReActConfig(max_iters=30))
    reply = await agent.reply(QUESTION)
    assert reply.get_text_content() == "It is 42."
    calls = session.calls
    assert len(calls) == 21
    assert all(continues(later, earlier) for earlier, later in itertools.pairwise(calls))
    tree = TokenTree.build(calls)
    assert len(list(tree.rows())) == 1
    assert tree.unique_tokens == len(calls[-1].prompt_ids) + len(calls[-1].completion_ids)
    assert tree.sampled_tokens == sum(len(call.completion_ids) for call in calls)


@pytest.mark.parametrize(("formatter", "rows"), [(None, 2), (DeepSeekChatFormatter(), 1)])
async def test_reasoning_stays_in_the_conversation_if_the_formatter_sends_it(
    formatter, rows
) -> None:
    thinking = "<think>\n2 and 40\n</think>\n\n"
    async with gateway_of(StubEngine([thinking + CALL, "It is 42."])) as gateway:
        session = gateway.open_session("r")
        model = chat_model(session, kind="agentscope2")
        model.formatter = formatter or model.formatter
        await agent_of(model, add).reply(QUESTION)
        assert len(session.calls) == 2
        assert len(list(TokenTree.build(session.calls).rows())) == rows


async def test_streamed_agent_with_tools_is_recorded_like_any_other() -> None:
    script = ["I add.\n" + CALL, "It is 42."]
    paths = []
    for stream in (False, True):
        async with gateway_of(StubEngine(script)) as gateway:
            session = gateway.open_session("r")
            model = chat_model(session, kind="agentscope2")
            model.stream = stream
            reply = await agent_of(model, add).reply(QUESTION)
            assert reply.get_text_content() == "It is 42."
            assert [call.streamed for call in session.calls] == [stream, stream]
            paths.append([(c.prompt_ids, c.completion_ids, c.logprobs) for c in session.calls])
    assert paths[0] == paths[1]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_agent_goes_back_into_a_recorded_rollout(stream: bool) -> None:
    async def agent(session: Session) -> str | None:
        model = chat_model(session, kind="agentscope2")
        model.stream = stream
        reply = await agent_of(model, add).reply(UserMsg("user", again.QUESTION))
        return reply.get_text_content()

    await again.check_goes_back(agent, dialect="chat", streamed=stream)


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
async def test_tools_that_end_in_another_order_are_another_conversation(at_once: bool) -> None:
    races = again.races()

    async def agent(session: Session) -> None:
        wait = next(races)

        async def add(a: int, b: int) -> str:
            """Add two integers."""
            if at_once:
                await wait()
            return str(a + b)

        tool = FunctionTool(add, is_concurrency_safe=at_once)
        solver = agent_of(chat_model(session, kind="agentscope2"), tool)
        await solver.reply(UserMsg("user", again.QUESTION))

    found = await again.what_differs(agent)
    assert ("messages[3].tool_call_id is 'call_" in found) == at_once == bool(found)


async def test_the_time_of_day_in_the_prompts_is_another_conversation() -> None:
    async def agent(session: Session) -> None:
        model = chat_model(session, kind="agentscope2")
        time = InjectionConfig(time_format="%H:%M:%S.%f")
        await agent_of(model, add, injection_config=time).reply(UserMsg("user", again.QUESTION))

    assert "at call 1: messages[2].content is " in await again.what_differs(agent)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_agentscopes_own_model_is_recorded_over_http(stream: bool) -> None:
    gateway = merging_gateway_of(letters("I add.\n" + CALL), letters("It is 42."))
    try:
        session = gateway.open_session("r")
        model = OpenAIChatModel(
            credential=OpenAICredential(api_key=session.key, base_url=session.base_url),
            model=session.model_name,
            stream=stream,
            max_retries=0,
        )
        reply = await agent_of(model, add).reply(QUESTION)
        assert reply.get_text_content() == "It is 42."
        first, second = session.calls
        assert [first.streamed, second.streamed] == [stream, stream]
        assert continues(second, first)
        await model.client.close()
    finally:
        await gateway.aclose()


async def test_roles_keep_the_settings_and_name_their_calls() -> None:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        model = chat_model(session, kind="agentscope2")
        model.parameters = model.Parameters(temperature=0.3)
        planner = model.role("planner")
        await agent_of(planner).reply(QUESTION)
        await agent_of(model).reply(QUESTION)
        assert [call.role for call in session.calls] == ["planner", None]
        assert session.calls[0].sampling.temperature == 0.3
        model.calls[1].reward = 0.5
        assert [call.reward for call in session.calls] == [None, 0.5]


class Verdict(BaseModel):
    """A verdict."""

    good: bool


async def test_structured_reply_is_the_call_of_a_tool() -> None:
    text = '<tool_call>\n{"name": "GenerateStructuredOutput", "arguments": {"good": %s}}\n'
    script = [text % value + "</tool_call>" for value in ('"perhaps"', "true")]
    async with gateway_of(StubEngine(script)) as gateway:
        session = gateway.open_session("r")
        agent = agent_of(chat_model(session, kind="agentscope2"))
        reply = await agent.reply(QUESTION, structured_schema=Verdict)
        assert reply.structured_output == {"good": True}
        first, second = session.calls
        assert [tool["function"]["name"] for tool in first.tools] == ["GenerateStructuredOutput"]
        assert "Input validation failed" in text_of(second.prompt_ids)


async def test_models_own_structured_output_ends_in_an_answer() -> None:
    """Also where the gateway refuses to force a call: AgentScope then asks without forcing."""
    text = '<tool_call>\n{"name": "generate_structured_output", "arguments": {"good": true}}\n'
    async with gateway_of(StubEngine([text + "</tool_call>"])) as gateway:
        session = gateway.open_session("r")
        model = chat_model(session, kind="agentscope2")
        response = await model.generate_structured_output([QUESTION], Verdict)
        assert response.content == {"good": True}
        assert len(session.calls) == 1


async def test_model_has_the_ways_in_for_other_frameworks_and_safe_defaults() -> None:
    async with gateway_of(StubEngine(max_model_len=1234)) as gateway:
        session = gateway.open_session("r")
        model = chat_model(session, kind="agentscope2")
        assert isinstance(model, OpenAIChatModel)
        assert (model.model, model.model_name, model.api_key) == ("tiny", "tiny", session.key)
        assert model.base_url.startswith("http://127.0.0.1:")
        assert isinstance(model.client, openai.AsyncOpenAI)
        assert (model.stream, model.max_retries, model.client.max_retries) == (False, 0, 0)
        assert model.context_size == model.max_model_len == 1234


async def test_the_run_s_sampling_applies_unless_the_user_sets_another() -> None:
    engine = StubEngine()
    async with gateway_of(engine) as gateway:
        defaults = SamplingDefaults(temperature=0.7, top_p=0.9, max_tokens=11)
        model = chat_model(gateway.open_session("r", defaults=defaults), kind="agentscope2")
        await agent_of(model).reply(QUESTION)
        model.parameters = model.Parameters(temperature=0.3, max_tokens=5)
        await agent_of(model).reply(QUESTION)
        (_, ours, _), (_, theirs, _) = engine.requests
        assert (ours.temperature, ours.top_p, ours.max_tokens) == (0.7, 0.9, 11)
        assert (theirs.temperature, theirs.top_p, theirs.max_tokens) == (0.3, 0.9, 5)


async def test_a_call_that_fails_is_made_once() -> None:
    engine = StubEngine([RuntimeError("no memory")])
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        with pytest.raises(openai.InternalServerError, match="no memory"):
            await agent_of(chat_model(session, kind="agentscope2")).reply(QUESTION)
        assert len(engine.requests) == 1


async def test_remote_model_has_the_same_attributes_and_reaches_its_url() -> None:
    async with gateway_of(StubEngine(["Well."])) as gateway:
        session = gateway.open_session("r")
        remote = remote_chat_model(
            base_url=session.base_url,
            api_key=session.key,
            model_name="tiny",
            kind="agentscope2",
        )
        assert (remote.base_url, remote.api_key) == (session.base_url, session.key)
        assert remote.model_name == "tiny"
        reply = await agent_of(remote).reply(QUESTION)
        assert reply.get_text_content() == "Well."


@pytest.mark.parametrize(
    ("found", "sentence"), [(None, "not installed"), ("1.0.21", r"1\.0\.21 is installed")]
)
def test_missing_agentscope_names_the_extra(monkeypatch, found, sentence) -> None:
    monkeypatch.setattr("tuner.rollouts.agentscope1.agentscope_version", lambda: found)
    trinity_chat_model.cache_clear()
    trinity_chat_model_1.cache_clear()
    try:
        with pytest.raises(MissingDependencyError, match=sentence) as error:
            tuner.require_agentscope2()
        assert "[agentscope]" in str(error.value)
    finally:
        trinity_chat_model.cache_clear()


async def test_images_of_messages_and_of_tool_results_are_read(tmp_path) -> None:
    model, spoken = vision_model()
    stored = png(12, 20, seed=2)
    (tmp_path / "stored.png").write_bytes(stored)

    def inline(seed: int) -> tuple[bytes, DataBlock]:
        content = png(20, 12, seed=seed)
        data = base64.b64encode(content).decode()
        return content, DataBlock(source=Base64Source(data=data, media_type="image/png"))

    (first, block), (looked, result) = inline(1), inline(3)
    file = URLSource(url=(tmp_path / "stored.png").as_uri(), media_type="image/png")
    question = UserMsg("user", [TextBlock(text="?"), block, DataBlock(source=file)])
    look = ToolCallBlock(id="c", name="look", input="{}")
    seen = ToolResultBlock(id="c", name="look", output=[result])

    async with vision_gateway(model, spoken, folder=tmp_path) as gateway:
        session = gateway.open_session("r")
        ask = chat_model(session, kind="agentscope2")
        await ask([question, AssistantMsg("solver", [look, seen])])
        found = [span.sha256 for span in session.calls[0].images]
        wanted = [hashlib.sha256(content).hexdigest() for content in (first, stored, looked)]
        assert found == wanted
