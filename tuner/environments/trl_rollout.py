"""A completion as TRL makes it: of a text or of messages, with tools and environments."""

from __future__ import annotations

import copy
import inspect
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuner.environments.trl_config import GRPOConfig
from tuner.errors import ConfigError, DatasetError
from tuner.functions.calling import in_thread
from tuner.functions.outputs import shown

_NO_TOOLS = ("reset", "get_reward")


@dataclass(frozen=True)
class Completed:
    """A completion, as reward functions see it.

    Attributes:
        prompt: With what the environment said of it.
        completion: A text of a text; of messages the messages that were added.
        ids: Token ids behind the prompt, results of tools among them.
        step: Updates of the weights so far.
        environment: Its own, or None; where it goes back to.
        metrics: Calls of tools, and how many failed.
    """

    prompt: Any
    completion: Any
    ids: list[int]
    step: int
    environment: Any = None
    environment_name: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def get_text_content(self) -> str:
        """The completion for people."""
        if isinstance(self.completion, str):
            return self.completion
        return str(self.completion[-1].get("content") or "") if self.completion else ""


class Instances:
    """Environments: made when none is idle, one for each rollout that runs; and what is a tool.

    Args:
        factory: As TRL takes it, or None.
        tools: Functions that are tools whatever the environment.

    Raises:
        ConfigError: An environment has no `reset`, or a tool no docstring or types.
    """

    def __init__(self, factory: Any, tools: Sequence[Callable[..., Any]]) -> None:
        self.several = isinstance(factory, Mapping)
        self._factories: Mapping[str | None, Any] = (
            factory if isinstance(factory, Mapping) else {None: factory} if factory else {}
        )
        self._standalone = list(tools)
        self._idle: dict[str | None, list[Any]] = defaultdict(list)
        self._schemas: dict[str | None, list[dict[str, Any]]] = {None: _schemas(self._standalone)}
        self.rewarding_classes: list[type[Any]] = []
        for name, make in self._factories.items():
            instance = make()
            if not callable(getattr(type(instance), "reset", None)):
                raise ConfigError(f"environment_factory made {shown(instance)}, which has no reset")
            self._idle[name].append(instance)
            self._schemas[name] = _schemas([*self._standalone, *_methods(instance)])
            rewards = hasattr(type(instance), "get_reward")
            if rewards and type(instance) not in self.rewarding_classes:
                self.rewarding_classes.append(type(instance))

    def __getstate__(self) -> dict[str, Any]:
        """In another process it makes its own environments: they may hold what no pickle can."""
        return {**self.__dict__, "_idle": defaultdict(list)}

    async def take(self, task: Mapping[str, Any]) -> tuple[str | None, Any]:
        """An environment for a row, by its name; None where there are none.

        Raises:
            DatasetError: The row names one that nobody makes.
        """
        if not self._factories:
            return None, None
        name = task.get("environment") if self.several else None
        if name not in self._factories:
            raise DatasetError(
                f"the row's environment is {name!r}; environment_factory makes "
                f"{', '.join(map(str, self._factories))}"
            )
        idle = self._idle[name]
        return name, idle.pop() if idle else await in_thread(self._factories[name])

    def give_back(self, name: str | None, instance: Any) -> None:
        """Let another rollout have it, which resets it."""
        if instance is not None:
            self._idle[name].append(instance)

    def clear(self) -> None:
        """Forget those that are idle."""
        self._idle.clear()

    def tools_of(self, name: str | None, instance: Any) -> Tools:
        """What a rollout may call."""
        methods = [] if instance is None else _methods(instance)
        functions = {one.__name__: one for one in [*self._standalone, *methods]}
        return Tools(functions, self._schemas[name])


@dataclass
class Tools:
    """Functions that the model may call, and what is said of them.

    Attributes:
        functions: By name.
        schemas: In OpenAI's form.
        called, failed: How many calls there were; how many of them raised.
    """

    functions: Mapping[str, Callable[..., Any]]
    schemas: list[dict[str, Any]]
    called: int = 0
    failed: int = 0

    async def result_of(self, name: str, arguments: str) -> Any:
        """What a call gives, or its error, as TRL tells the model."""
        self.called += 1
        try:
            if name not in self.functions:
                raise ValueError(f"Tool {name} not found.")
            function, given = self.functions[name], json.loads(arguments or "{}")
            if inspect.iscoroutinefunction(function):
                result = await function(**given)
            else:
                result = await in_thread(lambda: function(**given))
        except Exception as error:
            self.failed += 1
            result = {"error": str(error)}
        return result if isinstance(result, list) else str(result)


