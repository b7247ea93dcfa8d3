"""LangGraph's ReAct agents on the gateway, through LangChain's model for OpenAI."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from pydantic import BaseModel

from tests.gateway import again, drift
from tests.integration.frameworks.parts import (
    ANSWER,
    CALL,
    INSTRUCTIONS,
    REASONED,
    check_calls,
    check_continued,
    check_one_path,
    scripted,
)
from tests.kit.models import png, vision_model
from tests.kit.toy import vision_gateway
from tuner.gateway import Session
from tuner.traces import BranchCause, branches

USER = {"role": "user", "content": "2+40?"}
TWO_CALLS = f"{CALL}\n{CALL.replace('40', '50')}"


def the_tool(added: list[tuple[int, int]]) -> Any:
    @tool
    def add(a: int, b: int) -> int:
        """Add two integers."""
        added.append((a, b))
        return a + b

    return add


def racing_tool(wait: Callable[[], Awaitable[None]]) -> Any:
    @tool
    async def add(a: int, b: int) -> int:
        """Add two integers."""
        await wait()
        return a + b

    return add


def prebuilt(model: ChatOpenAI, tools: list[Any], *, system_prompt: str) -> Any:
    with warnings.catch_warnings():  # `create_agent` is its successor; agents in use still have it
        warnings.simplefilter("ignore")
        return create_react_agent(model, tools, prompt=system_prompt)


def chat_model(client: openai.AsyncOpenAI, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="tiny",
        async_client=client.chat.completions,
        root_async_client=client,
        **options,
    )


async def run(agent: Any, messages: list[Any], *, streamed: bool) -> list[Any]:
    """The conversation at the end."""
    if not streamed:
        return list((await agent.ainvoke({"messages": messages}))["messages"])
    last: list[Any] = []
    modes = ["messages", "values"]
    async for mode, value in agent.astream({"messages": messages}, stream_mode=modes):
        if mode == "values":
            last = value["messages"]
    return last


make = pytest.mark.parametrize("make", [create_agent, prebuilt], ids=["create_agent", "prebuilt"])
streaming = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@make
@streaming
async def test_an_agent_is_one_path(door: Any, make: Callable[..., Any], streamed: bool) -> None:
    gateway = scripted(CALL, TWO_CALLS, f"I add.\n{CALL}", ANSWER)
    session = gateway.open_session("r")
    added: list[tuple[int, int]] = []
    agent = make(chat_model(door(session)), [the_tool(added)], system_prompt=INSTRUCTIONS)
    try:
        messages = await run(agent, [USER], streamed=streamed)
        assert messages[-1].content == ANSWER
        assert sorted(added) == [(2, 40)] * 3 + [(2, 50)]
        check_one_path(gateway, session, 4)
        assert {(call.dialect, call.streamed) for call in session.calls} == {("chat", streamed)}
        # The next user turn goes on from the whole conversation.
        await run(agent, [*messages, {"role": "user", "content": "Sure?"}], streamed=streamed)
        check_one_path(gateway, session, 5)
    finally:
        await gateway.aclose()


@streaming
async def test_chat_completions_lose_the_reasoning_and_branch_at_every_turn(
    door: Any, streamed: bool
) -> None:
    gateway = scripted(REASONED + CALL, REASONED + CALL, REASONED + ANSWER)
    session = gateway.open_session("r")
    agent = create_agent(chat_model(door(session)), [the_tool([])], system_prompt=INSTRUCTIONS)
    try:
        messages = await run(agent, [USER], streamed=streamed)
        assert messages[-1].content == ANSWER
        check_calls(gateway, session, 3)
        causes = [branch.cause for branch in branches(session.calls)]
        assert causes == [BranchCause.REASONING] * 2
    finally:
        await gateway.aclose()


@streaming
async def test_the_policy_keep_makes_one_path_of_lost_reasoning(door: Any, streamed: bool) -> None:
    gateway = scripted(REASONED + CALL, REASONED + CALL, REASONED + ANSWER, reasoning="keep")
    session = gateway.open_session("r")
    agent = create_agent(chat_model(door(session)), [the_tool([])], system_prompt=INSTRUCTIONS)
    try:
        messages = await run(agent, [USER], streamed=streamed)
        assert messages[-1].content == ANSWER
        check_continued(gateway, session, 3)
    finally:
        await gateway.aclose()


@streaming
async def test_the_responses_api_keeps_the_reasoning_on_one_path(door: Any, streamed: bool) -> None:
    gateway = scripted(REASONED + CALL, REASONED + CALL, REASONED + ANSWER)
    session = gateway.open_session("r")
    model = chat_model(door(session), use_responses_api=True)
    agent = create_agent(model, [the_tool([])], system_prompt=INSTRUCTIONS)
    try:
        messages = await run(agent, [USER], streamed=streamed)
        assert messages[-1].text == ANSWER
        check_one_path(gateway, session, 3)
        assert {(c.dialect, c.streamed) for c in session.calls} == {("responses", streamed)}
    finally:
        await gateway.aclose()


@streaming
async def test_an_agent_that_does_not_await_runs_in_a_thread(streamed: bool) -> None:
    gateway = scripted(CALL, CALL, ANSWER)
    session = gateway.open_session("r")

    def work(session: Session) -> Any:
        model = ChatOpenAI(
            model="tiny", base_url=session.base_url, api_key=session.key, streaming=streamed
        )
        agent = create_agent(model, [the_tool([])], system_prompt=INSTRUCTIONS)
        answer = agent.invoke({"messages": [USER]})["messages"][-1].content
        model.root_client.close()
        return answer

    try:
        assert await asyncio.to_thread(work, session) == ANSWER
        check_one_path(gateway, session, 3)
        assert {call.streamed for call in session.calls} == {streamed}
    finally:
        await gateway.aclose()


@pytest.mark.parametrize("dialect", ["chat", "responses"])
@make
@streaming
async def test_an_agent_goes_back_into_a_recorded_rollout(
    door: Any, make: Callable[..., Any], streamed: bool, dialect: str
) -> None:
    races = again.races()

    async def lives(session: Session) -> Any:
        model = chat_model(door(session), use_responses_api=dialect == "responses")
        agent = make(model, [racing_tool(next(races))], system_prompt=INSTRUCTIONS)
        user = {"role": "user", "content": again.QUESTION}
        return (await run(agent, [user], streamed=streamed))[-1].text

    await again.check_goes_back(lives, dialect=dialect, streamed=streamed)


async def test_common_settings_of_the_model_are_honoured(door: Any) -> None:
    gateway = scripted(ANSWER)
    session = gateway.open_session("r")
    model = chat_model(
        door(session), temperature=0.5, top_p=0.9, max_tokens=6, seed=3, stop=["x"], logprobs=True
    )
    try:
        answer = await model.ainvoke("2+40?")
        (call,) = session.calls
        sampling = call.sampling
        assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.9, 6)
        assert (sampling.seed, sampling.stop) == (3, ("x",))
        assert len(call.completion_ids) == 6
        assert answer.content == drift.decoded(call.completion_ids)
        assert len(answer.response_metadata["logprobs"]["content"]) == 6
    finally:
        await gateway.aclose()


class Sum(BaseModel):
    """What the answer is to be."""

    value: int


async def test_structured_output_is_a_constrained_call(door: Any) -> None:
    gateway = scripted('{"value": 42}')
    session = gateway.open_session("r")
    model = chat_model(door(session)).with_structured_output(Sum)
    try:
        assert await model.ainvoke("2+40?") == Sum(value=42)
        check_calls(gateway, session, 1)
        assert session.calls[0].constrained
    finally:
        await gateway.aclose()


async def test_an_agent_with_a_response_format_calls_it_as_a_tool(door: Any) -> None:
    final = CALL.replace('"add"', '"Sum"').replace('{"a": 2, "b": 40}', '{"value": 42}')
    gateway = scripted(CALL, final)
    session = gateway.open_session("r")
    agent = create_agent(chat_model(door(session)), [the_tool([])], response_format=Sum)
    try:
        result = await agent.ainvoke({"messages": [USER]})
        assert result["structured_response"] == Sum(value=42)
        check_one_path(gateway, session, 2)
        assert all(call.constrained for call in session.calls)
    finally:
        await gateway.aclose()


async def test_images_of_messages_and_of_tool_results_are_read() -> None:
    """In the forms of OpenAI and of LangChain."""
    contents = [png(20, 12, seed=seed) for seed in range(3)]
    data = [base64.b64encode(content).decode() for content in contents]
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data[0]}"}}
    blocks = [{"type": "image", "base64": one, "mime_type": "image/png"} for one in data[1:]]
    call = {"name": "look", "args": {}, "id": "c"}
    async with vision_gateway(*vision_model()) as gateway:
        session = gateway.open_session("r")
        await chat_model(session.async_client(), max_tokens=8).ainvoke(
            [
                HumanMessage([{"type": "text", "text": "?"}, url, blocks[0]]),
                AIMessage("", tool_calls=[call]),
                ToolMessage([blocks[1]], tool_call_id="c"),
            ]
        )
        found = [span.sha256 for span in session.calls[0].images]
        assert found == [hashlib.sha256(content).hexdigest() for content in contents]
