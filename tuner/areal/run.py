"""What actor and rollout engine of one run share: the model, an event loop, the lock on weights."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from tuner.assembly.stack import Stack, build_stack
from tuner.config import RunConfig
from tuner.errors import ConfigError, TrainingError
from tuner.functions.outputs import WorkflowOutput
from tuner.tune import with_default_model

T = TypeVar("T")


class Run:
    """One model that is generated with and trained, and the thread that generation runs in.

    The verbs of the loop in the open are plain functions that may be called from anywhere, a
    notebook's running event loop included: what is asynchronous runs in a loop of its own.

    Args:
        config: The effective configuration, or what gives it when the model is loaded.
    """

    def __init__(self, config: RunConfig | Callable[[], RunConfig]) -> None:
        self._config = config
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stack: Stack | None = None
        self._training: contextlib.AsyncExitStack | None = None
        self._effective: RunConfig | None = None
        self._paused: contextlib.AsyncExitStack | None = None
        self.workflows: dict[str, Callable[..., Coroutine[Any, Any, WorkflowOutput]]] = {}

    @property
    def config(self) -> RunConfig:
        """The effective configuration, fixed when it is first asked for."""
        if self._effective is None:
            config = self._config() if callable(self._config) else self._config
            _check_settings(config)
            self._effective = with_default_model(config)
        return self._effective

    @property
    def stack(self) -> Stack:
        """Model, engine and gateway; loaded when they are first needed."""
        if self._stack is None:
            self._stack = self.call(self._build)
        return self._stack

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that generation runs in."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="tuner-areal", daemon=True).start()
        return self._loop

    async def _build(self) -> Stack:
        async def dispatch(
            task: dict[str, Any], model: Any, auxiliary_models: Any, logger: Any
        ) -> WorkflowOutput:
            rollout = model.session.id.rpartition("-")[0]
            return await self.workflows[rollout](task, model, auxiliary_models, logger)

        return build_stack(self.config, workflow=dispatch, judge=None)

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `work()`, run in the event loop.

        Raises:
            RuntimeError: It is called from the event loop itself.
        """
        with contextlib.suppress(RuntimeError):
            if asyncio.get_running_loop() is self._loop:
                raise ConfigError(
                    "a workflow called a verb of the training loop, which waits for workflows: use "
                    "engine.agenerate inside workflows"
                )
        return asyncio.run_coroutine_threadsafe(work(), self.loop).result()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold generation while the block runs: one model computes one thing at a time. Where
        generation has weights of its own, it goes on."""
        if not self.stack.shares_weights:
            yield
            return
        held = self._entered(self.stack.engine.pause)
        try:
            yield
        finally:
            self.call(held.aclose)

    def _entered(
        self, block: Callable[[], contextlib.AbstractAsyncContextManager[None]]
    ) -> contextlib.AsyncExitStack:
        """Be inside `block()` until what is returned is closed."""

        async def enter() -> contextlib.AsyncExitStack:
            stack = contextlib.AsyncExitStack()
            await stack.enter_async_context(block())
            return stack

        return self.call(enter)

    def pause(self) -> None:
        """Hold generation until `resume`."""
        if self._paused is None:
            self._paused = self._entered(self.stack.engine.pause)

    def resume(self) -> None:
        """Let generation go on."""
        if self._paused is not None:
            held, self._paused = self._paused, None
            self.call(held.aclose)

    def weights_will_change(self) -> None:
        """Hold generation from now on until `weights_are`, unless it has weights of its own and
        does not make room for training."""
        if self._training is None:
            self._training = self._entered(self.stack.training)

    def weights_are(self, publish: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Tell the engine of new weights and let it go on."""
        self.call(publish)
        self.weights_are_unchanged()

    def weights_are_unchanged(self) -> None:
        """Let the engine go on: what `weights_will_change` announced did not happen."""
        if self._training is not None:
            held, self._training = self._training, None
            self.call(held.aclose)

    def check_can_generate(self) -> None:
        """Load the model, and refuse to wait for answers that nobody will give.

        Raises:
            TrainingError: Generation is paused, or new weights were not published.
        """
        if self.stack.takes_turns and self._training is not None:
            raise TrainingError(
                "ppo_update changed the weights and the engine does not know yet: call "
                "actor.update_weights() before generating"
            )
        if self._paused is not None:
            raise TrainingError("the rollout engine is paused: call resume() before generating")

    def close(self) -> None:
        """Stop generation and forget the model; a later use loads it again."""
        if self._stack is not None:
            self.call(self._stack.aclose)
            self._stack = None
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None
        self._training = self._paused = None


def _check_settings(config: RunConfig) -> None:
    """Refuse settings that would have no effect here.

    Raises:
        ConfigError: One is set.
    """
    if config.tuner.on_failure != "drop":
        raise ConfigError(
            f"tuner.on_failure is {config.tuner.on_failure!r}, but the loop in the open leaves "
            "failed rollouts out (batch.account counts them); set it to drop"
        )
    if config.tuner.algorithm.overlong_buffer is not None:
        raise ConfigError(
            f"tuner.algorithm.overlong_buffer is {config.tuner.algorithm.overlong_buffer}, but the "
            "loop in the open takes rewards as the workflow gives them: punish long answers there, "
            "or leave it out"
        )
