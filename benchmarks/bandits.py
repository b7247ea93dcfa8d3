"""Efficiency of branched rollouts, and of the choice where to branch, on bandits with exact
gradients.

Six binary decisions, each a call; which of them cost much, which of them decide and how often they
succeed are the cells of a grid. In each cell the efficiency 1 / (mean squared error of the gradient
* sampled tokens) of flat rollouts with leave-one-out baselines (it is 1), of fixed allocations (T
trunks, all branched from before call k, m ends each; all k, m of 2 to 24, T as the budget of eight
flat rollouts has it), of groups that explore, four trunks each with a branch anywhere, and of
`best`, which decides from what it has seen of so many of those: the mean over pilots, and how far
off the gain it predicted is.

What is learned is one number for each decision, added to the logits of all its states, so that
what helps in one state mostly helps in the others; the rows "a table" have a number for each
state, which the prediction takes no account of, so they have no targets.

    python benchmarks/bandits.py [--seeds 10000] [--pilots 6] [--tasks 2000]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np
from _report import Row, report
from numpy.typing import NDArray

from tuner.rollouts.allocation import Advice, Fork, Positions, RolloutSummary, score
from tuner.training.forks import Piece, Point, tree_advantages

DECISIONS = 6
STATES = 2**DECISIONS - 1  # the states below state s are 2 s + 1 and 2 s + 2, by its action
DEPTH = np.floor(np.log2(np.arange(1, STATES + 1))).astype(int)
CALLS = range(1, DECISIONS)  # before which branches may begin
ROLLOUTS = 8  # of flat groups; what they sample is everybody's budget
TRUNKS = 4  # of groups that explore, each with a branch
FEW = (200, 50, 20)  # tasks that `best` has seen, besides many
ENDS = (2, 3, 4, 6, 8, 12, 16, 24)
COSTS = {"even": (1, 1, 1, 1, 1, 1), "expensive beginning": (5, 5, 5, 5, 1, 1)}
DECIDES = ("early", "late", "everywhere")
SUCCESS = ("common", "rare")
AS_GOOD, AT_THE_END, PREDICTED = 0.95, 4.0, 0.8

Array = NDArray[Any]


@dataclass(frozen=True)
class Allocation:
    """T trunks, branched from before call `call`, which then has `ends` ends; 1: flat."""

    trunks: int
    call: int = DECISIONS
    ends: int = 1

    def __str__(self) -> str:
        if self.ends == 1:
            return f"{self.trunks} flat"
        return f"T={self.trunks} k={self.call} m={self.ends}"


class Bandit:
    """Six decisions in a tree; the reward is 1 or 0 by what was chosen.

    Args:
        costs: Tokens of each call.
        decides: Which decisions the reward hangs on: the first two, the last two, or how many of
            all were right.
        success: "common" or "rare".
        shared: Whether what is learned is a number for each decision, or for each state.
    """

    def __init__(self, costs: Sequence[int], decides: str, success: str, shared: bool) -> None:
        actions = np.array(list(product((0, 1), repeat=DECISIONS)))
        if decides == "everywhere":
            right, middle = actions.sum(1) >= {"common": 3, "rare": 5}[success], 0.0
        else:
            of_these = slice(0, 2) if decides == "early" else slice(-2, None)
            right, middle = actions[:, of_these].all(1), {"common": 0.85, "rare": -1.1}[success]
        logits = middle + 0.5 * np.random.default_rng(0).standard_normal(STATES)
        self.costs = np.array(costs)
        self.explored = 1 / np.array([self.costs[call:].sum() for call in CALLS])
        self.explored /= self.explored.sum()
        self.p = 1 / (1 + np.exp(-logits))
        self.value = np.concatenate([np.zeros(STATES), right])
        reach = np.ones(2 * STATES + 1)
        for state in reversed(range(STATES)):
            no, yes = self.value[2 * state + 1], self.value[2 * state + 2]
            self.value[state] = no + self.p[state] * (yes - no)
        for state in range(STATES):
            reach[2 * state + 1] = reach[state] * (1 - self.p[state])
            reach[2 * state + 2] = reach[state] * self.p[state]
        self.parameter = DEPTH if shared else np.arange(STATES)
        gaps = self.value[2::2] - self.value[1::2]
        slopes = reach[:STATES] * self.p * (1 - self.p) * gaps
        self.gradient = np.bincount(self.parameter, slopes)

    def cost(self, one: Allocation) -> float:
        """Sampled tokens of a task."""
        before, behind = self.costs[: one.call].sum(), self.costs[one.call :].sum()
        return float(one.trunks * (before + one.ends * behind))

    def walk(
        self, dice: np.random.Generator, states: Array, steps: int
    ) -> tuple[Array, list[tuple[Array, Array]]]:
        """Where rollouts get to; on the way their states and the scores of their actions."""
        seen = []
        for _ in range(steps):
            chosen = dice.random(states.shape) < self.p[states]
            seen.append((states, chosen - self.p[states]))
            states = 2 * states + 1 + chosen
        return states, seen

    def estimates(self, one: Allocation, seeds: int, dice: np.random.Generator) -> Array:
        """The gradient as `tree_advantages` has it, shape [seeds, parameters]."""
        size = len(self.gradient)
        total = np.zeros(seeds * size)
        start = np.zeros((seeds, one.trunks), int)
        states, before = self.walk(dice, start, one.call)
        leaves, behind = self.walk(
            dice, np.repeat(states[..., None], one.ends, -1), DECISIONS - one.call
        )
        returns = self.value[leaves]
        values = returns.mean(-1)
        parts = [(before, _others(values))]
        if one.ends > 1:
            parts.append((behind, _others(returns) / one.ends))
        for seen, advantages in parts:
            seed = np.arange(seeds).reshape(-1, *[1] * (advantages.ndim - 1)) * size
            for where, scores in seen:
                places = seed + self.parameter[where]
                total += np.bincount(places.ravel(), (advantages * scores).ravel(), len(total))
        found: Array = total.reshape(seeds, size) / one.trunks
        return found

    def loss(self, one: Allocation, seeds: int) -> float:
        """Mean squared error of the gradient, times sampled tokens."""
        found = self.estimates(one, seeds, np.random.default_rng(1))
        return self._error(found) * self.cost(one)

    def _error(self, estimates: Array) -> float:
        return float(((estimates - self.gradient) ** 2).sum(1).mean())

    def loss_of_exploring(self, seeds: int) -> float:
        """The same of groups that explore, each branch before a call that was drawn beforehand."""
        dice, size = np.random.default_rng(1), len(self.gradient)
        calls = dice.choice(CALLS, (seeds, TRUNKS), p=self.explored)
        states, seen = np.zeros((seeds, TRUNKS, 2), int), []
        for step in range(DECISIONS):
            chosen = dice.random(states.shape) < self.p[states]
            chosen[..., 1] = np.where(step < calls, chosen[..., 0], chosen[..., 1])
            seen.append((states, chosen - self.p[states]))
            states = 2 * states + 1 + chosen
        returns = self.value[states]
        behind, total = _others(returns) / 2, np.zeros(seeds * size)
        before = _others(returns.mean(-1))[..., None] * [1, 0]
        for step, (where, scores) in enumerate(seen):
            advantages = np.where((step < calls)[..., None], before, behind)
            places = np.arange(seeds)[:, None, None] * size + self.parameter[where]
            total += np.bincount(places.ravel(), (advantages * scores).ravel(), len(total))
        costs = [self.cost(Allocation(TRUNKS, call, 2)) for call in CALLS]
        return self._error(total.reshape(seeds, size) / TRUNKS) * float(self.explored @ costs)

    def fixed(self, budget: float) -> Iterator[Allocation]:
        for call, ends in product(range(1, DECISIONS), ENDS):
            trunks = int(budget / self.cost(Allocation(1, call, ends)))
            if trunks > 1:
                yield Allocation(trunks, call, ends)

    def seen(
        self, dice: random.Random, given: Sequence[int] = ()
    ) -> tuple[list[int], RolloutSummary]:
        """A rollout behind the actions that it is given, as the pilot sees it."""
        state, actions, scores = 0, list(given), []
        for call in range(DECISIONS):
            if call >= len(given):
                actions.append(int(dice.random() < self.p[state]))
            probability = self.p[state] if actions[call] else 1 - self.p[state]
            scores.append(score([float(np.log(probability))]))
            state = 2 * state + 1 + actions[call]
        return actions, RolloutSummary(float(self.value[state]), self.costs.tolist(), scores)

    def pilot(self, tasks: int, dice: random.Random) -> Positions:
        """Groups that explore: trunks, each with a branch at a call that was drawn beforehand."""
        positions = Positions()
        for _ in range(tasks):
            trunks = [self.seen(dice) for _ in range(TRUNKS)]
            forks = []
            for number, (actions, seen) in enumerate(trunks):
                (call,) = dice.choices(CALLS, self.explored.tolist())
                branch = self.seen(dice, actions[:call])[1]
                forks.append(Fork(call, [seen, branch], number))
            positions.add([seen for _, seen in trunks], forks)
        return positions


def _others(values: Array) -> Array:
    """Each less the mean of the others of its row; of one 0."""
    count = values.shape[-1]
    found: Array = (values - values.mean(-1, keepdims=True)) * count / max(count - 1, 1)
    return found


def check(bandit: Bandit, one: Allocation) -> None:
    """The estimates are those of `tree_advantages`, here one by one."""
    fast = bandit.estimates(one, 20, np.random.default_rng(3))
    dice = np.random.default_rng(3)
    states, before = bandit.walk(dice, np.zeros((20, one.trunks), int), one.call)
    leaves, behind = bandit.walk(
        dice, np.repeat(states[..., None], one.ends, -1), DECISIONS - one.call
    )
    slow = np.zeros_like(fast)
    ids = list(product(range(20), range(one.trunks), range(one.ends)))
    origins = {id_: Point((*id_[:2], 0), one.call) for id_ in ids if id_[2]}
    calls = [(id_, call) for id_ in ids for call in range(one.call if id_[2] else 0, DECISIONS)]
    found = tree_advantages(
        {id_: bandit.value[leaves[id_]] for id_ in ids},
        {id_: id_[0] for id_ in ids},
        origins,
        [Piece(id_, call, 0, 1) for id_, call in calls],
    )
    for (id_, call), advantage, weight in zip(calls, found.advantages, found.weights, strict=True):
        early = call < one.call
        where, scores = before[call] if early else behind[call - one.call]
        at = id_[:2] if early else id_
        slope = advantage[0] * weight[0] * scores[at] / one.trunks
        slow[id_[0], bandit.parameter[where[at]]] += slope
    if not np.allclose(fast, slow):
        raise AssertionError(f"the estimates of {one} differ from those of tree_advantages")


def allocation(advice: Advice) -> Allocation:
    if advice.call is None:
        return Allocation(advice.trunks)
    return Allocation(advice.trunks, advice.call, advice.ends)


def cell(name: str, bandit: Bandit, given: argparse.Namespace, late: bool | None) -> list[Row]:
    """The rows of a bandit.

    Args:
        late: Whether the end decides behind an expensive beginning; None where the prediction
            knows too little for targets.
    """
    flat = Allocation(ROLLOUTS)
    budget = bandit.cost(flat)
    losses = {one: bandit.loss(one, given.seeds) for one in (flat, *bandit.fixed(budget))}
    gains = {one: losses[flat] / loss for one, loss in losses.items()}

    def gain(tasks: int) -> tuple[float, float, Allocation]:
        """The measured gain of what pilots advise, the predicted one, and the commonest advice."""
        # What few tasks advise differs more.
        dice = [random.Random(seed) for seed in range(max(given.pilots, 600 // tasks))]
        advised = [bandit.pilot(tasks, one).best(tokens=budget) for one in dice]
        chosen = [allocation(one) for one in advised]
        for one in set(chosen) - set(losses):
            losses[one] = bandit.loss(one, given.seeds)
        measured = losses[flat] / fmean(losses[one] for one in chosen)
        return measured, fmean(one.gain for one in advised), max(chosen, key=chosen.count)

    top, worst = max(gains, key=gains.__getitem__), min(gains, key=gains.__getitem__)
    best, predicted, often = gain(given.tasks)
    good, near = (None, None) if late is None else (AS_GOOD, PREDICTED)
    end = AT_THE_END if late else None
    metric, wrong = "efficiency, flat = 1", "predicted gain, times off"
    off = _times(predicted, best)
    rows = [
        Row(f"{name}: best ({often})", metric, best, str(top), gains[top], good),
        Row(f"{name}: best", metric, best, "flat", 1.0, end),
        Row(f"{name}: best", wrong, off, "", 1.0, near, more_is_better=False),
    ]
    for tasks in FEW:
        early, guessed, often = gain(tasks)
        few, off = f"{name}: best, {tasks} tasks seen", _times(guessed, early)
        rows.append(Row(f"{few} ({often})", metric, early, str(top), gains[top]))
        rows.append(Row(few, wrong, off, "", 1.0, more_is_better=False))
    exploring = losses[flat] / bandit.loss_of_exploring(given.seeds)
    return [
        *rows,
        Row(f"{name}: while it explores", metric, exploring, "flat", 1.0),
        Row(f"{name}: worst fixed ({worst})", metric, gains[worst], "flat", 1.0),
    ]


def _times(one: float, other: float) -> float:
    """How many times one is off from the other."""
    return max(one / other, other / one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--pilots", type=int, default=6)
    parser.add_argument("--tasks", type=int, default=2000)
    given = parser.parse_args()
    check(Bandit(COSTS["even"], "everywhere", "common", shared=True), Allocation(3, 2, 4))
    rows = []
    for costs, decides, success in product(COSTS, DECIDES, SUCCESS):
        bandit = Bandit(COSTS[costs], decides, success, shared=True)
        late = costs != "even" and decides == "late"
        rows += cell(f"{costs}, {decides}, {success}", bandit, given, late)
    for success in SUCCESS:
        bandit = Bandit(COSTS["expensive beginning"], "late", success, shared=False)
        rows += cell(f"a table: expensive beginning, late, {success}", bandit, given, None)
    report("bandits", rows, ["numpy"])


if __name__ == "__main__":
    main()
