"""Where to branch: what earlier steps say about each position, and the best use of a budget.

A position is the index of a call in its rollout. With T trunks that all fork before call k into m
ends each (the trunk's own included) the variance of the estimate of `tuner.training.forks` is
about 1/T of the sum of

    E - E_k + E_k / m - a (G - G_k) (T - 2) / (T - 1)              the calls before the fork, and
      + K_<k (S - S_k + S_k / m) / (T - 1)                         the part from their baseline
    (B_k - G_k (m - 2) / (m - 1)) / m + K_>=k S_k / (m - 1) / m    the calls after it, likewise
    (1 - a S_k / S) G_k                                            shared by ends of one trunk

and that of n flat rollouts with leave-one-out baselines 1/n of `B_0 - a G (n - 2) / (n - 1) +
K S / (n - 1)`, where

    S, S_k   total variance of the return, and the part still open before call k (0 at the end)
    K_j      squared length of the score, the gradient of the log-prob, of call j; K: of all
    E, E_k   that of the calls before k times the squared distance of the return from its mean, and
             the part of this decided after k
    B_k      that of the calls after k times the squared distance from the mean of what is decided
    G, G_k   squared length of the gradient itself: of all calls, and of those from k on in a state

The trunks give their cost, the location of their scores (a token that was sampled with probability
p has `(1 - p)^2`, as in a table of logits with two choices, so a certain one carries nothing) and
the distances between their returns. The forks give the open share of that distance (`Openness`):
the variance between ends is open, and the product of two ends' distances from the other trunks is
decided. The share is taken to be the same for S_k, E_k and B_k. As the variance is nearly linear in
the shares, their means give its mean, and the plan with the smallest is the best one given what is
known, however little that is.

G is not observed in samples: `sum_{j >= k} min(K_j, 1) (S_j - S_j+1)` is its value if one token
decided everything that a call does. That what helps in one state helps in others, as far as nothing
was decided before them and up to a = 0.95, is also an assumption; in a table of states it is wrong.
`benchmarks/bandits.py` measures how good all this is. Ends pay off if the beginning is expensive
and the return is decided after the point; otherwise flat rollouts are best, and the advice says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The share of the return's variance that is still open before each call, estimated from forks.
#
# Before the first call everything is open, s_0 = 1. Call j decides a share d_j of it, and the rest
# before call k is s_k = d_k + d_k+1 + ... The prior of the d_j is a Dirichlet distribution: call j
# has the share a_j / a of the scores, so a call whose tokens were nearly certain decides nearly
# nothing, and `a` says how far a call may differ from that. It is a chain: the part of the rest
# before call j that continues is Beta(a_j+1 + a_j+2 + ..., a_j), whatever was before. So the
# posterior of every s_k, given forks at each position, is computed by one pass forward and one
# back, exactly except for the grid.
#
# A fork before call k shows o, the variance of the return between its ends, and d, the product of
# two ends' distances from the other trunks, whose means are s V and (1 - s) V. At the true s,
# whatever V is, x = (1 - s) o - s d has mean 0. With n forks
#
#     log likelihood of s = - (sum x)^2 / (2 n v),   v = (V^2 + sum (x - mean x)^2) / (n + 1)
#
# as for a Gaussian mean with the variance v of the sample and of one additional fork that was off
# by V, without which two forks that happen to agree would be certain. A fork whose ends and trunks
# were all equal has x = 0 for each s: it says nothing.


ALIKE = 1.0
"""a: confidence of the prior that calls decide as much as their shares of the scores. At 0 one call
would decide everything, at infinity each exactly its share; at 1, of two equal calls one usually
does most of it. Of 1, 1.5 and 2 this had the least to lose on the bandits of
`benchmarks/bandits.py` after 20 and 50 tasks."""
_GRID = np.linspace(0.0, 1.0, 101)
"""The grid of shares; forks of thousands of tasks are not more precise than a hundredth."""
_LEAST = 1e-3
"""The minimum share of the scores: what a tool draws after a certain call also decides."""
_FLOOR = -50.0
"""The minimum log likelihood, so that forks of one position make nothing impossible."""

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class ForkResults:
    """Results of forks, for each position.

    Attributes:
        forks: Number of forks.
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
        """Likelihood of each share of the grid, up to a factor, shape [positions, shares].

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
    """Estimates of the open shares.

    Attributes:
        shares: Expected s_k of each position; 1 at position 0.
        unknown: Their uncertainty, from 1, before anything is seen, to 0: the sum of their
            variances divided by its initial value.
    """

    shares: Vector
    unknown: float


def openness(scores: Vector, variance: float, shown: ForkResults) -> Openness:
    """Estimate the open shares from forks.

    Args:
        scores: K_j of each position.
        variance: Variance of the return.
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
    """Probability, from each share of the grid, of each remaining share after a call.

    The mass of Beta(rest, one) in each cell of the grid: the factor that may be infinite at an end
    is integrated, and the other one is taken at the cell's middle.
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
    found: Vector = values / values.sum()
    return found


POSITIONS = 64
"""Later calls count for the last position, and nothing forks there."""
ENDS = 32
"""The maximum number of ends of a trunk that is considered."""
_ALIKE = 0.95
"""a: how far states agree in what helps, where nothing is decided yet."""
_POSSIBLE = 2.0
"""Number of forks that a position needs for more to be advised there: if calls run side by side, or
the agent diverges, none may ever begin."""

_OF_FORKS = ("forks", "open", "decided", "open2", "both", "decided2")


def score(logprobs: Sequence[float]) -> float:
    """Squared length of the scores of sampled tokens, `sum (1 - p)^2`."""
    return sum((1 - exp(one)) ** 2 for one in logprobs)


@dataclass(frozen=True)
class RolloutSummary:
    """The parts of a rollout that matter for where to branch.

    Attributes:
        reward: Its own, also if others branch from it.
        tokens: Number of sampled tokens of each call, including replayed calls.
        scores: `score` of each call, likewise.
    """

    reward: float
    tokens: Sequence[int]
    scores: Sequence[float]


@dataclass(frozen=True)
class Fork:
    """Branches that begin at the start of a call.

    Attributes:
        call: Its index.
        ends: The rollouts that continue from there, including the one that is branched from.
        trunk: The index of their tree's trunk among the task's; None if that is not used.
    """

    call: int
    ends: Sequence[RolloutSummary]
    trunk: int | None = None


@dataclass(frozen=True)
class Advice:
    """How to use a budget, and why.

    Attributes:
        trunks: Number of rollouts of a task that start at the beginning.
        call: Each of them is branched before this call, if it gets there; None: not at all.
        ends: Number of rollouts that continue from there, including the trunk; 1 without branches.
        gain: Factor by which variance times sampled tokens is smaller than without branches, as far
            as known.
        tokens: Expected sampled tokens of a task.
        open: Share of the return's variance that is decided after the point; 1 without one.
        reached: Share of rollouts that get to the point.
        cost: Expected sampled tokens of each call.
        decided: Share of the return's variance that each call decides.
        rollouts: Number of trunks this was learned from.
        forks: Number of forks this was learned from.
        unknown: Uncertainty of where the return is decided, from 1 at first to 0.
    """

    trunks: int
    call: int | None
    ends: int
    gain: float
    tokens: float
    open: float
    reached: float
    cost: tuple[float, ...]
    decided: tuple[float, ...]
    rollouts: int
    forks: int
    unknown: float

    def __str__(self) -> str:
        known = (
            f"learned from {self.rollouts} rollouts and {self.forks} forks, {self.unknown:.0%} of "
            "it still unknown"
        )
        if self.call is None:
            return (
                f"{self.trunks} rollouts from the beginning, {self.tokens:.0f} tokens a task: no "
                f"fork is expected to gain anything ({known})"
            )
        before, behind = sum(self.cost[: self.call]), sum(self.cost[self.call :])
        return (
            f"{self.trunks} rollouts from the beginning, {self.ends} ends from before call "
            f"{self.call} of each, {self.tokens:.0f} tokens a task: {self.gain:.1f} times as much "
            f"from a token as without branches. Getting there takes {before:.0f} tokens and the "
            f"rest {behind:.0f}, {self.open:.0%} of the return's variance is decided after it, and "
            f"{self.reached:.0%} of the rollouts get there ({known})"
        )


class Positions:
    """Statistics of each position from earlier steps, in constant memory.

    Attributes:
        sums: By name a number for each position. Over trunks that `reached` it: their number,
            `tokens` and `scores`, and the scores of the calls `before`; the squared distance of the
            return from the mean of the others (`squares`), times the score (`spread`), times those
            of the calls before (`early`). Over `forks`: their number, the variance of the ends'
            returns (`open`), the product of two ends' distances from the mean of the other trunks,
            minus the expected part from that mean's own (`decided`), and of these two the squares
            (`open2`, `decided2`) and the product (`both`).
        totals: `trunks`, 1 / other trunks (`fewer`), `variance` of the trunks' returns times its
            `degrees` of freedom, and these.
    """

    def __init__(self) -> None:
        of_trunks = ("reached", "tokens", "scores", "before", "squares", "spread", "early")
        self.sums = {name: np.zeros(POSITIONS) for name in (*of_trunks, *_OF_FORKS)}
        self.totals = dict.fromkeys(("trunks", "fewer", "variance", "degrees"), 0.0)

    def add(self, trunks: Sequence[RolloutSummary], forks: Sequence[Fork] = ()) -> None:
        """Add a task's rollouts; those without others to compare with say nothing."""
        if len(trunks) < 2:
            return
        variance, squares = _distances(trunks)
        self._add_trunks(trunks, variance, squares)
        for fork in forks:
            others = [one.reward for at, one in enumerate(trunks) if at != fork.trunk]
            if len(fork.ends) > 1 and 0 < fork.call < POSITIONS - 1:
                self._add_fork(fork, others, variance)

    def _add_trunks(
        self, trunks: Sequence[RolloutSummary], variance: float, squares: Vector
    ) -> None:
        count = len(trunks)
        for seen, square in zip(trunks, squares, strict=True):
            reached = np.minimum(_by_position(np.ones(len(seen.tokens))), 1.0)
            scores = _by_position(seen.scores)
            before = reached * (scores.cumsum() - scores)
            found = {
                "reached": reached,
                "tokens": _by_position(seen.tokens),
                "scores": scores,
                "before": before,
                "squares": reached * square,
                "spread": scores * square,
                "early": before * square,
            }
            for name, one in found.items():
                self.sums[name] += one
        self.totals["trunks"] += count
        self.totals["fewer"] += count / (count - 1)
        self.totals["variance"] += variance * (count - 1)
        self.totals["degrees"] += count - 1

    def _add_fork(self, fork: Fork, others: Sequence[float], variance: float) -> None:
        away = np.array([one.reward for one in fork.ends]) - np.mean(others)
        pairs = len(away) * (len(away) - 1)
        open_ = float(away.var(ddof=1))
        decided = float((away.sum() ** 2 - (away**2).sum()) / pairs) - variance / len(others)
        found = {
            "forks": 1.0,
            "open": open_,
            "decided": decided,
            "open2": open_**2,
            "both": open_ * decided,
            "decided2": decided**2,
        }
        for name, one in found.items():
            self.sums[name][fork.call] += one

    def fade(self, keep: float) -> None:
        """Discount what is known, since the policy has changed: once a step."""
        for one in self.sums.values():
            one *= keep
        self.totals = {name: value * keep for name, value in self.totals.items()}

    def state(self) -> dict[str, Any]:
        """The state, for JSON."""
        sums = {name: one.tolist() for name, one in self.sums.items()}
        return {"sums": sums, "totals": dict(self.totals)}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Positions:
        """Restore a result of `state`."""
        found = cls()
        new = found.sums
        found.sums = {name: np.array(state["sums"][name], dtype=float) for name in new}
        if any(one.shape != new[name].shape for name, one in found.sums.items()):
            raise ValueError("sums has not one number for each position")
        found.totals = {name: float(state["totals"][name]) for name in found.totals}
        return found

    @property
    def reach(self) -> tuple[float, ...]:
        """Share of trunks that get to each position, as far as any did."""
        reached = self.sums["reached"]
        return tuple((reached[reached > 0] / max(self.totals["trunks"], 1e-12)).tolist())

    def best(self, *, tokens: float | None = None, rollouts: int | None = None) -> Advice:
        """The use of a task's budget with the smallest expected variance times sampled tokens.

        Args:
            tokens: Budget of expected sampled tokens; or
            rollouts: budget of rollouts, branches included.

        Raises:
            ValueError: Nothing is known yet, or the budget has no room for two rollouts.
        """
        if not self.totals["degrees"]:
            raise ValueError("no task with two trunks was seen yet: branch by `spread` until then")
        known = _Figures.of(self)
        plans = list(known.plans(tokens, rollouts))
        if not plans:
            budget = f"{tokens} tokens" if tokens else f"{rollouts} rollouts"
            cost = known.cost.sum()
            raise ValueError(f"{budget} are too few: two rollouts need {cost:.0f} tokens")
        chosen = min(plans, key=lambda plan: plan.loss)
        at, shares = chosen.call or 0, _ratio(known.open_, known.open_[:1])
        return Advice(
            trunks=chosen.trunks,
            call=chosen.call,
            ends=chosen.ends,
            gain=plans[0].loss / chosen.loss if chosen.loss else 1.0,
            tokens=chosen.tokens,
            open=float(shares[at]),
            reached=float(known.reach[at]),
            cost=tuple(known.cost.tolist()),
            decided=tuple((-np.diff(shares, append=0.0)).tolist()),
            rollouts=round(self.totals["trunks"]),
            forks=round(self.sums["forks"].sum()),
            unknown=known.unknown,
        )


