"""Where rollouts begin inside others, by what is known before: each rule draws, and then looks.

What a rule may look at is the prefix up to a point, the other rollouts of the group, and earlier
steps (`tuner.algorithms.allocation`). So a position is drawn first, and where a rollout does not
get that far nothing begins.

    spread      any call that rollouts of earlier steps, or the others, get to
    uncertain   the same, in proportion to how unlikely the others' answers were there
    best        the call, and the numbers of trunks and ends, that earlier steps advise
    function    asked before each call, with the calls until then: how likely it is that one begins
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from math import isqrt
from random import Random
from statistics import fmean
from typing import Any

from tuner.algorithms.allocation import Advice, Fork, Positions, Seen, score
from tuner.algorithms.forks import Point, trunk_of
from tuner.config.explorer import BranchingSection
from tuner.errors import FunctionError
from tuner.traces import Call, Outcome, RolloutId, Trace

Hazard = Callable[[Sequence[Call]], float]
FADES = 0.98
"""What is left of what a step has shown after the next one: the policy changes."""
EXPLORED = 16
"""Where `best` decides and knows all, one of so many groups explores: the policy changes."""


@dataclass(frozen=True)
class Shares:
    """How the rollouts of a group are divided.

    Attributes:
        trunks: Start at the beginning.
        ends: Go on from each point, the one that is branched from included; 1: nothing begins.
        call: Before which call all begin, where that was advised.
    """

    trunks: int
    ends: int
    call: int | None = None


def exploring(repeat: int) -> Shares:
    """How a group of so many rollouts is divided that is to show what is decided where.

    What ends differ in is open at their point, and what trunks differ in more than that is decided
    before it: about as many of either tell most of both, and branches begin anywhere.
    """
    ends = max(2, isqrt(repeat))
    return Shares(max(2, repeat // ends), ends)


@dataclass(frozen=True)
class Grown:
    """The rollouts of a group so far.

    Attributes:
        planned: All that could have begun, in order.
        ended: Those that did.
    """

    planned: Sequence[RolloutId]
    ended: Mapping[RolloutId, Trace]

    def elsewhere(self, id_: RolloutId) -> list[Trace]:
        """Those that share nothing with a rollout."""
        origins = origins_of(self.ended.values())
        trunk = trunk_of(id_, origins)
        return [t for t in self.ended.values() if trunk_of(t.id, origins) != trunk]


@dataclass(eq=False)
class Where:
    """Chooses points, by nothing that came after them, and learns from steps where they pay.

    Args:
        section: `tuner.branching`.
        repeat: Rollouts in a group, at most.
        hazard: The user's rule, where `where` names one.

    Attributes:
        seen: What earlier steps have shown.
    """

    section: BranchingSection
    repeat: int
    hazard: Hazard | None = None
    seen: Positions = field(default_factory=Positions)

    def shares(self, dice: Random) -> Shares:
        """How a group is divided.

        `best` explores as likely as it is uncertain what is decided where. So it explores at first,
        and for longer where successes are rare and most forks show nothing.
        """
        section = self.section
        if section.where != "best":
            return Shares(section.trunks or max(2, self.repeat // section.ends), section.ends)
        advice = self.advice()
        if advice is None or dice.random() < max(advice.unknown, 1 / EXPLORED):
            return exploring(self.repeat)
        return Shares(advice.trunks, advice.ends, advice.call)

    def advice(self) -> Advice | None:
        """What earlier steps advise; None while rollouts of no task ended differently."""
        if not self.seen.totals["variance"]:
            return None
        return self.seen.best(rollouts=self.repeat)

    def points(
        self, group: Grown, count: int, dice: Random, shares: Shares
    ) -> list[Point[RolloutId] | None]:
        """`count` points in rollouts of a group, which may not be there; None: nothing begins.

        Args:
            group: Its rollouts so far.
            dice: Where what is drawn comes from.
        """
        if shares.call is not None:
            return [Point(id_, shares.call) for id_ in group.planned[:count]]
        slots = islice(cycle(reversed(group.planned)), count)  # the youngest first
        return [self._point(id_, group, dice) for id_ in slots]

    def _point(self, id_: RolloutId, group: Grown, dice: Random) -> Point[RolloutId] | None:
        trace, others = group.ended.get(id_), group.elsewhere(id_)
        dice.random()  # read by no rule: recorded runs, and those that resume, keep their points
        if trace is None:
            return None
        if self.hazard is not None:
            return self._by_hazard(self.hazard, trace, dice)
        longest = max((len(other.calls) for other in others), default=0)
        positions = range(1, max(len(self.seen.reach), longest))
        if not positions:
            return None
        weights = [1.0] * len(positions)
        if self.section.where == "uncertain":
            weights = [_surprise(others, call) for call in positions]
        elif self.section.where == "best":  # it explores: about as many tokens behind each
            weights = [1 / cost if (cost := _behind(others, call)) else 0.0 for call in positions]
        (call,) = dice.choices(positions, weights if any(weights) else None)
        return Point(id_, call, self._token(others, call, dice))

    def _token(self, others: Sequence[Trace], call: int, dice: Random) -> int:
        """A place in a call, as far as those of the others go; 0: before it."""
        if not self.section.inside:
            return 0
        lengths = [len(other.calls[call].completion_ids) for other in others if _has(other, call)]
        return int(dice.random() * max(lengths, default=1))

    def _by_hazard(self, hazard: Hazard, trace: Trace, dice: Random) -> Point[RolloutId] | None:
        """The first call before which the user's rule says so."""
        for call in range(1, len(trace.calls)):
            chance = hazard(trace.calls[:call])
            if not isinstance(chance, (int, float)) or not 0 <= chance <= 1:
                raise FunctionError(
                    f"tuner.branching.where: {self.section.where} returned {chance!r}; return the "
                    "probability, 0 to 1, that rollouts begin before the next call"
                )
            if dice.random() < chance:
                return Point(trace.id, call)
        return None

    def learn(self, traces: Sequence[Trace]) -> None:
        """Take note of all rollouts of a step."""
        groups: dict[tuple[int, int], list[Trace]] = defaultdict(list)
        for trace in traces:
            if trace.final and trace.outcome is Outcome.COMPLETED and trace.reward is not None:
                groups[trace.id.step, trace.id.task].append(trace)
        self.seen.fade(FADES)
        for members in groups.values():
            self.seen.add(*_group(members))

    def state(self) -> dict[str, Any]:
        """What was learned, for JSON."""
        return {"seen": self.seen.state()}

    def restored(self, state: dict[str, Any]) -> Where:
        """The same rule with what was learned until `state` was called."""
        return replace(self, seen=Positions.restored(state["seen"]))


