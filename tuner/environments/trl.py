"""TRL: a GRPOTrainer's reward functions, prompts, tools and environments.

    from tuner.environments.trl import GRPOConfig, GRPOTrainer      # was: from trl import ...

Reward functions are called once per group, with its completed completions. A completion that no
function scores has no reward: it is not trained and does not count for the others.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import json
import math
import shutil
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.config import RunConfig
from tuner.environments.conversation import Dialogue
from tuner.environments.trl_config import GRPOConfig, prompts_in_a_step, read_config, settings_of
from tuner.errors import ConfigError, DatasetError, FunctionError
from tuner.runs.environment import Environment
from tuner.tasks.datasets import DatasetConfig
from tuner.tasks.functions import (
    JudgeOutput,
    WorkflowOutput,
    called,
    in_thread,
    is_async,
    shown,
    unwrapped,
)
from tuner.tasks.loading import load_function

if TYPE_CHECKING:
    from tuner.runs.result import TuneResult


_NO_TOOLS = ("reset", "get_reward")


@dataclass(frozen=True)
class TrlCompletion:
    """A completion as reward functions see it: the prompt with the environment's text; text, or the
    added messages; the ids after the prompt, including tool results; and the number of weight
    updates so far."""

    prompt: Any
    completion: Any
    ids: list[int]
    step: int
    environment: Any = None
    environment_name: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def get_text_content(self) -> str:
        """The completion in readable form."""
        if isinstance(self.completion, str):
            return self.completion
        return str(self.completion[-1].get("content") or "") if self.completion else ""


class Instances:
    """Environments, created when none is idle (one for each running rollout), and their tools;
    `tools` are those of every environment. Raises ConfigError if one has no `reset`, or a tool no
    docstring or types."""

    def __init__(self, factory: Any, tools: Sequence[Callable[..., Any]]) -> None:
        self.several = isinstance(factory, Mapping)
        self._factories: Mapping[str | None, Any] = (
            factory if isinstance(factory, Mapping) else {None: factory} if factory else {}
        )
        self._standalone = list(tools)
        self.idle = defaultdict[str | None, list[Any]](list)
        self._schemas: dict[str | None, list[dict[str, Any]]] = {None: _schemas(self._standalone)}
        self.rewarding_classes: list[type[Any]] = []
        for name, make in self._factories.items():
            instance = make()
            if not callable(getattr(type(instance), "reset", None)):
                raise ConfigError(f"environment_factory made {shown(instance)}, which has no reset")
            self.idle[name].append(instance)
            self._schemas[name] = _schemas([*self._standalone, *_methods(instance)])
            rewards = hasattr(type(instance), "get_reward")
            if rewards and type(instance) not in self.rewarding_classes:
                self.rewarding_classes.append(type(instance))

    def __getstate__(self) -> dict[str, Any]:
        """Another process creates its own environments: these may not be picklable."""
        return {**self.__dict__, "idle": defaultdict(list)}

    async def take(self, task: Mapping[str, Any]) -> Tools:
        """The tools of a rollout, and its environment, if there are any. Raises DatasetError if the
        row names an unknown one."""
        name = task.get("environment") if self.several else None
        functions, instance = self._standalone, None
        if self._factories and name not in self._factories:
            raise DatasetError(
                f"the row's environment is {name!r}, but environment_factory makes "
                f"{', '.join(map(str, self._factories))}"
            )
        if self._factories:
            idle = self.idle[name]
            instance = idle.pop() if idle else await in_thread(self._factories[name])
            functions = [*functions, *_methods(instance)]
        by_name = {one.__name__: one for one in functions}
        return Tools(by_name, self._schemas[name], instance, name)

    def give_back(self, name: str | None, instance: Any) -> None:
        """Return an environment for another rollout, which resets it."""
        if instance is not None:
            self.idle[name].append(instance)


@dataclass
class Tools:
    """Functions that the model may call, by name, their schemas in OpenAI's form, the environment
    that they belong to, and the numbers of calls and of those that raised."""

    functions: Mapping[str, Callable[..., Any]]
    schemas: list[dict[str, Any]]
    environment: Any = None
    environment_name: str | None = None
    called: int = 0
    failed: int = 0

    async def result_of(self, name: str, arguments: str) -> Any:
        """The result of a call, or its error in TRL's form."""
        self.called += 1
        try:
            if name not in self.functions:
                raise ValueError(f"Tool {name} not found.")
            result = await called(self.functions[name], **json.loads(arguments or "{}"))
        except Exception as error:
            self.failed += 1
            result = {"error": str(error)}
        return result if isinstance(result, list) else str(result)


