"""A real AgentScope 1.x ReAct agent on the gateway."""

from __future__ import annotations

import os
import sys
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

os.environ["AGENTSCOPE_DISABLE_CONSOLE_OUTPUT"] = "true"

from tests.engines.test_grammar import make_engine
from tests.gateway import again
from tests.kit.toy import StubEngine, gateway_of, text_of
from tuner.errors import MissingDependencyError
from tuner.gateway import SamplingDefaults, Session
from tuner.rollouts.agentscope1 import CONSOLE, quiet_agents, trinity_chat_model
from tuner.rollouts.chat_models import PlainChatModel, chat_model, trinity_chat_model_class

pytest.importorskip("agentscope")

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg, TextBlock
from agentscope.model import OpenAIChatModel
from agentscope.plan import PlanNotebook, SubTask
from agentscope.tool import Toolkit, ToolResponse


def agent_of(
    model: object, toolkit: Toolkit | None = None, plan_notebook: PlanNotebook | None = None
) -> ReActAgent:
    return ReActAgent(
        name="solver",
        sys_prompt="You solve problems.",
        model=model,
        formatter=OpenAIChatFormatter(),
        toolkit=toolkit,
        plan_notebook=plan_notebook,
    )


def adding() -> Toolkit:
    def add(a: int, b: int) -> ToolResponse:
        """Add two integers.

        Args:
            a (int): first
            b (int): second
        """
        return ToolResponse(content=[TextBlock(type="text", text=str(a + b))])

    toolkit = Toolkit()
    toolkit.register_tool_function(add)
    return toolkit


async def test_react_agent_without_tools_gets_the_completion() -> None:
    async with gateway_of(StubEngine(["The answer is 4."])) as gateway:
        session = gateway.open_session("r")
        model = chat_model(session, kind="agentscope1")
        reply = await agent_of(model)(Msg("user", "What is 2 + 2?", "user"))
        assert reply.get_text_content() == "The answer is 4."
        (call,) = session.calls
        assert "What is 2 + 2?" in text_of(call.prompt_ids)
        assert text_of(call.completion_ids) == "The answer is 4.<|im_end|>"
        assert call.invalid is None


@pytest.mark.parametrize("streamed", [False, True])
async def test_react_agent_calls_a_tool_and_goes_on_with_its_result(streamed: bool) -> None:
    toolkit = adding()
    script = [
        'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2,  "b": 40}}\n</tool_call>',
        "It is 42.",
    ]
    engine = StubEngine(script)
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        model = chat_model(session, kind="agentscope1")
        model.stream = streamed
        reply = await agent_of(model, toolkit)(Msg("user", "2 + 40?", "user"))
        assert reply.get_text_content() == "It is 42."
        first, second = session.calls
        assert first.finish_reason == "tool_calls"
        assert [tool["function"]["name"] for tool in first.tools] == ["add"]
        assert "<tool_response>\n42\n</tool_response>" in text_of(second.prompt_ids)
        assert first.response["tool_calls"][0]["function"]["arguments"] == '{"a": 2,  "b": 40}'
        assert first.malformed_tool_calls == 0
        assert first.streamed == second.streamed == streamed
        assert session.in_flight.seconds > 0


@pytest.mark.parametrize("streamed", [False, True])
async def test_react_agent_goes_back_into_a_recorded_rollout(streamed: bool) -> None:
    async def agent(session: Session) -> str | None:
        model = chat_model(session, kind="agentscope1")
        model.stream = streamed
        reply = await agent_of(model, adding())(Msg("user", again.QUESTION, "user"))
        return reply.get_text_content()

    await again.check_goes_back(agent, dialect="chat", streamed=streamed)


@pytest.mark.parametrize("at_once", [False, True])
async def test_tools_that_end_in_another_order_are_another_conversation(at_once: bool) -> None:
    races = again.races()

    async def agent(session: Session) -> None:
        wait = next(races)

        async def add(a: int, b: int) -> ToolResponse:
            """Add two integers."""
            if at_once:
                await wait()
            return ToolResponse(content=[TextBlock(type="text", text=str(a + b))])

        toolkit = Toolkit()
        toolkit.register_tool_function(add)
        solver = agent_of(chat_model(session, kind="agentscope1"), toolkit)
        solver.parallel_tool_calls = at_once
        await solver(Msg("user", again.QUESTION, "user"))

    found = await again.what_differs(agent)
    assert ("messages[3].tool_call_id is 'call_" in found) == at_once == bool(found)


async def test_a_plan_with_its_times_is_another_conversation() -> None:
    async def agent(session: Session) -> None:
        plan, model = PlanNotebook(), chat_model(session, kind="agentscope1")
        step = {"name": "add", "description": "Add.", "expected_outcome": "The sum."}
        await plan.create_plan("sums", "Add.", "The sum.", [SubTask(**step)])
        await plan.update_subtask_state(0, "in_progress")
        solver = agent_of(model, adding(), plan_notebook=plan)
        await solver(Msg("user", again.QUESTION, "user"))

    assert "at call 1: messages[2].content is " in await again.what_differs(agent)


async def test_agentscopes_own_model_is_recorded_over_http() -> None:
    async with gateway_of(StubEngine(["It is 42."])) as gateway:
        session = gateway.open_session("r")
        model = OpenAIChatModel(
            model_name=session.model_name,
            api_key=session.key,
            stream=False,
            client_kwargs={"base_url": session.base_url},
        )
        reply = await agent_of(model)(Msg("user", "2 + 40?", "user"))
        assert reply.get_text_content() == "It is 42."
        assert [call.dialect for call in session.calls] == ["chat"]
        await model.client.close()


