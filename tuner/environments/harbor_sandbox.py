"""Harbor's tasks and sandboxes: containers of ours behind Harbor's interface, and Harbor's own."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import shlex
import tarfile
import tomllib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from tuner.environments.containers import ContainerEngine, owned_folder
from tuner.environments.program import model_variables
from tuner.errors import (
    ConfigError,
    RewardError,
    RewardTimeout,
    SandboxError,
    importing,
    problem_text,
)
from tuner.rewards.sandbox import remove
from tuner.tasks.functions import shown

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it downloads a table of prices
with importing("tasks of Harbor need harbor 0.25 and Python 3.12", "harbor"):
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
logger = logging.getLogger("tuner.environments")
AGENTS = sorted(AgentName.values())
_COPIED_BYTES = 64 * 2**20
_FEEDBACK = 4000
_INSIDE = EnvironmentPaths()
_LOGS = (_INSIDE.agent_dir, _INSIDE.verifier_dir, _INSIDE.artifacts_dir)


class ContainerSandbox(BaseEnvironment):  # type: ignore[misc]  # harbor has no types here
    """A container of podman or docker, without compose."""

    container = ""

    def __init__(self, *args: Any, engine: ContainerEngine, **kwargs: Any) -> None:
        self.engine = engine
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
        config = self.task_env_config
        image = config.docker_image or f"localhost/tuner-harbor:{self.environment_id}"

        async def get() -> None:
            seconds = config.build_timeout_sec
            if config.docker_image:
                await self.engine.pull(image, seconds=seconds)
            else:
                await self.engine.build(self.environment_dir, image, seconds=seconds)

        await self.engine.need(image, get)
        own = (self._effective_cpus, self._effective_memory_mb, self._effective_storage_mb)
        given = zip(("cpus", "memory_mb", "disk_mb"), own, strict=True)
        limited = {name: value for name, value in given if value is not None}
        limits = replace(self.engine.default, **limited)
        options = ["--network=none"] if self._network_disabled else []
        self.container = await self.engine.create(
            image, limits, environment=self._startup_env(), options=options
        )
        folders = self._ensure_dirs_command(_LOGS)
        if config.workdir:
            folders += f" && mkdir -p {shlex.quote(config.workdir)}"
        made = await self.engine.exec(self.container, "bash", "-c", folders, user="root")
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
            *("bash", "-c", command),
            seconds=timeout_sec,
            environment=self._merge_env(env),
            workdir=cwd or self.task_env_config.workdir,
            user=self._resolve_user(user),
        )
        stdout, stderr = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
        if done.timed_out:
            stderr += f"\nended at its time limit of {timeout_sec:g} s"
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
    if (content := tar.extractfile(member := tar.getmembers()[0])) is None:
        raise SandboxError(f"{member.name} is not a file")
    target.write_bytes(content.read())


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


class SandboxPool:
    """Reads tasks, starts sandboxes, and removes them. `ahead` is the number of those that are
    started early, for the next rollout of a task, when none is waited for."""

    def __init__(
        self,
        engine: ContainerEngine,
        *,
        sandbox: str,
        network: str,
        options: Mapping[str, Any],
        ahead: int,
    ) -> None:
        self._engine, self._kind = engine, sandbox_of(sandbox)
        self._network, self._options, self._ahead = network, options, ahead
        self.tasks: dict[str, Task] = {}
        self._begin()

    def _begin(self) -> None:
        self._folder: Path | None = None
        self._early: dict[Task, asyncio.Task[TaskSandbox]] = {}
        self._kept: deque[TaskSandbox] = deque()
        self._live: set[TaskSandbox] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._waiting = 0

    def __getstate__(self) -> dict[str, Any]:
        """Another process has its own containers."""
        given = ("_engine", "_kind", "_network", "_options", "_ahead")
        return {name: getattr(self, name) for name in given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, tasks={})
        self._begin()

    def task(self, folder: str) -> Task:
        """The task of a folder; raises ConfigError, also if its sandbox could not be made."""
        if (known := self.tasks.get(folder)) is None:
            known = self.tasks[folder] = loaded(Path(folder))
            try:
                self._made(known, TrialPaths(Path(folder)))
            except (ValueError, RuntimeError, OSError) as error:
                raise ConfigError(f"{known.paths.config_path}: {error}") from error
        return known

    def _made(self, task: Task, paths: TrialPaths) -> TaskSandbox:
        """A sandbox that is not started; raises what Harbor raises if it cannot be."""
        config = task.config.environment.model_copy(deep=True)
        policy = config.resolve_baseline()
        if self._network == "none":
            policy = NetworkPolicy(network_mode=NetworkMode.NO_NETWORK)
        here = (paths.agent_dir, paths.verifier_dir, paths.artifacts_dir)
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
                for source, target in zip(here, _LOGS, strict=True)
            ],
            **self._options,
        }
        if self._kind is None:
            environment = ContainerSandbox(engine=self._engine, **given)
        else:
            environment = EnvironmentFactory.create_environment(self._kind, **given)
        return TaskSandbox(task, environment, paths)

    async def take(self, task: Task) -> TaskSandbox:
        """A started sandbox of the task."""
        if kept := next((one for one in self._kept if one.task is task), None):
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
        if (started := self._early.pop(task, None)) is None:
            return None
        try:
            return await asyncio.shield(started)
        except asyncio.CancelledError:
            self._early[task] = started
            raise
        except Exception as error:  # said again by the next one, if it lasts
            logger.info("a sandbox of %s did not start early: %s", task.name, error)
            return None

    async def _started(self, task: Task) -> TaskSandbox:
        self._folder = self._folder or owned_folder()
        paths = TrialPaths(self._folder / f"{task.short_name}-{os.urandom(4).hex()}")
        paths.mkdir()
        sandbox = self._made(task, paths)
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
        if task in self._early:
            return
        while len(self._early) >= self._ahead:
            self._early.pop(next(iter(self._early))).add_done_callback(self._drop_started)
        self._early[task] = asyncio.ensure_future(self._started(task))

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
        """Remove all sandboxes and folders."""
        loop = asyncio.get_running_loop()
        early = [one for one in self._early.values() if one.get_loop() is loop]
        for started in early:
            started.cancel()
        await asyncio.gather(*early, return_exceptions=True)
        ending = [one for one in self._ending if one.get_loop() is loop]
        stopping = [sandbox.stop() for sandbox in self._live]
        folder = self._folder
        self._begin()
        await asyncio.gather(*ending, *stopping, return_exceptions=True)
        await self._engine.close()
        if folder is not None:
            remove(folder)


async def run_harbors_agent(
    name: str, options: Mapping[str, Any], sandbox: TaskSandbox, values: Mapping[str, str]
) -> None:
    """Let one of Harbor's agents work, with the session's URL and key."""
    config = AgentConfig(
        name=name,
        model_name=f"openai/{values['model']}",
        env=model_variables(values),
        kwargs=dict(options),
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


async def verified(sandbox: TaskSandbox, key: str) -> tuple[float, dict[str, float]]:
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
        said = tests_said(sandbox)
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


def tests_said(sandbox: TaskSandbox) -> str | None:
    path = sandbox.paths.test_stdout_path
    if not path.is_file() or path.is_symlink():
        return None
    return path.read_text("utf-8", "replace").strip()[-_FEEDBACK:] or None


def loaded(folder: Path) -> Task:
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
        raise ConfigError(f"{file}: verifier: tests in a separate container are not supported")
    return task


def sandbox_of(name: str) -> EnvironmentType | None:
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
