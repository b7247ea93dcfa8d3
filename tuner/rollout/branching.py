"""Rollouts of a task that begin inside others of it: first the trunks, then round after round.

    round 0   trunk 0 ──────x──────────        a group of 8, 2 trunks, 4 ends:
              trunk 1 ───────────x─────        3 branches begin at each x
    round 1              0' ├─────── (3)
                              1' ├──── (3)

A point must be chosen by what was known before it (`tuner.algorithms.forks` says why), so where
a trunk has no such call, nothing begins, and the group has fewer rollouts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from tuner.algorithms.forks import Point, resolved, trunk_of
from tuner.config import RunConfig
from tuner.config.explorer import WHERE
from tuner.data.order import derive_seed
from tuner.engines.base import SamplingParams
from tuner.errors import ConfigError, TunerError
from tuner.functions.loading import load_function
from tuner.rollout.attempt import Again
from tuner.rollout.runner import RolloutRunner
from tuner.rollout.where import Grown, Shares, Where, origins_of
from tuner.traces import RolloutId, Trace
from tuner.traces.store import complete_lines

Run = Callable[[Sequence[RolloutId], Mapping[RolloutId, Again]], Awaitable[list[Trace]]]


@dataclass(eq=False)
class Branching:
    """Runs groups of which a part begins inside the others.

    Args:
        where: Chooses points.
        seed: Of the run.
        can_go_on: Whether the engine goes on inside completions of such settings.
        notes: The file of what each step has shown, by which a run that was killed goes on; None:
            nowhere.
    """

    where: Where
    seed: int
    can_go_on: Callable[[SamplingParams], bool]
    notes: Path | None = None

    async def run(self, ids: Sequence[RolloutId], run: Run) -> list[Trace]:
        """Every attempt of the rollouts of a group.

        Args:
            ids: All that there may be, in order.
            run: Runs some of them; those that are known it gives back.
        """
        shares = self.where.shares(self._dice(ids[0], "shares"))
        found = await run(ids[: shares.trunks], {})
        last = shares.trunks * shares.ends if shares.call else len(ids)
        left = ids[shares.trunks : last]
        for number, some in enumerate(_parts(left, self.where.section.rounds)):
            ended = {trace.id: trace for trace in found if trace.final}
            group = Grown(ids[: ids.index(some[0])], ended)
            again = self.chosen(some, group, shares, self._dice(ids[0], number))
            found += await run(list(again), again)
        return sorted(found, key=lambda trace: (trace.id, trace.attempt))

    def _dice(self, *what: object) -> Random:
        return Random(derive_seed(self.seed, "branching", *what))

    def chosen(
        self, ids: Sequence[RolloutId], group: Grown, shares: Shares, dice: Random
    ) -> dict[RolloutId, Again]:
        """Where rollouts begin; those that begin nowhere are not there.

        Args:
            ids: Rollouts that have not begun.
        """
        each = shares.ends - 1
        left = iter(ids)
        again: dict[RolloutId, Again] = {}
        for point in self.where.points(group, -(-len(ids) // each), dice, shares):
            mine = list(islice(left, each))
            if point is not None and (at := self._possible(point, group.ended)) is not None:
                again |= dict.fromkeys(mine, at)
        return again

    def learn(self, step: int, traces: Sequence[Trace]) -> None:
        """Take note of the rollouts that a step takes."""
        self.where.learn(traces)
        if self.notes is not None:
            with self.notes.open("ab") as file:
                row = {"step": step, "state": self.where.state()}
                file.write(json.dumps(row).encode() + b"\n")

    def restore(self, step: int) -> None:
        """Go on with what was known when `step` had been trained; later steps are taken again.

        Raises:
            TunerError: The file is damaged.
        """
        if self.notes is None or not self.notes.exists():
            return
        kept = 0
        for number, line in complete_lines(self.notes):
            try:
                row = json.loads(line)
                if int(row["step"]) > step:
                    break
                self.where = self.where.restored(row["state"])
            except (ValueError, LookupError, TypeError) as error:
                raise TunerError(f"{self.notes}, line {number} is no note: {error!r}") from error
            kept += len(line)
        os.truncate(self.notes, kept)

    def _possible(
        self,
        point: Point[RolloutId],
        ended: Mapping[RolloutId, Trace],
    ) -> Again | None:
        """The point in the rollout that sampled what lies before it; None: it is not there."""
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
        return Again(trace, (trunk.id, trunk.attempt), at.call, token, ends=drop)


def branching_of(config: RunConfig, runner: RolloutRunner, notes: Path) -> Branching | None:
    """How a configuration divides groups; None where every rollout starts at the beginning.

    Raises:
        ConfigError: The judge takes groups, or `tuner.branching.where` names no function.
    """
    section = config.tuner.branching
    if section is None:
        return None
    if runner.judges_groups:
        raise ConfigError(
            "tuner.branching is set, but the judge takes the rollouts of a group together, which "
            "then begin one after the other: give a judge of single rollouts"
        )
    hazard = None
    if section.where not in WHERE:
        hazard = load_function(section.where, setting="tuner.branching.where")
    return Branching(
        Where(section, config.algorithm.repeat_times, hazard),
        config.tuner.seed,
        runner.gateway.engine.capabilities.can_go_on,
        notes,
    )


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
