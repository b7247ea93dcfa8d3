"""Agents that are independent of training, and the conversion of any agent to a workflow."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from numbers import Real
from typing import Any

import openai

from tuner.areal.token_workflow import EpisodeWorkflow, TokenWorkflow
from tuner.config import RunConfig
from tuner.errors import ConfigError, FunctionError
from tuner.gateway import RecordedCall
from tuner.rollouts.without_framework import SessionHandle
from tuner.runs.stack import adds_up
from tuner.tasks.functions import Rejected, WorkflowOutput, call_function, check_workflow_function
from tuner.tasks.loading import load_function

# Model name in the requests of such agents, if the name does not matter.
ANY_MODEL = "default"


class AgentWorkflow:
    """An agent with `async def run(self, data, **extra)` as a workflow function.

    `extra` is `base_url`, `api_key` and `http_client`; the last reaches the gateway without a
    socket, for any URL. `run` may be a plain function, and may omit arguments that it does not use.
    It returns the rollout's reward, as a float, int or bool; or rewards by call id; or None to
    reject.

    With rewards by call id, a call's return is its own reward plus `turn_discount` times the return
    of the call that continues it (the mean of several). A call that neither has a reward nor leads
    to one, such as a sub-agent's, is not trained, and is counted as `excluded_call`.

    Args:
        agent: An instance; a class; or a reference to one: "package.module:Name",
            "path/file.py:Name" or "package.module.Name".
        turn_discount: A turn's share of the return of the next one. Not allowed if the run has a
            discount itself (`tuner.algorithm.turn_discount`, ppo), which then discounts the rewards
            by call id.
        arguments: For the constructor, if a class is given.

    Raises:
        ConfigError: There is no such class, or it does not take the arguments.
        FunctionError: It has no `run` that takes `data`.
    """

    def __init__(self, agent: Any, *, turn_discount: float = 1.0, **arguments: Any) -> None:
        if isinstance(agent, str):
            if ":" not in agent and "." in agent:
                module, _, name = agent.rpartition(".")
                agent = f"{module}:{name}"
            agent = load_function(agent, setting="the agent")
        if isinstance(agent, type):
            try:
                inspect.signature(agent).bind(**arguments)
            except TypeError as error:
                raise ConfigError(
                    f"{agent.__qualname__}{inspect.signature(agent)} does not take the arguments "
                    f"{', '.join(arguments) or 'none'}: {error}"
                ) from None
            agent = agent(**arguments)
        elif arguments:
            raise ConfigError(
                f"arguments {', '.join(arguments)} were given, but {agent!r:.80} is an instance: "
                "pass its class"
            )
        run = getattr(agent, "run", None)
        if not callable(run):
            raise FunctionError(
                f"{agent!r:.80} has no run(data, **extra): pass an agent, its class, or a "
                "reference to it"
            )
        parameters = inspect.signature(run).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        if "data" not in parameters and not takes_any:
            raise FunctionError(
                f"{type(agent).__name__}.run takes no `data`: add this parameter for the row"
            )
        self._run = run
        self._source = f"{type(agent).__name__}.run"
        self._discount = turn_discount

    def check_settings(self, config: RunConfig) -> None:
        """Reject a discount in addition to the trainer's.

        Raises:
            ConfigError: There are two.
        """
        if self._discount != 1.0 and adds_up(config):
            by = f"tuner.algorithm.turn_discount {config.tuner.algorithm.turn_discount}"
            if config.algorithm.advantage_fn == "ppo":
                by = "algorithm.advantage_fn ppo"
            raise ConfigError(
                f"AgentWorkflow has turn_discount {self._discount}, but the run also discounts "
                f"the returns of calls ({by}): remove one of them"
            )

    async def __call__(self, task: dict[str, Any], model: SessionHandle) -> WorkflowOutput:
        """Run the agent once as a rollout.

        Raises:
            Rejected: It returned None.
            FunctionError: It did not return rewards, or returned a reward of a call that it did not
                make.
        """
        session = model.session
        session.other_names = (ANY_MODEL,)
        async with aclosing(session.http_client(openai.DefaultAsyncHttpxClient)) as client:
            arguments = {
                "data": task,
                "base_url": model.base_url,
                "api_key": model.api_key,
                "http_client": client,
            }
            value = await call_function(self._run, arguments)
        if value is None:
            raise Rejected(f"{self._source} returned None")
        if isinstance(value, Mapping):
            return WorkflowOutput(reward=self._give(value, session.calls_so_far()))
        return WorkflowOutput(reward=_number(value, self._source))

    def _give(self, rewards: Mapping[str, Any], calls: Sequence[RecordedCall]) -> float:
        """Give calls their returns; the rollout's reward is that of the last call named."""
        ids = {call.id for call in calls} | {_response(call.id) for call in calls}
        unknown = [name for name in rewards if name not in ids]
        if unknown or not rewards:
            found = f"rewards of {', '.join(map(str, unknown))}" if unknown else "no rewards"
            raise FunctionError(
                f"{self._source} returned {found}; the calls it made are "
                f"{', '.join(sorted({_response(call.id) for call in calls})) or 'none'}"
            )
        own: list[float | None] = []
        for call in calls:
            name = call.id if call.id in rewards else _response(call.id)
            own.append(_number(rewards[name], self._source) if name in rewards else None)
        for call, reward, total in zip(
            calls, own, returns(calls, own, self._discount), strict=True
        ):
            if total is None:
                call.exclude()
            else:
                call.reward, call.gained = total, reward
        return next(reward for reward in reversed(own) if reward is not None)


