"""Rollouts of a task that begin inside others of it: first the trunks, then round after round.

    round 0   trunk 0 ──────x──────────        a group of 8, 2 trunks, 4 ends:
              trunk 1 ───────────x─────        3 branches begin at each x
    round 1              0' ├─────── (3)
                              1' ├──── (3)

A point must be chosen by what was known before it (`tuner.algorithms.forks` says why), so where
a trunk has no such call, nothing begins, and the group has fewer rollouts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any, Protocol

from tuner.algorithms.forks import Point, resolved, trunk_of
from tuner.config.explorer import BranchingSection
from tuner.data.order import derive_seed
from tuner.engines.base import SamplingParams
from tuner.rollout.attempt import Again
from tuner.traces import RolloutId, Trace

Run = Callable[[Sequence[RolloutId], Mapping[RolloutId, Again]], Awaitable[list[Trace]]]


class Where(Protocol):
    """Chooses points, by nothing that came after them."""

    def points(
        self, traces: Sequence[Trace], count: int, dice: Random
    ) -> Sequence[Point[RolloutId]]:
        """At most `count` points in rollouts of a group, which may not be there.

        Args:
            traces: The rollouts of the group so far, in the order of their ids.
            dice: Where what is drawn comes from.
        """
        ...

    def learn(self, traces: Sequence[Trace]) -> None:
        """Take note of the rollouts of a step."""
        ...


@dataclass(frozen=True)
class Shares:
    """How the rollouts of a group are divided.

    Attributes:
        trunks: Start at the beginning.
        ends: Go on from each point, the one that is branched from included.
    """

    trunks: int
    ends: int

    @classmethod
    def of(cls, section: BranchingSection, repeat: int) -> Shares:
        """Those of a configuration."""
        return cls(section.trunks or max(2, repeat // section.ends), section.ends)


@dataclass(eq=False)
class Branching:
    """Runs groups of which a part begins inside the others.

    Args:
        section: `tuner.branching`.
        where: Chooses points.
        repeat: Rollouts in a group, at most.
        seed: Of the run.
        can_go_on: Whether the engine goes on inside completions of such settings.
    """

    section: BranchingSection
    where: Where
    repeat: int
    seed: int
    can_go_on: Callable[[SamplingParams], bool]

    async def run(self, ids: Sequence[RolloutId], run: Run) -> list[Trace]:
        """Every attempt of the rollouts of a group.

        Args:
            ids: All that there may be, in order.
            run: Runs some of them; those that are known it gives back.
        """
        shares = Shares.of(self.section, self.repeat)
        found = await run(ids[: shares.trunks], {})
        left = ids[shares.trunks :]
        for number, some in enumerate(_parts(left, self.section.rounds)):
            dice = Random(derive_seed(self.seed, "branching", ids[0], number))
            again = self.chosen(some, found, shares.ends - 1, dice)
            found += await run(list(again), again)
        return sorted(found, key=lambda trace: (trace.id, trace.attempt))

    def chosen(
        self, ids: Sequence[RolloutId], traces: Sequence[Trace], each: int, dice: Random
    ) -> dict[RolloutId, Again]:
        """Where rollouts begin; those that begin nowhere are not there.

        Args:
            ids: Rollouts that have not begun.
            traces: Attempts at those that have ended.
            each: How many begin at a point.
        """
        ended = {trace.id: trace for trace in traces if trace.final}
        origins = origins_of(ended.values())
        count = -(-len(ids) // each)
        points = self.where.points([ended[id_] for id_ in sorted(ended)], count, dice)
        left = iter(ids)
        again: dict[RolloutId, Again] = {}
        for point in points[:count]:
            mine = list(islice(left, each))
            at = self._possible(point, ended, origins)
            if at is not None:
                again |= dict.fromkeys(mine, at)
        return again

    def _possible(
        self,
        point: Point[RolloutId],
        ended: Mapping[RolloutId, Trace],
        origins: Mapping[RolloutId, Point[RolloutId]],
    ) -> Again | None:
        """The point in the rollout that sampled what lies before it; None: it is not there."""
        new = object()
        at: Point[Any] = resolved({**origins, new: point})[new]
        trace = ended[at.rollout]
        if at.call >= len(trace.calls):
            return None
        token = at.token
        if token >= len(trace.calls[at.call].completion_ids):
            return None
        if token and not self.can_go_on(trace.calls[at.call].sampling):
            token = 0
        if not stands_still(trace, at.call, token):
            return None
        trunk = ended[trunk_of(at.rollout, origins)]
        drop = self.section.on_divergence == "drop"
        return Again(trace, (trunk.id, trunk.attempt), at.call, token, ends=drop)


def origins_of(traces: Any) -> dict[RolloutId, Point[RolloutId]]:
    """Where rollouts begin that begin inside others."""
    return {
        trace.id: Point(trace.origin.rollout, *trace.origin.position)
        for trace in traces
        if trace.origin is not None
    }


def stands_still(trace: Trace, calls: int, token: int) -> bool:
    """Whether nothing is in flight at a point but the call that it lies in, and all that was before
    can be given back.

    Of calls side by side, what is committed first hangs on what the others sample.
    """
    before, at, after = trace.calls[:calls], trace.calls[calls], trace.calls[calls + 1 :]
    given = [*before, at] if token else before
    if any(call.invalid is not None for call in given) or any(call.undelivered for call in before):
        return False
    ended = max((call.started + call.seconds for call in before), default=0.0)
    at_end = at.started + at.seconds if token else ended
    return at.started >= ended and all(call.started >= max(ended, at_end) for call in after)


def _parts(ids: Sequence[RolloutId], count: int) -> Iterator[Sequence[RolloutId]]:
    """`ids` in at most `count` parts of about one size."""
    for number in range(count):
        start, stop = (len(ids) * edge // count for edge in (number, number + 1))
        if start < stop:
            yield ids[start:stop]
