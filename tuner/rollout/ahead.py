"""Work that is begun before it is needed: numbered, under way at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from tuner.errors import TrainingError

T = TypeVar("T")


class Ahead(Generic[T]):
    """Pieces of work by number, until they are taken.

    Args:
        on_end: Called with the number of each piece that ends.
    """

    def __init__(self, on_end: Callable[[int], None] = lambda number: None) -> None:
        self._on_end = on_end
        self._running: dict[int, asyncio.Task[T]] = {}
        self._ended: dict[int, T] = {}
        self._errors: list[BaseException] = []
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Pieces that were begun and not taken."""
        return len(self._running) + len(self._ended)

    @property
    def running(self) -> list[int]:
        """Numbers of what has not ended, rising."""
        return sorted(self._running)

    @property
    def ended(self) -> list[int]:
        """Numbers of what can be taken, rising: the oldest first."""
        return sorted(self._ended)

    def begin(self, number: int, work: Coroutine[Any, Any, T]) -> None:
        """Begin a piece of work; an event loop must be running."""
        task = asyncio.ensure_future(work)
        self._running[number] = task
        task.add_done_callback(lambda task: self._end(number, task))

    def add(self, number: int, result: T) -> None:
        """A piece that ended earlier."""
        self._ended[number] = result

    def _end(self, number: int, task: asyncio.Task[T]) -> None:
        if self._running.pop(number, None) is None:
            return  # cancelled by `cancel`
        if task.cancelled():
            self._errors.append(TrainingError(f"group {number} was cancelled from outside"))
        elif (error := task.exception()) is not None:
            self._errors.append(error)
        else:
            self._ended[number] = task.result()
        self._changed.set()
        self._on_end(number)

    async def until(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`, which is asked whenever a piece ends.

        Raises:
            BaseException: What a piece failed with.
        """
        while True:
            if self._errors:
                raise self._errors.pop(0)
            if ready():
                return
            self._changed.clear()
            await self._changed.wait()

    def take(self, numbers: Sequence[int]) -> list[T]:
        """The results of pieces that ended, which are forgotten here."""
        return [self._ended.pop(number) for number in numbers]

    async def cancel(self) -> None:
        """Cancel what runs, and forget everything."""
        tasks = list(self._running.values())
        self._running.clear()
        self._ended.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
