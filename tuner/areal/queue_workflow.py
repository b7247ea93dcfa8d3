"""Queue agents as workflow functions; agents and environments by name, including gymnasium's."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tuner.areal.hyperparameters import GenerationHyperparameters
from tuner.areal.queues import (
    BundledGenerationOutputs,
    CheckedEnvironment,
    EnvironmentService,
    ObservationQueue,
    SequenceSample,
    Step,
    serve,
    trajectories_of,
)
from tuner.areal.token_workflow import (
    Episode,
    EpisodeWorkflow,
    SessionEngine,
    settled_episode,
)
from tuner.config.schema import EnvironmentSection, TunerSection
from tuner.errors import ConfigError, FunctionError, MissingDependencyError, pip_install
from tuner.gateway.sessions import Access
from tuner.tasks.functions import Rejected, in_thread, is_async
from tuner.tasks.loading import import_module_or_file, load_function

_AGENTS: dict[str, type[Any]] = {}
_ENVIRONMENTS: dict[str, type[Any]] = {}


@dataclass(frozen=True)
class AgentAbstraction:
    """Name and arguments of an agent.

    Attributes:
        type_: The name it is registered under, or `package.module:Class`, or `path/file.py:Class`.
        args: Arguments of its constructor.
    """

    type_: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EnvServiceAbstraction:
    """Name and arguments of an environment, like `AgentAbstraction`."""

    type_: str
    args: Mapping[str, Any] = field(default_factory=dict)


def register_agent(name: str, agent_class: type[Any]) -> None:
    """Register a class of agents under `name`.

    Raises:
        ConfigError: The name is taken by another class.
    """
    _register(_AGENTS, "agent", name, agent_class)


def register_environment(name: str, environment_class: type[Any]) -> None:
    """Register a class of environments under `name`.

    Raises:
        ConfigError: The name is taken by another class.
    """
    _register(_ENVIRONMENTS, "environment", name, environment_class)


def make_agent(agent: AgentAbstraction) -> Any:
    """Create an agent of the named class.

    Raises:
        ConfigError: There is no such class, or it does not take the arguments.
    """
    return _maker(_AGENTS, "agent", agent.type_, agent.args)()


def make_environment(environment: EnvServiceAbstraction) -> Any:
    """Create an environment of the named class.

    Raises:
        ConfigError: There is no such class, or it does not take the arguments.
    """
    return _environment_maker(environment)()


def _environment_maker(environment: EnvServiceAbstraction) -> Callable[[], Any]:
    return _maker(_ENVIRONMENTS, "environment", environment.type_, environment.args)


def _register(known: dict[str, type[Any]], what: str, name: str, new: type[Any]) -> None:
    old = known.setdefault(name, new)
    # A module that is imported twice under one name registers its class again.
    if (old.__module__, old.__qualname__) != (new.__module__, new.__qualname__):
        raise ConfigError(
            f"{what} {name!r} is {old.__module__}.{old.__qualname__} already; register "
            f"{new.__module__}.{new.__qualname__} under another name"
        )
    known[name] = new


def _maker(
    known: Mapping[str, type[Any]], what: str, name: str, args: Mapping[str, Any]
) -> Callable[[], Any]:
    """A factory for instances of the named class; also works in a worker, where nothing is
    registered."""
    if name in known:
        made: Any = known[name]
    elif ":" in name:
        made = load_function(name, setting=f"the {what}")
    else:
        names = ", ".join(sorted(known)) or "none"
        raise ConfigError(
            f"there is no {what} {name!r} (registered: {names}); import the module that registers "
            "it (tuner.imports), or use package.module:Class"
        )
    given = dict(args)
    if isinstance(given.get("gconfig"), Mapping):
        given["gconfig"] = GenerationHyperparameters(**given["gconfig"])
    try:
        inspect.signature(made).bind(**given)
    except TypeError as error:
        raise ConfigError(
            f"{what} {name!r} is {made.__qualname__}{inspect.signature(made)}, which does not take "
            f"the arguments {', '.join(given) or 'none'}: {error}"
        ) from None
    return functools.partial(made, **given)


def registered(id: Any) -> Any:
    """Registration of a gymnasium id, for another process where it is not registered."""
    if isinstance(id, str) and ":" not in id:
        import gymnasium

        return gymnasium.spec(id)
    return id


class GymnasiumEnvironment(EnvironmentService):
    """A gymnasium environment; each call runs in a thread, one after the other.

    Args:
        id: A registered id such as "FrozenLake-v1", its registration, or an environment.
        read_action: Converts the agent's argument of `step` to the environment's action.
        make_args: Passed to `gymnasium.make`.

    Raises:
        MissingDependencyError: An id is given and gymnasium is not installed.
    """

    def __init__(
        self, id: str | Any, read_action: Callable[[Any], Any] | None = None, **make_args: Any
    ) -> None:
        if not hasattr(id, "step"):
            try:
                import gymnasium
            except ImportError as error:
                raise MissingDependencyError(
                    f"environment {id!r} needs gymnasium, which cannot be imported ({error}): "
                    f"{pip_install('gymnasium')}"
                ) from error
            id = gymnasium.make(id, **make_args)
        self.env: Any = id
        self._read_action = read_action

    async def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Like gymnasium's `Env.reset`."""
        answer: tuple[Any, dict[str, Any]] = await in_thread(
            functools.partial(self.env.reset, seed=seed, options=options)
        )
        return answer

    async def step(self, action: Any) -> Step:
        """Like gymnasium's `Env.step`."""
        if self._read_action is not None:
            action = self._read_action(action)
        answer: Step = await in_thread(functools.partial(self.env.step, action))
        return answer

    async def close(self) -> None:
        """Like gymnasium's `Env.close`."""
        await in_thread(self.env.close)


