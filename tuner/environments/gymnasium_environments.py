"""gymnasium's environments: the agent that plays them, and tasks that are seeds."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

from tuner.areal.queue_workflow import GymnasiumEnvironment, registered
from tuner.areal.queues import CheckedEnvironment
from tuner.environments.conversation import Dialogue
from tuner.errors import ConfigError, TunerError
from tuner.runs.environment import Environment, seed_rows
from tuner.tasks.functions import WorkflowOutput, call_function, in_thread, is_async, where
from tuner.tasks.loading import function_of

logger = logging.getLogger("tuner.rollout")
_NUMBER = re.compile(r"-?\d+")
_CLOSING_SECONDS = 5.0

Agent = Callable[..., Awaitable[WorkflowOutput]]


class Gymnasium(Environment):
    """A gymnasium environment whose actions a model writes.

    A task is an episode: `seed` and `options` of a row are passed to `reset`; without `options`,
    the whole row except the seed. The agent sends each observation as a user's message and reads
    each answer as an action, until the episode ends; its reward is the sum of the environment's. An
    answer that is not an action ends the episode with `no_action` added, and is counted by the
    metric `no_action`; exceptions of the environment are workflow errors.

    The observation is the state of the call that answers it, for `gigpo`.

    Each rollout has its own environment; it is used again if the episode ended well.

    Args:
        id: A registered id such as "FrozenLake-v1" (or "module:Id", which imports the module
            first), an environment made from one, or a function that makes one.
        agent: Plays an episode in place of the agent above: async, takes `task`, `env` (with async
            `reset` and `step`; `env.env` is gymnasium's own) and `model`, and returns a
            `WorkflowOutput`. Or its name, `package.module:function` or `path/file.py:function`.
        show: Converts an observation to a message's text; None: `str`.
        read_action: Converts the text of an answer to an action; raises ValueError if it is not
            one.
            None: the text itself for a space of texts, and its last number for a discrete one.
        system_prompt: Sent before the first observation.
        max_turns: Maximum number of answers of an episode, which is then truncated.
        no_action: Added to the reward for an answer that is not an action.
        train_tasks, eval_tasks: Number of seeds for training and evaluation, from 0 and from
            1,000,000 on; 0: none.
        make_args: Passed to `gymnasium.make`.

    Raises:
        ConfigError: It cannot be made, or its actions cannot be read from text.
        MissingDependencyError: gymnasium is not installed.
    """

    def __init__(
        self,
        id: Any,
        *,
        agent: Agent | str | None = None,
        show: Callable[[Any], str] | str | None = None,
        read_action: Callable[[str], Any] | str | None = None,
        system_prompt: str | None = None,
        max_turns: int = 32,
        no_action: float = 0.0,
        train_tasks: int = 1024,
        eval_tasks: int = 64,
        make_args: Mapping[str, Any] | None = None,
    ) -> None:
        made, spec = hasattr(id, "step") and not isinstance(id, type), getattr(id, "spec", None)
        if made and spec is None:
            raise ConfigError(
                f"environment {id!r:.80} was not made from a registered id, so a second one "
                "cannot be made: pass a function that makes one"
            )
        self._id, self._make_args = spec if made else id, dict(make_args or {})
        self._agent: Agent = function_of(agent, setting="agent") or self._play
        self._show: Callable[[Any], str] = function_of(show, setting="show") or str
        self._read_action = function_of(read_action, setting="read_action")
        self._system_prompt, self._max_turns = system_prompt, max_turns
        self._no_action = no_action
        if agent is not None and not is_async(self._agent):
            raise ConfigError(f"the agent {where(self._agent)} must be async")
        self._closing: set[asyncio.Task[None]] = set()
        # Created now, so that a wrong name or argument fails before the run begins.
        try:
            self._idle = [self._made()]
        except TunerError:
            raise
        except Exception as error:
            raise ConfigError(
                f"gymnasium environment {id!r:.80} cannot be made: {type(error).__name__}: {error}"
            ) from error
        self._space = self._idle[0].env.action_space
        # The environment checks texts: a space's characters and length are seldom meant for models.
        self._any_text = type(self._space).__name__ == "Text"
        unread = agent is None and self._read_action is None and not self._any_text
        if unread and type(self._space).__name__ != "Discrete":
            raise ConfigError(
                f"the environment's actions are {self._space!r:.80}, which are not text: pass "
                "read_action or an agent"
            )
        self.train_dataset, self.eval_dataset = seed_rows(train_tasks, eval_tasks)

    def __getstate__(self) -> dict[str, Any]:
        """State for another process, where the id is not registered: includes its registration."""
        changed = {"_id": registered(self._id), "_idle": [], "_closing": set()}
        return {**super().__getstate__(), **changed}

    def _made(self) -> GymnasiumEnvironment:
        if callable(self._id):
            return GymnasiumEnvironment(self._id())
        return GymnasiumEnvironment(self._id, **self._make_args)

    async def workflow(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        """Play one episode; raises EnvironmentFault for an invalid result of the environment."""
        async with self._one() as env:
            arguments = {"task": task, "env": env, "model": model}
            return cast(WorkflowOutput, await call_function(self._agent, arguments))

    @asynccontextmanager
    async def _one(self) -> AsyncIterator[CheckedEnvironment]:
        """An environment that no other rollout uses."""
        environment = self._idle.pop() if self._idle else await in_thread(self._made)
        try:
            yield CheckedEnvironment(environment)
        except BaseException:
            # Its thread may hang, and the failed rollout must not wait for it.
            task = asyncio.ensure_future(_closed(environment))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            raise
        self._idle.append(environment)

    async def _play(self, task: dict[str, Any], env: Any, model: Any) -> WorkflowOutput:
        rest = {name: value for name, value in task.items() if name != "seed"}
        options = task.get("options", rest) or None
        observation, info = await env.reset(seed=task.get("seed"), options=options)
        conversation = Dialogue(model, self._system_prompt)
        reward, metrics = 0.0, {"steps": 0.0, "no_action": 0.0, "terminated": 0.0}
        shown = ""
        for _ in range(self._max_turns):
            observed = str(self._show(observation))
            conversation.tell([{"role": "user", "content": observed}])
            answer = await conversation.answer(state=observed)
            shown = answer.content or ""
            try:
                action = self._action(shown)
            except ValueError:
                reward, metrics["no_action"] = reward + self._no_action, 1.0
                break
            observation, step_reward, terminated, truncated, info = await env.step(action)
            reward += float(step_reward)
            metrics["steps"] += 1
            metrics["terminated"] = float(terminated)
            if terminated or truncated:
                break
        numbers = {name: float(v) for name, v in info.items() if isinstance(v, bool | int | float)}
        return WorkflowOutput(reward=reward, response=shown, metrics=numbers | metrics)

    def _action(self, text: str) -> Any:
        """Raises ValueError if the text is not an action."""
        action: Any = text
        if self._read_action is not None:
            action = self._read_action(text)
        elif not self._any_text:
            if not (found := _NUMBER.findall(text)):
                raise ValueError("there is no number in it")
            try:
                action = type(self._space.start)(found[-1])
            except OverflowError:
                raise ValueError(f"{found[-1]:.60} is not in {self._space}") from None
        if not self._any_text and not self._space.contains(action):
            raise ValueError(f"{action!r:.60} is not in {self._space}")
        return action

    async def close(self) -> None:
        """Close every environment without a running episode."""
        idle, self._idle = self._idle, []
        closing = [*self._closing, *(asyncio.ensure_future(_closed(one)) for one in idle)]
        if closing:
            _, left = await asyncio.wait(closing, timeout=_CLOSING_SECONDS)
            if left:
                logger.warning("%d gymnasium environments cannot be closed", len(left))


async def _closed(environment: GymnasiumEnvironment) -> None:
    try:
        await environment.close()
    except Exception as error:
        logger.warning("closing a gymnasium environment failed: %s", error)
