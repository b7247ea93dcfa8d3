"""An episode of OpenEnv: what the model is told, what it may do, and what its answers do."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import openai

from tuner.errors import FunctionError

T = TypeVar("T")

# The only tool of an environment whose actions have fields of their own.
ACT = "act"
# What the schema of actions is called where an action is a call of one of the environment's tools.
_TOOL_ACTIONS = frozenset({"Action", "CallToolAction", "ListToolsAction"})
# How the client says that the server found an action to be none.
_INVALID = "(code: VALIDATION_ERROR)"


@dataclass(frozen=True)
class ToolCall:
    """What `action_of` is given where the model called a tool.

    Attributes:
        name: The tool's.
        arguments: As the model gave them.
    """

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Form:
    """How observations become messages, and answers actions; None: as the server's schema says."""

    message_of: Callable[[Any], Any]
    action_of: Callable[[Any], Any] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    system_prompt: str | None = None


@dataclass
class Episode:
    """A session at the server, and how far it has come.

    Attributes:
        client: OpenEnv's, connected.
        server: As messages name it.
        seconds: For an answer, as messages name them.
        form: How it talks.
        schema: Of actions; empty where the form says what they are.
        result: Of the last step, or the reset.
        rewards: Those of its steps that had one.
        said: The last answer's text.
        turns, refused: Answers; actions that were none.
        out_of_room: Whether it ended because no further answer would fit in the context.
    """

    client: Any
    server: str
    seconds: float
    form: Form
    schema: Mapping[str, Any] = field(default_factory=dict)
    result: Any = None
    rewards: list[float] = field(default_factory=list)
    said: str = ""
    turns: int = 0
    refused: int = 0
    out_of_room: bool = False
    _left: bool = False
    _tools: list[dict[str, Any]] = field(default_factory=list)
    _messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether the environment is done, or the agent, which called no tool or has no room."""
        return self._left or self.out_of_room or bool(self.result.done)

    async def reset(self, arguments: Mapping[str, Any]) -> None:
        """Begin; what the server's environment does not know of the arguments it leaves."""
        self.result = await self._answered("reset", self.client.reset(**arguments))

    async def begin(self, prompt: Any) -> None:
        """Find out what the agent may do, and what it is told first.

        Raises:
            FunctionError: That is nothing.
        """
        self._tools = await self._offer()
        told = [*messages(prompt), *messages(self.form.message_of(self.result.observation))]
        if not told:
            raise FunctionError(
                "there is nothing to tell the model: the environment's first observation is empty, "
                "and the row has no `prompt`; give rows one, or message_of"
            )
        self._messages = [*messages(self.form.system_prompt, role="system"), *told]

    async def turn(self, model: Any) -> None:
        """An answer of the model, and the steps that it asks for."""
        offer = {"tools": self._tools} if self._tools else {}
        try:
            reply = await model.client.chat.completions.create(
                model=model.model_name, messages=self._messages, **offer
            )
        except openai.BadRequestError as error:
            if error.code != "context_length_exceeded" or not self.turns:
                raise
            self.out_of_room = True
            return
        message = reply.choices[0].message
        self.turns += 1
        self.said = message.content or ""
        self._messages.append(message.model_dump(exclude_none=True))
        if not self._tools:
            self._messages += messages(await self._act(self.said))
            return
        self._left = not message.tool_calls
        for call in message.tool_calls or ():
            if self.ended:
                return
            told = await self._call(call.function)
            text = told if isinstance(told, str) else _json(told)
            self._messages.append({"role": "tool", "tool_call_id": call.id, "content": text})

    async def _offer(self) -> list[dict[str, Any]]:
        if self.form.tools is not None or not self.schema:
            return [dict(tool) for tool in self.form.tools or ()]
        if self._calls_tools:
            listed = await self._step({"type": "list_tools"})
            tools = _fields(listed.observation).get("tools")
            if not tools:
                raise RuntimeError(f"{self.server} has actions that call tools, and lists no tool")
            return [_tool(one["name"], one["description"], one["input_schema"]) for one in tools]
        if self._text_field is not None:
            return []
        fields = {**self.schema, "properties": _own_fields(self.schema)}
        return [_tool(ACT, self.schema.get("description", ""), fields)]

    async def _call(self, function: Any) -> Any:
        names = [tool["function"]["name"] for tool in self._tools]
        if function.name not in names:
            self.refused += 1
            return f"no such tool; there is {', '.join(names)}"
        try:
            arguments = json.loads(function.arguments or "{}")
        except ValueError:
            self.refused += 1
            return "the arguments are no JSON"
        return await self._act(ToolCall(function.name, arguments))

    async def _act(self, said: str | ToolCall) -> Any:
        """What the model is told of a step; an action that is none is its mistake."""
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

    async def _answered(self, asked: str, answer: Awaitable[T]) -> T:
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
        """The only field of an action, where it is a text."""
        fields = _own_fields(self.schema)
        (name, form), *others = fields.items() if fields else [(None, {})]
        return name if not others and form.get("type") == "string" else None


def observation_text(observation: Any) -> str:
    """What the model is told of an observation: the one field that is set, if it is a text, else
    the fields as JSON; nothing of an empty one."""
    fields = {
        name: value
        for name, value in _fields(observation).items()
        if value is not None and name not in ("done", "reward", "metadata")
    }
    values = list(fields.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return _json(fields) if fields else ""


def messages(told: Any, role: str = "user") -> list[dict[str, Any]]:
    """A text as a message; messages as they are; nothing of nothing."""
    if isinstance(told, str) or not told:
        return [{"role": role, "content": told}] if told else []
    return [dict(told)] if isinstance(told, Mapping) else list(told)


def _own_fields(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an action but the one that every action has."""
    found: Mapping[str, Any] = schema.get("properties", {})
    return {name: form for name, form in found.items() if name != "metadata"}


def _fields(observation: Any) -> dict[str, Any]:
    if hasattr(observation, "model_dump"):
        observation = observation.model_dump()
    return observation if isinstance(observation, dict) else {"observation": observation}


def _tool(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}


def _tool_result(observation: Mapping[str, Any]) -> Any:
    """What a tool gave, of OpenEnv's observation of its call."""
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
