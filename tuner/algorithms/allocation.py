"""Where to branch: what earlier steps say about single positions, and the best use of a budget.

A position is the index of a call in its rollout. With T trunks that all fork before call k into m
ends each (the trunk's own included) the variance of the estimate of `tuner.algorithms.forks`
is about

    1/T      [ M_<k - A_k + A_k/m  +  K_<k (S - S_k + S_k/m) / (T - 1) ]       calls before the fork
  + 1/(T m)  [ B_k  +  K_>=k S_k / (m - 1) ]                                   calls behind it
  + 1/T      (1 - alike) sum_{j >= k} K_j (S_j - S_j+1)                        between the trunks

and that of n flat rollouts with leave-one-out baselines `(M + K S / (n - 1)) / n`, where

    S, S_k    variance of the return in all, and of what is still open before call k (0 behind the
              end): between trunks of a task, and between siblings at a fork
    K_j       squared length of the score (the gradient of the log-prob) of call j; K without an
              index is the sum
    M_j       mean of that length times the squared distance of the return from its mean
    A_k, B_k  the same for what is decided behind call k, of the calls before it and behind

All of them are means over trunks and forks, and need no gradient: the score of a token that was
sampled with probability p counts `(1 - p)^2`, as in a table of logits with two choices, so that a
call whose tokens were certain carries nothing. The last line cannot be seen without gradients: to
which degree the ends of one trunk repeat each other, because what helps in its state helps in it
alone. `alike` says how far states agree: 1 where one parameter serves all, 0 for a table.

Ends are cheap where the beginning was expensive, and they are worth it where the return is decided
behind the point; where neither holds, flat rollouts are best, and `Positions.best` says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

import numpy as np
from numpy.typing import NDArray

POSITIONS = 64
"""Calls beyond are not told apart: they count for the last position, and nothing forks there."""
ENDS = 32
"""The most ends of a trunk that are tried."""
ALIKE = 0.9
_DOUBT = 8.0
"""As how many forks it counts that score and return have nothing to do with each other."""
_ENOUGH = 8.0
"""How many forks a position must have had before more are advised there."""

Vector = NDArray[np.float64]


def score(logprobs: Sequence[float]) -> float:
    """Squared length of the scores of sampled tokens, `sum (1 - p)^2`."""
    return sum((1 - exp(one)) ** 2 for one in logprobs)


@dataclass(frozen=True)
class Seen:
    """A rollout as far as it matters for where to branch.

    Attributes:
        reward: Its own, also where others begin inside it.
        tokens: Sampled tokens of each call; of calls that were given back those that they have.
        scores: `score` of each call, likewise.
    """

    reward: float
    tokens: Sequence[int]
    scores: Sequence[float]


@dataclass(frozen=True)
class Advice:
    """How to use a budget, and why.

    Attributes:
        trunks: How many rollouts of a task start at the beginning.
        call: Before which call each of them is branched from, if it gets there; None: not at all.
        ends: How many rollouts go on from there, the trunk included; 1 without branches.
        gain: How many times smaller variance times sampled tokens is than without branches, as far
            as it can be told.
        tokens: Expected sampled tokens of a task.
        open: Share of the return's variance that is decided behind the point; 1 without one.
        reached: How often a rollout gets to the point.
        cost: Expected sampled tokens of each call.
        decided: Share of the return's variance that each call decides.
        rollouts: How many trunks this was learned from.
        forks: And how many forks.
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

    def __str__(self) -> str:
        known = f"learned from {self.rollouts} rollouts and {self.forks} forks"
        if self.call is None:
            return (
                f"{self.trunks} rollouts from the beginning, {self.tokens:.0f} tokens a task: no "
                f"fork is expected to gain anything ({known})"
            )
        before = sum(self.cost[: self.call])
        behind = sum(self.cost[self.call :])
        return (
            f"{self.trunks} rollouts from the beginning, {self.ends} ends from before call "
            f"{self.call} of each, {self.tokens:.0f} tokens a task: {self.gain:.1f} times as much "
            f"from a token as without branches. Getting there takes {before:.0f} tokens and going "
            f"on {behind:.0f}, {self.open:.0%} of the return's variance is decided behind it, and "
            f"{self.reached:.0%} of the rollouts get there ({known})"
        )


_BY_POSITION = (
    *("reached", "tokens", "scores", "spread", "returns"),  # of trunks
    *("forks", "fewer", "open", "before", "behind"),
)
_IN_ALL = ("trunks", "few", "variance", "degrees")


