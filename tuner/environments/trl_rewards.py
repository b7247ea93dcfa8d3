"""TRL's reward functions on a group's completions: called as TRL calls them, added as it adds."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
from collections.abc import Callable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from tuner.errors import ConfigError, FunctionError
from tuner.functions.calling import in_thread, is_async, unwrapped
from tuner.functions.outputs import JudgeOutput, shown

if TYPE_CHECKING:
    from tuner.environments.trl_rollout import Completed


# Reward functions that are not async are written for a trainer that calls one at a time.
_ONE_AT_A_TIME = threading.Lock()
# Groups are judged beside each other, and of two threads that import transformers one may find half
# of it.
_IMPORTING = threading.Lock()


class RewardFunctions:
    """Reward functions and their weights.

    Those that are not async are called one at a time, as TRL does: in a thread, but never two.

    Args:
        functions: As TRL takes them; a reward model is none.
        weights: One each, or None for 1.
        classes: Of environments that have a reward of their own, which counts once.

    Raises:
        ConfigError: One cannot be called, there is none, or there are more or fewer weights.
    """

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
                "reward functions: give each one"
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
                "nothing rewards: give reward_funcs, or an environment_factory whose environments "
                "have get_reward()"
            )

    async def of(
        self, task: dict[str, Any], group: Sequence[Completed], *, max_steps: int
    ) -> list[JudgeOutput]:
        """The weighted sum of the rewards of each completion; NaN where it has none.

        Args:
            task: Their row.
            group: The completions.
            max_steps: Of the run, for `trainer_state`.

        Raises:
            FunctionError: A function returned something else than a reward, or None, for each.
        """
        extra: dict[str, list[Any]] = {}
        logged: dict[str, list[float]] = {}
        arguments: dict[str, Any] = {
            name: [value] * len(group)
            for name, value in task.items()
            if name not in ("prompt", "completion", "completion_ids")
        }
        arguments |= {
            "prompts": [one.prompt for one in group],
            "completions": [one.completion for one in group],
            "completion_ids": [one.ids for one in group],
            "trainer_state": await in_thread(lambda: _state(group[0].step, max_steps)),
            "log_extra": lambda column, values: extra.setdefault(column, []).extend(values),
            "log_metric": lambda name, value: logged.setdefault(name, []).append(value),
        }
        if group[0].environment is not None:
            arguments["environments"] = [one.environment for one in group]
        columns = await self._columns(arguments, len(group))
        metrics = {name: sum(values) / len(values) for name, values in logged.items()}
        return [
            self._output(
                [column[i] for column in columns],
                metrics,
                {name: values[i] for name, values in extra.items() if i < len(values)},
            )
            for i in range(len(group))
        ]

    async def _columns(self, arguments: dict[str, Any], count: int) -> list[list[float | None]]:
        """What each function says, of which those that are async run together."""
        found: dict[int, Any] = {}
        waiting = {}
        for index, function in enumerate(self._functions):
            if is_async(function):
                waiting[index] = function(**arguments)
            else:
                call = functools.partial(self._alone, function, arguments)
                found[index] = await in_thread(call)
        answers = await asyncio.gather(*waiting.values())
        found |= dict(zip(waiting, answers, strict=True))
        return [_checked(found[i], self._names[i], count) for i in range(len(self._functions))]

    @staticmethod
    def _alone(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        with _ONE_AT_A_TIME:
            return function(**arguments)

    def _output(
        self, rewards: Sequence[float | None], metrics: dict[str, float], extra: dict[str, Any]
    ) -> JudgeOutput:
        scored = {
            name: reward
            for name, reward in zip(self._names, rewards, strict=True)
            if reward is not None and not math.isnan(reward)
        }
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


def _state(step: int, max_steps: int) -> Any:
    """transformers' own, whose import takes seconds and PyTorch."""
    with _IMPORTING:
        from transformers import TrainerState

    return TrainerState(global_step=step, max_steps=max_steps)


def _check(function: Any, where: str) -> None:
    """
    Raises:
        ConfigError: It is a reward model, a class, or nothing that can be called.
    """
    bases = type(function).__mro__
    if isinstance(function, str) or any(one.__module__.startswith("torch.nn") for one in bases):
        raise ConfigError(
            f"{where} is {shown(function)}, a reward model: pass a function that asks it, as "
            "`def scored(prompts, completions, **columns): return model(...)`"
        )
    if isinstance(function, type) or not callable(function):
        raise ConfigError(f"{where} is {shown(function)}: pass a function, or an object")


def _checked(said: Any, name: str, count: int) -> list[float | None]:
    """
    Raises:
        FunctionError: It is something else than a reward, or None, for each completion.
    """
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
    name = _name_of(made)  # in a worker the class may be there twice: sent, and imported
    return [await _rewarded(one) if _name_of(type(one)) == name else None for one in environments]


def _name_of(made: type[Any]) -> tuple[str, str]:
    return made.__module__, made.__qualname__


async def _rewarded(environment: Any) -> float | None:
    if inspect.iscoroutinefunction(environment.get_reward):
        awaited: float | None = await environment.get_reward()
        return awaited
    found: float | None = await in_thread(environment.get_reward)
    return found


def _name(function: Any) -> str:
    function = unwrapped(function)
    return str(getattr(function, "__name__", type(function).__name__))
