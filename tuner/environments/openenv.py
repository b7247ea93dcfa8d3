"""OpenEnv: an environment behind a server; each rollout is a session of its own on its WebSocket.

    row -> reset(**row) -> observation -> message -> answer -> action -> step -> ... -> done

Server and client are OpenEnv's. An observation becomes the user's next message and the answer an
action; if an action is a tool call, the observation is its result.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isawaitable
from pathlib import Path
from typing import Any, Literal

from tuner.config import RunConfig
from tuner.environments.conversation import Dialogue, function_tool, messages
from tuner.environments.server_process import ServerProcess
from tuner.errors import ConfigError, FunctionError, importing
from tuner.runs.environment import Environment, seed_rows
from tuner.tasks.functions import WorkflowOutput, in_thread, shown
from tuner.tasks.loading import function_of

# The only tool of an environment whose actions have their own fields.
ACT = "act"
# Title of the schema of actions if an action calls one of the environment's tools.
_TOOL_ACTIONS = frozenset({"Action", "CallToolAction", "ListToolsAction"})
# The client's error for an action that the server rejected as invalid.
_INVALID = "(code: VALIDATION_ERROR)"


@dataclass(frozen=True)
class ToolCall:
    """Input of `action_of` when the model called a tool: its name, and the model's arguments."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Form:
    """Conversion of observations to messages, and of answers to actions; None: by the server's
    schema."""

    message_of: Callable[[Any], Any]
    action_of: Callable[[Any], Any] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    system_prompt: str | None = None


@dataclass
class OpenEnvEpisode:
    """A session at the server, and its state."""

    client: Any
    server: str  # and the time limit of its answers, for messages
    seconds: float
    form: Form
    schema: Mapping[str, Any] = field(default_factory=dict)  # of actions, if the form has none
    result: Any = None  # of the last step, or of the reset
    rewards: list[float] = field(default_factory=list)  # of the steps that had one
    said: str = ""  # the text of the last answer
    refused: int = 0  # invalid actions
    out_of_room: bool = False  # no further answer fits in the context
    _left: bool = False

    @property
    def ended(self) -> bool:
        """Whether the environment is done, or the agent, which called no tool or has no room."""
        return self._left or self.out_of_room or bool(self.result.done)

    async def reset(self, arguments: Mapping[str, Any]) -> None:
        """Begin; arguments unknown to the server's environment are dropped."""
        self.result = await self._answered("reset", self.client.reset(**arguments))

    async def play(self, model: Any, prompt: Any, max_turns: int) -> int:
        """Let the model act until the end; returns the number of its answers. Raises FunctionError
        if there is no first message."""
        tools = await self._offer()
        told = [*messages(prompt), *messages(self.form.message_of(self.result.observation))]
        if not told:
            raise FunctionError(
                "there is no message for the model: the environment's first observation is empty, "
                "and the row has no `prompt`; add one to the rows, or set message_of"
            )
        offer = {"tools": tools} if tools else {}
        conversation = Dialogue(model, self.form.system_prompt, **offer)
        conversation.tell(told)
        names = [tool["function"]["name"] for tool in tools]
        while not self.ended and conversation.turns < max_turns:
            await self._turn(conversation, names)
        return conversation.turns

    async def _turn(self, conversation: Dialogue, tools: Sequence[str]) -> None:
        # The results of tools are no states.
        state = None if self._calls_tools else observation_text(self.result.observation)
        message = await conversation.answer(state=state, until_full=True)
        if message is None:
            self.out_of_room = True
            return
        self.said = message.content or ""
        if not tools:
            conversation.tell(await self._act(self.said))
            return
        self._left = not message.tool_calls
        for call in message.tool_calls or ():
            if self.ended:
                return
            told = await self._call(call.function, tools)
            conversation.tell_result(call, told if isinstance(told, str) else _json(told))

    async def _offer(self) -> list[dict[str, Any]]:
        if self.form.tools is not None or not self.schema:
            return [dict(tool) for tool in self.form.tools or ()]
        if self._calls_tools:
            listed = await self._step({"type": "list_tools"})
            tools = _fields(listed.observation).get("tools")
            if not tools:
                raise RuntimeError(f"{self.server} has actions that call tools, but lists no tool")
            return [
                function_tool(one["name"], one["description"], one["input_schema"]) for one in tools
            ]
        if self._text_field is not None:
            return []
        fields = {**self.schema, "properties": _own_fields(self.schema)}
        return [function_tool(ACT, self.schema.get("description", ""), fields)]

    async def _call(self, function: Any, tools: Sequence[str]) -> Any:
        if function.name not in tools:
            self.refused += 1
            return f"no such tool; there is {', '.join(tools)}"
        try:
            arguments = json.loads(function.arguments or "{}")
        except ValueError:
            self.refused += 1
            return "the arguments are no JSON"
        return await self._act(ToolCall(function.name, arguments))

    async def _act(self, said: str | ToolCall) -> Any:
        """Take a step; returns the text for the model. An invalid action is the model's mistake."""
        try:
            self.result = await self._step(self._action(said))
        except RuntimeError as error:
            if _INVALID not in str(error):
                raise
            self.refused += 1
            fields = ", ".join(_own_fields(self.schema))
            return f"no valid action; it has the fields {fields}" if fields else "no valid action"
        if self.result.reward is not None:
            self.rewards.append(float(self.result.reward))
        observation = self.result.observation
        if self._calls_tools and isinstance(said, ToolCall):
            return _tool_result(_fields(observation))
        return self.form.message_of(observation)

    def _action(self, said: str | ToolCall) -> Any:
        if self.form.action_of is not None:
            return self.form.action_of(said)
        if isinstance(said, str):
            return {self._text_field: said}
        if self._calls_tools:
            return {"type": "call_tool", "tool_name": said.name, "arguments": said.arguments}
        return said.arguments

    async def _step(self, action: Any) -> Any:
        return await self._answered("step", self.client.step(action))

    async def _answered(self, asked: str, answer: Awaitable[Any]) -> Any:
        from websockets.exceptions import ConnectionClosed

        try:
            return await answer
        except TimeoutError as error:
            told = f"{self.server} did not answer a {asked} within {self.seconds:g} s"
            raise TimeoutError(told) from error
        except ConnectionClosed as error:
            raise ConnectionError(f"{self.server} went away at a {asked}: {error}") from error

    @property
    def _calls_tools(self) -> bool:
        """Whether an action is a call of one of the environment's tools."""
        return self.schema.get("title") in _TOOL_ACTIONS

    @property
    def _text_field(self) -> str | None:
        """The only field of an action, if it is text."""
        fields = _own_fields(self.schema)
        (name, form), *others = fields.items() if fields else [(None, {})]
        return name if not others and form.get("type") == "string" else None