@dataclass
class TrlPrompt:
    """A prompt to be completed."""

    prompt: Any
    tools: Tools
    config: GRPOConfig

    @classmethod
    async def of(cls, task: Mapping[str, Any], tools: Tools, config: GRPOConfig) -> TrlPrompt:
        """A row's prompt, with the text of the environment's reset. Raises DatasetError if it has
        no prompt, or images."""
        if images := [key for key in ("image", "images") if task.get(key) is not None]:
            raise DatasetError(f"the row has {images[0]}: only text can be trained")
        empty = None if tools.environment is None else [{"role": "user", "content": ""}]
        prompt = copy.deepcopy(task.get("prompt", empty))
        if not isinstance(prompt, (str, list)) or (tools.functions and isinstance(prompt, str)):
            raise DatasetError(
                f"the row's prompt is {shown(prompt)}; expected messages"
                + ("" if tools.functions else ", or a text")
            )
        if tools.environment is not None:
            hidden = () if tools.environment_name is None else ("environment",)
            given = {key: value for key, value in task.items() if key not in hidden}
            if (said := await called(tools.environment.reset, **given)) is not None:
                last: Any = prompt[-1]
                prompt = [*prompt[:-1], {**last, "content": last["content"] + said}]
        return cls(prompt, tools, config)

    async def completed(self, model: Any) -> TrlCompletion:
        """Complete the prompt; `args` sets the sampling."""
        added = None if isinstance(self.prompt, str) else await self._answered(model)
        if added is None:
            await model.client.completions.create(
                model=model.model_name, prompt=self.prompt, **self._sampling()
            )
        calls = [one.call for one in model.calls]
        if self.config.mask_truncated_completions and calls[-1].finish_reason == "length":
            for one in model.calls:
                one.exclude()
        if added is None or not self.tools.schemas:
            text = model.session.text_of(calls[-1].completion_ids)
            added = text if added is None else [{"role": "assistant", "content": text}]
        counts = {"tool_calls": self.tools.called, "tool_failures": self.tools.failed}
        return TrlCompletion(
            prompt=self.prompt,
            completion=added,
            ids=_ids(calls),
            step=_step(model.session.id),
            environment=self.tools.environment,
            environment_name=self.tools.environment_name,
            metrics={name: float(n) for name, n in counts.items()} if self.tools.schemas else {},
        )

    async def _answered(self, model: Any) -> list[dict[str, Any]]:
        """Messages added to the prompt, in TRL's form."""
        added = []
        limit = self.config.max_tool_calling_iterations
        limit = sys.maxsize if limit is None else limit
        offer = {"tools": self.tools.schemas} if self.tools.schemas else {}
        conversation = Dialogue(model, **offer)
        conversation.tell(self.prompt)
        for iteration in range(limit + 1):
            message = await conversation.answer(**self._sampling(model))
            added.append(_as_trl(message))
            if not message.tool_calls or iteration == limit or self._room(model) == 0:
                break
            for call in message.tool_calls:
                name = call.function.name
                content = await self.tools.result_of(name, call.function.arguments)
                conversation.tell_result(call, content)
                added.append({"role": "tool", "name": name, "content": content})
        return added

    def _sampling(self, model: Any = None) -> dict[str, Any]:
        """Sampling settings of a call; the others are the run's."""
        found: dict[str, Any] = {}
        if (left := self._room(model)) is not None:
            found["max_tokens"] = left
        template = None if isinstance(self.prompt, str) else self.config.chat_template_kwargs
        extra = {"min_p": self.config.min_p, "chat_template_kwargs": template or None}
        if self.config.repetition_penalty != 1.0:
            extra["repetition_penalty"] = self.config.repetition_penalty
        body = {name: value for name, value in extra.items() if value is not None}
        return {**found, "extra_body": body} if body else found

    def _room(self, model: Any) -> int | None:
        """Tokens left for the completion; counts tool results except the next ones."""
        limit: int | None = self.config.max_completion_length
        if limit is None:
            return None
        calls = [] if model is None else [one.call for one in model.calls]
        return max(0, limit - len(_ids(calls)))


