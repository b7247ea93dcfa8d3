"""The OpenAI Agents SDK on the gateway: every call recorded exactly, in both of its dialects."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import agents
import pytest

from tests.gateway import again, drift
from tests.integration.frameworks.parts import (
    ANSWER,
    CALL,
    INSTRUCTIONS,
    REASONED,
    check_one_path,
    scripted,
)
from tuner.gateway import Session
from tuner.traces import branches

agents.set_tracing_disabled(True)


def the_tool(added: list[tuple[int, int]], **options: Any) -> agents.Tool:
    @agents.function_tool(**options)
    def add(a: int, b: int) -> int:
        """Add two integers."""
        added.append((a, b))
        return a + b

    return add


def racing_tool(wait: Callable[[], Awaitable[None]]) -> agents.Tool:
    @agents.function_tool
    async def add(a: int, b: int) -> int:
        """Add two integers."""
        await wait()
        return a + b

    return add


async def run(agent: agents.Agent, prompt: Any, *, streamed: bool, **options: Any) -> Any:
    if not streamed:
        return await agents.Runner.run(agent, prompt, **options)
    result = agents.Runner.run_streamed(agent, prompt, **options)
    events = [event.type async for event in result.stream_events()]
    assert "raw_response_event" in events
    return result


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_an_agent_on_the_responses_api_is_one_path(door: Any, streamed: bool) -> None:
    gateway = scripted(REASONED + CALL, REASONED + CALL, REASONED + ANSWER)
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
    gateway = scripted(REASONED + CALL, ANSWER)
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
    gateway = scripted(CALL, CALL, ANSWER)
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


@pytest.mark.parametrize("by_ids", [False, True], ids=["by items", "by response ids"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_an_agent_on_the_responses_api_goes_back_into_a_recorded_rollout(
    door: Any, streamed: bool, by_ids: bool
) -> None:
    kind, options = agents.OpenAIResponsesModel, {"auto_previous_response_id": by_ids}
    await goes_back(door, kind, "responses", streamed, **options)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_an_agent_on_chat_completions_goes_back_into_a_recorded_rollout(
    door: Any, streamed: bool
) -> None:
    await goes_back(door, agents.OpenAIChatCompletionsModel, "chat", streamed)


async def goes_back(door: Any, kind: Any, dialect: str, streamed: bool, **options: Any) -> None:
    races = again.races()

    async def agent(session: Session) -> Any:
        tools = [racing_tool(next(races))]
        model = kind(model="tiny", openai_client=door(session))
        solver = agents.Agent("one", instructions=INSTRUCTIONS, tools=tools, model=model)
        result = await run(solver, again.QUESTION, streamed=streamed, **options)
        return result.final_output

    await again.check_goes_back(agent, dialect=dialect, streamed=streamed)


async def test_a_handoff_is_recorded_as_another_conversation(door: Any) -> None:
    handoff = '<tool_call>\n{"name": "transfer_to_calculator", "arguments": {}}\n</tool_call>'
    gateway = scripted(handoff, CALL, ANSWER)
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
