"""smolagents on the gateway: it writes its history anew, so that most calls are paths of their own.

A step becomes text: "Calling tools: [...]" and "Observation: ...". Nothing of that is a turn that
the model sampled, and each step is trained as it was sampled, under the prompt that it had.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from smolagents import CodeAgent, LogLevel, OpenAIModel, Tool, ToolCallingAgent

from tests.integration.frameworks.parts import CALL, FINAL, check_calls, scripted
from tuner.gateway import Session
from tuner.traces import BranchCause, branches

streaming = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


class Add(Tool):  # type: ignore[misc]
    name = "add"
    description = "Add two integers."
    inputs = {  # noqa: RUF012
        "a": {"type": "integer", "description": "One."},
        "b": {"type": "integer", "description": "The other."},
    }
    output_type = "integer"

    def forward(self, a: int, b: int) -> int:
        return a + b


def solve(
    session: Session, kind: Callable[..., Any], tools: list[Tool], *, streamed: bool, **options: Any
) -> Any:
    """What the agent says; to be run in a thread, because smolagents does not await."""
    model = OpenAIModel(model_id="tiny", api_base=session.base_url, api_key=session.key, **options)
    agent = kind(
        tools=tools, model=model, stream_outputs=streamed, verbosity_level=LogLevel.OFF, max_steps=4
    )
    try:
        return agent.run("2+40?")
    finally:
        model.client.close()


@streaming
@pytest.mark.parametrize("forced", [True, False], ids=["forced", "auto"])
async def test_tool_calling_agent_has_every_call_recorded(streamed: bool, forced: bool) -> None:
    gateway = scripted(CALL, CALL if forced else f"I add.\n{CALL}", FINAL)
    session = gateway.open_session("r")
    options = {} if forced else {"tool_choice": "auto"}
    try:
        answer = await asyncio.to_thread(
            solve, session, ToolCallingAgent, [Add()], streamed=streamed, **options
        )
        assert answer == "42"
        check_calls(gateway, session, 3)
        assert {(call.dialect, call.streamed) for call in session.calls} == {("chat", streamed)}
        assert {call.constrained for call in session.calls} == {forced}
        causes = [branch.cause for branch in branches(session.calls)]
        assert causes == [BranchCause.REWRITE] * 2
        second = session.calls[1].messages
        assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
        assert "Calling tools:" in str(second[2]["content"])
        assert second[3]["content"] == [{"type": "text", "text": "Observation:\n42"}]
    finally:
        await gateway.aclose()


@streaming
async def test_code_agent_has_every_call_recorded(streamed: bool) -> None:
    gateway = scripted(
        "I add.\n<code>\nprint(add(2, 40))\n</code>", "<code>\nfinal_answer(42)\n</code>"
    )
    session = gateway.open_session("r")
    try:
        answer = await asyncio.to_thread(solve, session, CodeAgent, [Add()], streamed=streamed)
        assert answer == 42
        check_calls(gateway, session, 2)
        assert {(call.dialect, call.streamed) for call in session.calls} == {("chat", streamed)}
        assert [branch.cause for branch in branches(session.calls)] == [BranchCause.REWRITE]
        assert session.calls[0].sampling.stop == ("Observation:", "Calling tools:", "</code>")
    finally:
        await gateway.aclose()


@streaming
async def test_code_agent_with_structured_outputs_is_constrained(streamed: bool) -> None:
    steps = [{"thought": "add", "code": code} for code in ("add(2, 40)", "final_answer(42)")]
    gateway = scripted(*map(json.dumps, steps))
    session = gateway.open_session("r")
    agent = partial(CodeAgent, use_structured_outputs_internally=True)
    try:
        assert await asyncio.to_thread(solve, session, agent, [Add()], streamed=streamed) == 42
        check_calls(gateway, session, 2)
        assert all(call.constrained for call in session.calls)
    finally:
        await gateway.aclose()
