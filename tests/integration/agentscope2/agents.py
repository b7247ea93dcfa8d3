"""AgentScope 2.x agents for the tests, safe for training unless a test asks for less."""

from __future__ import annotations

from typing import Any

from agentscope.agent import Agent, InjectionConfig, ReActConfig
from agentscope.permission import PermissionContext, PermissionMode
from agentscope.state import AgentState
from agentscope.tool import FunctionTool, Toolkit

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2,  "b": 40}}\n</tool_call>'


async def add(a: int, b: int) -> str:
    """Add two integers.

    Args:
        a (int): first
        b (int): second
    """
    return str(a + b)


def state(mode: PermissionMode = PermissionMode.BYPASS) -> AgentState:
    return AgentState(permission_context=PermissionContext(mode=mode))


def agent_of(model: Any, *tools: Any, **settings: Any) -> Agent:
    safe = {
        "state": state(),
        "injection_config": InjectionConfig(inject_runtime_state=False),
        "react_config": ReActConfig(max_iters=10),
    }
    return Agent(
        name="solver",
        system_prompt="You solve problems.",
        model=model,
        toolkit=Toolkit(tools=[t if hasattr(t, "name") else FunctionTool(t) for t in tools]),
        **{**safe, **settings},
    )
