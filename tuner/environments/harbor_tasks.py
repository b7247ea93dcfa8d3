"""Tasks in Harbor's format: an instruction, a container and tests, which are the judge.

    tune(environment="harbor:tasks")              # each folder below it with a task.toml
    tune(environment=Harbor("tasks", agent=my_agent, limits={"memory_mb": 4096}))

Harbor reads the folders and runs the tests. Containers are ours, by podman or docker, or those of
any environment that Harbor has (`sandbox="daytona"`): its `BaseEnvironment` is the interface of
both.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import logging
import os
import shlex
import tarfile
import tempfile
import tomllib
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import openai
from pydantic import ValidationError

from tuner.encoding import displayable
from tuner.environments.containers import ContainerEngine, ContainerLimits, owned_folder
from tuner.environments.program import filled, model_variables
from tuner.errors import (
    ConfigError,
    MissingDependencyError,
    ProgramError,
    RewardError,
    RewardTimeout,
    SandboxError,
    pip_install,
    problem_text,
)
from tuner.rewards.sandbox import remove
from tuner.runs.environment import Environment
from tuner.tasks.functions import JudgeOutput, WorkflowOutput, shown
from tuner.tasks.loading import function_of

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it downloads a table of prices
try:
    from harbor.agents.factory import AgentFactory
    from harbor.environments.base import BaseEnvironment, ExecResult, transfer_tar_filter
    from harbor.environments.capabilities import (
        EnvironmentCapabilities,
        EnvironmentResourceCapabilities,
    )
    from harbor.environments.definition import require_agent_environment_definition
    from harbor.environments.factory import EnvironmentFactory
    from harbor.models.agent.context import AgentContext
    from harbor.models.agent.name import AgentName
    from harbor.models.environment_type import EnvironmentType
    from harbor.models.task.config import NetworkMode, NetworkPolicy
    from harbor.models.task.task import Task
    from harbor.models.task.verifier_mode import task_has_any_separate_verifier
    from harbor.models.trial.config import AgentConfig
    from harbor.models.trial.paths import EnvironmentPaths, TrialPaths
    from harbor.verifier.verifier import Verifier
except (ImportError, SyntaxError) as error:  # older Pythons cannot read its files
    raise MissingDependencyError(
        f"tasks of Harbor need harbor 0.25 and Python 3.12 ({error}): {pip_install('harbor')}"
    ) from error

logger = logging.getLogger("tuner.environments")
LIMITS = ContainerLimits(cpus=1, memory_mb=2048, disk_mb=10240)
"""Limits of a container if its task says nothing else."""
_COPIED_BYTES = 64 * 2**20
_FEEDBACK = 4000
_INSIDE = EnvironmentPaths()
_LOGS = (_INSIDE.agent_dir, _INSIDE.verifier_dir, _INSIDE.artifacts_dir)

# A container of ours, behind Harbor's interface.


class Containers:
    """The client that containers are started with, found at the first one, and its images."""

    def __init__(self, kind: str | None, limits: ContainerLimits) -> None:
        self.limits, self._kind = limits, kind
        self._lock = asyncio.Lock()
        self._engine: ContainerEngine | None = None
        self._images: dict[str, str] = {}

    async def image(self, environment: BaseEnvironment) -> tuple[ContainerEngine, str]:
        """The client, and the name of a task's image, pulled or built once."""
        config, content = environment.task_env_config, environment.environment_id

        async def get(engine: ContainerEngine) -> str:
            if config.docker_image:
                await engine.pull(config.docker_image, seconds=config.build_timeout_sec)
                return str(config.docker_image)
            tag, seconds = f"localhost/tuner-harbor:{content}", config.build_timeout_sec
            await engine.build(environment.environment_dir, tag, seconds=seconds)
            return tag

        async with self._lock:
            if self._engine is None:
                self._engine = await ContainerEngine.of(get, self.limits, kind=self._kind)
            key = config.docker_image or content
            if key not in self._images:
                self._images[key] = await get(self._engine)
            return self._engine, self._images[key]

    async def close(self) -> None:
        """Remove all containers."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.close)


class ContainerSandbox(BaseEnvironment):  # type: ignore[misc]  # harbor has no types here
    """A container of podman or docker, without compose."""

    engine: ContainerEngine
    container = ""

    def __init__(self, *args: Any, containers: Containers, **kwargs: Any) -> None:
        self._containers = containers
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "local"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        able = ("cpu_limit", "memory_limit", "fractional_cpus")
        return EnvironmentResourceCapabilities(**dict.fromkeys(able, True))

    def _validate_definition(self) -> None:
        image = self.task_env_config.docker_image
        require_agent_environment_definition(self.environment_dir, docker_image=image)
        if (self.environment_dir / "docker-compose.yaml").exists():
            raise ValueError(
                "environment/docker-compose.yaml has several containers: set sandbox to one of "
                "Harbor's that has compose, such as 'harbor-docker'"
            )

    async def start(self, force_build: bool) -> None:
        self.engine, image = await self._containers.image(self)
        own = {
            "cpus": self._effective_cpus,
            "memory_mb": self._effective_memory_mb,
            "disk_mb": self._effective_storage_mb,
        }
        given = {name: value for name, value in own.items() if value is not None}
        limits = replace(self._containers.limits, **given)
        self.container = await self.engine.create(
            image, limits, environment=self._startup_env(), network=not self._network_disabled
        )
        folders = self._ensure_dirs_command(_LOGS)
        if self.task_env_config.workdir:
            folders += f" && mkdir -p {shlex.quote(self.task_env_config.workdir)}"
        made = await self.engine.exec(self.container, folders, user="root")
        if made.status:
            raise SandboxError(f"the image {image!r} needs bash: {made.problem}")
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        if self.container:
            await self.engine.remove(self.container)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: float | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        done = await self.engine.exec(
            self.container,
            command,
            seconds=timeout_sec,
            environment=self._merge_env(env),
            workdir=cwd or self.task_env_config.workdir,
            user=self._resolve_user(user),
        )
        stderr = done.stderr.decode(errors="replace")
        if done.timed_out:
            stderr += f"\nended at its time limit of {timeout_sec:g} s"
        stdout = done.stdout.decode(errors="replace")
        return ExecResult(stdout=stdout, stderr=stderr, return_code=done.status)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._upload(str(source_path), target_path, str(PurePosixPath(target_path).parent))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._upload(f"{source_dir}/.", target_dir, target_dir)

    async def _upload(self, source: str, target: str, folder: str) -> None:
        await self.exec(f"mkdir -p {shlex.quote(folder)}", user="root")
        await self.engine.copy_in(self.container, source, target)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        with await self._archive(source_path) as tar:
            _extract_file(tar, Path(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        with await self._archive(f"{source_dir}/.") as tar:
            tar.extractall(target_dir, filter=transfer_tar_filter)

    async def _archive(self, source: str) -> tarfile.TarFile:
        found = await self.engine.copy_out(self.container, source, limit=_COPIED_BYTES)
        return tarfile.open(fileobj=io.BytesIO(found))


def _extract_file(tar: tarfile.TarFile, target: Path) -> None:
    content = tar.extractfile(tar.getmembers()[0])
    if content is None:
        raise SandboxError(f"{tar.getmembers()[0].name} is not a file")
    target.write_bytes(content.read())


# What an agent does, and what its sandbox is.


@dataclass(eq=False)
class TaskSandbox:
    """A sandbox of a task, behind Harbor's interface, and the folders for its logs here."""

    task: Task
    environment: BaseEnvironment
    paths: TrialPaths

    async def stop(self) -> None:
        """Remove it."""
        try:
            await self.environment.stop(delete=True)
        except Exception as error:
            logger.warning("a sandbox of %s was not removed: %s", self.task.name, error)
        remove(self.paths.trial_dir)