async def test_reasoning_becomes_a_thinking_block() -> None:
    async with gateway_of(StubEngine(["<think>\nhm\n</think>\n\nYes."])) as gateway:
        model = chat_model(gateway.open_session("r"), kind="agentscope1")
        response = await model([{"role": "user", "content": "Well?"}])
        kinds = [
            (block["type"], block.get("thinking") or block["text"]) for block in response.content
        ]
        assert kinds == [("thinking", "hm"), ("text", "Yes.")]


async def test_model_is_an_openai_chat_model_with_the_ways_in_for_other_frameworks() -> None:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        model = chat_model(session, kind="agentscope1")
        assert isinstance(model, OpenAIChatModel)
        assert isinstance(model, trinity_chat_model_class())
        assert model.model_name == "tiny"
        assert model.api_key == session.key
        assert model.base_url.startswith("http://127.0.0.1:")
        assert model.base_url.endswith("/v1")
        assert not model.stream


class Verdict(BaseModel):
    """A verdict."""

    good: bool


async def test_structured_output_falls_back_to_a_tool_the_model_may_call() -> None:
    name = "generate_structured_output"
    text = f'<tool_call>\n{{"name": "{name}", "arguments": {{"good": true}}}}\n</tool_call>'
    async with gateway_of(StubEngine([text])) as gateway:
        session = gateway.open_session("r")
        model = chat_model(session, kind="agentscope1")
        response = await model([{"role": "user", "content": "Good?"}], structured_model=Verdict)
        assert response.metadata == {"good": True}
        assert len(session.calls) == 1


async def test_a_call_may_set_its_own_sampling() -> None:
    engine = StubEngine()
    async with gateway_of(engine) as gateway:
        model = chat_model(gateway.open_session("r"), kind="agentscope1")
        await model([{"role": "user", "content": "x"}], temperature=0.3, max_tokens=5)
        assert engine.requests[0][1].temperature == 0.3
        assert engine.requests[0][1].max_tokens == 5


@pytest.mark.parametrize(
    ("found", "sentence"),
    [(None, "not installed"), ("2.0.10", r"2\.0\.10 is installed")],
)
def test_missing_agentscope_names_the_extra(monkeypatch, found, sentence) -> None:
    monkeypatch.setattr("tuner.rollouts.agentscope1.agentscope_version", lambda: found)
    monkeypatch.setattr("tuner.rollouts.chat_models.agentscope_version", lambda: found)
    trinity_chat_model.cache_clear()
    try:
        with pytest.raises(MissingDependencyError, match=sentence) as error:
            trinity_chat_model()
        assert "[agentscope1]" in str(error.value)
        assert trinity_chat_model_class() is PlainChatModel
    finally:
        trinity_chat_model.cache_clear()


def test_agentscope_that_does_not_import_is_reported_with_its_cause(monkeypatch, caplog) -> None:
    monkeypatch.setitem(sys.modules, "agentscope.model", None)
    trinity_chat_model.cache_clear()
    try:
        with pytest.raises(MissingDependencyError, match="does not import"):
            trinity_chat_model()
        assert trinity_chat_model_class() is PlainChatModel
        assert "does not import" in caplog.text
    finally:
        trinity_chat_model.cache_clear()


class Ruling(BaseModel):
    model_config = ConfigDict(extra="forbid")

    colour: Literal["red", "grün"]
    count: int = Field(ge=0, le=20)


async def test_a_random_model_gives_the_structured_output_that_is_asked_for() -> None:
    async with gateway_of(make_engine(max_model_len=4096), reasoning_parser="none") as gateway:
        session = gateway.open_session("r")
        model = chat_model(session, kind="agentscope1")
        answer = await model([{"role": "user", "content": "hi"}], structured_model=Ruling)
        Ruling.model_validate(answer.metadata)
        assert not model._structured_output_fallback
        (call,) = session.calls
        assert call.constrained
        assert call.finish_reason == "stop"


async def test_the_way_round_by_a_tool_call_gives_it_too() -> None:
    async with gateway_of(make_engine(max_model_len=4096), reasoning_parser="none") as gateway:
        session = gateway.open_session("r")
        model = chat_model(session, kind="agentscope1")
        model._structured_output_fallback = True
        answer = await model([{"role": "user", "content": "hi"}], structured_model=Ruling)
        Ruling.model_validate(answer.metadata)
        (call,) = session.calls
        assert call.finish_reason == "tool_calls"


async def test_react_agent_with_a_random_model_ends_with_the_structured_output() -> None:
    defaults = SamplingDefaults(max_tokens=100)
    async with gateway_of(make_engine(max_model_len=4096), reasoning_parser="none") as gateway:
        session = gateway.open_session("r", defaults=defaults)
        agent = agent_of(chat_model(session, kind="agentscope1"))
        reply = await agent(Msg("user", "red or green?", "user"), structured_model=Ruling)
        Ruling.model_validate(reply.metadata)
        forced = [call for call in session.calls if call.constrained]
        assert forced
        assert forced[0].response["tool_calls"][0]["function"]["name"] == "generate_response"
        assert all(call.invalid is None for call in session.calls)


@pytest.mark.parametrize(("given", "shown"), [(None, ""), ("false", "solver: hello\n")])
async def test_agents_print_nothing_in_training_unless_the_environment_asks_for_it(
    given, shown, monkeypatch, capsys
):
    monkeypatch.delenv(CONSOLE, raising=False)
    if given is not None:
        monkeypatch.setenv(CONSOLE, given)
    message = Msg("solver", "hello", "assistant")
    with quiet_agents() as line:
        await agent_of(object()).print(message)
    assert capsys.readouterr().out == shown
    told = f"AgentScope's agents print nothing ({CONSOLE}=false shows their messages)"
    assert line == (told if given is None else None)
    await agent_of(object()).print(message)
    assert capsys.readouterr().out == "solver: hello\n"
