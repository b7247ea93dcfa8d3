"""What of a session is being generated, in whichever task."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class InFlight:
    """What of a session is being generated, how long that took, and when it last began or ended."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        self.moved = time.perf_counter()
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """Wall time during which at least one task was running."""
        return self._seconds + (time.perf_counter() - self.moved if self.tasks else 0.0)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, as a task that can be cancelled."""
        task = asyncio.get_running_loop().create_task(work)
        with self._generating(task):
            return await task

    @contextmanager
    def here(self) -> Iterator[None]:
        """While the block runs, the task that runs it is generating, and can be cancelled."""
        task = asyncio.current_task()
        assert task is not None, "an answer is awaited"
        with self._generating(task):
            yield

    @contextmanager
    def _generating(self, task: asyncio.Task[Any]) -> Iterator[None]:
        self._move()
        self.tasks.add(task)
        try:
            yield
        finally:
            self._move()
            self.tasks.discard(task)

    def _move(self) -> None:
        self._seconds, self.moved = self.seconds, time.perf_counter()

    def cancel(self) -> None:
        """Cancel every task, from any thread."""
        for task in list(self.tasks):
            task.get_loop().call_soon_threadsafe(task.cancel)