class Terminal:
    """The computer that an agent works on; `environment` is Harbor's object for it.

    Args:
        seconds: Time limit of a command.
    """

    def __init__(self, environment: BaseEnvironment, seconds: float) -> None:
        self.environment, self.seconds = environment, seconds

    async def run(
        self,
        command: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109  # it holds in the container
    ) -> ExecResult:
        """Run a command of bash; the result has `stdout`, `stderr` and `return_code`."""
        seconds = self.seconds if timeout is None else timeout
        return await self.environment.exec(command, timeout_sec=seconds)

    async def read(self, path: str) -> str:
        """The text of a file; raises FileNotFoundError."""
        done = await self.environment.exec(f"cat {shlex.quote(path)}")
        if done.return_code:
            raise FileNotFoundError((done.stderr or path).strip())
        return done.stdout or ""

    async def write(self, path: str, text: str) -> None:
        """Write a text to a file."""
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=self.environment.trial_paths.trial_dir
        ) as file:
            file.write(text)
            file.flush()
            await self.environment.upload_file(file.name, path)


Agent = Callable[[dict[str, Any], Terminal, Any], Awaitable[Any]]
_PROMPT = (
    "You work in a terminal. Call bash to run a command and read its output; call submit when the "
    "task is done."
)


def _tool(name: str, description: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


class TerminalAgent:
    """An agent with two tools, `bash` and `submit`.

    It ends with a call of submit, an answer without a call, its last turn, or a full context.

    Args:
        turns: Maximum number of answers.
        commands: The only commands of bash that it may call; None: any.
        shown: Characters of a command's output that the model sees.
        request: Other arguments of each request, such as `tool_choice`.
    """

    def __init__(
        self,
        *,
        turns: int = 30,
        commands: Sequence[str] | None = None,
        prompt: str | None = _PROMPT,
        shown: int = 8000,
        request: Mapping[str, Any] | None = None,
    ) -> None:
        self.turns, self.shown, self._prompt = turns, shown, prompt
        command = {"type": "string"} if commands is None else {"enum": [*commands]}
        tools = {
            "bash": ("Run a command and return its output.", {"command": command}),
            "submit": ("Say that the task is done.", {}),
        }
        self._fixed = {"tools": [_tool(name, *tool) for name, tool in tools.items()]}
        self._fixed |= request or {}

    async def __call__(self, task: dict[str, Any], terminal: Terminal, model: Any) -> str:
        """Work on a task; returns its last words."""
        messages = [{"role": "user", "content": task["instruction"]}]
        if self._prompt:
            messages.insert(0, {"role": "system", "content": self._prompt})
        said = ""
        for turn in range(self.turns):
            try:
                reply = await model.client.chat.completions.create(
                    model=model.model_name, messages=messages, **self._fixed
                )
            except openai.BadRequestError as error:
                if error.code != "context_length_exceeded" or not turn:
                    raise
                break
            message = reply.choices[0].message
            said = message.content or said
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                if call.function.name == "submit":
                    return said
                told = await self._told(call.function, terminal)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
        return said

    async def _told(self, function: Any, terminal: Terminal) -> str:
        if function.name != "bash":
            return f"there is no tool {function.name}; there are bash and submit"
        try:
            command = json.loads(function.arguments or "{}")["command"]
        except (ValueError, KeyError, TypeError):
            return "the arguments are not JSON with a command"
        done = await terminal.run(str(command))
        text = f"{done.stdout or ''}{done.stderr or ''}".strip()
        if len(text) > self.shown:
            half = self.shown // 2
            text = f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"
        return f"{text}\nexit status {done.return_code}" if done.return_code else text


class SandboxPool:
    """Starts sandboxes, some of them early for the next rollout of a task, and removes them.

    Args:
        make: Makes the sandbox of a task, which is then started.
        ahead: Number of sandboxes that are started before they are needed, when none is waited for.
    """

    def __init__(self, make: Callable[[Task], TaskSandbox], ahead: int) -> None:
        self._make, self._ahead = make, ahead
        self._early: deque[tuple[Task, asyncio.Task[TaskSandbox]]] = deque()
        self._kept: deque[TaskSandbox] = deque()
        self._live: set[TaskSandbox] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._waiting = 0

    async def take(self, task: Task) -> TaskSandbox:
        """A started sandbox of the task."""
        for kept in self._kept:
            if kept.task is task:
                self._kept.remove(kept)
                return kept
        self._waiting += 1
        try:
            sandbox = await self._started_early(task) or await self._started(task)
        finally:
            self._waiting -= 1
        if self._ahead and not self._waiting:
            self._start_early(task)
        return sandbox

    async def _started_early(self, task: Task) -> TaskSandbox | None:
        for found in self._early:
            if found[0] is task:
                self._early.remove(found)
                try:
                    return await asyncio.shield(found[1])
                except asyncio.CancelledError:
                    self._early.append(found)
                    raise
                except Exception as error:  # said again by the next one, if it lasts
                    logger.info("a sandbox of %s did not start early: %s", task.name, error)
                    return None
        return None

    async def _started(self, task: Task) -> TaskSandbox:
        sandbox = self._make(task)
        self._live.add(sandbox)
        seconds = task.config.environment.build_timeout_sec
        try:
            async with asyncio.timeout(seconds) as limit:
                await sandbox.environment.start(force_build=False)
                await sandbox.environment.run_healthcheck()
        except BaseException as error:
            self.drop(sandbox)
            if isinstance(error, TimeoutError) and limit.expired():
                raise SandboxError(
                    f"the sandbox of {task.name} did not start within {seconds:g} s "
                    "(environment.build_timeout_sec)"
                ) from None
            raise
        return sandbox

    def _start_early(self, task: Task) -> None:
        if any(waiting is task for waiting, _ in self._early):
            return
        while len(self._early) >= self._ahead:
            self._early.popleft()[1].add_done_callback(self._drop_started)
        self._early.append((task, asyncio.ensure_future(self._started(task))))

    def _drop_started(self, started: asyncio.Task[TaskSandbox]) -> None:
        if not started.cancelled() and started.exception() is None:
            self.drop(started.result())

    def give_back(self, sandbox: TaskSandbox) -> None:
        """Keep a sandbox for the next rollout of its task: no more than are in use."""
        self._kept.append(sandbox)
        if len(self._kept) > max(self._ahead, len(self._live) - len(self._kept)):
            self.drop(self._kept.popleft())

    def drop(self, sandbox: TaskSandbox) -> None:
        """Remove a sandbox in the background."""
        if sandbox not in self._live:
            return
        try:
            ending = asyncio.get_running_loop().create_task(sandbox.stop())
        except RuntimeError:  # no event loop: close() removes it
            return
        self._live.discard(sandbox)
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Remove all sandboxes."""
        loop = asyncio.get_running_loop()
        early = [started for _, started in self._early if started.get_loop() is loop]
        for started in early:
            started.cancel()
        await asyncio.gather(*early, return_exceptions=True)
        ending = [task for task in self._ending if task.get_loop() is loop]
        stopping = [sandbox.stop() for sandbox in self._live]
        self._live.clear()
        await asyncio.gather(*ending, *stopping, return_exceptions=True)


# The environment.


@dataclass
class HarborOutput:
    """The response of a rollout: what its agent said, and its sandbox, which the judge looks into.

    Attributes:
        said: The agent's last words.
        sandbox: None once it was judged.
        failure: Why the judge could not, which it says again.
        unjudged: Removes the sandbox of a response that is dropped.
    """

    said: str
    sandbox: TaskSandbox | None = field(repr=False)
    failure: RewardError | None = None
    unjudged: weakref.finalize[..., Any] | None = field(default=None, repr=False)

    def get_text_content(self) -> str:
        """The text that the trace stores."""
        return self.said


class Harbor(Environment):
    """Tasks in Harbor's format.

    Rows have `task`, its name, `folder` and `instruction`. Each rollout has a container of its own,
    without a network. When the agent is done, or its time is over, the task's tests run in it, and
    their reward file is the reward.

    Args:
        folder: A task, or a folder with tasks.
        eval_folder: The same for evaluation.
        agent: An async function of the task, a `Terminal` and the model, or `path/file.py:name` of
            one; a list, the command of a program in the container, which finds the model by the
            usual variables, and in which {prompt} and {instruction} are filled in; the name of one
            of Harbor's agents, such as "terminus-2". None: a `TerminalAgent`.
        agent_options: Arguments of Harbor's agent, or of `TerminalAgent`.
        sandbox: "local", "podman" or "docker" by our containers; or the name of one of Harbor's
            environments, such as "daytona", "e2b", "modal"; for its own docker, "harbor-docker".
        sandbox_options: Arguments of Harbor's environment.
        network: "none", or "task": what each task says.
        limits: Limits of containers whose task says nothing else; replaces some of `LIMITS`.
        command_seconds: Time limit of a command of the agent.
        ahead: Sandboxes that are started before they are needed.
        reward: Key of the reward if the tests give several; the others are metrics.

    Raises:
        ConfigError: A task cannot be read, or asks for what the sandbox cannot do.
        MissingDependencyError: Harbor is not installed.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        eval_folder: str | Path | None = None,
        agent: Agent | str | Sequence[str] | None = None,
        agent_options: Mapping[str, Any] | None = None,
        sandbox: str = "local",
        sandbox_options: Mapping[str, Any] | None = None,
        network: str = "none",
        limits: Mapping[str, Any] | None = None,
        command_seconds: float = 120.0,
        ahead: int = 1,
        reward: str = "reward",
    ) -> None:
        if network not in ("none", "task"):
            raise ConfigError(f"network is {network!r}: expected 'none', or 'task'")
        self._network, self._ahead, self._reward = network, ahead, reward
        self._command_seconds = command_seconds
        self._agent_options = dict(agent_options or {})
        self._agent = self._agent_of(agent)
        self._sandbox, self._sandbox_options = _sandbox_of(sandbox), dict(sandbox_options or {})
        self._local = sandbox if sandbox in ("podman", "docker") else None
        self._limits = _limits(limits)
        self._tasks: dict[str, Task] = {}
        self._begin()
        self.train_dataset = self._rows(folder)
        self.eval_dataset = None if eval_folder is None else self._rows(eval_folder)
        tasks = self._tasks.values()
        modes = {task.name: task.config.environment.network_mode for task in tasks}
        asking = [name for name, mode in modes.items() if mode != NetworkMode.NO_NETWORK]
        if asking and network == "none":
            logger.warning(
                "%d of %d tasks have a network in Harbor and none here (%s): set network to 'task' "
                "if they need it",
                len(asking),
                len(self._tasks),
                ", ".join(asking[:3]),
            )

    def _begin(self) -> None:
        self._pool: SandboxPool | None = None
        self._containers: Containers | None = None
        self._folder: Path | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Another process has its own containers."""
        return {**super().__getstate__(), "_pool": None, "_containers": None, "_folder": None}

    def _agent_of(self, agent: Any) -> Any:
        try:
            if agent is None:
                return TerminalAgent(**self._agent_options)
        except TypeError as error:
            raise ConfigError(f"agent_options: {error}") from None
        if isinstance(agent, str) and agent not in AgentName.values():
            return function_of(agent, setting="agent")
        if callable(agent) or isinstance(agent, str | list | tuple):
            return agent
        raise ConfigError(
            f"agent is {shown(agent)}: expected an async function, the words of a command, or the "
            f"name of one of Harbor's agents ({', '.join(sorted(AgentName.values()))})"
        )

    def _rows(self, folder: str | Path) -> list[dict[str, Any]]:
        root = Path(folder).resolve()
        found = [root] if (root / "task.toml").is_file() else sorted(
            path.parent for path in root.glob("*/task.toml")
        )  # fmt: skip
        if not found:
            raise ConfigError(
                f"folder is {str(folder)!r}: neither it nor a folder in it has a task.toml"
            )
        return [self._row(path) for path in found]

    def _row(self, folder: Path) -> dict[str, Any]:
        task = self._task_in(folder)
        return {"task": task.name, "folder": str(folder), "instruction": task.instruction}

    def _task_in(self, folder: Path) -> Task:
        if (known := self._tasks.get(str(folder))) is None:
            known = self._tasks[str(folder)] = _loaded(folder)
            try:
                self._make(known, TrialPaths(folder))  # it checks what the task asks for
            except (ValueError, RuntimeError, OSError) as error:
                raise ConfigError(f"{folder / 'task.toml'}: {error}") from error
        return known

    def _make(self, task: Task, paths: TrialPaths) -> TaskSandbox:
        """A sandbox of a task, not started yet."""
        config = task.config.environment.model_copy(deep=True)
        policy = config.resolve_baseline()
        if self._network == "none":
            policy = NetworkPolicy(network_mode=NetworkMode.NO_NETWORK)
        given: dict[str, Any] = {
            "environment_dir": task.paths.environment_dir,
            "environment_name": task.short_name,
            "session_id": paths.trial_dir.name,
            "trial_paths": paths,
            "task_env_config": config,
            "network_policy": policy,
            "logger": logger,
            "auto_mounts": [
                {"type": "bind", "source": str(source), "target": str(target)}
                for source, target in zip(
                    (paths.agent_dir, paths.verifier_dir, paths.artifacts_dir), _LOGS, strict=True
                )
            ],
            **self._sandbox_options,
        }
        if self._sandbox is not None:
            made = EnvironmentFactory.create_environment(self._sandbox, **given)
        else:
            if self._containers is None:
                self._containers = Containers(self._local, self._limits)
            made = ContainerSandbox(containers=self._containers, **given)
        return TaskSandbox(task, made, paths)

    def _fresh(self, task: Task) -> TaskSandbox:
        if self._folder is None:
            self._folder = owned_folder()
        paths = TrialPaths(self._folder / f"{task.short_name}-{os.urandom(4).hex()}")
        paths.mkdir()
        return self._make(task, paths)

    async def workflow(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        """Let the agent work on one task.

        Raises:
            SandboxError: Its container did not start.
            ProgramError: The agent is a program, and failed.
        """
        if self._pool is None:
            self._pool = SandboxPool(self._fresh, self._ahead)
        pool = self._pool
        sandbox = await pool.take(self._task_in(Path(task["folder"])))
        seconds = sandbox.task.config.agent.timeout_sec
        metrics = {"agent_timeout": 0.0}
        said: Any = None
        try:
            with sandbox.environment.with_default_user(sandbox.task.config.agent.user):
                try:
                    async with asyncio.timeout(seconds) as limit:
                        said = await self._run_agent(task, sandbox, model)
                except TimeoutError:
                    if not limit.expired():
                        raise
                    metrics["agent_timeout"] = 1.0
        except BaseException:
            pool.drop(sandbox)
            raise
        output = HarborOutput("" if said is None else str(said), sandbox)
        output.unjudged = weakref.finalize(output, pool.drop, sandbox)
        output.unjudged.atexit = False
        return WorkflowOutput(response=output, metrics=metrics)

    async def _run_agent(self, task: dict[str, Any], sandbox: TaskSandbox, model: Any) -> Any:
        if callable(self._agent):
            terminal = Terminal(sandbox.environment, self._command_seconds)
            said = self._agent(task, terminal, model)
            return await said if inspect.isawaitable(said) else said
        environment = sandbox.environment
        reaching: Any = nullcontext()
        if isinstance(environment, ContainerSandbox):
            reaching = environment.engine.reaching(environment.container, model.base_url)
        values = displayable({name: str(value) for name, value in task.items()}) | {
            "prompt": displayable(task["instruction"]),
            "base_url": model.base_url,
            "api_key": model.api_key,
            "model": model.model_name,
        }
        async with reaching:
            if isinstance(self._agent, str):
                return await self._run_harbors(self._agent, sandbox, values)
            command = shlex.join(filled(word, values) for word in self._agent)
            done = await environment.exec(command, env=model_variables(values))
        if done.return_code:
            said = (done.stderr or done.stdout or "").strip()[-1000:]
            raise ProgramError(f"{self._agent[0]} ended with {done.return_code}: {said}")
        return (done.stdout or "").strip()

    async def _run_harbors(self, name: str, sandbox: TaskSandbox, values: Mapping[str, str]) -> str:
        config = AgentConfig(
            name=name,
            model_name=f"openai/{values['model']}",
            env=model_variables(values),
            kwargs=self._agent_options,
        )
        own: dict[str, Any] = {}
        if name == AgentName.ORACLE.value:
            own = {"task_dir": sandbox.task.task_dir, "trial_paths": sandbox.paths}
        agent = AgentFactory.create_agent_from_config(
            config, logs_dir=sandbox.paths.agent_dir, logger=logger, **own
        )
        context = AgentContext()
        with sandbox.environment.scoped_exec_env(dict(config.env)):
            await agent.setup(sandbox.environment)
            await agent.run(sandbox.task.instruction, sandbox.environment, context)
        return ""

    async def judge(self, task: dict[str, Any], response: Any) -> JudgeOutput:
        """The reward of the task's tests, with the end of their output as feedback.

        Raises:
            RewardError: They gave none, or the container is gone.
            RewardTimeout: They took too long.
        """
        if isinstance(response, HarborOutput) and response.failure is not None:
            raise response.failure
        sandbox, pool = getattr(response, "sandbox", None), self._pool
        if not isinstance(sandbox, TaskSandbox) or pool is None:
            raise RewardError(
                f"the response is {shown(response)}: a task's tests run in its container, which "
                "exists only during the rollout"
            )
        response.sandbox, reused = None, False
        response.unjudged.detach()
        try:
            reward, others = await _verified(sandbox, self._reward)
            reused = sandbox.task.config.metadata.get("reuse") is True
        except RewardError as error:
            response.failure = error
            raise
        finally:
            feedback = _tests_said(sandbox)
            pool.give_back(sandbox) if reused else pool.drop(sandbox)
        return JudgeOutput(reward=reward, metrics=others or None, feedback=feedback)

    async def close(self) -> None:
        """Remove the containers and folders."""
        pool, containers, folder = self._pool, self._containers, self._folder
        self._begin()
        if pool is not None:
            await pool.close()
        if containers is not None:
            await containers.close()
        if folder is not None:
            remove(folder)


async def _verified(sandbox: TaskSandbox, key: str) -> tuple[float, dict[str, float]]:
    """The reward of a task's tests, and their others; raises RewardError."""
    name, config = sandbox.task.name, sandbox.task.config.verifier
    verifier = Verifier(sandbox.task, sandbox.paths, sandbox.environment, logger=logger)
    try:
        with sandbox.environment.with_default_user(config.user):
            async with asyncio.timeout(config.timeout_sec) as limit:
                rewards = dict((await verifier.verify()).rewards or {})
    except Exception as error:
        if isinstance(error, TimeoutError) and limit.expired():
            raise RewardTimeout(
                f"the tests of {name} took longer than {config.timeout_sec:g} s "
                "(verifier.timeout_sec)"
            ) from None
        why = "".join(f": {type(one).__name__}: {one}" for one in (error, error.__cause__) if one)
        said = _tests_said(sandbox)
        raise RewardError(
            f"the tests of {name} gave no reward{why}" + (f"\nThey said: {said}" if said else "")
        ) from error
    key = key if len(rewards) > 1 else next(iter(rewards), key)
    if key not in rewards:
        raise RewardError(
            f"the tests of {name} give {', '.join(rewards) or 'nothing'}: set reward to the one "
            "that counts"
        )
    reward = float(rewards.pop(key))
    return reward, {f"reward_{other}": float(value) for other, value in rewards.items()}


