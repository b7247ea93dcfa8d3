"""Rollouts of a task that branch from others of it: first the trunks, then round after round.

    round 0   trunk 0 ──────x──────────        a group of 8, 2 trunks, 4 ends:
              trunk 1 ───────────x─────        3 branches begin at each x
    round 1              0' ├─────── (3)
                              1' ├──── (3)

A point must be chosen from what was known before it (`tuner.training.forks` says why), so if a
trunk has no such call, nothing begins, and the group has fewer rollouts.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from math import isqrt
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from tuner.config import RunConfig
from tuner.config.schema import WHERE, BranchingSection
from tuner.engines.base import SamplingParams
from tuner.errors import ConfigError, FunctionError, TunerError
from tuner.rollouts.allocation import Advice, Fork, Positions, RolloutSummary, score
from tuner.rollouts.runner import BranchStart, RolloutRunner
from tuner.tasks.loading import load_function
from tuner.tasks.selection import derive_seed
from tuner.traces import Call, Outcome, RolloutId, Trace, without_vote
from tuner.traces.reading import Count, JsonReader, Number, Text
from tuner.traces.store import closed
from tuner.training.forks import Point, resolved, trunk_of

# Where branches begin, given what is known before: each rule draws, and then looks.
#
# A rule may look at the prefix up to a point, the other rollouts of the group, and earlier steps
# (`tuner.rollouts.allocation`). So a position is drawn first, and if a rollout does not get that
# far nothing begins.
#
#     spread      any call that rollouts of earlier steps, or the others, get to
#     uncertain   the same, in proportion to how unlikely the others' answers were there
#     best        the call, and the numbers of trunks and ends, that earlier steps advise
#     function    asked before each call, with the calls so far, for the probability of a branch


Hazard = Callable[[Sequence[Call]], float]
FADES = 0.98
"""Factor by which the evidence of a step shrinks with each next one: the policy changes."""
EXPLORED = 16
"""If `best` decides and is certain, one group in this many still explores: the policy changes."""


@dataclass(frozen=True)
class Shares:
    """How the rollouts of a group are divided.

    Attributes:
        trunks: Number that start at the beginning.
        ends: Number that continue from each point, including the rollout that is branched from; 1:
            nothing begins.
        call: The advised call before which all branches begin, if any.
    """

    trunks: int
    ends: int
    call: int | None = None


def exploring(repeat: int) -> Shares:
    """How a group of `repeat` rollouts is divided to find out what is decided where.

    Differences between ends are open at their point, and additional differences between trunks are
    decided before it: about equal numbers of both say most about both, and branches begin anywhere.
    """
    ends = max(2, isqrt(repeat))
    return Shares(max(2, repeat // ends), ends)


@dataclass(frozen=True)
class GrowingGroup:
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
class PointSelector:
    """Chooses points from what came before them, and learns from steps where they pay off.

    Args:
        section: `tuner.branching`.
        repeat: Maximum number of rollouts in a group.
        hazard: The user's rule, if `where` names one.

    Attributes:
        seen: Statistics of earlier steps.
    """

    section: BranchingSection
    repeat: int
    hazard: Hazard | None = None
    seen: Positions = field(default_factory=Positions)

    def shares(self, dice: Random) -> Shares:
        """How a group is divided.

        `best` explores with a probability equal to its uncertainty. So it explores at first, and
        for longer if successes are rare and most forks show nothing.
        """
        section = self.section
        if section.where != "best":
            return Shares(section.trunks or max(2, self.repeat // section.ends), section.ends)
        advice = self.advice()
        if advice is None or dice.random() < max(advice.unknown, 1 / EXPLORED):
            return exploring(self.repeat)
        return Shares(advice.trunks, advice.ends, advice.call)

    def advice(self) -> Advice | None:
        """Advice from earlier steps; None while the rollouts of every task ended alike."""
        if not self.seen.totals["variance"]:
            return None
        return self.seen.best(rollouts=self.repeat)

    def points(
        self, group: GrowingGroup, count: int, dice: Random, shares: Shares
    ) -> list[Point[RolloutId] | None]:
        """`count` points in rollouts of a group, which may not exist there; None: nothing begins.

        Args:
            group: Its rollouts so far.
            dice: Source of random numbers.
        """
        if shares.call is not None:
            return [Point(id_, shares.call) for id_ in group.planned[:count]]
        slots = islice(cycle(reversed(group.planned)), count)  # the youngest first
        return [self._point(id_, group, dice) for id_ in slots]

    def _point(self, id_: RolloutId, group: GrowingGroup, dice: Random) -> Point[RolloutId] | None:
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
        elif self.section.where == "best":  # it explores: about as many tokens after each
            weights = [1 / cost if (cost := _behind(others, call)) else 0.0 for call in positions]
        (call,) = dice.choices(positions, weights if any(weights) else None)
        return Point(id_, call, self._token(others, call, dice))

    def _token(self, others: Sequence[Trace], call: int, dice: Random) -> int:
        """A token's index in a call, within the lengths of the others' calls; 0: before it."""
        if not self.section.inside:
            return 0
        lengths = [len(other.calls[call].completion_ids) for other in others if _has(other, call)]
        return int(dice.random() * max(lengths, default=1))

    def _by_hazard(self, hazard: Hazard, trace: Trace, dice: Random) -> Point[RolloutId] | None:
        """The first call before which the user's rule chooses to branch."""
        for call in range(1, len(trace.calls)):
            chance = hazard(trace.calls[:call])
            if not isinstance(chance, (int, float)) or not 0 <= chance <= 1:
                raise FunctionError(
                    f"tuner.branching.where: {self.section.where} returned {chance!r}; return the "
                    "probability, 0 to 1, that branches begin before the next call"
                )
            if dice.random() < chance:
                return Point(trace.id, call)
        return None

    def learn(self, traces: Sequence[Trace]) -> None:
        """Add all rollouts of a step."""
        groups: dict[tuple[int, int], list[Trace]] = defaultdict(list)
        for trace in traces:
            voted = trace.reward is not None and without_vote(trace) is None
            if trace.final and trace.outcome is Outcome.COMPLETED and voted:
                groups[trace.id.step, trace.id.task].append(trace)
        self.seen.fade(FADES)
        for members in groups.values():
            self.seen.add(*_group(members))

    def state(self) -> dict[str, Any]:
        """The learned state, for JSON."""
        return {"seen": self.seen.state()}

    def restored(self, state: dict[str, Any]) -> PointSelector:
        """The same rule with a result of `state`."""
        return replace(self, seen=Positions.restored(state["seen"]))


