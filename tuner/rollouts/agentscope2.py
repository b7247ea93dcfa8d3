"""The chat model for AgentScope 2.x: its own `OpenAIChatModel`, with the gateway as its client.

Its defaults are those that training needs (no streams, no retries, no sampling settings). The
agent's settings are checked when it calls. A setting that spoils training without failing is
reported as a finding: the setting, and a sentence with its effect and the alternative.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Any

from tuner.errors import TunerError
from tuner.rollouts.agentscope1 import agentscope_modules
from tuner.rollouts.without_framework import SessionHandle

if TYPE_CHECKING:
    from tuner.gateway.sessions import Access


_MANY_ITERATIONS = 50  # AgentScope's default; a reply of only reasoning is asked again as often


def require_agentscope2() -> None:
    """Fail with instructions to install AgentScope 2.x if it cannot be imported.

    Raises:
        MissingDependencyError: AgentScope 2.x is not installed, or does not import.
    """
    trinity_chat_model()


@cache
def trinity_chat_model() -> type[Any]:
    """The class `TrinityChatModel`, made when first used: importing AgentScope takes long.

    Raises:
        MissingDependencyError: AgentScope 2.x is not installed, or does not import.
    """
    model, credential, agent = _modules()

    class TrinityChatModel(SessionHandle, model.OpenAIChatModel):  # type: ignore[misc, name-defined]  # imported
        """The model being trained, as an AgentScope 2.x chat model.

        Not streamed, and no call is repeated automatically. Settings of the run (temperature,
        limits) apply if the user sets none in `parameters`.

        Attributes:
            client: An `openai.AsyncOpenAI` that reaches the gateway without a socket.
            model: AgentScope's name for `model_name`.
            max_model_len: Tokens of prompt and answer together; equal to `context_size`, at which
                AgentScope begins to compress the context.
        """

        def __init__(self, session: Access, role: str | None = None) -> None:
            SessionHandle.__init__(self, session, role)
            client: Any = session.async_client(role)
            # AgentScope creates its own client here; given ours, it opens no connections.
            model.OpenAIChatModel.__init__(
                self,
                credential=credential.OpenAICredential(api_key=self.api_key),
                model=session.model_name,
                stream=False,
                max_retries=0,
                context_size=session.max_model_len,
                client_kwargs={"http_client": client._client, "max_retries": 0},
            )
            self.client = client
            self.max_model_len = session.max_model_len
            self._agents: list[Any] = []  # kept, because their replies are checked at the end

        def role(self, name: str) -> Any:
            """See `SessionHandle.role`; keeps the settings of this model."""
            named: Any = super().role(name)
            own = ("_role", "api_key", "client", "client_kwargs", "credential")
            vars(named).update({k: v for k, v in vars(self).items() if k not in own})
            return named

        async def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """One model call, as in `ChatModelBase`; an agent is checked at its first."""
            caller = _calling_agent(sys._getframe(1), agent.Agent)
            if caller is not None and all(caller is not known for known in self._agents):
                self._agents.append(caller)
                self._warn(await check_agent(caller))
            return await super().__call__(*args, **kwargs)

        async def generate_structured_output(
            self, messages: Any, structured_model: Any, **kwargs: Any
        ) -> Any:
            """As in `ChatModelBase`; an agent's own summaries are checked."""
            caller = _calling_agent(sys._getframe(1), agent.Agent)
            if caller is not None:
                self._warn(check_summary(caller, structured_model))
            return await super().generate_structured_output(messages, structured_model, **kwargs)

        def workflow_ended(self) -> None:
            """Check how the replies of this rollout ended, for every role.

            Raises:
                ParkedToolCallError: An agent still waits for permission to call a tool.
            """
            for setting, sentence in check_replies_ended(self._agents).items():
                self.session.warn_once(setting, sentence)

        def _warn(self, unsafe: dict[str, str]) -> None:
            if self.session.keeps_calls:  # the others' replies are not trained
                for setting, sentence in unsafe.items():
                    self.session.warn_once(setting, sentence)

    return TrinityChatModel


def agentscope2_remote_model(
    *, base_url: str, api_key: str, model_name: str, http_client: Any
) -> Any:
    """AgentScope 2.x's chat model for a URL, with the attributes of the trained one."""
    model, credential, _ = _modules()
    remote = model.OpenAIChatModel(
        credential=credential.OpenAICredential(api_key=api_key, base_url=base_url),
        model=model_name,
        stream=False,
        client_kwargs={"http_client": http_client},
    )
    remote.base_url, remote.api_key, remote.model_name = base_url, api_key, model_name
    return remote


def _modules() -> list[Any]:
    """AgentScope's `model`, `credential` and `agent`."""
    names = ("model", "credential", "agent")
    return agentscope_modules("2", ">=2.0.10,<3", "agentscope", *names)


def _calling_agent(frame: FrameType | None, agent_class: type[Any]) -> Any:
    """The agent whose code calls the model, or None.

    AgentScope passes a model the messages and tools and nothing of the agent, and a workflow only
    writes `Agent(model=model)`: the call stack is where the agent can be found.
    """
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            owner = frame.f_locals.get("self")
            if isinstance(owner, agent_class):
                return owner
        frame = frame.f_back
    return None


class ParkedToolCallError(TunerError, RuntimeError):
    """A reply stopped at a tool call that waits for a permission that nobody gave."""


async def check_agent(agent: Any) -> dict[str, str]:
    """The unsafe settings of an `agentscope.agent.Agent`: sentences by setting, {} if there are
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
    if agent.react_config.max_iters >= _MANY_ITERATIONS:
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
        schema: The requested structured output.
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
        # Whether AgentScope's own tools ask depends on their arguments.
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
            "streaming has no benefit in training; leave it False"
        )
    if model.max_retries > 0:
        found["model.max_retries"] = _retries(model.max_retries)
    retries = getattr(getattr(model, "client", None), "max_retries", 0)
    if retries > 0:
        found["model.client.max_retries"] = _retries(retries)
    limit = getattr(model, "max_model_len", model.context_size)
    if model.context_size > limit:
        found["model.context_size"] = (
            f"is {model.context_size}, but the model supports {limit} tokens: AgentScope would "
            "compress the context only after calls are rejected; do not set it"
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
