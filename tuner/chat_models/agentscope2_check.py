"""What an AgentScope 2.x agent does that spoils training without failing: found, and named.

Each finding is a setting and a sentence that says what it does and what to write instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from tuner.errors import TunerError

MANY_ITERATIONS = 50  # AgentScope's default; a reply of only reasoning is asked again as often


class ParkedToolCallError(TunerError, RuntimeError):
    """A reply stopped at a tool call that waits for somebody's permission, and nobody answered."""


async def check_agent(agent: Any) -> dict[str, str]:
    """The unsafe settings of an `agentscope.agent.Agent`: sentences by setting, {} if there is
    none."""
    found = {}
    if agent.injection_config.inject_runtime_state:
        found["InjectionConfig.inject_runtime_state"] = (
            "is True: AgentScope writes the time of day into the prompts, so the same task is "
            "never asked twice in the same words; give the agent "
            "injection_config=InjectionConfig(inject_runtime_state=False)"
        )
    if asking := await _tools_that_ask(agent):
        found["PermissionContext.mode"] = (
            f"is {agent.state.permission_context.mode.name}: calls of {', '.join(asking)} wait "
            "for somebody's permission, and the rollout fails; give the agent "
            "state=AgentState(permission_context=PermissionContext(mode=PermissionMode.BYPASS)) "
            "or allow the tool, FunctionTool(..., permission=PermissionDecision(behavior="
            "PermissionBehavior.ALLOW, message=''))"
        )
    if agent.react_config.max_iters >= MANY_ITERATIONS:
        found["ReActConfig.max_iters"] = (
            f"is {agent.react_config.max_iters}: an answer of nothing but reasoning, such as one "
            "that the token limit cuts, is asked again that often; give the agent "
            "react_config=ReActConfig(max_iters=...) with what its tasks need"
        )
    if agent.model_config.max_retries > 0:
        found["ModelConfig.max_retries"] = _retries(agent.model_config.max_retries)
    if agent.model_config.fallback_model is not None:
        found["ModelConfig.fallback_model"] = (
            "is set: when a call fails, another model answers in the agent's name, and none of "
            "that is recorded or trained; leave it out"
        )
    return found | _model_settings(agent.model)


def check_summary(agent: Any, schema: Any) -> dict[str, str]:
    """The finding if `agent` asks for a summary of its context with the time of day in it.

    Args:
        schema: What structured output is asked for.
    """
    config = agent.context_config
    if schema is not config.summary_schema or "{current_time}" not in config.compression_prompt:
        return {}
    return {
        "ContextConfig.compression_prompt": (
            "holds {current_time}: the context is full and AgentScope has it summarized, with the "
            "time of day in the prompt; write the prompt without it, or raise model.max_model_len "
            "so that tasks fit"
        )
    }


def check_replies_ended(agents: Iterable[Any]) -> dict[str, str]:
    """The findings if replies of `agents` stopped in the middle.

    Raises:
        ParkedToolCallError: A tool call waits for permission.
    """
    found = {}
    for agent in agents:
        waiting = agent.state.get_awaiting_tool_calls(agent.name)
        asking = _names(call for call in waiting if call.state.value == "asking")
        if asking:
            raise ParkedToolCallError(
                f"agent {agent.name!r} stopped because calling {', '.join(asking)} needs a "
                "permission that nobody gave: its reply is AgentScope's sentence, not the "
                "model's; use PermissionMode.BYPASS, allow the tool, or answer with a "
                "UserConfirmResultEvent in the workflow"
            )
        if waiting:
            found["external tools"] = (
                f"were called and not run ({', '.join(_names(waiting))}): the reply is not the "
                "model's but AgentScope's, which waits; hand the results to the agent with an "
                "ExternalExecutionResultEvent, or have the judge read the calls"
            )
    return found


async def _tools_that_ask(agent: Any) -> list[str]:
    """The functions among the agent's tools that it may not call without asking."""
    function_tool = import_module("agentscope.tool").FunctionTool
    engine = import_module("agentscope.permission").PermissionEngine(agent.state.permission_context)
    groups = agent.state.tool_context.activated_groups
    asking = []
    for schema in await agent.toolkit.get_tool_schemas(groups):
        tool = await agent.toolkit.check_tool_available(schema["function"]["name"], groups)
        # Whether the tools that AgentScope brings ask depends on what they are called with.
        if isinstance(tool, function_tool):
            decision = await engine.check_permission(tool, {})
            if decision.behavior.value in ("ask", "passthrough"):
                asking.append(tool.name)
    return asking


def _model_settings(model: Any) -> dict[str, str]:
    found = {}
    if model.stream:
        found["model.stream"] = (
            "is True: an agent that stops reading early cuts the model's answer short, and "
            "nothing is gained while nobody looks on; leave it False"
        )
    if model.max_retries > 0:
        found["model.max_retries"] = _retries(model.max_retries)
    retries = getattr(getattr(model, "client", None), "max_retries", 0)
    if retries > 0:
        found["model.client.max_retries"] = _retries(retries)
    limit = getattr(model, "max_model_len", model.context_size)
    if model.context_size > limit:
        found["model.context_size"] = (
            f"is {model.context_size}, but the model takes {limit} tokens: AgentScope begins to "
            "shorten the context when calls have long been refused; leave it as it is"
        )
    return found


def _retries(count: int) -> str:
    return (
        f"is {count}: a call that fails is made again, and what was sampled the first time may "
        "already be in the trace; leave it 0, a rollout that fails is tried again as a whole "
        "(explorer.max_retry_times)"
    )


def _names(calls: Iterable[Any]) -> list[str]:
    return sorted({call.name for call in calls})