def origins_of(traces: Iterable[Trace]) -> dict[RolloutId, Point[RolloutId]]:
    """The points where branches begin."""
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
    """Tokens from a call on: the mean over rollouts that get there, 0 if none does."""
    found = [trace.calls[call:] for trace in traces if _has(trace, call)]
    return fmean(sum(len(one.completion_ids) for one in calls) for calls in found) if found else 0.0


def _group(members: Sequence[Trace]) -> tuple[list[RolloutSummary], list[Fork]]:
    """The trunks of a group, and the branches that begin at the start of a call."""
    seen = {trace.id: _seen(trace) for trace in members}
    trunks = [trace.id for trace in members if trace.origin is None]
    begun: dict[tuple[RolloutId, int], list[RolloutSummary]] = defaultdict(list)
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


def _seen(trace: Trace) -> RolloutSummary:
    assert trace.reward is not None
    return RolloutSummary(
        trace.reward,
        [len(call.completion_ids) for call in trace.calls],
        [score(call.logprobs) for call in trace.calls],
    )


Run = Callable[[Sequence[RolloutId], Mapping[RolloutId, BranchStart]], Awaitable[list[Trace]]]


_SEEN = closed("Seen", {"sums": dict[Text, list[Number]], "totals": dict[Text, Number]})
_NOTES = JsonReader[dict[str, Any]](
    closed("BranchingNote", {"step": Count, "state": closed("State", {"seen": _SEEN})}), "a note"
)


