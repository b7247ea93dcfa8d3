"""Which groups of a run are begun when, and which a step takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Generic, TypeVar

from tuner.rollout.ahead import Ahead
from tuner.rollout.staleness import admissible, in_time

T = TypeVar("T")


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

    def __init__(
        self,
        run: Callable[[int], Coroutine[Any, Any, T]],
        *,
        batch: int,
        total: int,
        repeat: int,
        max_running: int,
        staleness: int,
        waits: bool = True,
        version: int = 0,
        hold: int = 0,
    ) -> None:
        self._run = run
        self._batch = batch
        self._total = total
        self._repeat = repeat
        self._max_running = max_running
        self._staleness = staleness
        self._waits = waits
        self._version = version
        self._hold = hold
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

    def advance(self, version: int) -> None:
        """The weights have seen `version` updates."""
        self._version = version
        self.fill()

    def rollout_ended(self, number: int) -> None:
        """A rollout of a group ended."""
        if self._left.get(number, 0) > 0:
            self._left[number] -= 1
            self.fill()

    def fill(self) -> None:
        """Begin what may be begun."""
        if self._version < self._hold:
            return
        while True:
            while self._next in self._skipped:
                self._next += 1
            running = len(self._left)
            # A group is begun when one of its rollouts can be: later ones see newer weights.
            room = -(-(self._max_running - self.running) // self._repeat)
            allowed = admissible(
                max_running=running + room,
                running=running,
                accepted=self._next - running,
                batch=self._batch,
                version=self._version,
                staleness=self._staleness,
            )
            if not allowed or self._next >= self._total:
                return
            number, self._next = self._next, self._next + 1
            self._begun[number] = self._earliest.get(number, self._version)
            self._left[number] = self._repeat
            self._ahead.begin(number, self._run(number))

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
        return self._ahead.ended[: self._batch]

    def _ready(self) -> bool:
        chosen = self._choice()
        if len(chosen) < self._batch:
            return False
        if not self._waits or not self._ahead.running:
            return True
        left = (begun for number, begun in self._begun.items() if number not in chosen)
        return in_time(left, batch=self._batch, version=self._version, staleness=self._staleness)

    async def cancel(self) -> None:
        """Cancel what runs."""
        self._left.clear()
        self._total = 0
        await self._ahead.cancel()