def origins_of(traces: Iterable[Trace]) -> dict[RolloutId, Point[RolloutId]]:
    """Where rollouts begin that begin inside others."""
    return {
        trace.id: Point(trace.origin.rollout, *trace.origin.position)
        for trace in traces
        if trace.origin is not None
    }


def _has(trace: Trace, call: int) -> bool:
    return call < len(trace.calls)


def _surprise(traces: Sequence[Trace], call: int) -> float:
    """How unlikely a token of the calls at a position was, in nats: the mean over rollouts."""
    found = [trace.calls[call].logprobs for trace in traces if _has(trace, call)]
    return fmean(-fmean(logprobs) for logprobs in found if logprobs) if any(found) else 0.0


def _behind(traces: Sequence[Trace], call: int) -> float:
    """Tokens from a call on: the mean over rollouts that get there, 0 where none does."""
    found = [trace.calls[call:] for trace in traces if _has(trace, call)]
    return fmean(sum(len(one.completion_ids) for one in calls) for calls in found) if found else 0.0


def _group(members: Sequence[Trace]) -> tuple[list[Seen], list[Fork]]:
    """The trunks of a group, and what goes on from the start of a call that others begin at."""
    seen = {trace.id: _seen(trace) for trace in members}
    trunks = [trace.id for trace in members if trace.origin is None]
    begun: dict[tuple[RolloutId, int], list[Seen]] = defaultdict(list)
    for trace in members:
        origin = trace.origin
        if origin is not None and origin.diverged is None and not origin.token:
            begun[origin.rollout, origin.calls].append(seen[trace.id])
    origins = origins_of(members)
    forks = []
    for (rollout, call), ends in begun.items():
        trunk = trunk_of(rollout, origins)
        at = trunks.index(trunk) if trunk in trunks else None
        forks.append(Fork(call, [seen[rollout], *ends] if rollout in seen else ends, at))
    return [seen[id_] for id_ in trunks], forks


def _seen(trace: Trace) -> Seen:
    assert trace.reward is not None
    return Seen(
        trace.reward,
        [len(call.completion_ids) for call in trace.calls],
        [score(call.logprobs) for call in trace.calls],
    )