register_environment("gymnasium", GymnasiumEnvironment)


logger = logging.getLogger("tuner.rollout")

PROMPT_KEYS = ("input_ids", "messages", "prompt", "question")
ID_KEYS = ("query_id", "qid", "id")


class QueueWorkflow(EpisodeWorkflow):
    """A queue agent as a workflow function: `tune(QueueWorkflow(agent, env), dataset=...)`.

    A row's prompt is its first field of `input_ids` (token ids), `messages` (rendered with the chat
    template), `prompt` and `question` (text, encoded without a template); its id is the first of
    `query_id`, `qid` and `id`, else the rollout's own name.

    With `tuner.workers` each worker has its own agent and environments. Each rollout has its own
    environment. It is used again by a later rollout if the episode ended well; it is closed if the
    episode failed, was cancelled or timed out.

    Args:
        agent: An object with `collect_trajectory`, or a description of one.
        environment: Source of environments: a class, a function without arguments, or an
            `EnvServiceAbstraction`. Or an `EnvironmentService`, which all rollouts of a process
            share: it must then be stateless.

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
                f"{agent!r:.80} is not an agent: pass an instance with async collect_trajectory("
                "prompt, env, obs_queue, act_queue), or an AgentAbstraction"
            )
        self._make: Callable[[], Any] | None = None
        self._idle: list[Any] = []
        if isinstance(environment, EnvServiceAbstraction):
            # Created now, so that a wrong name or argument fails before the run begins.
            self._make = _environment_maker(environment)
            self._idle.append(self._make())
        elif callable(environment) and not isinstance(environment, EnvironmentService):
            self._make = environment
        else:
            self._shared = environment

    def __getstate__(self) -> dict[str, Any]:
        """State for a worker's copy, which creates its own environments."""
        make = self._make
        if isinstance(make, functools.partial) and make.func is GymnasiumEnvironment:
            make = functools.partial(make, id=registered(make.keywords["id"]))
        return {**vars(self), "_make": make, "_idle": []}

    async def episode(self, task: dict[str, Any], session: Access) -> Episode:
        """Like `EpisodeWorkflow.episode`; returning no trajectory rejects.

        Raises:
            EnvironmentFault: The environment returned an invalid result.
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

    async def run_ended(self) -> None:
        """Close every environment without a running episode; called if no rollout follows."""
        idle, self._idle = self._idle, []
        for environment in idle:
            _close_beside(environment)
        await asyncio.gather(*_closing)

    async def _collect(
        self, prompt: SequenceSample, environment: Any, engine: SessionEngine
    ) -> Any:
        """The agent's result; the error of a failed answer is raised at once."""
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
    """The workflow from `tuner.agent`, `tuner.environment` and `tuner.imports`.

    Raises:
        ConfigError: A module cannot be imported, a class is missing, or it does not take the
            arguments.
    """
    environment = settings.environment
    assert settings.agent is not None
    assert isinstance(environment, EnvironmentSection)
    assert environment.type is not None
    for module in settings.imports:
        import_module_or_file(module, setting="tuner.imports")
    return QueueWorkflow(
        AgentAbstraction(settings.agent.type, settings.agent.args),
        EnvServiceAbstraction(environment.type, environment.args),
    )


_closing: set[asyncio.Future[None]] = set()


def _close_beside(environment: Any) -> None:
    """Close an environment in the background while its error or cancellation propagates."""

    async def close() -> None:
        try:
            await environment.close()
        except Exception as error:
            logger.warning("closing %s failed: %s", type(environment).__name__, error)

    if hasattr(environment, "close"):
        task = asyncio.ensure_future(close())
        _closing.add(task)
        task.add_done_callback(_closing.discard)


def _prompt(task: dict[str, Any], session: Access) -> SequenceSample:
    """A row of the dataset as an agent's prompt."""
    key = next((key for key in PROMPT_KEYS if key in task), None)
    if key is None:
        raise FunctionError(
            f"the task has none of {', '.join(PROMPT_KEYS)} to make a prompt from; its fields are "
            f"{', '.join(task)}"
        )
    value = task[key]
    if key == "messages" and isinstance(value, str):
        raise FunctionError(
            f"the task's messages are text ({value!r:.60}), but must be a list of messages; or "
            "name the field prompt to encode the text without a template"
        )
    if key == "messages" or isinstance(value, str):
        value = session.encode(value)
    ids = torch.tensor([int(token) for token in value], dtype=torch.long)
    name = next((str(task[key]) for key in ID_KEYS if key in task), session.id)
    return SequenceSample(
        ids=[name],
        data={"packed_prompts": ids},
        seqlens={"packed_prompts": [[len(ids)]]},
        metadata={"task": dict(task)},
    )