def _methods(instance: Any) -> list[Callable[..., Any]]:
    """The environment's methods that are tools."""
    members = inspect.getmembers(type(instance), predicate=inspect.isfunction)
    names = [name for name, _ in members if name not in _NO_TOOLS and not name.startswith("_")]
    return [getattr(instance, name) for name in names]


def _schemas(tools: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """Raises ConfigError if a tool has no docstring, or an argument no type or description."""
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


def _as_trl(message: Any) -> dict[str, Any]:
    """An answer in the form of TRL's parser: arguments are a dict, and calls have no id."""
    told = message.model_dump(exclude_none=True)
    found = {"role": "assistant", "content": told.get("content") or ""}
    if told.get("reasoning_content"):
        found["reasoning_content"] = told["reasoning_content"]
    if calls := [one["function"] for one in told.get("tool_calls") or ()]:
        given = [one | {"arguments": json.loads(one["arguments"] or "{}")} for one in calls]
        found["tool_calls"] = [{"type": "function", "function": one} for one in given]
    return found


def _ids(calls: Sequence[Any]) -> list[int]:
    """Ids after the first prompt, up to the end of the last call; only the sampled ids if the last
    call does not continue the first."""
    if not calls:
        return []
    first, last = calls[0].prompt_ids, calls[-1]
    if tuple(last.prompt_ids[: len(first)]) == tuple(first):
        return [*last.prompt_ids[len(first) :], *last.completion_ids]
    return [id for call in calls for id in call.completion_ids]


def _step(session: str) -> int:
    """Weight updates before a rollout, from its session's name, such as `train-3-0-1-1`."""
    split, step, *numbers = session.rsplit("-", 4)
    return int(step) - (split == "train") if len(numbers) == 3 else 0


# Reward functions that are not async expect a trainer that calls one at a time.
_ONE_AT_A_TIME = threading.Lock()
# Groups are judged concurrently, and if two threads import transformers, one may find it
# half imported.
_IMPORTING = threading.Lock()


class RewardFunctions:
    """Reward functions in TRL's form and their weights (None: 1), and classes of environments that
    have a reward. Functions that are not async run in a thread, one at a time, as TRL calls them.
    Raises ConfigError."""

    def __init__(
        self,
        functions: Sequence[Any],
        weights: Sequence[float] | None,
        classes: Sequence[type[Any]] = (),
    ) -> None:
        for index, function in enumerate(functions):
            _check(function, f"reward_funcs[{index}]")
        if weights is not None and len(weights) != len(functions):
            raise ConfigError(
                f"GRPOConfig.reward_weights has {len(weights)} weights for {len(functions)} "
                "reward functions: give one for each"
            )
        own = [functools.partial(_reward_of_environment, one) for one in classes]
        self._functions = [*functions, *own]
        self._weights = [*(weights or [1.0] * len(functions)), *(1.0 for _ in classes)]
        names = [*map(_name, functions), *(one.__name__ for one in classes)]
        self._names = [
            name if name not in names[:i] else f"{name}_{i + 1}" for i, name in enumerate(names)
        ]
        if not self._functions:
            raise ConfigError(
                "there is no reward: give reward_funcs, or an environment_factory whose "
                "environments have get_reward()"
            )

    async def of(
        self, task: dict[str, Any], group: Sequence[TrlCompletion], *, max_steps: int
    ) -> list[JudgeOutput]:
        """The weighted sum of the rewards of each completion of a row; NaN if it has none. Raises
        FunctionError if a function did not return a reward or None for each."""
        extra, logged = defaultdict[str, list[Any]](list), defaultdict[str, list[float]](list)
        own = ("prompt", "completion", "completion_ids")
        columns = {name: [value] * len(group) for name, value in task.items() if name not in own}
        arguments: dict[str, Any] = columns | {
            "prompts": [one.prompt for one in group],
            "completions": [one.completion for one in group],
            "completion_ids": [one.ids for one in group],
            "trainer_state": await in_thread(lambda: _state(group[0].step, max_steps)),
            "log_extra": lambda column, values: extra[column].extend(values),
            "log_metric": lambda name, value: logged[name].append(value),
        }
        if group[0].environment is not None:
            arguments["environments"] = [one.environment for one in group]
        found: dict[int, Any] = {}
        waiting = {}
        for index, function in enumerate(self._functions):
            if is_async(function):
                waiting[index] = function(**arguments)
            else:
                found[index] = await in_thread(functools.partial(_alone, function, **arguments))
        found |= zip(waiting, await asyncio.gather(*waiting.values()), strict=True)
        given = [_checked(found[i], name, len(group)) for i, name in enumerate(self._names)]
        metrics = {name: sum(values) / len(values) for name, values in logged.items()}
        outputs = []
        for i, rewards in enumerate(zip(*given, strict=True)):
            notes = {name: values[i] for name, values in extra.items() if i < len(values)}
            outputs.append(self._output(rewards, metrics, notes))
        return outputs

    def _output(
        self, rewards: Sequence[float | None], metrics: dict[str, float], extra: dict[str, Any]
    ) -> JudgeOutput:
        given = zip(self._names, rewards, strict=True)
        scored = {name: one for name, one in given if one is not None and not math.isnan(one)}
        weights = dict(zip(self._names, self._weights, strict=True))
        total = sum(weights[name] * reward for name, reward in scored.items())
        numbers = {k: float(v) for k, v in extra.items() if isinstance(v, Real)}
        notes = [f"{name}: {value}" for name, value in extra.items() if name not in numbers]
        if not scored:
            notes.append("no reward function scores this completion")
        return JudgeOutput(
            reward=total if scored else math.nan,
            metrics={f"rewards/{name}": one for name, one in scored.items()} | metrics | numbers,
            feedback="\n".join(notes) or None,
        )


def _alone(function: Callable[..., Any], **arguments: Any) -> Any:
    with _ONE_AT_A_TIME:
        return function(**arguments)


def _state(step: int, max_steps: int) -> Any:
    """transformers' TrainerState; its import takes seconds and needs PyTorch."""
    with _IMPORTING:
        from transformers import TrainerState

    return TrainerState(global_step=step, max_steps=max_steps)


def _check(function: Any, where: str) -> None:
    """Raises ConfigError for a reward model, a class, or anything that cannot be called."""
    bases = type(function).__mro__
    if isinstance(function, str) or any(one.__module__.startswith("torch.nn") for one in bases):
        raise ConfigError(
            f"{where} is {shown(function)}, a reward model: pass a function that calls it, such as "
            "`def scored(prompts, completions, **columns): return model(...)`"
        )
    if isinstance(function, type) or not callable(function):
        raise ConfigError(f"{where} is {shown(function)}: pass a function, or an object")


def _checked(said: Any, name: str, count: int) -> list[float | None]:
    """Raises FunctionError unless there is a reward or None for each completion."""
    try:
        rewards = [None if one is None else float(one) for one in said]
    except (TypeError, ValueError):
        raise FunctionError(
            f"the reward function {name!r} returned {shown(said)}; expected a list with a number "
            "or None for each completion"
        ) from None
    if len(rewards) != count:
        raise FunctionError(
            f"the reward function {name!r} returned {len(rewards)} rewards for {count} "
            "completions; expected one for each"
        )
    return rewards


async def _reward_of_environment(
    made: type[Any], environments: Sequence[Any], **_: Any
) -> list[float | None]:
    # A worker may have the class twice: sent, and imported.
    its = [(type(one).__module__, type(one).__qualname__) for one in environments]
    mine = [one == (made.__module__, made.__qualname__) for one in its]
    each = zip(environments, mine, strict=True)
    return [await called(one.get_reward) if counts else None for one, counts in each]


def _name(function: Any) -> str:
    function = unwrapped(function)
    return str(getattr(function, "__name__", type(function).__name__))


__all__ = ["TRL", "GRPOConfig", "GRPOTrainer", "from_trl"]


class TRL(Environment):
    """A `GRPOTrainer`'s arguments as an environment.

    Args:
        reward_funcs: One or several, sync or async, or objects with `__call__`; called with
            `prompts`, `completions`, `completion_ids`, the columns of the row, `trainer_state`,
            `log_extra`, `log_metric` and, if there are any, `environments`.
            A string refers to one, as in the file: `path/file.py:name`, `package.module:name`.
        train_dataset, eval_dataset: Rows with a `prompt`, a text or messages.
        args: A GRPOConfig (ours or TRL's), or a mapping: settings that neither the file nor the
            caller of `tune()` sets. None: no settings.
        tools: Functions that the model may call, with types and a docstring in Google's style.
        environment_factory: Makes environments; or a mapping of factories, chosen by the row's
            field `environment`. Their methods are tools; `reset(**row)` may return a text,
            `get_reward()` is one more reward.

    Raises:
        ConfigError: There is no reward, or an argument is not supported.
    """

    def __init__(
        self,
        reward_funcs: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        args: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
    ) -> None:
        config = GRPOConfig(max_completion_length=None) if args is None else read_config(args)
        self._instances = Instances(
            _loaded(environment_factory, "environment_factory"),
            [_loaded(one, "tools") for one in tools or ()],
        )
        given = reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        functions = [_loaded(one, "reward_funcs") for one in given if one is not None]
        classes = self._instances.rewarding_classes
        self._rewards = RewardFunctions(functions, config.reward_weights, classes)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        if train_dataset is None and environment_factory is not None:
            # The environment provides the prompts: as many rows as a step needs.
            count = prompts_in_a_step(config)
            self.train_dataset = [{"prompt": [{"role": "user", "content": ""}]}] * count
        if args is not None:
            self.settings = settings_of(config, _rows_in(self.train_dataset))
        self._config, self._steps = config, int(self.settings.get("buffer.total_steps", 0))

    def check_settings(self, config: RunConfig) -> None:
        """Remember the length of the run; the file and overrides win over `args`."""
        self._steps = config.buffer.total_steps or self._steps

    async def workflow(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        """Complete a prompt, with tool calls."""
        prompted = await TrlPrompt.of(task, await self._instances.take(task), self._config)
        completed = await prompted.completed(model)
        return WorkflowOutput(response=completed, metrics=completed.metrics)

    async def _judge(
        self, task: dict[str, Any], responses: list[TrlCompletion]
    ) -> list[JudgeOutput]:
        """Weighted sums of the rewards of a group."""
        outputs = await self._rewards.of(task, responses, max_steps=self._steps)
        for one in responses:
            self._instances.give_back(one.environment_name, one.environment)
        return outputs

    @property
    def judge(self) -> Callable[..., Any]:  # type: ignore[override]  # nobody sets it
        return self._judge

    async def close(self) -> None:
        """Drop the idle environments."""
        self._instances.idle.clear()


class GRPOTrainer:
    """TRL's GRPOTrainer whose `train()` is `tune()`; `environment` is what that gets. Raises
    ConfigError, which names it, for an argument that is not supported."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Any = None,
        optimizers: Any = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        refused = {
            "processing_class": (processing_class, "the tokenizer of the model's folder is used"),
            "reward_processing_classes": (reward_processing_classes, "there are no reward models"),
            "callbacks": (callbacks, "see metrics.jsonl, or set report_to"),
            "optimizers": (tuple(optimizers) != (None, None), "set them in args"),
            "quantization_config": (quantization_config, "weights are trained unquantized"),
            "rollout_func": (rollout_func, "use a workflow instead: tune(workflow, ...)"),
        }
        for name, (value, instead) in refused.items():
            if value:
                raise ConfigError(f"GRPOTrainer's {name} is not supported: {instead}")
        if not isinstance(model, (str, Path)):
            raise ConfigError(
                f"GRPOTrainer's model is a {type(model).__name__}: pass the name or folder that it "
                "was loaded from"
            )
        self.environment = TRL(
            reward_funcs,
            train_dataset,
            eval_dataset,
            args=args or GRPOConfig(),
            tools=tools,
            environment_factory=environment_factory,
        )
        own = {"model.model_path": str(model)}
        adapter = {} if peft_config is None else _adapter(peft_config)
        self.environment.settings = {**self.environment.settings, **own, **adapter}
        self.result: TuneResult | None = None

    def train(self, **given: Any) -> TuneResult:
        """Train the model; arguments of `tune()`, such as `overrides`, win over args."""
        from tuner.tune import tune

        self.result = tune(environment=self.environment, **given)
        return self.result

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Copy the trained model to a folder; None: `args.output_dir`. Raises ConfigError if
        nothing has been trained."""
        if self.result is None or self.result.checkpoint is None:
            raise ConfigError("there is no trained model yet: call train() first")
        target = output_dir or self.environment.settings["checkpoint_root_dir"]
        shutil.copytree(self.result.checkpoint, target, dirs_exist_ok=True)


def from_trl(model: Any, reward_funcs: Any = None, args: Any = None, **given: Any) -> TRL:
    """The arguments of TRL's `GRPOTrainer` as an environment: `tune(environment=from_trl(...))`.
    Raises ConfigError for one that is not supported."""
    return GRPOTrainer(model, reward_funcs, args, **given).environment


def _adapter(config: Any) -> dict[str, Any]:
    """peft's `LoraConfig` as keys of the file; raises ConfigError for another adapter, or a
    field that is not supported."""
    if type(config).__name__ != "LoraConfig":
        raise ConfigError(f"peft_config is a {type(config).__name__}: only LoraConfig is supported")
    if config.target_modules is None:
        raise ConfigError(
            "peft_config.target_modules is not set, and peft's default depends on the model: name "
            "the layers, or set 'all-linear'"
        )
    refused = "lora_dropout use_rslora use_dora modules_to_save layers_to_transform"
    for name in refused.split():
        if value := getattr(config, name, None):
            raise ConfigError(f"peft_config.{name} is {value!r}, which is not supported")
    targets = config.target_modules
    layers = targets if isinstance(targets, str) else sorted(targets)
    one = {"lora_rank": config.r, "lora_alpha": config.lora_alpha, "target_modules": layers}
    return {"model.lora_configs": [one]}


def _loaded(given: Any, argument: str) -> Any:
    """The function that a string refers to; other strings are names of models."""
    refers = isinstance(given, str) and ":" in given
    return load_function(given, setting=argument) if refers else given


def _rows_in(dataset: Any) -> int | None:
    if dataset is None or isinstance(dataset, (str, Path, DatasetConfig)):
        return None
    try:
        return len(dataset)
    except TypeError:
        return None
