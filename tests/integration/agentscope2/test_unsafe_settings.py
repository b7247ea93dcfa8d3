"""Settings of an agent that spoil training are named, once; parked tool calls are no rewards."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest
from agentscope.agent import ContextConfig, InjectionConfig, ModelConfig, ReActConfig
from agentscope.message import UserMsg
from agentscope.middleware import MiddlewareBase
from agentscope.permission import PermissionBehavior, PermissionDecision, PermissionMode
from agentscope.tool import FunctionTool

from tests.integration.agentscope2.agents import CALL, add, agent_of, state
from tests.kit.toy import StubEngine, gateway_of, text_of
from tuner import WorkflowOutput
from tuner.gateway import Gateway, SamplingDefaults
from tuner.rollouts import RolloutRunner, RolloutSettings
from tuner.rollouts.agentscope2 import check_agent
from tuner.rollouts.chat_models import chat_model
from tuner.traces import Outcome, RolloutId

QUESTION = UserMsg("user", "What is 2 + 40?")
TIME = "InjectionConfig.inject_runtime_state"
PERMISSION = "PermissionContext.mode"


def runner_of(gateway: Gateway, workflow, *, timeout: float = 20.0) -> RolloutRunner:
    return RolloutRunner(
        gateway,
        workflow,
        None,
        make_model=lambda session: chat_model(session, kind="agentscope2"),
        auxiliary_models=lambda rollout, seed: contextlib.nullcontext({}),
        settings=RolloutSettings(timeout=timeout, max_retries=0, seed=1),
    )


async def run(runner: RolloutRunner, rollout: int = 0):
    (trace,) = await runner.run({"x": 1}, RolloutId(1, 0, rollout), SamplingDefaults())
    return trace


async def test_time_in_the_prompts_is_warned_of_once_in_a_run(caplog) -> None:
    async def workflow(task, model):
        agent = agent_of(model, injection_config=InjectionConfig())
        await agent.reply(QUESTION)
        return WorkflowOutput(reward=1.0)

    async with gateway_of(StubEngine()) as gateway:
        runner = runner_of(gateway, workflow)
        traces = [await run(runner, rollout) for rollout in range(3)]
        assert "<current-time>" in text_of(traces[0].calls[0].prompt_ids)
    (record,) = [r for r in caplog.records if r.name.startswith("tuner")]
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"{TIME} is True")
    assert "inject_runtime_state=False" in record.getMessage()


async def test_safe_agent_warns_of_nothing(caplog) -> None:
    async with gateway_of(StubEngine([CALL, "42"])) as gateway:
        model = chat_model(gateway.open_session("r"), kind="agentscope2")
        await agent_of(model, add).reply(QUESTION)
    assert [r for r in caplog.records if r.name.startswith("tuner")] == []


@pytest.mark.parametrize(
    ("setting", "settings"),
    [
        (TIME, {"injection_config": InjectionConfig()}),
        (PERMISSION, {"state": state(PermissionMode.DEFAULT)}),
        ("ReActConfig.max_iters", {"react_config": ReActConfig()}),
        ("ModelConfig.max_retries", {"model_config": ModelConfig(max_retries=1)}),
    ],
)
async def test_each_unsafe_setting_of_an_agent_is_named(setting, settings) -> None:
    async with gateway_of(StubEngine()) as gateway:
        model = chat_model(gateway.open_session("r"), kind="agentscope2")
        agent = agent_of(model, add, **settings)
        assert set(await check_agent(agent)) == {setting}
        await agent.reply(QUESTION)
        assert gateway.warned == {setting}


@pytest.mark.parametrize(
    ("setting", "value"), [("stream", True), ("max_retries", 3), ("context_size", 128_000)]
)
async def test_each_unsafe_setting_of_the_model_is_named(setting, value) -> None:
    async with gateway_of(StubEngine()) as gateway:
        model = chat_model(gateway.open_session("r"), kind="agentscope2")
        setattr(model, setting, value)
        assert set(await check_agent(agent_of(model))) == {f"model.{setting}"}


async def test_retrying_client_and_second_model_are_named() -> None:
    async with gateway_of(StubEngine()) as gateway:
        model, other = (chat_model(gateway.open_session(n), kind="agentscope2") for n in "ab")
        model.client = model.client.with_options(max_retries=2)
        agent = agent_of(model, model_config=ModelConfig(fallback_model=other))
        found = await check_agent(agent)
        assert set(found) == {"model.client.max_retries", "ModelConfig.fallback_model"}


async def test_tools_that_are_allowed_or_only_read_need_no_permission() -> None:
    allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="")
    tools = (
        FunctionTool(add, permission=allowed),
        FunctionTool(add, name="look", is_read_only=True),
    )
    async with gateway_of(StubEngine()) as gateway:
        model = chat_model(gateway.open_session("r"), kind="agentscope2")
        agent = agent_of(model, *tools, state=state(PermissionMode.DEFAULT))
        assert await check_agent(agent) == {}


async def test_agent_is_found_behind_middlewares_and_sub_agents() -> None:
    class Passing(MiddlewareBase):
        async def on_model_call(self, agent, input_kwargs, next_handler):
            return await next_handler()

    async def workflow(task, model):
        async def ask_helper() -> str:
            """Ask the helper."""
            helper = agent_of(model, react_config=ReActConfig(), middlewares=[Passing()])
            return (await helper.reply(QUESTION)).get_text_content()

        await agent_of(model, ask_helper).reply(QUESTION)
        return WorkflowOutput(reward=1.0)

    call = '<tool_call>\n{"name": "ask_helper", "arguments": {}}\n</tool_call>'
    async with gateway_of(StubEngine([call, "42", "It is 42."])) as gateway:
        trace = await run(runner_of(gateway, workflow))
        assert trace.outcome is Outcome.COMPLETED
        assert len(trace.calls) == 3
        assert gateway.warned == {"ReActConfig.max_iters"}


async def test_models_that_are_not_trained_may_be_used_as_they_are() -> None:
    async with gateway_of(StubEngine()) as gateway:
        model = chat_model(gateway.open_session("r", recorded=False), kind="agentscope2")
        await agent_of(model, injection_config=InjectionConfig()).reply(QUESTION)
        assert gateway.warned == set()


async def test_summary_with_the_time_of_day_is_named() -> None:
    summary = '<tool_call>\n{"name": "generate_structured_output", "arguments": {}}\n</tool_call>'
    answers = ["A" * 1500, "B" * 1500, "C" * 1500, summary, "D"]
    async with gateway_of(StubEngine(answers, max_model_len=8000)) as gateway:
        model = chat_model(gateway.open_session("r"), kind="agentscope2")
        model.context_size = 1500
        agent = agent_of(model, context_config=ContextConfig(trigger_ratio=0.5))
        for _ in range(4):
            await agent.reply(QUESTION)
        assert gateway.warned == {"ContextConfig.compression_prompt"}


async def test_parked_tool_call_is_a_failed_rollout_and_not_a_reward(caplog) -> None:
    async def workflow(task, model):
        agent = agent_of(model, add, state=state(PermissionMode.DEFAULT))
        reply = await agent.reply(QUESTION)
        assert "waiting for your permission" in reply.get_text_content()
        return WorkflowOutput(reward=0.0, response=reply)

    async with gateway_of(StubEngine([CALL])) as gateway:
        trace = await run(runner_of(gateway, workflow))
        assert trace.outcome is Outcome.WORKFLOW_ERROR
        assert trace.reward is None
        assert "calling add needs a permission that nobody gave" in trace.error
        assert f"{PERMISSION} is DEFAULT: calls of add wait" in caplog.text


async def test_parked_reply_of_a_role_is_found_too() -> None:
    async def workflow(task, model):
        helper = agent_of(model.role("helper"), add, state=state(PermissionMode.DEFAULT))
        await helper.reply(QUESTION)
        return WorkflowOutput(reward=1.0)

    async with gateway_of(StubEngine([CALL])) as gateway:
        trace = await run(runner_of(gateway, workflow))
        assert trace.outcome is Outcome.WORKFLOW_ERROR


async def test_permission_that_the_workflow_gives_is_no_failure() -> None:
    from agentscope.event import ConfirmResult, RequireUserConfirmEvent, UserConfirmResultEvent

    async def workflow(task, model):
        agent = agent_of(model, add, state=state(PermissionMode.DEFAULT))
        asked = [
            event
            async for event in agent.reply_stream(QUESTION)
            if isinstance(event, RequireUserConfirmEvent)
        ]
        (event,) = asked
        results = [ConfirmResult(confirmed=True, tool_call=call) for call in event.tool_calls]
        answer = UserConfirmResultEvent(reply_id=event.reply_id, confirm_results=results)
        reply = await agent.reply(answer)
        return WorkflowOutput(reward=1.0, response=reply)

    async with gateway_of(StubEngine([CALL, "It is 42."])) as gateway:
        trace = await run(runner_of(gateway, workflow))
        assert (trace.outcome, trace.response) == (Outcome.COMPLETED, "It is 42.")


async def test_external_tool_that_nobody_runs_is_named() -> None:
    tool = FunctionTool(add)
    tool.is_external_tool = True

    async def workflow(task, model):
        reply = await agent_of(model, tool).reply(QUESTION)
        return WorkflowOutput(reward=1.0, response=reply)

    async with gateway_of(StubEngine([CALL])) as gateway:
        trace = await run(runner_of(gateway, workflow))
        assert trace.outcome is Outcome.COMPLETED
        assert gateway.warned == {"external tools"}


async def test_timed_out_agent_is_a_timeout_although_it_swallows_its_cancellation() -> None:
    replies = []

    async def workflow(task, model):
        reply = await agent_of(model).reply(QUESTION)
        replies.append(reply.get_text_content())
        return WorkflowOutput(reward=1.0, response=reply)

    engine = StubEngine()
    engine.gate.clear()
    async with gateway_of(engine) as gateway:
        trace = await asyncio.wait_for(run(runner_of(gateway, workflow, timeout=0.1)), 10)
        assert trace.outcome is Outcome.TIMEOUT
        assert trace.reward is None
        assert replies == ["I notice the interruption. How can I help you?"]
        assert engine.cancelled == 1