def returns(
    calls: Sequence[RecordedCall], own: Sequence[float | None], discount: float
) -> list[float | None]:
    """Return of each call: its reward, plus `discount` times the mean return of the calls that
    continue it; None if there is neither.

    Call b continues call a if its prompt begins with the prompt and the completion of a, and with
    those of no longer call.

    Args:
        calls: In order of commitment.
        own: Their rewards, None if they have none.
    """
    ids = [call.call.prompt_ids + call.call.completion_ids for call in calls]
    after: list[list[int]] = [[] for _ in calls]
    for index, call in enumerate(calls):
        prompt = call.call.prompt_ids
        before = [i for i in range(index) if prompt[: len(ids[i])] == ids[i]]
        if before:
            after[max(before, key=lambda i: (len(ids[i]), i))].append(index)
    totals: list[float | None] = list(own)
    for index in reversed(range(len(calls))):
        later = [total for i in after[index] if (total := totals[i]) is not None]
        if later:
            totals[index] = (own[index] or 0.0) + discount * sum(later) / len(later)
    return totals


def _response(call_id: str) -> str:
    """The id of the response that a call is a choice of."""
    return call_id.rpartition("-")[0]


def _number(value: Any, source: str) -> float:
    try:  # NumPy's and PyTorch's numbers too
        number = float(value) if isinstance(value, Real) else float(value.item())
    except (AttributeError, TypeError, ValueError):
        raise FunctionError(
            f"{source} returned {value!r:.80} ({type(value).__name__}); it must return a number, "
            "rewards by call id, or None to reject"
        ) from None
    if not math.isfinite(number):
        raise FunctionError(f"{source} returned the reward {number}: give a finite number")
    return number


def as_workflow(workflow: Any) -> Any:
    """Convert an agent of any kind to a workflow function.

    Args:
        workflow: A token-level workflow (an object with `arun_episode`), a `QueueWorkflow`, a
            workflow function `(task, model)`, or an agent that `AgentWorkflow` takes.

    Raises:
        FunctionError: It is none of these.
    """
    if isinstance(workflow, EpisodeWorkflow):
        return workflow
    if hasattr(workflow, "arun_episode"):
        return TokenWorkflow(workflow)
    if isinstance(workflow, str) or hasattr(workflow, "run"):
        return AgentWorkflow(workflow)
    if not callable(workflow):
        raise FunctionError(
            f"{workflow!r:.80} is not a workflow: pass an object with arun_episode, a "
            "QueueWorkflow, a workflow function, or an agent with run"
        )
    check_workflow_function(workflow)
    return workflow
