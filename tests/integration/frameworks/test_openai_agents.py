"""The OpenAI Agents SDK on the gateway: every call recorded exactly, in both of its dialects."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import agents
import openai
import pytest

from tests.gateway import drift
from tuner.gateway import Gateway, Session
from tuner.traces import TokenTree, branches

agents.set_tracing_disabled(True)

# Letter by letter, as the tokenizer never would write it: text alone cannot bring the ids back.
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 40}}\n</tool_call>'
REASONED = "<think>\nadd the user answer\n</think>\n\n"
ANSWER = "The answer is 42."
INSTRUCTIONS = "You are a calculator."


def the_tool(added: list[tuple[int, int]], **options: Any) -> agents.Tool:
    @agents.function_tool(**options)
    def add(a: int, b: int) -> int:
        """Add two integers."""
        added.append((a, b))
        return a + b

    return add


@pytest.fixture(params=["in process", "over HTTP"])
async def door(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """Gives the client of a session."""
    clients: list[Any] = []

    def client_of(session: Session) -> openai.AsyncOpenAI:
        if request.param == "in process":
            return session.async_client()
        clients.append(
            openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key, max_retries=0)
        )
        return clients[-1]

    yield client_of
    for client in clients:
        await client.close()


async def run(agent: agents.Agent, prompt: Any, *, streamed: bool, **options: Any) -> Any:
    if not streamed:
        return await agents.Runner.run(agent, prompt, **options)
    result = agents.Runner.run_streamed(agent, prompt, **options)
    events = [event.type async for event in result.stream_events()]
    assert "raw_response_event" in events
    return result


def check_one_path(gateway: Gateway, session: Session, count: int) -> None:
    calls = session.calls
    assert len(calls) == count
    assert session.errors == []
    assert all(drift.continues(later, earlier) for earlier, later in itertools.pairwise(calls))
    assert all(call.invalid is None and not call.undelivered for call in calls)
    assert branches(calls) == ()
    (row,) = TokenTree.build(calls).rows()
    assert sum(row.samples > 0) == sum(len(call.completion_ids) for call in calls)
    assert drift.decoded(calls[-1].prompt_ids) == drift.rendered(gateway, calls[-1])


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_an_agent_on_the_responses_api_is_one_path(door: Any, streamed: bool) -> None:
    gateway = drift.gateway_of(
        *(drift.letters(text) for text in (REASONED + CALL, REASONED + CALL, REASONED + ANSWER))
    )
    session = gateway.open_session("r")
    added: list[tuple[int, int]] = []
    agent = agents.Agent(
        "calculator",
        instructions=INSTRUCTIONS,
        tools=[the_tool(added)],
        model=agents.OpenAIResponsesModel(model="tiny", openai_client=door(session)),
    )
    try:
        result = await run(agent, "2+40?", streamed=streamed)
        assert result.final_output == ANSWER
        assert added == [(2, 40)] * 2
        check_one_path(gateway, session, 3)
        assert {(call.dialect, call.streamed) for call in session.calls} == {
            ("responses", streamed)
        }
        roles = [message["role"] for message in session.calls[-1].messages]
        assert roles == ["system", "user", *["assistant", "tool"] * 2]
        # The next user turn goes on from the whole conversation.
        following = [*result.to_input_list(), {"role": "user", "content": "Sure?"}]
        await run(agent, following, streamed=streamed)
        check_one_path(gateway, session, 4)
    finally:
        await gateway.aclose()


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_an_agent_that_goes_on_by_response_ids_is_one_path(door: Any, streamed: bool) -> None:
    gateway = drift.gateway_of(*(drift.letters(text) for text in (REASONED + CALL, ANSWER)))
    session = gateway.open_session("r")
    added: list[tuple[int, int]] = []
    agent = agents.Agent(
        "calculator",
        instructions=INSTRUCTIONS,
        tools=[the_tool(added)],
        model=agents.OpenAIResponsesModel(model="tiny", openai_client=door(session)),
    )
    try:
        result = await run(agent, "2+40?", streamed=streamed, auto_previous_response_id=True)
        assert (result.final_output, added) == (ANSWER, [(2, 40)])
        check_one_path(gateway, session, 2)
    finally:
        await gateway.aclose()


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_an_agent_on_chat_completions_is_one_path(door: Any, streamed: bool) -> None:
    gateway = drift.gateway_of(*(drift.letters(text) for text in (CALL, CALL, ANSWER)))
    session = gateway.open_session("r")
    added: list[tuple[int, int]] = []
    agent = agents.Agent(
        "calculator",
        instructions=INSTRUCTIONS,
        tools=[the_tool(added, strict_mode=False)],
        model=agents.OpenAIChatCompletionsModel(model="tiny", openai_client=door(session)),
    )
    try:
        result = await run(agent, "2+40?", streamed=streamed)
        assert (result.final_output, added) == (ANSWER, [(2, 40)] * 2)
        check_one_path(gateway, session, 3)
        assert {(call.dialect, call.streamed) for call in session.calls} == {("chat", streamed)}
    finally:
        await gateway.aclose()


async def test_a_handoff_is_recorded_as_another_conversation(door: Any) -> None:
    handoff = '<tool_call>\n{"name": "transfer_to_calculator", "arguments": {}}\n</tool_call>'
    gateway = drift.gateway_of(*(drift.letters(text) for text in (handoff, CALL, ANSWER)))
    session = gateway.open_session("r")
    added: list[tuple[int, int]] = []
    model = agents.OpenAIResponsesModel(model="tiny", openai_client=door(session))
    calculator = agents.Agent(
        "calculator", instructions=INSTRUCTIONS, tools=[the_tool(added)], model=model
    )
    triage = agents.Agent(
        "triage", instructions="Send them on.", handoffs=[calculator], model=model
    )
    try:
        result = await run(triage, "2+40?", streamed=False)
        assert (result.final_output, added) == (ANSWER, [(2, 40)])
        assert result.last_agent is calculator
        first, second, third = session.calls
        assert drift.continues(third, second)
        assert not drift.continues(second, first)  # other instructions, other tools
        assert [branch.call for branch in branches(session.calls)] == [1]
    finally:
        await gateway.aclose()
