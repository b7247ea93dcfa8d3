"""A queue agent and its environment as a workflow function."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import torch

from tuner.areal import gym as _  # noqa: F401  # registers "gymnasium"
from tuner.areal.engine import SessionEngine
from tuner.areal.episodes import Episode, settled_episode
from tuner.areal.queues import (
    BundledGenerationOutputs,
    CheckedEnvironment,
    EnvironmentService,
    ObservationQueue,
    serve,
)
from tuner.areal.registry import (
    AgentAbstraction,
    EnvServiceAbstraction,
    make_agent,
    make_environment,
)
from tuner.areal.samples import SequenceSample, trajectories_of
from tuner.chat_models.plain import SessionHandle
from tuner.config.schema import TunerSection
from tuner.errors import FunctionError
from tuner.functions.calling import is_async
from tuner.functions.loading import import_module_or_file
from tuner.functions.outputs import Rejected, WorkflowOutput
from tuner.gateway import Session

logger = logging.getLogger("tuner.rollout")

PROMPT_KEYS = ("input_ids", "messages", "prompt", "question")
ID_KEYS = ("query_id", "qid", "id")


class QueueWorkflow:
    """A queue agent as a workflow function: `tune(QueueWorkflow(agent, env), dataset=...)`.

    A row's prompt is the first that it has of `input_ids` (token ids), `messages` (rendered with
    the chat template), `prompt` and `question` (text, encoded as it is); its id the first of
    `query_id`, `qid` and `id`, else the rollout's own name.

    Each rollout has an environment to itself. One whose episode ended well is used again by a later
    rollout; one whose episode failed, was cancelled or timed out is closed.

    Args:
        agent: An object with `collect_trajectory`, or what to make one of.
        environment: What to make environments of: a class, a function without arguments, or an
            `EnvServiceAbstraction`. Or an `EnvironmentService`, which all rollouts share: it must
            then be without state.

    Raises:
        ConfigError: There is no such agent or environment, or it does not take the arguments.
        FunctionError: The agent has no `collect_trajectory`.
    """

    def __init__(
        self,
        agent: Any,
        environment: EnvServiceAbstraction | EnvironmentService | Callable[[], Any],
    ) -> None:
        self._agent = make_agent(agent) if isinstance(agent, AgentAbstraction) else agent
        self._source = f"{type(self._agent).__name__}.collect_trajectory"
        collect = getattr(self._agent, "collect_trajectory", None)
        if collect is None or isinstance(self._agent, type) or not is_async(collect):
            raise FunctionError(
                f"{agent!r:.80} is no agent: pass an instance with async collect_trajectory("
                "prompt, env, obs_queue, act_queue), or an AgentAbstraction"
            )
        self._make: Callable[[], Any] | None = None
        self._idle: list[Any] = []
        if isinstance(environment, EnvServiceAbstraction):
            # Made now, so that a wrong name or argument stops the run before it begins.
            self._idle.append(make_environment(environment))
            self._make = lambda: make_environment(environment)
        elif callable(environment) and not isinstance(environment, EnvironmentService):
            self._make = environment
        else:
            self._shared = environment

    async def __call__(self, task: dict[str, Any], model: SessionHandle) -> WorkflowOutput:
        """Run one episode as a rollout.

        Raises:
            Rejected: The agent returned no trajectory.
            FunctionError: What it returned cannot be trained as it says.
            EnvironmentFault: The environment gave something that is no answer.
        """
        episode = await self.episode(task, model.session)
        return WorkflowOutput(reward=episode.reward)

    async def episode(self, task: dict[str, Any], session: Session) -> Episode:
        """Run one episode and give its calls the credit that its trajectories name.

        Raises:
            As `__call__`.
        """
        engine = SessionEngine(session)
        prompt = _prompt(task, session)
        if self._make is None:
            values = await self._collect(prompt, self._shared, engine)
        else:
            environment = self._idle.pop() if self._idle else self._make()
            try:
                values = await self._collect(prompt, environment, engine)
            except BaseException:
                _close_beside(environment)
                raise
            self._idle.append(environment)
        trajectories = trajectories_of(values, self._source)
        if not trajectories:
            raise Rejected(f"{self._source} returned no trajectory")
        return settled_episode(trajectories, session, self._source)

    async def _collect(
        self, prompt: SequenceSample, environment: Any, engine: SessionEngine
    ) -> Any:
        """What the agent returns; the error of an answer that failed is raised, not waited for."""
        observations = ObservationQueue()
        actions: asyncio.Queue[BundledGenerationOutputs] = asyncio.Queue()
        agent = asyncio.ensure_future(
            self._agent.collect_trajectory(
                prompt, CheckedEnvironment(environment), observations, actions
            )
        )
        server = asyncio.ensure_future(serve(engine, observations, actions))
        try:
            await asyncio.wait((agent, server), return_when=asyncio.FIRST_COMPLETED)
            return await (agent if agent.done() else server)
        finally:
            agent.cancel()
            server.cancel()
            await asyncio.gather(agent, server, return_exceptions=True)


def configured_agent(settings: TunerSection) -> QueueWorkflow:
    """The workflow that `tuner.agent`, `tuner.environment` and `tuner.imports` describe.

    Raises:
        ConfigError: A module cannot be imported, a class is not there, or it does not take the
            arguments.
    """
    assert settings.agent is not None
    assert settings.environment is not None
    for module in settings.imports:
        import_module_or_file(module, setting="tuner.imports")
    return QueueWorkflow(
        AgentAbstraction(settings.agent.type, settings.agent.args),
        EnvServiceAbstraction(settings.environment.type, settings.environment.args),
    )


_closing: set[asyncio.Future[None]] = set()


def _close_beside(environment: Any) -> None:
    """Close an environment while the error or cancellation that it failed with goes on."""

    async def close() -> None:
        try:
            await environment.close()
        except Exception as error:
            logger.warning("closing %s failed: %s", type(environment).__name__, error)

    if hasattr(environment, "close"):
        task = asyncio.ensure_future(close())
        _closing.add(task)
        task.add_done_callback(_closing.discard)


def _prompt(task: dict[str, Any], session: Session) -> SequenceSample:
    """A row of the dataset as the prompt that an agent gets."""
    key = next((key for key in PROMPT_KEYS if key in task), None)
    if key is None:
        raise FunctionError(
            f"the task has none of {', '.join(PROMPT_KEYS)} to make a prompt of; its fields are "
            f"{', '.join(task)}"
        )
    value, renderer = task[key], session.gateway.renderer
    if key == "messages":
        value = renderer.render_text(value, [])
    if isinstance(value, str):
        value = renderer.encode(value)
    ids = torch.tensor([int(token) for token in value], dtype=torch.long)
    name = next((str(task[key]) for key in ID_KEYS if key in task), session.id)
    return SequenceSample(
        ids=[name],
        data={"packed_prompts": ids},
        seqlens={"packed_prompts": [[len(ids)]]},
        metadata={"task": dict(task)},
    )
