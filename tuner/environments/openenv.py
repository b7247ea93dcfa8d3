"""OpenEnv: an environment behind a server; each rollout is a session of its own on its WebSocket.

    row -> reset(**row) -> observation -> message -> answer -> action -> step -> ... -> done

Server and client are OpenEnv's. An observation becomes the user's next message and the answer an
action; where an action is a call of a tool, the observation is its result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from inspect import isawaitable
from pathlib import Path
from typing import Any, Literal

from tuner.config import RunConfig
from tuner.environments.openenv_episode import Episode, Form, observation_text
from tuner.environments.seam import Environment, seed_rows
from tuner.environments.server_process import ServerProcess
from tuner.errors import ConfigError, MissingDependencyError, pip_install
from tuner.functions.calling import in_thread
from tuner.functions.loading import function_of
from tuner.functions.outputs import WorkflowOutput, shown

# How the client says that the server has as many sessions as it may.
_FULL = "(code: CAPACITY_REACHED)"


class OpenEnv(Environment):
    """An OpenEnv server as an environment: `tune(environment=OpenEnv("http://127.0.0.1:8000"))`.

    A row of the dataset is what `reset` is given, of which the server takes what its environment
    knows; all rollouts of a row have its `seed`. The row's `prompt`, a text or messages, is told
    before the first observation. A server that has no session left is waited for as long as some
    of ours are running.

    What the agent may do is read from the server's schema of actions: say something, where an
    action has one field that is a text; call the environment's tools, where it has tools (MCP);
    else call a tool `act`, whose arguments are the action's fields. Where there are tools, an
    answer without a call of one ends the episode.

    Args:
        url: The server's; or an `EnvClient`, whose class and server are taken.
        command: What starts the server when the first rollout needs it, and again where it has
            died; `{port}` in it is a free port of loopback. It is ended with the run.
        client: A class of clients, or a function that makes one (async, if need be); it is called
            with `base_url=` where there is a url or a command. None: OpenEnv's generic client,
            whose observations and actions are dicts. A text refers to it, as in the file.
        message_of: `(observation) -> text`, or a reference to such a function. None: the one field
            that is set, if it is a text, else the fields as JSON.
        action_of: `(text or ToolCall) -> action`, the same. None: as the schema says.
        tools: What is offered in the place of the schema's tools, in OpenAI's form.
        system_prompt: The conversation's first message.
        max_turns: Answers of the model in an episode, at most.
        reward: The rollout's: the `sum` of the rewards of its steps, or the `last` of them.
        unrewarded: The reward where no step had one. None: such a rollout is an `invalid_reward`.
        train_dataset, eval_dataset: As `tune()` takes them. Where there is none to train on, rows
            `{"seed": i}` are made for both.
        train_tasks, eval_tasks: How many, from 0 and from 1,000,000 on; 0: none.
        connect_timeout, step_timeout: Seconds for a session to be there, and for an answer.
        folder: Where `command` runs. None: in the current folder.

    Raises:
        ConfigError: There is no server, or a setting does not go with another.
        MissingDependencyError: openenv-core is not installed.
    """

    def __init__(
        self,
        url: Any = None,
        *,
        command: Sequence[str] | None = None,
        client: Callable[..., Any] | str | None = None,
        message_of: Callable[[Any], Any] | str | None = None,
        action_of: Callable[[Any], Any] | str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        system_prompt: str | None = None,
        max_turns: int = 10,
        reward: Literal["sum", "last"] = "sum",
        unrewarded: float | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        train_tasks: int = 1024,
        eval_tasks: int = 64,
        connect_timeout: float = 10.0,
        step_timeout: float = 60.0,
        folder: str | Path | None = None,
    ) -> None:
        any_client, generic, of_tools = _clients()
        if isinstance(url, any_client):
            client, url = client or type(url), url._ws_url.removesuffix("/ws")
        if url is None and command is None and client is None:
            raise ConfigError(
                "OpenEnv has no server: give url, or command, which starts one, or client"
            )
        if reward not in ("sum", "last"):
            raise ConfigError(f"OpenEnv's reward is {shown(reward)}; expected 'sum' or 'last'")
        self._url = url
        self._server = None if command is None else ServerProcess(command, url=url, folder=folder)
        client = function_of(client, setting="client")
        # The one for tools reads the same answers, and less of them.
        is_of_tools = isinstance(client, type) and issubclass(client, of_tools)
        self._client: Any = generic if client is None or is_of_tools else client
        self._generic = isinstance(self._client, type) and issubclass(self._client, generic)
        self._form = Form(
            function_of(message_of, setting="message_of") or observation_text,
            function_of(action_of, setting="action_of"),
            tools,
            system_prompt,
        )
        if not self._generic and self._form.action_of is None:
            name = getattr(client, "__name__", client)
            raise ConfigError(
                f"OpenEnv's client is {name}, whose actions are of classes of its own: give "
                "action_of, which makes one of a text or a ToolCall, or leave client out"
            )
        self._max_turns = max_turns
        self._reward = reward
        self._unrewarded = unrewarded
        self._connect_timeout, self._step_timeout = connect_timeout, step_timeout
        self._schema: dict[str, Any] | None = None
        self._running = 0
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        if train_dataset is None:
            self.train_dataset, held_out = seed_rows(train_tasks, eval_tasks)
            self.eval_dataset = eval_dataset or held_out

    async def workflow(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        """One episode.

        Raises:
            ConnectionError: The server cannot be reached, or went away.
            TimeoutError: It did not answer in time.
            RuntimeError: The environment failed; the message is the server's.
            FunctionError: There is nothing to tell the model.
        """
        url = self._url if self._server is None else await in_thread(self._server.address)
        episode = await self._begun(url, {"episode_id": model.session.id, **task})
        self._running += 1
        try:
            if self._form.action_of is None:
                episode.schema = await self._schema_of_actions(episode.client)
            await episode.begin(task.get("prompt"))
            while not episode.ended and episode.turns < self._max_turns:
                await episode.turn(model)
        finally:
            self._running -= 1
            await episode.client.close()
        return self._output(episode)

    def check_settings(self, config: RunConfig) -> None:
        """
        Raises:
            ConfigError: Several processes would start a server at one place.
        """
        workers = config.tuner.workers
        if workers and self._server is not None and self._url is not None:
            raise ConfigError(
                f"tuner.workers is {workers}, and each of them starts a server by command, all at "
                f"{self._url}: leave url out and put {{port}} into command, or set it to 0"
            )

    async def close(self) -> None:
        """End the server that was started here."""
        if self._server is not None:
            await in_thread(self._server.close)

    async def _begun(self, url: str | None, reset: dict[str, Any]) -> Episode:
        """A session after its reset. Where the server has none left, one of ours has to end."""
        from websockets.exceptions import ConnectionClosedOK

        waits_since, pause = time.monotonic(), 0.05
        while True:
            client = await self._connected(url)
            episode = Episode(client, url or "the server", self._step_timeout, self._form)
            try:
                await episode.reset(reset)
                return episode
            except BaseException as error:
                await client.close()
                # A server that is full may have hung up before it was asked.
                if _FULL not in str(error) and not isinstance(error.__cause__, ConnectionClosedOK):
                    raise
            now = time.monotonic()
            if self._running:
                waits_since = now
            elif now - waits_since > self._connect_timeout:
                raise ConnectionError(f"{episode.server} has no session left for us")
            await asyncio.sleep(pause)
            pause = min(1.0, 1.5 * pause)

    async def _connected(self, url: str | None) -> Any:
        given: dict[str, Any] = {} if url is None else {"base_url": url}
        if self._generic:
            given["connect_timeout_s"] = self._connect_timeout
            given["message_timeout_s"] = self._step_timeout
        made = self._client(**given)
        client = await made if isawaitable(made) else made
        try:
            await client.connect()
        except BaseException:
            await client.close()  # it may have a container
            raise
        return client

    async def _schema_of_actions(self, client: Any) -> dict[str, Any]:
        if self._schema is None:
            import httpx

            base = "http" + client._ws_url.removeprefix("ws").removesuffix("/ws")
            async with httpx.AsyncClient(trust_env=False, timeout=self._step_timeout) as asking:
                reply = await asking.get(f"{base}/schema")
            reply.raise_for_status()
            self._schema = reply.json()["action"]
        return self._schema

    def _output(self, episode: Episode) -> WorkflowOutput:
        rewards, reward = episode.rewards, self._unrewarded
        if rewards:
            reward = sum(rewards) if self._reward == "sum" else rewards[-1]
        metrics = {
            "turns": float(episode.turns),
            "done": float(episode.result.done),
            "refused_actions": float(episode.refused),
            "out_of_room": float(episode.out_of_room),
        }
        return WorkflowOutput(reward=reward, response=episode.said, metrics=metrics)


def _clients() -> tuple[type[Any], type[Any], type[Any]]:
    """OpenEnv's class of all clients, that of dicts, and that of tools.

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        from openenv.core.env_client import EnvClient
        from openenv.core.generic_client import GenericEnvClient
        from openenv.core.mcp_client import MCPClientBase
    except ImportError as error:
        raise MissingDependencyError(
            f"OpenEnv needs openenv-core, which does not import ({error}): {pip_install('openenv')}"
        ) from error
    return EnvClient, GenericEnvClient, MCPClientBase