@dataclass(eq=False)
class Branching:
    """Runs groups in which some rollouts branch from others.

    Args:
        where: Chooses points.
        seed: The run's seed.
        can_go_on: Whether the engine can continue partial completions with such settings.
        notes: File of the results of each step, from which a killed run resumes; None: no file.
    """

    where: PointSelector
    seed: int
    can_go_on: Callable[[SamplingParams], bool]
    notes: Path | None = None

    async def run(self, ids: Sequence[RolloutId], run: Run) -> list[Trace]:
        """Every attempt of the rollouts of a group.

        Args:
            ids: All rollouts that there may be, in order.
            run: Runs some of them; returns known ones.
        """
        shares = self.where.shares(self._dice(ids[0], "shares"))
        found = await run(ids[: shares.trunks], {})
        last = shares.trunks * shares.ends if shares.call else len(ids)
        left = ids[shares.trunks : last]
        for number, some in enumerate(_parts(left, self.where.section.rounds)):
            ended = {trace.id: trace for trace in found if trace.final}
            group = GrowingGroup(ids[: ids.index(some[0])], ended)
            again = self.chosen(some, group, shares, self._dice(ids[0], number))
            found += await run(list(again), again)
        return sorted(found, key=lambda trace: (trace.id, trace.attempt))

    def _dice(self, *what: object) -> Random:
        return Random(derive_seed(self.seed, "branching", *what))

    def chosen(
        self, ids: Sequence[RolloutId], group: GrowingGroup, shares: Shares, dice: Random
    ) -> dict[RolloutId, BranchStart]:
        """Where rollouts begin; without those that begin nowhere.

        Args:
            ids: Rollouts that have not begun.
        """
        each = shares.ends - 1
        left = iter(ids)
        again: dict[RolloutId, BranchStart] = {}
        for point in self.where.points(group, -(-len(ids) // each), dice, shares):
            mine = list(islice(left, each))
            if point is not None and (at := self._possible(point, group.ended)) is not None:
                again |= dict.fromkeys(mine, at)
        return again

    def learn(self, step: int, traces: Sequence[Trace]) -> None:
        """Add the rollouts that a step takes."""
        self.where.learn(traces)
        if self.notes is not None:
            with self.notes.open("ab") as file:
                row = {"step": step, "state": self.where.state()}
                file.write(json.dumps(row).encode() + b"\n")

    def restore(self, step: int) -> None:
        """Restore the state after `step`; later steps are taken again.

        Raises:
            TunerError: The file is damaged.
        """
        if self.notes is None or not os.path.lexists(self.notes):
            return
        kept = 0
        for number, line, row in _NOTES.lines(self.notes):
            if row["step"] > step:
                break
            try:
                self.where = self.where.restored(row["state"])
            except (ValueError, LookupError) as error:
                raise TunerError(f"{self.notes}, line {number} is not a note: {error!r}") from error
            kept += len(line)
        os.truncate(self.notes, kept)

    def _possible(
        self,
        point: Point[RolloutId],
        ended: Mapping[RolloutId, Trace],
    ) -> BranchStart | None:
        """The point in the rollout that sampled the tokens before it; None if it does not exist."""
        origins = origins_of(ended.values())
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
        drop = self.where.section.on_divergence == "drop"
        return BranchStart(trace, (trunk.id, trunk.attempt), at.call, token, ends=drop)


def branching_of(config: RunConfig, runner: RolloutRunner, notes: Path) -> Branching | None:
    """How a configuration divides groups; None if every rollout starts at the beginning.

    Raises:
        ConfigError: The judge takes groups, or `tuner.branching.where` does not name a function.
    """
    section = config.tuner.branching
    if section is None:
        return None
    if runner.judges_groups:
        raise ConfigError(
            "tuner.branching is set, but the judge takes the rollouts of a group together, which "
            "would then begin one after the other: use a judge of single rollouts"
        )
    hazard = None
    if section.where not in WHERE:
        hazard = load_function(section.where, setting="tuner.branching.where")
    return Branching(
        PointSelector(section, config.algorithm.repeat_times, hazard),
        config.tuner.seed,
        runner.gateway.engine.capabilities.can_go_on,
        notes,
    )


def stands_still(trace: Trace, calls: int, token: int) -> bool:
    """Whether nothing is in flight at a point except the call that it lies in, and everything
    before can be replayed.

    If calls run side by side, the order of their commitment depends on what the others sample.
    """
    before, at, after = trace.calls[:calls], trace.calls[calls], trace.calls[calls + 1 :]
    given = [*before, at] if token else before
    if any(call.invalid is not None for call in given) or any(call.undelivered for call in before):
        return False
    ended = max((call.started + call.seconds for call in before), default=0.0)
    at_end = at.started + at.seconds if token else ended
    return at.started >= ended and all(call.started >= max(ended, at_end) for call in after)


def _parts(ids: Sequence[RolloutId], count: int) -> Iterator[Sequence[RolloutId]]:
    """`ids` in at most `count` parts of about equal size."""
    for number in range(count):
        start, stop = (len(ids) * edge // count for edge in (number, number + 1))
        if start < stop:
            yield ids[start:stop]
