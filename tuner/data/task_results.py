"""What the tasks of a run have shown so far, and how often each is drawn for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

FADING = 0.75
"""What remains of a task's earlier rollouts, as evidence of what it is now, when it is taken."""

Task: TypeAlias = dict[str, Any]
Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]
# The row, its rollouts that had a reward, and how many of those passed.
Visit: TypeAlias = tuple[int, int, int]


@dataclass(eq=False)
class TaskResults:
    """What the tasks have shown so far; arrays have a number for each row of the dataset, [N].

    Attributes:
        tasks: The rows.
        visits: How often a step took the row.
        tries: Its rollouts that had a reward.
        passed: How many of them passed: a reward of at least `tuner.pass_reward`.
        latest: The share that passed when it was taken last; nan where no rollout had a reward.
        last: The step that took it last, 0 before the first.
        step: The last step whose results these are.
    """

    tasks: Sequence[Task]
    visits: Integers = field(init=False)
    tries: Integers = field(init=False)
    passed: Integers = field(init=False)
    latest: Floats = field(init=False)
    last: Integers = field(init=False)
    step: int = 0

    def __post_init__(self) -> None:
        count = len(self.tasks)
        self.visits, self.tries, self.passed, self.last = np.zeros((4, count), np.int64)
        self.latest = np.full(count, np.nan)
        self._tries, self._passed = np.zeros((2, count))

    @property
    def rate(self) -> Floats:
        """The share of a task's rollouts that would pass by now, as far as it is known: between 0
        and 1, and 0.5 where nothing is. Earlier visits count less, each time by `FADING`."""
        rate: Floats = (self._passed + 0.5) / (self._tries + 1.0)
        return rate

    def add(self, step: int, visits: Sequence[Visit]) -> None:
        """Take note of what a step took."""
        self.step = step
        for row, tries, passed in visits:
            self.visits[row] += 1
            self.tries[row] += tries
            self.passed[row] += passed
            self.last[row] = step
            if tries:
                self.latest[row] = passed / tries
                self._tries[row] = FADING * self._tries[row] + tries
                self._passed[row] = FADING * self._passed[row] + passed


def by_success(results: TaskResults) -> Floats:
    """A weight for each task, [N]: 1 where half of its rollouts pass or nothing is known, 0 where
    all or none do. It is in proportion to the variance of a rollout's success, p (1 - p), which is
    what a group can teach (arXiv 2502.12272). A task that was tried and gave no reward has 0."""
    rate = results.rate
    weights: Floats = 4 * rate * (1 - rate)
    return np.where((results.visits > 0) & (results.tries == 0), 0.0, weights)


def draw(
    rows: Integers, weights: Floats, count: int, *, floor: float, dice: np.random.Generator
) -> list[int]:
    """`count` of some rows, with the weights [rows]; none twice while there are others.

    Each is drawn in proportion to its weight among those that are left (Efraimidis & Spirakis
    2006). No weight is less than `floor` of the highest; all are 1 where all are 0.
    """
    top = float(weights.max(initial=0.0))
    lifted = np.maximum(weights, floor * top) if top > 0 else np.ones(len(rows))
    found: list[int] = []
    while len(found) < count:
        waiting = -np.log1p(-dice.random(len(rows))) / lifted
        order = np.argsort(waiting, kind="stable")[: count - len(found)]
        found += rows[order].tolist()
    return found
