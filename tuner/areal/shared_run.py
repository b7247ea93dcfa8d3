"""State shared by actor and rollout engine of one run: the model, an event loop, the weights'
lock."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from contextvars import ContextVar
from typing import Any, Literal, TypeVar

from tuner.areal.token_workflow import Episode, EpisodeWorkflow
from tuner.config import RunConfig
from tuner.errors import ConfigError, TrainingError
from tuner.gateway import SamplingDefaults
from tuner.rollouts.groups import Rollouts
from tuner.runs.stack import Stack, build_stack
from tuner.tasks.functions import WorkflowOutput, call_workflow
from tuner.tune import with_default_model

T = TypeVar("T")

# The workflow of the current task's rollouts, and the episodes that they name, by session.
RUNNING: ContextVar[tuple[Any, dict[str, Episode]]] = ContextVar("RUNNING")


class Run:
    """One model for generation and training, and the thread in which generation runs.

    The methods of an explicit training loop are plain functions that may be called from anywhere,
    including a notebook's running event loop: asynchronous code runs in a separate loop.

    Args:
        config: The effective configuration, or a function that returns it when the model is loaded.
    """

    def __init__(self, config: RunConfig | Callable[[], RunConfig]) -> None:
        self._config = config
        self._effective: RunConfig | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stack: Stack | None = None
        self._rollouts: Rollouts | None = None
        self._held: dict[str, AsyncExitStack] = {}

    @property
    def config(self) -> RunConfig:
        """The effective configuration, fixed at the first access."""
        if self._effective is None:
            config = self._config() if callable(self._config) else self._config
            _check_settings(config)
            self._effective = with_default_model(config)
        return self._effective

    @property
    def defaults(self) -> SamplingDefaults:
        """Sampling settings of calls that do not set them."""
        args = self.config.rollout_args(self.config.buffer.explorer_input.taskset)
        return SamplingDefaults(**args.model_dump())

    @property
    def stack(self) -> Stack:
        """Model, engine and gateway; loaded at the first access."""
        if self._stack is None:

            async def build() -> Stack:
                return build_stack(self.config, workflow=_dispatch, judge=None)

            self._stack = self.call(build)
        return self._stack

    @property
    def rollouts(self) -> Rollouts:
        """Runs rollouts of the workflow in `RUNNING`; nothing is stored."""
        if self._rollouts is None:
            runner, config = self.stack.runner, self.config
            assert runner is not None, "an explicit training loop always has a workflow"
            self._rollouts = Rollouts(runner, None, max_running=config.concurrent_rollouts)
        return self._rollouts

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of generation."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="tuner-areal", daemon=True).start()
        return self._loop

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `work()`, run in the event loop.

        Raises:
            ConfigError: It is called from the event loop itself.
        """
        with contextlib.suppress(RuntimeError):
            if asyncio.get_running_loop() is self._loop:
                raise ConfigError(
                    "a workflow called a function of the training loop, which waits for workflows: "
                    "use engine.agenerate inside workflows"
                )
        return asyncio.run_coroutine_threadsafe(work(), self.loop).result()

    def hold(
        self,
        why: Literal["paused", "training", "computing"],
        block: Callable[[], AbstractAsyncContextManager[None]],
    ) -> None:
        """Enter `block()`, which holds generation, until `release(why)`."""

        async def enter() -> AsyncExitStack:
            stack = AsyncExitStack()
            await stack.enter_async_context(block())
            return stack

        if why not in self._held:
            self._held[why] = self.call(enter)

    def release(self, why: Literal["paused", "training", "computing"]) -> None:
        """Continue generation, as far as it was held for this reason."""
        if why in self._held:
            self.call(self._held.pop(why).aclose)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Hold generation while the block runs: one model computes one thing at a time. Generation
        with its own weights continues."""
        if not self.stack.shares_weights:
            yield
            return
        self.hold("computing", self.stack.engine.pause)
        try:
            yield
        finally:
            self.release("computing")

    def check_can_generate(self) -> None:
        """Load the model, and check that answers are possible.

        Raises:
            TrainingError: Generation is paused, or new weights were not published.
        """
        if self.stack.takes_turns and "training" in self._held:
            raise TrainingError(
                "ppo_update changed the weights, but the engine was not told: call "
                "actor.update_weights() before generating"
            )
        if "paused" in self._held:
            raise TrainingError("the rollout engine is paused: call resume() before generating")

    def close(self) -> None:
        """Stop generation and drop the model; the next use loads it again."""
        if self._stack is not None:
            self.call(self._stack.aclose)
            self._stack = self._rollouts = None
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None
        self._held.clear()


async def _dispatch(
    task: dict[str, Any], model: Any, auxiliary_models: Any, logger: Any
) -> WorkflowOutput:
    """Run one rollout of the workflow in `RUNNING`."""
    workflow, episodes = RUNNING.get()
    if not isinstance(workflow, EpisodeWorkflow):
        return await call_workflow(
            workflow, task=task, model=model, auxiliary_models=auxiliary_models, logger=logger
        )
    episode = episodes[model.session.id] = await workflow.episode(task, model.session)
    return WorkflowOutput(reward=episode.reward)


def _check_settings(config: RunConfig) -> None:
    """Reject settings that would have no effect here."""
    if config.tuner.on_failure != "drop":
        raise ConfigError(
            f"tuner.on_failure is {config.tuner.on_failure!r}, but an explicit training loop drops "
            "failed rollouts (batch.account counts them); set it to drop"
        )
    if config.tuner.workers:
        raise ConfigError(
            f"tuner.workers is {config.tuner.workers}, but an explicit training loop runs agents "
            "in its own process: set it to 0"
        )
    if config.tuner.algorithm.overlong_buffer is not None:
        raise ConfigError(
            f"tuner.algorithm.overlong_buffer is {config.tuner.algorithm.overlong_buffer}, but an "
            "explicit training loop uses the workflow's rewards unchanged: penalize long answers "
            "there, or remove the setting"
        )
    if config.algorithm.advantage_fn == "gigpo":
        raise ConfigError(
            "algorithm.advantage_fn is gigpo, but the trajectories of an explicit training loop do "
            "not carry the states of calls: use tune(), or set algorithm.algorithm_type to "
            "multi_step_grpo"
        )