@dataclass
class Prompted:
    """A prompt that is to be completed."""

    prompt: Any
    tools: Tools
    config: GRPOConfig
    environment: Any = None
    environment_name: str | None = None

    @classmethod
    async def of(
        cls,
        task: Mapping[str, Any],
        name: str | None,
        environment: Any,
        instances: Instances,
        config: GRPOConfig,
    ) -> Prompted:
        """A row's prompt, with what the environment says at its reset.

        Raises:
            DatasetError: The row has no prompt, or images.
        """
        if images := [key for key in ("image", "images") if task.get(key) is not None]:
            raise DatasetError(f"the row has {images[0]}: only text is trained here")
        empty = [{"role": "user", "content": ""}]
        prompt = copy.deepcopy(task.get("prompt", None if environment is None else empty))
        tools = instances.tools_of(name, environment)
        if not isinstance(prompt, (str, list)) or (tools.functions and isinstance(prompt, str)):
            raise DatasetError(
                f"the row's prompt is {shown(prompt)}; expected messages"
                + ("" if tools.functions else ", or a text")
            )
        if environment is not None:
            hidden = ("environment",) if instances.several else ()
            given = {key: value for key, value in task.items() if key not in hidden}
            if (said := await _reset(environment, given)) is not None:
                last: Any = prompt[-1]
                prompt = [*prompt[:-1], {**last, "content": last["content"] + said}]
        return cls(prompt, tools, config, environment, name)

    async def completed(self, model: Any) -> Completed:
        """Its completion; what is sampled is `args`'."""
        added = None if isinstance(self.prompt, str) else await self._answered(model)
        if added is None:
            await self._continued(model)
        calls = [one.call for one in model.calls]
        if self.config.mask_truncated_completions and calls[-1].finish_reason == "length":
            for one in model.calls:
                one.exclude()
        if added is None or not self.tools.schemas:
            text = model.session.text_of(calls[-1].completion_ids)
            added = text if added is None else [{"role": "assistant", "content": text}]
        counts = {"tool_calls": self.tools.called, "tool_failures": self.tools.failed}
        return Completed(
            prompt=self.prompt,
            completion=added,
            ids=_ids(calls),
            step=_step(model.session.id),
            environment=self.environment,
            environment_name=self.environment_name,
            metrics={name: float(n) for name, n in counts.items()} if self.tools.schemas else {},
        )

    async def _continued(self, model: Any) -> None:
        await model.client.completions.create(
            model=model.model_name, prompt=self.prompt, **self._sampling()
        )

    async def _answered(self, model: Any) -> list[dict[str, Any]]:
        """The messages that are added to the prompt, as TRL has them."""
        sent, added = list(self.prompt), []
        limit = self.config.max_tool_calling_iterations
        limit = sys.maxsize if limit is None else limit
        offer = {"tools": self.tools.schemas} if self.tools.schemas else {}
        for iteration in range(limit + 1):
            reply = await model.client.chat.completions.create(
                model=model.model_name, messages=sent, **offer, **self._sampling(model)
            )
            message = reply.choices[0].message
            sent.append(message.model_dump(exclude_none=True))
            added.append(_as_trl(message))
            if not message.tool_calls or iteration == limit or self._room(model) == 0:
                break
            for call in message.tool_calls:
                name = call.function.name
                content = await self.tools.result_of(name, call.function.arguments)
                sent.append({"role": "tool", "tool_call_id": call.id, "content": content})
                added.append({"role": "tool", "name": name, "content": content})
        return added

    def _sampling(self, model: Any = None) -> dict[str, Any]:
        """What a call says of how it is sampled; the rest is the run's."""
        found: dict[str, Any] = {}
        if (left := self._room(model)) is not None:
            found["max_tokens"] = left
        extra = {"min_p": self.config.min_p, "chat_template_kwargs": self._template()}
        if self.config.repetition_penalty != 1.0:
            extra["repetition_penalty"] = self.config.repetition_penalty
        body = {name: value for name, value in extra.items() if value is not None}
        return {**found, "extra_body": body} if body else found

    def _template(self) -> dict[str, Any] | None:
        return None if isinstance(self.prompt, str) else self.config.chat_template_kwargs or None

    def _room(self, model: Any) -> int | None:
        """Tokens that the completion may still have, results of tools but the next ones counted."""
        limit: int | None = self.config.max_completion_length
        if limit is None:
            return None
        calls = [] if model is None else [one.call for one in model.calls]
        return max(0, limit - len(_ids(calls)))


def _methods(instance: Any) -> list[Callable[..., Any]]:
    """The environment's methods that are tools."""
    members = inspect.getmembers(type(instance), predicate=inspect.isfunction)
    return [
        getattr(instance, name)
        for name, _ in members
        if name not in _NO_TOOLS and not name.startswith("_")
    ]


def _schemas(tools: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """
    Raises:
        ConfigError: A tool has no docstring, or an argument no type or description.
    """
    if not tools:
        return []
    from transformers.utils.chat_template_utils import get_json_schema

    found = []
    for tool in tools:
        try:
            found.append(get_json_schema(tool))
        except Exception as error:
            raise ConfigError(f"the tool {tool.__name__} cannot be offered: {error}") from error
    return found


async def _reset(environment: Any, given: dict[str, Any]) -> Any:
    if inspect.iscoroutinefunction(environment.reset):
        return await environment.reset(**given)
    return await in_thread(lambda: environment.reset(**given))


def _as_trl(message: Any) -> dict[str, Any]:
    """An answer as TRL's parser gives it: arguments are a dict, and calls have no id."""
    told = message.model_dump(exclude_none=True)
    found = {"role": "assistant", "content": told.get("content") or ""}
    if told.get("reasoning_content"):
        found["reasoning_content"] = told["reasoning_content"]
    if calls := told.get("tool_calls"):
        found["tool_calls"] = [
            {
                "type": "function",
                "function": {
                    "name": one["function"]["name"],
                    "arguments": json.loads(one["function"]["arguments"] or "{}"),
                },
            }
            for one in calls
        ]
    return found


def _ids(calls: Sequence[Any]) -> list[int]:
    """What follows the first prompt, up to the end of the last call; where the last does not go on
    from the first, what was sampled."""
    if not calls:
        return []
    first, last = calls[0].prompt_ids, calls[-1]
    if tuple(last.prompt_ids[: len(first)]) == tuple(first):
        return [*last.prompt_ids[len(first) :], *last.completion_ids]
    return [id for call in calls for id in call.completion_ids]


def _step(session: str) -> int:
    """Updates of the weights before a rollout: its session is called `train-3-0-1-1`."""
    split, step, *numbers = session.rsplit("-", 4)
    return int(step) - (split == "train") if len(numbers) == 3 else 0
