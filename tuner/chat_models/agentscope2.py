"""The chat model for AgentScope 2.x: its own `OpenAIChatModel` whose client is the gateway's.

Its defaults are those that training needs (no streams, no retries, no sampling settings of its
own). What the agent adds to them is looked at when it calls: see `agentscope2_check`.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Any

from tuner.chat_models.agentscope1 import agentscope_version
from tuner.chat_models.agentscope2_check import check_agent, check_replies_ended, check_summary
from tuner.chat_models.without_framework import SessionHandle
from tuner.errors import MissingDependencyError

if TYPE_CHECKING:
    from tuner.gateway import Session

__all__ = ["agentscope2_remote_model", "check_agent", "require_agentscope2", "trinity_chat_model"]

_INSTALL = "pip install 'agentscope-tuner[agentscope]'"


def require_agentscope2() -> None:
    """Say what to install, where a program that imports AgentScope 2.x would only fail.

    Raises:
        MissingDependencyError: AgentScope 2.x is not installed, or does not import.
    """
    trinity_chat_model()


@cache
def trinity_chat_model() -> type[Any]:
    """The class `TrinityChatModel`, made when first asked for: importing AgentScope takes long.

    Raises:
        MissingDependencyError: AgentScope 2.x is not installed, or does not import.
    """
    model, credential, agent = _modules()

    class TrinityChatModel(SessionHandle, model.OpenAIChatModel):  # type: ignore[misc, name-defined]
        """The model being trained, as an AgentScope 2.x chat model.

        Not streamed, and no call is made twice by itself. Settings of the run (temperature,
        limits) apply where the user sets none in `parameters`.

        Attributes:
            client: An `openai.AsyncOpenAI` that reaches the gateway without a socket.
            model: AgentScope's name for `model_name`.
            max_model_len: Tokens of prompt and answer together; `context_size` is the same, and
                where AgentScope begins to compress the context.
        """

        def __init__(self, session: Session, role: str | None = None) -> None:
            SessionHandle.__init__(self, session, role)
            client: Any = session.async_client(role)
            # AgentScope makes a client of its own here; given ours, it opens no connections.
            model.OpenAIChatModel.__init__(
                self,
                credential=credential.OpenAICredential(api_key=self.api_key),
                model=session.model_name,
                stream=False,
                max_retries=0,
                context_size=session.service.engine.capabilities.max_model_len,
                client_kwargs={"http_client": client._client, "max_retries": 0},
            )
            self.client = client
            self.max_model_len = session.service.engine.capabilities.max_model_len
            self._agents: list[Any] = []  # held, because their replies are looked at in the end

        def role(self, name: str) -> Any:
            """As `SessionHandle` has it, with the settings of this one."""
            named: Any = super().role(name)
            own = ("_role", "api_key", "client", "client_kwargs", "credential")
            vars(named).update({k: v for k, v in vars(self).items() if k not in own})
            return named

        async def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """One model call, as `ChatModelBase` has it; an agent's first is looked at."""
            caller = _calling_agent(sys._getframe(1), agent.Agent)
            if caller is not None and all(caller is not known for known in self._agents):
                self._agents.append(caller)
                self._warn(await check_agent(caller))
            return await super().__call__(*args, **kwargs)

        async def generate_structured_output(
            self, messages: Any, structured_model: Any, **kwargs: Any
        ) -> Any:
            """As `ChatModelBase` has it; an agent's own summaries are looked at."""
            caller = _calling_agent(sys._getframe(1), agent.Agent)
            if caller is not None:
                self._warn(check_summary(caller, structured_model))
            return await super().generate_structured_output(messages, structured_model, **kwargs)

        def workflow_ended(self) -> None:
            """Look at how the replies of this rollout ended, those of every role.

            Raises:
                ParkedToolCallError: An agent still waits for permission to call a tool.
            """
            for setting, sentence in check_replies_ended(self._agents).items():
                self._session.warn_once(setting, sentence)

        def _warn(self, unsafe: dict[str, str]) -> None:
            if self._session.recording.kept:  # nothing is trained on what the others say
                for setting, sentence in unsafe.items():
                    self._session.warn_once(setting, sentence)

    return TrinityChatModel


def agentscope2_remote_model(
    *, base_url: str, api_key: str, model_name: str, http_client: Any
) -> Any:
    """AgentScope 2.x's chat model for a URL, with the attributes of the one that is trained.

    Raises:
        MissingDependencyError: AgentScope 2.x is not installed, or does not import.
    """
    model, credential, _ = _modules()
    remote = model.OpenAIChatModel(
        credential=credential.OpenAICredential(api_key=api_key, base_url=base_url),
        model=model_name,
        stream=False,
        client_kwargs={"http_client": http_client},
    )
    remote.base_url, remote.api_key, remote.model_name = base_url, api_key, model_name
    return remote


def _modules() -> tuple[Any, Any, Any]:
    """AgentScope's `model`, `credential` and `agent`. Type checkers see AgentScope 1.x or 2.x,
    never both, so they are told nothing."""
    found = agentscope_version()
    if found is None:
        raise MissingDependencyError(
            f"this needs AgentScope 2.x, which is not installed: {_INSTALL}"
        )
    if not found.startswith("2."):
        raise MissingDependencyError(
            f"this needs agentscope>=2.0.10,<3, but {found} is "
            f"installed: {_INSTALL}, in an environment of its own"
        )
    try:
        names = ("model", "credential", "agent")
        model, credential, agent = (import_module(f"agentscope.{name}") for name in names)
    except ImportError as error:
        raise MissingDependencyError(
            f"agentscope {found} is installed but does not import ({error}): {_INSTALL} brings "
            "versions that work together"
        ) from error
    return model, credential, agent


def _calling_agent(frame: FrameType | None, agent_class: type[Any]) -> Any:
    """The agent inside whose code the model is called, or None.

    AgentScope hands a model the messages and tools and nothing of the agent, and a workflow only
    has to write `Agent(model=model)`: the callers are where the agent can be found.
    """
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            owner = frame.f_locals.get("self")
            if isinstance(owner, agent_class):
                return owner
        frame = frame.f_back
    return None