@dataclass(frozen=True)
class _Plan:
    """A use of a budget: its cost, and its variance times that."""

    trunks: int
    call: int | None
    ends: int
    tokens: float
    loss: float


@dataclass(frozen=True)
class _Figures:
    """The quantities of the module's formula, for each position that rollouts get to.

    Attributes:
        cost, reach: Expected sampled tokens of a call, and the share of rollouts that make it.
        score: K_j.
        open_: S_k; S for position 0.
        early, early_open, late: E, E_k and B_k.
        slope: G_k.
        forkable: Where forks were seen to begin.
        unknown: Uncertainty of the open shares, from 1 to 0.
    """

    cost: Vector
    reach: Vector
    score: Vector
    open_: Vector
    early: Vector
    early_open: Vector
    late: Vector
    slope: Vector
    forkable: tuple[int, ...]
    unknown: float

    @classmethod
    def of(cls, seen: Positions) -> _Figures:
        """From the sums, minus the contribution of the means that they compare with."""
        size = int((seen.sums["reached"] > 0).sum())
        sums = {name: one[:size] for name, one in seen.sums.items()}
        trunks, degrees = seen.totals["trunks"], seen.totals["degrees"]
        variance = seen.totals["variance"] / degrees
        added = variance * seen.totals["fewer"] / trunks
        score, reach, before = (sums[name] / trunks for name in ("scores", "reached", "before"))
        squares = np.maximum(sums["squares"] / trunks - reach * added, 0.0)
        spread = np.maximum(sums["spread"] / trunks - score * added, 0.0)
        early = np.maximum(sums["early"] / trunks - before * added, 0.0)
        shown = ForkResults(**{name: sums[name] for name in _OF_FORKS})
        held = openness(score, variance, shown)
        share = held.shares
        left = np.append(squares * share, 0.0)
        left[0] = variance
        return cls(
            cost=sums["tokens"] / trunks,
            reach=reach,
            score=score,
            open_=left[:-1],
            early=spread.cumsum() - spread,
            early_open=early * share,
            late=_behind(spread) * share,
            slope=_behind(np.minimum(score / reach, 1.0) * -np.diff(left)),
            forkable=tuple(np.flatnonzero(sums["forks"] >= _POSSIBLE).tolist()),
            unknown=held.unknown,
        )

    def plans(self, tokens: float | None, rollouts: int | None) -> Iterator[_Plan]:
        """The plans within a budget, flat rollouts first."""
        for call, ends in [(0, 1), *((k, m) for k in self.forkable for m in range(2, ENDS + 1))]:
            each = float(self.cost[:call].sum() + ends * self.cost[call:].sum())
            trunks = int(tokens / each) if tokens else (rollouts or 0) // ends
            if trunks > 1:
                variance = self._forked(trunks, call, ends) if call else self._flat(trunks)
                yield _Plan(trunks, call or None, ends, trunks * each, variance * trunks * each)

    def _flat(self, rollouts: int) -> float:
        slope = _ALIKE * self.slope[0] * (rollouts - 2)
        added = (self.score.sum() * self.open_[0] - slope) / (rollouts - 1)
        return max(float(self.late[0] + added), 0.0) / rollouts

    def _forked(self, trunks: int, call: int, ends: int) -> float:
        left, slope, before = self.open_[call], self.slope[call], self.score[:call].sum()
        early = self.early[call] - self.early_open[call] * (1 - 1 / ends)
        early += before * (self.open_[0] - left + left / ends) / (trunks - 1)
        early -= _ALIKE * (self.slope[0] - slope) * (trunks - 2) / (trunks - 1)
        added = self.score[call:].sum() * left / self.reach[call] - slope * (ends - 2)
        late = (self.late[call] + added / (ends - 1)) / ends
        shared = (1 - _ALIKE * left / (self.open_[0] or 1.0)) * slope
        return float(max(early, 0.0) + max(late, 0.0) + shared) / trunks


def _by_position(values: Sequence[float] | Vector) -> Vector:
    """The numbers of calls by position, those beyond the last added to it."""
    found = np.zeros(POSITIONS)
    places = np.minimum(np.arange(len(values)), POSITIONS - 1)
    np.add.at(found, places, np.asarray(values, dtype=np.float64))
    return found


def _distances(seen: Sequence[RolloutSummary]) -> tuple[float, Vector]:
    """The variance of returns, and for each its squared distance from the mean of the others."""
    returns = np.array([one.reward for one in seen])
    away = (returns - returns.mean()) * len(returns) / (len(returns) - 1)
    return float(returns.var(ddof=1)), away**2


def _behind(values: Vector) -> Vector:
    """The sum of each and all that follow."""
    return np.flip(np.flip(values).cumsum())


def _ratio(above: Vector, below: Vector) -> Vector:
    """`above / below`, 0 where `below` is 0."""
    return above / np.where(below > 0, below, np.inf)