class Positions:
    """What earlier steps say about each position; as large after a million rollouts as after one.

    Attributes:
        sums: By name a number for each position. Over trunks: how many `reached` it, their
            `tokens` and `scores` there, `spread` (score times squared distance of the return from
            the mean of the others), and `returns`. Over forks: how many, `fewer` (1 / (siblings -
            1)), `open` (variance of the siblings' returns), and this times the scores of the calls
            `before`; `behind` is the spread of the calls behind.
        totals: `trunks`, `few` (the sum of 1 / (trunks of the task - 1)), `variance` of the trunks'
            returns times its `degrees` of freedom, and these.
    """

    def __init__(self) -> None:
        self.sums = {name: np.zeros(POSITIONS) for name in _BY_POSITION}
        self.totals = dict.fromkeys(_IN_ALL, 0.0)

    def add(self, trunks: Sequence[Seen], forks: Sequence[tuple[int, Sequence[Seen]]] = ()) -> None:
        """Take note of a task's rollouts; what has no sibling says nothing of variances.

        Args:
            trunks: Those that started at the beginning.
            forks: Where branches begin at the start of a call: its index, and those that go on from
                there, the rollout that is branched from included.
        """
        if len(trunks) > 1:
            self._add_trunks(trunks)
        for call, ends in forks:
            if len(ends) > 1 and 0 < call < POSITIONS - 1:
                self._add_fork(call, ends)

    def _add_trunks(self, trunks: Sequence[Seen]) -> None:
        variance, squares = _distances(trunks)
        count = len(trunks)
        for seen, square in zip(trunks, squares, strict=True):
            reached = _by_position(np.ones(len(seen.tokens)))
            scores = _by_position(seen.scores)
            self.sums["reached"] += np.minimum(reached, 1.0)
            self.sums["tokens"] += _by_position(seen.tokens)
            self.sums["scores"] += scores
            self.sums["spread"] += scores * square
            self.sums["returns"] += np.minimum(reached, 1.0) * seen.reward
        self.totals["trunks"] += count
        self.totals["few"] += count / (count - 1)
        self.totals["variance"] += variance * (count - 1)
        self.totals["degrees"] += count - 1

    def _add_fork(self, call: int, ends: Sequence[Seen]) -> None:
        variance, squares = _distances(ends)
        behind = [sum(seen.scores[call:]) for seen in ends]
        found = {
            "forks": 1.0,
            "fewer": 1 / (len(ends) - 1),
            "open": variance,
            "before": variance * sum(ends[0].scores[:call]),
            "behind": float(np.mean(squares * behind)),
        }
        for name, value in found.items():
            self.sums[name][call] += value

    def fade(self, keep: float) -> None:
        """Let what is known count less, since the policy has changed: once a step."""
        for one in self.sums.values():
            one *= keep
        self.totals = {name: value * keep for name, value in self.totals.items()}

    def state(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {"sums": {name: one.tolist() for name, one in self.sums.items()}} | {
            "totals": dict(self.totals)
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Positions:
        """As it was when `state` was called."""
        found = cls()
        found.sums = {name: np.array(state["sums"][name]) for name in _BY_POSITION}
        found.totals = {name: float(state["totals"][name]) for name in _IN_ALL}
        return found

    @property
    def reach(self) -> tuple[float, ...]:
        """How often a trunk gets to each position, as far as any did."""
        reached = self.sums["reached"]
        return tuple((reached[reached > 0] / max(self.totals["trunks"], 1e-12)).tolist())

    def best(
        self, *, tokens: float | None = None, rollouts: int | None = None, alike: float = ALIKE
    ) -> Advice:
        """The use of a task's budget with the least expected variance times sampled tokens.

        Args:
            tokens: How many sampled tokens it may expect to take; or
            rollouts: how many rollouts, branches included.
            alike: How far states agree in what they teach, 0 to 1.

        Raises:
            ValueError: Nothing is known yet, or the budget has no room for two rollouts.
        """
        if not self.totals["degrees"]:
            raise ValueError("no task with two trunks was seen yet: branch by `spread` until then")
        known = _Figures.of(self, alike)
        plans = list(known.plans(tokens, rollouts))
        if not plans:
            raise ValueError(
                f"a rollout takes {known.cost.sum():.0f} tokens: a budget of {tokens or rollouts} "
                f"{'tokens' if tokens else 'rollouts'} has no room for two"
            )
        flat, *_ = plans
        chosen = min(plans, key=lambda plan: plan.loss)
        call = chosen.call
        spent = np.diff(known.open_, append=0.0) * -1
        return Advice(
            trunks=chosen.trunks,
            call=call,
            ends=chosen.ends,
            gain=flat.loss / chosen.loss if chosen.loss else 1.0,
            tokens=chosen.tokens,
            open=float(known.open_[call or 0] / known.open_[0]) if known.open_[0] else 0.0,
            reached=float(known.reach[call or 0]),
            cost=tuple(known.cost.tolist()),
            decided=tuple((spent / (known.open_[0] or 1.0)).tolist()),
            rollouts=round(self.totals["trunks"]),
            forks=round(self.sums["forks"].sum()),
        )


@dataclass(frozen=True)
class _Plan:
    """A use of a budget: what it takes, and its variance times that."""

    trunks: int
    call: int | None
    ends: int
    tokens: float
    loss: float


@dataclass(frozen=True)
class _Figures:
    """The quantities of the module's formula, for each position that rollouts get to.

    Attributes:
        cost, reach: Expected sampled tokens of a call, and how often there is one.
        score: K_j.
        spread: M_j.
        open_: S_k; S for position 0.
        before, behind: A_k and B_k.
        between: The variance between trunks of what their ends are expected to teach.
        forkable: Where enough forks were seen.
    """

    cost: Vector
    reach: Vector
    score: Vector
    spread: Vector
    open_: Vector
    before: Vector
    behind: Vector
    between: Vector
    forkable: tuple[int, ...]

    @classmethod
    def of(cls, seen: Positions, alike: float) -> _Figures:
        """What the sums come to; where little was seen, score and return are taken to be
        independent, and each call to decide as much as its share of the score."""
        count = int((seen.sums["reached"] > 0).sum())
        sums = {name: one[:count] for name, one in seen.sums.items()}
        trunks, few = seen.totals["trunks"], seen.totals["few"]
        variance = seen.totals["variance"] / seen.totals["degrees"]
        score, reach = sums["scores"] / trunks, sums["reached"] / trunks
        spread = sums["spread"] - score * variance * few + _DOUBT * score * variance
        known = np.flatnonzero(sums["forks"] >= _ENOUGH)
        left = score[::-1].cumsum()[::-1]
        open_ = _open(variance, reach, left / (left[0] or 1.0), sums, known)
        inside = score / reach
        each = open_ / reach  # the variance at a fork that there is
        weight = sums["open"] + _DOUBT * each
        prior = inside.cumsum() - inside
        before = (sums["before"] + _DOUBT * each * prior) / np.where(weight, weight, 1.0)
        after = left / reach
        noise = after * sums["open"] * sums["fewer"] / np.maximum(sums["forks"], 1.0)
        behind = (sums["behind"] - noise + _DOUBT * each * after) / np.where(weight, weight, 1.0)
        decided = -np.diff(open_, append=0.0)
        return cls(
            cost=sums["tokens"] / trunks,
            reach=reach,
            score=score,
            spread=np.maximum(spread / (trunks + _DOUBT), 0.0),
            open_=open_,
            before=before * open_,
            behind=np.maximum(behind, 0.0) * open_,
            between=(1 - alike) * (inside * decided)[::-1].cumsum()[::-1],
            forkable=tuple(known.tolist()),
        )

    def plans(self, tokens: float | None, rollouts: int | None) -> Iterator[_Plan]:
        """Those that a budget has room for, flat rollouts first."""
        for call, ends in [(None, 1), *((k, m) for k in self.forkable for m in range(2, ENDS + 1))]:
            each = self.cost.sum() if call is None else self._cost(call, ends)
            trunks = int(tokens / each) if tokens else (rollouts or 0) // ends
            if trunks > 1:
                variance = self._flat(trunks) if call is None else self._forked(trunks, call, ends)
                yield _Plan(trunks, call, ends, trunks * each, variance * trunks * each)

    def _cost(self, call: int, ends: int) -> float:
        return float(self.cost[:call].sum() + ends * self.cost[call:].sum())

    def _flat(self, rollouts: int) -> float:
        others = self.score.sum() * self.open_[0] / (rollouts - 1)
        return float((self.spread.sum() + others) / rollouts)

    def _forked(self, trunks: int, call: int, ends: int) -> float:
        left = self.open_[call]
        early = max(self.spread[:call].sum() - self.before[call], 0.0) + self.before[call] / ends
        early += self.score[:call].sum() * (self.open_[0] - left + left / ends) / (trunks - 1)
        others = self.score[call:].sum() * left / self.reach[call] / (ends - 1)
        late = (self.behind[call] + others) / ends
        return float((early + late + self.between[call]) / trunks)


def _by_position(values: Sequence[float] | Vector) -> Vector:
    """The numbers of calls by position, those beyond the last added to it."""
    places = np.minimum(np.arange(len(values)), POSITIONS - 1)
    found = np.zeros(POSITIONS)
    np.add.at(found, places, np.asarray(values, dtype=np.float64))
    return found


def _distances(seen: Sequence[Seen]) -> tuple[float, Vector]:
    """The variance of returns, and of each its squared distance from the mean of the others."""
    rewards = np.array([one.reward for one in seen])
    factor = len(rewards) / (len(rewards) - 1)
    return float(rewards.var(ddof=1)), ((rewards - rewards.mean()) * factor) ** 2


def _open(
    variance: float, reach: Vector, share: Vector, sums: Mapping[str, Vector], known: NDArray[Any]
) -> Vector:
    """S_k: what is open before each call, never more than before an earlier one."""
    prior = variance * share[known]
    forks, found = sums["forks"][known], sums["open"][known] * reach[known]
    at_forks = _falling((found + _DOUBT * prior) / (forks + _DOUBT), forks)
    places = [0, *known.tolist(), len(reach)]
    there = [variance, *np.minimum(at_forks, variance), 0.0]
    return np.interp(np.arange(len(reach)), places, there).astype(np.float64)


def _falling(values: Vector, weights: Vector) -> Vector:
    """The nearest sequence that never rises: neighbours that do are pooled."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        size = 1
        while pools and pools[-1][0] < value:
            before, heavy, many = pools.pop()
            value = (before * heavy + value * weight) / (heavy + weight)
            weight, size = heavy + weight, size + many
        pools.append((value, weight, size))
    return np.concatenate([np.zeros(0), *(np.full(size, value) for value, _, size in pools)])
