"""A real AgentScope 1.x ReAct agent on the gateway."""

from __future__ import annotations

import os

import pytest

os.environ["AGENTSCOPE_DISABLE_CONSOLE_OUTPUT"] = "true"

from tests.gateway.toy import StubEngine, gateway_of, text_of
from tuner.chat_models import chat_model, trinity_chat_model_class

pytest.importorskip("agentscope")

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg, TextBlock
from agentscope.model import OpenAIChatModel
from agentscope.tool import Toolkit, ToolResponse


def agent_of(model: object, toolkit: Toolkit | None = None) -> ReActAgent:
    return ReActAgent(
        name="solver",
        sys_prompt="You solve problems.",
        model=model,
        formatter=OpenAIChatFormatter(),
        toolkit=toolkit,
    )


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


async def test_react_agent_calls_a_tool_and_goes_on_with_its_result() -> None:
    def add(a: int, b: int) -> ToolResponse:
        """Add two integers.

        Args:
            a (int): first
            b (int): second
        """
        return ToolResponse(content=[TextBlock(type="text", text=str(a + b))])

    toolkit = Toolkit()
    toolkit.register_tool_function(add)
    script = [
        'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2,  "b": 40}}\n</tool_call>',
        "It is 42.",
    ]
    engine = StubEngine(script)
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        model = chat_model(session, kind="agentscope1")
        reply = await agent_of(model, toolkit)(Msg("user", "2 + 40?", "user"))
        assert reply.get_text_content() == "It is 42."
        first, second = session.calls
        assert first.finish_reason == "tool_calls"
        assert [tool["function"]["name"] for tool in first.tools] == ["add"]
        assert "<tool_response>\n42\n</tool_response>" in text_of(second.prompt_ids)
        assert first.response["tool_calls"][0]["function"]["arguments"] == '{"a": 2,  "b": 40}'
        assert session.malformed_tool_calls == 0
        assert session.generation_seconds > 0


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
