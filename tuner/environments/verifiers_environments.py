"""verifiers' environments: taskset, harness and rewards, with our model behind verifiers'
client."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, cast

from tuner.config import RunConfig
from tuner.errors import ConfigError, RewardError, RewardTimeout, TunerError, importing
from tuner.runs.environment import Environment
from tuner.tasks.functions import JudgeOutput, WorkflowOutput, shown

_SCORING = "scoring"


class EpisodeError(TunerError, RuntimeError):
    """An episode of verifiers failed before it could be scored."""


class VerifiersReply(str):
    """The agent's last message, and verifiers' record of the episode, a `verifiers.v1.Trace`."""

    trace: Any


class Verifiers(Environment):
    """One environment of verifiers (0.4, whose stack is `verifiers.v1`).

    Its taskset is the dataset, and its harness runs the agent in its runtime. The weighted sum of
    its rewards is the reward, its metrics are metrics, and the table of all of them is the
    feedback. Its client calls our gateway with the rollout's key. The interception server, shared
    toolsets, and anything that `Env.start` starts exist once.

    Args:
        env: A `verifiers.v1.Env`, its `EnvConfig`, or the id of a taskset. None: see `config`.
        train, eval: Selection of the tasks for training and evaluation, with the keys of verifiers'
            `SelectConfig` (`include`, `exclude`, `shuffle`, `seed`, `skip`, `limit`). `train` None:
            all; `eval` None: none.
        config: The keys of an `EnvConfig`, such as `taskset={"id": ...}, agent={"harness": ...}`.

    Raises:
        ConfigError: It cannot be loaded; or it has several agents, its own model or client, or
            retries.
        MissingDependencyError: verifiers is not installed.
    """

    def __init__(
        self,
        env: Any = None,
        *,
        train: Mapping[str, Any] | None = None,
        eval: Mapping[str, Any] | None = None,
        **config: Any,
    ) -> None:
        self._env = _loaded(env, config)
        self._seat = _only_seat(self._env.config)
        self._begin()
        taskset = self._env.taskset
        self.train_dataset = self._rows(taskset, train or {}, "train")
        if eval is not None:
            self.eval_dataset = self._rows(taskset, eval, "eval")

    def _begin(self) -> None:
        self._held: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._over: asyncio.Event | None = None
        self._tasks: dict[int, Any] = {}
        self._classes: set[type[Any]] = set()

    def check_settings(self, config: RunConfig) -> None:
        """Raises ConfigError if a worker would build other tasks from the rows than the taskset
        has."""
        made = type(self._env.taskset).task_type()
        others = ", ".join(sorted(one.__name__ for one in self._classes - {made}))
        if config.tuner.workers and others:
            raise ConfigError(
                f"tuner.workers is {config.tuner.workers}, but {self._env.config.env_id} has tasks "
                f"of the classes {made.__name__} and {others}, which rows do not "
                "distinguish: set it to 0"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self._env.config.model_dump(mode="json"), "seat": self._seat}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._env, self._seat = _loaded(None, state["config"]), state["seat"]
        self._begin()

    def _rows(self, taskset: Any, select: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
        from verifiers.v1 import SelectConfig

        try:
            view = taskset.select(SelectConfig.model_validate(dict(select)))
            if not view.bounded:
                raise ValueError("the taskset is infinite: set limit, or closed ranges to include")
            tasks = list(view)
        except Exception as error:
            raise ConfigError(
                f"the tasks of {self._env.config.env_id} ({name}) cannot be read: "
                f"{type(error).__name__}: {error}"
            ) from error
        self._tasks |= {task.data.idx: task for task in tasks}
        self._classes |= {type(task) for task in tasks}
        return [_row(task) for task in tasks]

    def _task(self, row: Mapping[str, Any]) -> Any:
        """The task of a row: the taskset's, or one made from the row if that is another."""
        known = self._tasks.get(row.get("idx", -1))
        if known is not None and _row(known) == row:
            return known
        taskset = self._env.taskset
        made = type(taskset).task_type()
        return made(made.data_type().model_validate(dict(row)), taskset.config.task)

    async def workflow(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        """Run one episode; raises EpisodeError, which names verifiers' error, and RewardError or
        RewardTimeout if scoring failed."""
        from verifiers.v1 import EvalClientConfig, ModelContext

        await self._serve()
        with _api_key(model.api_key) as variable:
            client = EvalClientConfig(base_url=model.base_url, api_key_var=variable)
            context = ModelContext(model=model.model_name, client=client)
            episode = await self._env.run_episode(self._task(task), context)
        trace = episode.traces[-1] if episode.traces else None
        _raise_failure(episode, trace)
        assert trace is not None, "an episode without a trace has failed"
        numbers = {name: value for name, value in trace.metrics.items() if value is not None}
        scores = {f"reward_{name}": one.score for name, one in trace.rewards.items()}
        metrics = {"turns": trace.num_turns, **numbers, **scores}
        reply = VerifiersReply(trace.last_reply)
        reply.trace = trace
        return WorkflowOutput(response=reply, metrics=metrics)

    async def judge(self, task: dict[str, Any], response: Any) -> JudgeOutput:
        """The reward, and each of the rewards in words; raises RewardError for another response."""
        if not isinstance(response, VerifiersReply):
            raise RewardError(
                f"the response is {shown(response)}: verifiers scores an episode only while it runs"
            )
        trace = response.trace
        return JudgeOutput(reward=trace.reward, feedback=_feedback(trace))

    async def _serve(self) -> None:
        """Start what all rollouts share, once in an event loop."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._over = asyncio.Event()
            # In a task of its own, because the task that enters the contexts must leave them.
            self._held = asyncio.ensure_future(self._hold(self._ready, self._over))
        await asyncio.shield(self._ready)

    async def _hold(self, ready: asyncio.Future[None], over: asyncio.Event) -> None:
        try:
            async with self._env.serving(), _door(self._env) as door:
                self._env._interception = door
                ready.set_result(None)
                await over.wait()
        except Exception as error:
            if ready.done():
                raise
            self._ready = None  # the next rollout tries again
            ready.set_exception(EpisodeError(f"Env.serving(): {type(error).__name__}: {error}"))

    async def close(self) -> None:
        """Stop what all rollouts share."""
        held, over = self._held, self._over
        self._held = self._ready = self._over = None
        if held is not None and over is not None:
            over.set()
            await held


@asynccontextmanager
async def _door(env: Any) -> AsyncIterator[Any]:
    """One interception server for all rollouts if everything runs on this machine; else None, and
    each rollout starts its own, with a tunnel. verifiers' server keeps a client for each key, and
    reads the certificates for each; here all use one pool, and none outlives its rollout."""
    from verifiers.v1 import EvalClientConfig
    from verifiers.v1.clients import EvalClient
    from verifiers.v1.clients.base import build_async_httpx
    from verifiers.v1.configs.client import resolve_api_key, resolve_headers
    from verifiers.v1.interception import InterceptionServer

    class VerifiersClient(EvalClient):  # type: ignore[misc]  # verifiers has no types here
        def __init__(self, config: Any) -> None:
            self.base_url, self.client = config.base_url, pool
            self.api_key, self.headers = resolve_api_key(config), resolve_headers(config)

    class VerifiersDoor(InterceptionServer):  # type: ignore[misc]
        def _client(self, config: Any) -> Any:
            return VerifiersClient(config)

    shared = env._shared_tools
    if env._requires_tunnel(shared):
        yield None
        return
    keys = tuple(one.state_secret for one in shared.values() if one.state_secret)
    async with (
        build_async_httpx(EvalClientConfig()) as pool,
        VerifiersDoor(state_service_secrets=keys) as door,
    ):
        yield door


def _loaded(env: Any, config: Mapping[str, Any]) -> Any:
    with importing("environments of verifiers need verifiers 0.4", "verifiers"):
        from verifiers import v1
    _remove_port_files()
    if isinstance(env, v1.Env):
        if config:
            raise ConfigError(f"the environment already exists: remove {', '.join(config)}")
        return env
    if isinstance(env, v1.Taskset):
        raise ConfigError(
            f"{type(env).__name__} is only a taskset, without an agent: pass its id, or "
            "verifiers.v1.load_environment(config)"
        )
    try:
        if isinstance(env, v1.EnvConfig):
            return v1.load_environment(env)
        if env is not None:
            config = {**config, "taskset": {**config.get("taskset", {}), "id": env}}
        return v1.load_environment(v1.resolve_env_config(dict(config)))
    except Exception as error:
        raise ConfigError(
            f"verifiers cannot load the environment {env or dict(config)!r:.200}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _remove_port_files() -> None:
    """Delete the files in `/tmp` in which servers of tools on this machine announced their
    ports."""
    from verifiers.v1.mcp import launch

    read: Any = getattr(launch, "_read_back_port", None)  # its own files, which may be deleted
    if read is None or read.__module__ != launch.__name__:
        return  # or already deleted

    async def read_and_removed(runtime: Any, path: str) -> int:
        try:
            return cast(int, await read(runtime, path))
        finally:
            if runtime.type == "subprocess":
                with suppress(FileNotFoundError):
                    os.unlink(path)

    launch._read_back_port = read_and_removed


def _only_seat(config: Any) -> str:
    """The name of the trained agent; raises ConfigError if there are several, or another model
    would answer, or more than once."""
    from verifiers.v1.configs.agent import agent_config_fields

    seats = agent_config_fields(config)
    if len(seats) != 1:
        raise ConfigError(
            f"environment {config.env_id} has the agents {', '.join(seats)}: only environments "
            "with one agent can be trained, because a rollout has one reward"
        )
    name, seat = next(iter(seats.items()))
    of = f"of environment {config.env_id} is set"
    for key in ("model", "client"):
        if getattr(seat, key) is not None:
            raise ConfigError(f"{name}.{key} {of}, but the trained model answers: remove it")
    for path, found in ((f"{name}.retries", seat.retries), ("retries", config.retries)):
        if found.max_retries or found.rules:
            raise ConfigError(
                f"{path} {of}, but each attempt at a rollout is a separate trace: remove it, and "
                "set explorer.max_retry_times"
            )
    return str(name)


def _row(task: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", task.data.model_dump(mode="json", exclude_defaults=True))


@contextmanager
def _api_key(key: str) -> Iterator[str]:
    """Name of an environment variable with a rollout's key, for verifiers to read; its programs
    do not inherit a variable of that name."""
    name = f"TUNER_{secrets.token_hex(8).upper()}_API_KEY"
    os.environ[name] = key
    try:
        yield name
    finally:
        del os.environ[name]


def _raise_failure(episode: Any, trace: Any) -> None:
    """Raises EpisodeError, RewardError or RewardTimeout; see `Verifiers.workflow`."""
    unscored = trace is not None and [name for name, one in trace.rewards.items() if one is None]
    if not episode.ok:
        errors = [*episode.errors, *(trace.errors if trace is not None else ())]
        last = errors[-1] if errors else None
        said = "no reason is recorded" if last is None else f"{last.type}: {last.message}"
        scoring = last is not None and _SCORING in last.message.partition(":")[0]
        raise RewardError(said) if scoring else EpisodeError(said)
    stop = trace.stop_condition
    if stop == "scoring_timeout":
        raise RewardTimeout("verifiers' own time limit for scoring has passed")
    if stop == "setup_timeout":
        raise EpisodeError("verifiers' own time limit for setup has passed")
    if unscored or not trace.rewards:
        what = f"{', '.join(unscored)} gave none" if unscored else "it has no rewards"
        raise RewardError(f"the episode is not scored: {what} (stopped by {stop})")


def _feedback(trace: Any) -> str:
    rewards, metrics = trace.rewards.items(), trace.metrics.items()
    lines = [f"{name}: {one.score:g} (weight {one.weight:g})" for name, one in rewards]
    lines += [f"{name}: {value:g}" for name, value in metrics if value is not None]
    lines.append(f"stopped by: {trace.stop_condition}")
    if trace.info:
        lines.append(f"info: {json.dumps(trace.info, default=str)}")
    return "\n".join(lines)
