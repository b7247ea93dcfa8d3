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
import json
import logging
import os
import shlex
import tempfile
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai

from tuner.encoding import displayable
from tuner.environments.containers import ContainerLimits, Containers, owned_folder
from tuner.environments.program import filled, model_variables
from tuner.errors import ConfigError, ProgramError, RewardError
from tuner.rewards.sandbox import remove
from tuner.runs.environment import Environment
from tuner.tasks.functions import JudgeOutput, WorkflowOutput, shown
from tuner.tasks.loading import function_of

if TYPE_CHECKING:
    from harbor.environments.base import BaseEnvironment, ExecResult
    from harbor.models.task.task import Task
    from harbor.models.trial.paths import TrialPaths

    from tuner.environments.harbor_sandbox import SandboxPool, TaskSandbox

logger = logging.getLogger("tuner.environments")
LIMITS = ContainerLimits(cpus=1, memory_mb=2048, disk_mb=10240)
"""Limits of a container if its task says nothing else."""


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

    Rows have `task`, its name, `folder` and `instruction`. Each rollout has its own container,
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
        from tuner.environments import harbor_sandbox

        if network not in ("none", "task"):
            raise ConfigError(f"network is {network!r}: expected 'none', or 'task'")
        self._network, self._ahead, self._reward = network, ahead, reward
        self._command_seconds = command_seconds
        self._agent_options = dict(agent_options or {})
        self._agent = self._agent_of(agent)
        harbor_sandbox.sandbox_of(sandbox)
        self._sandbox, self._sandbox_options = sandbox, dict(sandbox_options or {})
        kind = sandbox if sandbox in ("podman", "docker") else None
        self._containers = Containers(_limits(limits), kind)
        self._tasks: dict[str, Task] = {}
        self._begin()
        self.train_dataset = self._rows(folder)
        self.eval_dataset = None if eval_folder is None else self._rows(eval_folder)
        asking = harbor_sandbox.networked(self._tasks.values())
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
        self._folder: Path | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Another process has its own containers."""
        return {**super().__getstate__(), "_pool": None, "_folder": None}

    def _agent_of(self, agent: Any) -> Any:
        from tuner.environments.harbor_sandbox import AGENTS

        try:
            if agent is None:
                return TerminalAgent(**self._agent_options)
        except TypeError as error:
            raise ConfigError(f"agent_options: {error}") from None
        if isinstance(agent, str) and agent not in AGENTS:
            return function_of(agent, setting="agent")
        if callable(agent) or isinstance(agent, str | list | tuple):
            return agent
        raise ConfigError(
            f"agent is {shown(agent)}: expected an async function, the words of a command, or the "
            f"name of one of Harbor's agents ({', '.join(AGENTS)})"
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
        from harbor.models.trial.paths import TrialPaths

        from tuner.environments.harbor_sandbox import loaded

        if (known := self._tasks.get(str(folder))) is None:
            known = self._tasks[str(folder)] = loaded(folder)
            try:
                self._made(known, TrialPaths(folder))  # it checks what the task asks for
            except (ValueError, RuntimeError, OSError) as error:
                raise ConfigError(f"{folder / 'task.toml'}: {error}") from error
        return known

    def _made(self, task: Task, paths: TrialPaths) -> TaskSandbox:
        from tuner.environments.harbor_sandbox import made

        return made(
            task,
            paths,
            self._containers,
            sandbox=self._sandbox,
            network=self._network,
            options=self._sandbox_options,
        )

    def _fresh(self, task: Task) -> TaskSandbox:
        from harbor.models.trial.paths import TrialPaths

        if self._folder is None:
            self._folder = owned_folder()
        paths = TrialPaths(self._folder / f"{task.short_name}-{os.urandom(4).hex()}")
        paths.mkdir()
        return self._made(task, paths)

    async def workflow(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        """Let the agent work on one task.

        Raises:
            SandboxError: Its container did not start.
            ProgramError: The agent is a program, and failed.
        """
        from tuner.environments.harbor_sandbox import SandboxPool

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
        from tuner.environments.harbor_sandbox import ContainerSandbox, run_harbors_agent

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
                await run_harbors_agent(self._agent, self._agent_options, sandbox, values)
                return None
            command = shlex.join(filled(word, values) for word in self._agent)
            done = await environment.exec(command, env=model_variables(values))
        if done.return_code:
            said = (done.stderr or done.stdout or "").strip()[-1000:]
            raise ProgramError(f"{self._agent[0]} ended with {done.return_code}: {said}")
        return (done.stdout or "").strip()

    async def judge(self, task: dict[str, Any], response: Any) -> JudgeOutput:
        """The reward of the task's tests, with the end of their output as feedback.

        Raises:
            RewardError: They gave none, or the container is gone.
            RewardTimeout: They took too long.
        """
        from tuner.environments.harbor_sandbox import TaskSandbox, tests_said, verified

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
            reward, others = await verified(sandbox, self._reward)
            reused = sandbox.task.config.metadata.get("reuse") is True
        except RewardError as error:
            response.failure = error
            raise
        finally:
            feedback = tests_said(sandbox)
            pool.give_back(sandbox) if reused else pool.drop(sandbox)
        return JudgeOutput(reward=reward, metrics=others or None, feedback=feedback)

    async def close(self) -> None:
        """Remove the containers and folders."""
        pool, folder = self._pool, self._folder
        self._begin()
        if pool is not None:
            await pool.close()
        await self._containers.close()
        if folder is not None:
            remove(folder)


def _limits(given: Mapping[str, Any] | None) -> ContainerLimits:
    try:
        return replace(LIMITS, **(given or {}))
    except TypeError:
        raise ConfigError(
            f"limits is {dict(given or {})!r}; its keys are {', '.join(vars(LIMITS))}"
        ) from None
