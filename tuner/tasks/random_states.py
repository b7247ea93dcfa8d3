"""The global random states, which the user's functions may use: one for each rollout."""

from __future__ import annotations

import asyncio
import random
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

T = TypeVar("T")
_OURS = str(Path(__file__).resolve().parents[1])


def seed_everything(seed: int) -> None:
    """Set the global random states, which the user's functions may use."""
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # which would also look for devices, for 3 ms each time
        torch.default_generator.manual_seed(seed)


_OWNER: ContextVar[RandomStates | None] = ContextVar("tuner_random_states", default=None)


class RandomStates:
    """The global random states of Python, NumPy and torch as the functions of one rollout see them.

    Rollouts run at the same time, and the states exist once. They are exchanged before each step of
    a task, from one `await` to the next, that belongs to another rollout than the step before. A
    thread cannot be stopped for that, so while a plain function runs in one (`alone`), the tasks of
    other rollouts wait. Random numbers that an async function draws in threads are not its own.
    """

    _loaded: ClassVar[RandomStates | None] = None
    _holder: ClassVar[RandomStates | None] = None
    _held: ClassVar[int] = 0  # by how many blocks of the holder, which may overlap
    _waiting: ClassVar[list[asyncio.Future[None]]] = []

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._kept: tuple[Any, ...] | None = None

    def load(self) -> None:
        """Make these states the global ones, keeping those of the rollout before."""
        import torch

        before = RandomStates._loaded
        if before is self:
            return
        if before is not None:
            states = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
            before._kept = states
        if self._kept is None:
            seed_everything(self._seed)
        else:
            of_python, of_numpy, of_torch = self._kept
            random.setstate(of_python)
            np.random.set_state(of_numpy)
            torch.set_rng_state(of_torch)
        RandomStates._loaded = self

    async def stepping(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, with these states in all its steps and those of its tasks."""
        loop = asyncio.get_running_loop()
        made: Any = loop.get_task_factory()
        if not isinstance(made, _TaskFactory):
            loop.set_task_factory(_TaskFactory(made))
        _OWNER.set(self)
        return await self._steps(work)

    @types.coroutine
    def _steps(self, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        step: Callable[[Any], Any] = work.send
        value: Any = None
        while True:
            try:
                while RandomStates._holder not in (None, self):
                    yield from self._turn()
            except GeneratorExit:
                work.close()
                raise
            except BaseException as error:  # a cancellation, which the work has to see at once
                step, value = work.throw, error
            if RandomStates._holder in (None, self):
                self.load()
            try:
                awaited = step(value)
            except StopIteration as end:
                result: T = end.value
                return result
            try:
                step, value = work.send, (yield awaited)
            except BaseException as error:
                step, value = work.throw, error

    @staticmethod
    def _turn() -> asyncio.Future[None]:
        """Ends when no rollout is alone any more."""
        turn = asyncio.get_running_loop().create_future()
        RandomStates._waiting.append(turn)
        return turn

    @staticmethod
    @asynccontextmanager
    async def alone() -> AsyncIterator[None]:
        """While the block runs, the states are those of this task's rollout, if it has any."""
        owner = _OWNER.get()
        if owner is None:
            yield
            return
        while RandomStates._holder not in (None, owner):
            await RandomStates._turn()
        RandomStates._holder = owner
        RandomStates._held += 1
        owner.load()
        try:
            yield
        finally:
            RandomStates._held -= 1
            if not RandomStates._held:
                RandomStates._holder = None
                waiting, RandomStates._waiting = RandomStates._waiting, []
                for turn in waiting:
                    if not turn.done():
                        turn.get_loop().call_soon_threadsafe(_end, turn)


def _end(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


@dataclass(frozen=True)
class _TaskFactory:
    """Makes the tasks of a rollout's functions step with its random states. Those of this package
    serve all rollouts."""

    made: Callable[..., asyncio.Task[Any]] | None

    def __call__(
        self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any
    ) -> asyncio.Task[Any]:
        context = options.get("context")
        owner = _OWNER.get() if context is None else context.get(_OWNER)
        code = getattr(work, "cr_code", None)
        if owner is not None and code is not None and not code.co_filename.startswith(_OURS):
            work = owner.stepping(work)
        if self.made is None:
            return asyncio.Task(work, loop=loop, **options)
        return self.made(loop, work, **options)
