"""What of a session is being generated, in whichever task."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class CutOff(Exception):
    """What was being generated was cancelled, and not who awaits it."""


class InFlight:
    """What of a session is being generated, how long that took, and when it last began or ended.

    Attributes:
        tasks: Those that generate, once for each thing that they generate.
        moved: When one last began or ended, by `time.perf_counter`.
    """

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[Any]] = []
        self.moved = time.perf_counter()
        self._seconds = 0.0
        self._cut: set[asyncio.Task[Any]] = set()

    @property
    def seconds(self) -> float:
        """Wall time during which at least one task was running."""
        return self._seconds + (time.perf_counter() - self.moved if self.tasks else 0.0)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`.

        Raises:
            CutOff: `cancel` ended it, and not who awaits it.
        """
        task = asyncio.current_task()
        assert task is not None, "an answer is awaited"
        try:
            with self._generating(task):
                return await work
        except asyncio.CancelledError:
            if self._taken_back(task):
                raise CutOff from None
            raise
        finally:
            self._taken_back(task)

    def _taken_back(self, task: asyncio.Task[Any]) -> bool:
        """Take back what `cancel` has asked of a task; whether nobody else wants it to end.

        What the task generates around this is cut off, too, and ends as it would.
        """
        if task in self.tasks or task not in self._cut:
            return False
        self._cut.discard(task)
        return task.uncancel() == 0

    @contextmanager
    def here(self) -> Iterator[None]:
        """While the block runs, the task that runs it is generating, and can be cancelled."""
        task = asyncio.current_task()
        assert task is not None, "an answer is awaited"
        try:
            with self._generating(task):
                yield
        finally:
            if task not in self.tasks:
                self._cut.discard(task)

    @contextmanager
    def _generating(self, task: asyncio.Task[Any]) -> Iterator[None]:
        self._move()
        self.tasks.append(task)
        try:
            yield
        finally:
            self._move()
            self.tasks.remove(task)

    def _move(self) -> None:
        self._seconds, self.moved = self.seconds, time.perf_counter()

    def cancel(self) -> None:
        """Cancel every task, from any thread."""
        for task in {*self.tasks}:
            task.get_loop().call_soon_threadsafe(self._cancel, task)

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        if task in self.tasks:  # it may have gone on to something else
            self._cut.add(task)
            task.cancel()
