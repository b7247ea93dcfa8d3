"""Tasks in Harbor's format: an instruction, a container and tests, which are the judge.

    tune(environment="harbor:tasks")              # each folder below it with a task.toml
    tune(environment=Harbor("tasks", agent=my_agent, limits={"memory_mb": 4096}))

Harbor reads the folders and runs the tests. Containers are ours, by podman or docker, or those of
any environment that Harbor has (`sandbox="daytona"`): its `BaseEnvironment` is the interface of
both.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import tempfile
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.config.schema import FEW_ROLLOUTS
from tuner.environments.containers import ContainerEngine, ContainerLimits
from tuner.environments.conversation import Dialogue, function_tool
from tuner.environments.program import filled, limits_of, model_variables, values_of
from tuner.errors import ConfigError, ProgramError, RewardError
from tuner.runs.environment import Environment
from tuner.tasks.functions import JudgeOutput, WorkflowOutput, called, shown
from tuner.tasks.loading import function_of

if TYPE_CHECKING:
    from harbor.environments.base import BaseEnvironment, ExecResult

    from tuner.environments.harbor_sandbox import TaskSandbox

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
        given = {
            "bash": ("Run a command and return its output.", {"command": command}),
            "submit": ("Say that the task is done.", {}),
        }
        tools = [
            function_tool(
                name,
                description,
                {"type": "object", "properties": fields}
                | {"required": [*fields], "additionalProperties": False},
            )
            for name, (description, fields) in given.items()
        ]
        self._request = {"tools": tools, **(request or {})}

    async def __call__(self, task: dict[str, Any], terminal: Terminal, model: Any) -> str:
        """Work on a task; returns its last words."""
        conversation = Dialogue(model, self._prompt, **self._request)
        conversation.tell(task["instruction"])
        said = ""
        while conversation.turns < self.turns:
            if (message := await conversation.answer(until_full=True)) is None:
                break
            said = message.content or said
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                if call.function.name == "submit":
                    return said
                conversation.tell_result(call, await self._told(call.function, terminal))
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


@dataclass
class HarborOutput:
    """The response of a rollout: what its agent said, and its sandbox, for the judge."""

    said: str
    sandbox: TaskSandbox | None = field(repr=False)  # None once it was judged
    failure: RewardError | None = None  # why it could not be, which is said again
    # Removes the sandbox of a response that is dropped.
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

    settings: Mapping[str, Any] = {"explorer.runner_per_model": FEW_ROLLOUTS}

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
        self._reward, self._command_seconds = reward, command_seconds
        self._agent_options = dict(agent_options or {})
        self._agent = self._agent_of(agent)
        self._pool = harbor_sandbox.SandboxPool(
            ContainerEngine(limits_of(LIMITS, limits), sandbox),
            sandbox=sandbox,
            network=network,
            options=dict(sandbox_options or {}),
            ahead=ahead,
        )
        self.train_dataset = self._rows(folder)
        self.eval_dataset = None if eval_folder is None else self._rows(eval_folder)
        configs = {task.name: task.config.environment for task in self._pool.tasks.values()}
        asking = [name for name, one in configs.items() if one.network_mode != "no-network"]
        if asking and network == "none":
            logger.warning(
                "%d of %d tasks have a network in Harbor and none here (%s): set network to 'task' "
                "if they need it",
                *(len(asking), len(configs), ", ".join(asking[:3])),
            )

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
        file = root / "task.toml"
        found = [file] if file.is_file() else sorted(root.glob("*/task.toml"))
        if not found:
            raise ConfigError(
                f"folder is {str(folder)!r}: neither it nor a folder in it has a task.toml"
            )
        tasks = {path: self._pool.task(path) for path in (str(one.parent) for one in found)}
        return [
            {"task": task.name, "folder": path, "instruction": task.instruction}
            for path, task in tasks.items()
        ]

    async def workflow(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        """Let the agent work on one task; raises SandboxError if its container did not start, and
        ProgramError if the agent is a program that failed."""
        pool = self._pool
        sandbox = await pool.take(pool.task(task["folder"]))
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
            return await called(self._agent, task, terminal, model)
        environment = sandbox.environment
        reaching: Any = nullcontext()
        if isinstance(environment, ContainerSandbox):
            reaching = environment.engine.reaching(environment.container, model.base_url)
        values = values_of(task, task["instruction"], model)
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
        """The reward of the task's tests, with the end of their output as feedback; raises
        RewardError if they gave none, or the container is gone, and RewardTimeout."""
        from tuner.environments.harbor_sandbox import TaskSandbox, tests_said, verified

        if isinstance(response, HarborOutput) and response.failure is not None:
            raise response.failure
        sandbox, pool = getattr(response, "sandbox", None), self._pool
        if not isinstance(sandbox, TaskSandbox):
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
        await self._pool.close()