def observation_text(observation: Any) -> str:
    """Text of an observation: its only non-empty field if that is text, else the fields as
    JSON; empty for an empty observation."""
    given = _fields(observation).items()
    others = ("done", "reward", "metadata")
    fields = {name: one for name, one in given if one is not None and name not in others}
    values = list(fields.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return _json(fields) if fields else ""


def _own_fields(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an action, without the one common to all actions."""
    found: Mapping[str, Any] = schema.get("properties", {})
    return {name: form for name, form in found.items() if name != "metadata"}


def _fields(observation: Any) -> dict[str, Any]:
    if hasattr(observation, "model_dump"):
        observation = observation.model_dump()
    return observation if isinstance(observation, dict) else {"observation": observation}


def _tool_result(observation: Mapping[str, Any]) -> Any:
    """A tool's result, from OpenEnv's observation of its call."""
    if error := observation.get("error"):
        return {"error": error.get("message", error)}
    result = observation.get("result")
    if not isinstance(result, dict) or "data" not in result:
        return result
    if result["data"] is not None:
        return result["data"]
    parts = result.get("content") or ()
    return "\n".join(str(part.get("text", part)) for part in parts)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


# The client's error if the server has its maximum number of sessions.
_FULL = "(code: CAPACITY_REACHED)"


class OpenEnv(Environment):
    """An OpenEnv server as an environment: `tune(environment=OpenEnv("http://127.0.0.1:8000"))`.

    A row of the dataset is passed to `reset`, of which the server uses the arguments known to its
    environment; all rollouts of a row have its `seed`. The row's `prompt`, a text or messages,
    comes before the first observation. If the server has no free session, a rollout waits as long
    as other rollouts of this process have some.

    The agent's actions come from the server's schema: text, if an action has one field and that is
    text; calls of the environment's tools, if it has tools (MCP); else calls of a tool `act`, whose
    arguments are the action's fields. If there are tools, an answer without a call ends the
    episode.

    Args:
        url: The server's; or an `EnvClient`, whose class and server are used.
        command: Starts the server at the first rollout, and again if it has died; `{port}` in it is
            a free port of loopback. It is stopped with the run.
        client: A class of clients, or a function that makes one (it may be async); called with
            `base_url=` if there is a url or a command. None: OpenEnv's generic client, whose
            observations and actions are dicts. A string refers to it, as in the file.
        message_of: `(observation) -> text`, or a reference to such a function. None: the only
            non-empty field if that is text, else the fields as JSON.
        action_of: `(text or ToolCall) -> action`, or a reference. None: by the schema.
        tools: Tools for the model in place of the schema's, in OpenAI's form.
        system_prompt: The conversation's first message.
        max_turns: Maximum number of the model's answers in an episode.
        reward: The rollout's reward: the `sum` of its steps' rewards, or the `last` of them.
        unrewarded: The reward if no step had one. None: such a rollout is an `invalid_reward`.
        train_dataset, eval_dataset: Like those of `tune()`. Without a training set, rows
            `{"seed": i}` are made for both.
        train_tasks, eval_tasks: Number of these rows, from 0 and from 1,000,000 on; 0: none.
        connect_timeout, step_timeout: Seconds for a session to open, and for an answer.
        folder: Working directory of `command`. None: the current one.

    Raises:
        ConfigError: There is no server, or settings contradict each other.
        MissingDependencyError: openenv is not installed.
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
        with importing("OpenEnv needs the package openenv", "openenv"):
            from openenv.core.env_client import EnvClient
            from openenv.core.generic_client import GenericEnvClient
            from openenv.core.mcp_client import MCPClientBase
        if isinstance(url, EnvClient):
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
        # The client for tools reads the same answers, but drops a part of them.
        is_of_tools = isinstance(client, type) and issubclass(client, MCPClientBase)
        self._client: Any = GenericEnvClient if client is None or is_of_tools else client
        self._generic = isinstance(self._client, type) and issubclass(
            self._client, GenericEnvClient
        )
        self._form = Form(
            function_of(message_of, setting="message_of") or observation_text,
            function_of(action_of, setting="action_of"),
            tools,
            system_prompt,
        )
        if not self._generic and self._form.action_of is None:
            name = getattr(client, "__name__", client)
            raise ConfigError(
                f"OpenEnv's client is {name}, which has its own classes of actions: give "
                "action_of, which makes one from text or a ToolCall, or remove client"
            )
        self._max_turns, self._reward, self._unrewarded = max_turns, reward, unrewarded
        self._connect_timeout, self._step_timeout = connect_timeout, step_timeout
        self._schema: dict[str, Any] | None = None
        self._running = 0
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        if train_dataset is None:
            self.train_dataset, held_out = seed_rows(train_tasks, eval_tasks)
            self.eval_dataset = eval_dataset or held_out

    async def workflow(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        """Run one episode; errors of the connection are ConnectionError and TimeoutError, those of
        the environment RuntimeError, with the server's message."""
        url = self._url if self._server is None else await in_thread(self._server.address)
        episode = await self._begun(url, {"episode_id": model.session.id, **task})
        self._running += 1
        try:
            if self._form.action_of is None:
                episode.schema = await self._schema_of_actions(episode.client)
            turns = await episode.play(model, task.get("prompt"), self._max_turns)
        finally:
            self._running -= 1
            await episode.client.close()
        return self._output(episode, turns)

    def check_settings(self, config: RunConfig) -> None:
        """Raises ConfigError if several processes would start a server at one address."""
        workers = config.tuner.workers
        if workers and self._server is not None and self._url is not None:
            raise ConfigError(
                f"tuner.workers is {workers}, and each worker starts a server by command, all at "
                f"{self._url}: remove url and put {{port}} into command, or set workers to 0"
            )

    async def close(self) -> None:
        """Stop the server that was started here."""
        if self._server is not None:
            await in_thread(self._server.close)

    async def _begun(self, url: str | None, reset: dict[str, Any]) -> OpenEnvEpisode:
        """A session after its reset. If the server has none free, wait until one of ours ends."""
        from websockets.exceptions import ConnectionClosedOK

        waits_since, pause = time.monotonic(), 0.05
        while True:
            client = await self._connected(url)
            episode = OpenEnvEpisode(client, url or "the server", self._step_timeout, self._form)
            try:
                await episode.reset(reset)
                return episode
            except BaseException as error:
                await client.close()
                # A full server may have closed the connection before the request.
                if _FULL not in str(error) and not isinstance(error.__cause__, ConnectionClosedOK):
                    raise
            now = time.monotonic()
            if self._running:
                waits_since = now
            elif now - waits_since > self._connect_timeout:
                raise ConnectionError(f"{episode.server} has no free session")
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

    def _output(self, episode: OpenEnvEpisode, turns: int) -> WorkflowOutput:
        rewards, reward = episode.rewards, self._unrewarded
        if rewards:
            reward = sum(rewards) if self._reward == "sum" else rewards[-1]
        metrics = {
            "turns": float(turns),
            "done": float(episode.result.done),
            "refused_actions": float(episode.refused),
            "out_of_room": float(episode.out_of_room),
        }
        return WorkflowOutput(reward=reward, response=episode.said, metrics=metrics)
