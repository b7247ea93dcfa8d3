"""Which share of the return's variance is still open before each call, by what forks have shown.

Before the first call all is open, s_0 = 1. Call j decides a share d_j of it, and what is left
before call k is s_k = d_k + d_k+1 + ... What is held of the d_j while nothing was seen is a
Dirichlet distribution: call j has the share a_j / a of the scores, so that one whose tokens were
nearly certain decides nearly nothing, and `a` says how far a call may differ from that. It is a
chain: of what is left before call j a part goes on that is Beta(a_j+1 + a_j+2 + ..., a_j), whatever
was before. So what is to be held of every s_k, given forks at each position, is computed by one
pass ahead and one back, exactly but for a grid.

A fork before call k shows o, the variance of the return between its ends, and d, the product of two
ends' distances from the other trunks, whose means are s V and (1 - s) V. At the true s, whatever V
is, x = (1 - s) o - s d has the mean 0. With n forks

    log likelihood of s = - (sum x)^2 / (2 n v),   v = (V^2 + sum (x - mean x)^2) / (n + 1)

as a Gaussian mean has it whose variance v is that of the sample, and of one more fork that was off
by V, without which two forks that happen to agree would be certain. A fork whose ends and trunks
were all alike has x = 0 for each s: it says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

ALIKE = 1.0
"""a: how sure it is, without forks, that calls decide as much as their shares of the scores. At 0
one call would decide all, at infinity each exactly its share; at 1, of two that are alike one does
most of it, more often than not. Of 1, 1.5 and 2 this had the least to lose on the bandits of
`benchmarks/bandits.py` after 20 and 50 tasks."""
_GRID = np.linspace(0.0, 1.0, 101)
"""The shares that are told apart; forks of thousands of tasks are not surer than a hundredth."""
_LEAST = 1e-3
"""The least share of the scores: what is drawn behind a certain call, by a tool, decides too."""
_FLOOR = -50.0
"""The least log likelihood, so that nothing is impossible that the forks of one position say."""

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Shown:
    """What forks have shown, for each position.

    Attributes:
        forks: How many there were.
        open, decided: Sums of o and d.
        open2, both, decided2: Sums of o^2, o d and d^2.
    """

    forks: Vector
    open: Vector
    decided: Vector
    open2: Vector
    both: Vector
    decided2: Vector

    def likelihoods(self, variance: float) -> Vector:
        """Of each share of the grid, up to a factor, shape [positions, shares].

        Args:
            variance: V.
        """
        left = 1 - _GRID
        total = np.outer(self.open, left) - np.outer(self.decided, _GRID)
        squares = np.outer(self.open2, left**2) + np.outer(self.decided2, _GRID**2)
        squares -= 2 * np.outer(self.both, left * _GRID)
        tiny = np.finfo(float).tiny
        forks = np.maximum(self.forks, tiny)[:, None]
        inner = np.maximum(squares - total**2 / forks, 0.0)
        off = forks * (variance**2 + inner) / (forks + 1)
        logs = -(total**2) / (2 * np.maximum(off, tiny))
        found: Vector = np.exp(np.maximum(logs - logs.max(axis=1, keepdims=True), _FLOOR))
        return found


@dataclass(frozen=True)
class Openness:
    """What is held of the shares that are open.

    Attributes:
        shares: s_k of each position, as far as can be expected; 1 at position 0.
        unknown: How far they are uncertain, from 1, before anything is seen, to 0: the sum of their
            variances by what that was at first.
    """

    shares: Vector
    unknown: float


def openness(scores: Vector, variance: float, shown: Shown) -> Openness:
    """What is held of the shares, given what forks have shown.

    Args:
        scores: K_j of each position.
        variance: Of the return.
    """
    mean = np.maximum(scores / (scores.sum() or 1.0), _LEAST)
    behind = np.flip(np.flip(mean).cumsum())[1:] / mean.sum()
    steps = [_step(ALIKE * (one - rest), ALIKE * rest) for one, rest in pairwise([1.0, *behind])]
    chances = shown.likelihoods(variance)[1:]
    ahead = [np.append(np.zeros(len(_GRID) - 1), 1.0)]
    for step, chance in zip(steps, chances, strict=True):
        ahead.append(_sum_to_one(ahead[-1] @ step * chance))
    back = [np.ones(len(_GRID))]
    for step, chance in zip(steps[::-1], chances[::-1], strict=True):
        back.append(_sum_to_one(step @ (chance * back[-1])))
    held = np.array([_sum_to_one(a * b) for a, b in zip(ahead, back[::-1], strict=True)])
    shares: Vector = held @ _GRID
    uncertain = float((held @ _GRID**2 - shares**2).sum())
    at_first = float((behind * (1 - behind)).sum()) / (ALIKE + 1)
    return Openness(shares, min(uncertain / at_first, 1.0) if at_first else 0.0)


def _step(one: float, rest: float) -> Vector:
    """How likely it is that from each share of the grid so much is left behind a call.

    The mass of Beta(rest, one) in each cell of the grid: of its two factors the one that may be
    infinite at an end is integrated there, and the other one is that of the cell's middle.
    """
    count = np.arange(len(_GRID), dtype=np.float64)
    at = np.maximum(count, 1.0)[:, None]
    low, high = (np.clip((count + edge) / at, 0.0, 1.0) for edge in (-0.5, 0.5))
    middle = (low + high) / 2
    beginning = (high**rest - low**rest) / rest * (1 - np.minimum(middle, 0.5)) ** (one - 1)
    end = ((1 - low) ** one - (1 - high) ** one) / one * np.maximum(middle, 0.5) ** (rest - 1)
    mass = np.where(middle < 0.5, beginning, end)
    mass[0] = np.eye(1, len(_GRID))
    found: Vector = mass / mass.sum(axis=1, keepdims=True)
    return found


def _sum_to_one(values: Vector) -> Vector:
    """The same in proportion."""
    found: Vector = values / values.sum()
    return found
