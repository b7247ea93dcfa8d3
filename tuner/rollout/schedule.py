"""Which groups of a run are begun when, and which a step takes: collection ahead of training.

How far collection may run ahead of training: pure rules, in groups and updates.

A group that begins at version b has tokens of version b and later. In the step that makes update
v + 1 (the weights have seen v) its staleness is at most v - b: within a bound s its *deadline* is
the step at v = b + s. `admissible` begins no more groups than steps can take before their
deadlines; `in_time` keeps a step from leaving behind more than the later steps can take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, TypeVar

from tuner.errors import TrainingError

T = TypeVar("T")


def admissible(
    *, max_running: int, running: int, accepted: int, batch: int, version: int, staleness: int
) -> int:
    """Groups that may be begun, at least 0 (AReaL, arXiv 2505.24298, equation 3).

    A step uses up `batch` groups, so those that are begun now are trained once everything before
    them is: `(accepted + running) // batch` steps from the start, `version` of which are over.
    A staleness of 0 is synchronous.

    Args:
        max_running: Groups that may run at the same time.
        running: Groups that do.
        accepted: Groups that ended and are trained on, since the run began.
        batch: Groups in a step.
        version: Updates that the weights have seen.
        staleness: Updates by which a sample may be older than the weights that it trains.
    """
    ahead = (staleness + version + 1) * batch - (accepted + running)
    return max(0, min(max_running - running, ahead))


def in_time(left: Iterable[int], *, batch: int, version: int, staleness: int) -> bool:
    """Whether every group that a step leaves behind can still be trained within the bound.

    The groups whose deadline is d or earlier must fit into the steps up to the one at d: for every
    d, `#{begun + staleness <= d} <= (d - version) * batch`.

    Args:
        left: The version at which each group began that is neither trained nor in this step.
        batch: Groups in a step.
        version: Updates that the weights have seen which this step trains.
        staleness: The bound.
    """
    deadlines = sorted(begun + staleness for begun in left)
    return all(
        count <= max(0, deadline - version) * batch for count, deadline in enumerate(deadlines, 1)
    )


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


@dataclass(eq=False)
class Schedule(Generic[T]):
    """The groups of a run, numbered from 0: begun in order, trained when they are complete.

    Group `n` begins once the weights have seen `n // batch - staleness` updates and there is room
    for its rollouts. A step takes the oldest `batch` groups that are complete. With `waits` it
    first waits for groups without which later steps would have to exceed the staleness; otherwise
    slow groups grow older than that, and their old tokens have to be left out.

    Args:
        run: Runs the group of a number; calls `rollout_ended` for each of its rollouts.
        batch: Groups in a step.
        total: Groups in the run.
        repeat: Rollouts in a group.
        max_running: Rollouts at the same time.
        staleness: Updates by which collection may be ahead; 0 is synchronous.
        waits: Whether a step waits for groups that would become too old.
        version: Updates that the weights have seen.
        hold: Version before which nothing is begun: steps before it take groups that are known.
    """

    run: Callable[[int], Coroutine[Any, Any, T]]
    _: KW_ONLY
    batch: int
    total: int
    repeat: int
    max_running: int
    staleness: int
    waits: bool = True
    version: int = 0
    hold: int = 0

    def __post_init__(self) -> None:
        self._next = 0
        self._begun: dict[int, int] = {}
        self._skipped: set[int] = set()
        self._earliest: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._ahead: Ahead[T] = Ahead(self._group_ended)

    @property
    def complete(self) -> int:
        """Groups that no step has taken yet and that have ended."""
        return len(self._ahead.ended)

    @property
    def running(self) -> int:
        """Rollouts that were begun and have not ended."""
        return sum(self._left.values())

    def restore(
        self,
        *,
        trained: Collection[int],
        complete: Mapping[int, tuple[T, int]],
        begun: Mapping[int, int],
    ) -> None:
        """Go on with a run of which something is known. Called before anything is begun.

        Args:
            trained: Groups that steps have taken.
            complete: Result of each other group that ended, and the version it began at.
            begun: The version that each unfinished group of which something is known began at.
        """
        self._skipped = {*trained, *complete}
        for number, (result, version) in complete.items():
            self._ahead.add(number, result)
            self._begun[number] = version
        self._earliest = dict(begun)
        self._begun.update(begun)  # what is left of them may wait for room, and grows older

    def advance(self, version: int) -> None:
        """The weights have seen `version` updates."""
        self.version = version
        self.fill()

    def rollout_ended(self, number: int) -> None:
        """A rollout of a group ended."""
        if self._left.get(number, 0) > 0:
            self._left[number] -= 1
            self.fill()

    def fill(self) -> None:
        """Begin what may be begun."""
        if self.version < self.hold:
            return
        while True:
            while self._next in self._skipped:
                self._next += 1
            running = len(self._left)
            # A group is begun when one of its rollouts can be: later ones see newer weights.
            room = -(-(self.max_running - self.running) // self.repeat)
            allowed = admissible(
                max_running=running + room,
                running=running,
                accepted=self._next - running,
                batch=self.batch,
                version=self.version,
                staleness=self.staleness,
            )
            if not allowed or self._next >= self.total:
                return
            number, self._next = self._next, self._next + 1
            self._begun[number] = self._earliest.get(number, self.version)
            self._left[number] = self.repeat
            self._ahead.begin(number, self.run(number))

    def _group_ended(self, number: int) -> None:
        self._left.pop(number, None)
        self.fill()

    async def take(self, numbers: Sequence[int] | None = None) -> dict[int, T]:
        """What the next step trains, by number, oldest first.

        Args:
            numbers: The groups that it took when it was begun before; None: as they come.

        Raises:
            BaseException: What a group failed with.
        """
        self.fill()
        if numbers is not None:
            wanted = set(numbers)
            await self._ahead.until(lambda: wanted <= set(self._ahead.ended))
            chosen = sorted(wanted)
        else:
            await self._ahead.until(self._ready)
            chosen = self._choice()
        for number in chosen:
            del self._begun[number]
        return dict(zip(chosen, self._ahead.take(chosen), strict=True))

    def _choice(self) -> list[int]:
        # After a kill a group may be older than one before it that was begun anew.
        oldest = sorted(self._ahead.ended, key=lambda number: (self._begun[number], number))
        return sorted(oldest[: self.batch])

    def _ready(self) -> bool:
        chosen = self._choice()
        if len(chosen) < self.batch:
            return False
        if not self.waits or not self._ahead.running:
            return True
        left = (begun for number, begun in self._begun.items() if number not in chosen)
        return in_time(left, batch=self.batch, version=self.version, staleness=self.staleness)

    async def cancel(self) -> None:
        """Cancel what runs."""
        self._left.clear()
        self.total = 0
        await self._ahead.cancel()