def _tests_said(sandbox: TaskSandbox) -> str | None:
    path = sandbox.paths.test_stdout_path
    if not path.is_file() or path.is_symlink():
        return None
    return path.read_text("utf-8", "replace").strip()[-_FEEDBACK:] or None


def _loaded(folder: Path) -> Task:
    """Harbor's task of a folder; raises ConfigError, which names file, field and value."""
    file = folder / "task.toml"
    try:
        task = Task(folder)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not TOML: {error}") from None
    except ValidationError as error:
        detail = error.errors()[0]
        place = ".".join(str(part) for part in detail["loc"])
        given = shown(detail["input"])
        raise ConfigError(f"{file}: {place} is {given}: {problem_text(detail)}") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{folder}: {error}") from None
    if task.has_steps:
        raise ConfigError(f"{file}: steps: tasks with several steps are not supported")
    if task_has_any_separate_verifier(task.config):
        raise ConfigError(f"{file}: verifier: tests in a container of their own are not supported")
    return task


def _sandbox_of(name: str) -> EnvironmentType | None:
    """Harbor's environment of a name; None: ours."""
    if name in ("local", "podman", "docker"):
        return None
    known = {one.value: one for one in EnvironmentType}
    known |= {f"harbor-{own}": known[own] for own in ("docker", "podman")}
    if name not in known:
        raise ConfigError(
            f"sandbox is {name!r}: expected 'local', 'podman', 'docker', or one of Harbor's: "
            f"{', '.join(sorted(known))}"
        )
    return known[name]


def _limits(given: Mapping[str, Any] | None) -> ContainerLimits:
    try:
        return replace(LIMITS, **(given or {}))
    except TypeError:
        raise ConfigError(
            f"limits is {dict(given or {})!r}; its keys are {', '.join(vars(LIMITS))}"
        ) from None
