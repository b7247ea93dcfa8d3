"""Bets against hypotheses about a difference: what is won is the evidence against them.

Of a series of scores with mean mu, each hypothesis "mu <= m" has a gambler who bets against it
(Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS-B 86(1),
2024, arXiv 2010.09686):

    K_t(m) = sum_k w_k prod_{i<=t} (1 + lambda_ik (score_i - m)),      lambda_ik >= 0

where lambda_ik depends on nothing but earlier scores. Where the hypothesis is true this is a
supermartingale that begins at 1, so it ever reaches 1 / alpha with a chance of alpha at most
(Ville's inequality): K is an e-value at every look. The m that were ever refuted end at a lower
bound that holds at every look; bets on the other side give the upper one.

The score of a session that a coin of chance p gave to the candidate (else to what serves) is

    score_i = (reward_i - c_i) * (1 / p  if the candidate's, else  -1 / (1 - p))

with c_i the mean reward of all earlier sessions of both arms (the augmented inverse-probability
score with a predictable baseline: Waudby-Smith, Wu, Ramdas, Karampatziakis and Mineiro,
"Anytime-valid off-policy inference for contextual bandits", arXiv 2210.10768). Its mean is
candidate - serving whatever c is, and its variance is that of the difference of the arms' means,
times the sessions: nothing is lost to a test that compares the means.

What is bet is lambda_k = k * target / E[score^2]: with k = 1, the bet that grows fastest if the
target is the difference, as in Wald's sequential probability ratio test; smaller and larger k with
a part of the wealth each are there for a target that was wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tuner.errors import ProofError

Floats = NDArray[np.float64]

_BETS = np.array([0.0, 0.25, 0.5, 1.0, 2.0, 4.0])
_WEIGHTS_SB = np.array([[0.2, 0.04, 0.12, 0.4, 0.16, 0.08], [0.0, 0.05, 0.15, 0.5, 0.2, 0.1]])
"""Multiples of the bet that the target asks for, and the wealth that begins with each, by side.
Against "at most m" a fifth is never bet: it takes a few more sessions, and what happens by chance
stays clear of alpha."""
_MOST = 0.8
"""Of its wealth a gambler never bets more than this against the worst that may come."""
_BELIEVED = 4
"""For as many sessions the score's spread counts as the largest that is usual."""
_LARGEST, _SMALLEST = 1e300, 1e-200
"""Wealth above is cut and below lost: what is proven is proven, and processors slow down there."""


class Evidence:
    """The wealth of the bets against M hypotheses in D comparisons at once.

    Axes: D comparisons, M hypotheses, S sides (0: the difference is at most m; 1: at least m),
    B bets. Rewards and differences are parts of the range.

    Args:
        hypotheses_M: The m.
        target: The distance of the mean from a hypothesis that bets are made for.
        spread: The mean square of scores that is usual at most, for the first bets.
        comparisons: D.
    """

    def __init__(
        self, hypotheses_M: Floats, *, target: float, spread: float, comparisons: int = 1
    ) -> None:
        shape = comparisons, len(hypotheses_M), 2
        self.hypotheses_M = hypotheses_M
        self.wealth_DMSB = np.broadcast_to(_WEIGHTS_SB, (*shape, len(_BETS))).copy()
        self.peak_DMS = np.ones(shape)  # the largest e-values so far
        self.sessions = 0
        self.rewards_D = np.full(comparisons, 0.5)  # with one session in the middle of the range
        self.scores_D = np.zeros(comparisons)
        self.squares_D = np.full(comparisons, _BELIEVED * spread)
        self._target = target

    @property
    def bets_DB(self) -> Floats:
        """What is bet next, where the worst that may come allows it."""
        bets_DB: Floats = (self._target / self.spread_D)[:, None] * _BETS
        return bets_DB

    @property
    def spread_D(self) -> Floats:
        """The mean square of the scores."""
        spread: Floats = self.squares_D / (_BELIEVED + self.sessions)
        return spread

    @property
    def e_DMS(self) -> Floats:
        """The e-value against each hypothesis, now."""
        e_values: Floats = self.wealth_DMSB.sum(axis=-1)
        return e_values

    def add_sessions(self, candidate_D: NDArray[np.bool_], reward_D: Floats, share: float) -> None:
        """One session of each comparison.

        Args:
            candidate_D: Whether it was the candidate's.
            reward_D: Its reward.
            share: The chance that it would be.
        """
        centre_D = self.rewards_D / (1 + self.sessions)
        score_D = (reward_D - centre_D) * np.where(candidate_D, 1 / share, -1 / (1 - share))
        self.rewards_D += reward_D
        # Of the candidate's rewards 0 and 1, and of those of what serves.
        lowest_D = -np.maximum(centre_D / share, (1 - centre_D) / (1 - share))
        highest_D = np.maximum((1 - centre_D) / share, centre_D / (1 - share))
        self._add(score_D, lowest_D, highest_D)

    def add_pairs(self, difference_D: Floats) -> None:
        """One pair of each comparison: the candidate's reward less that of what serves."""
        self._add(difference_D, np.full_like(difference_D, -1.0), np.ones_like(difference_D))

    def _add(self, score_D: Floats, lowest_D: Floats, highest_D: Floats) -> None:
        gain_DM = score_D[:, None] - self.hypotheses_M
        gain_DMS = np.stack([gain_DM, -gain_DM], axis=-1)
        loss_DMS = np.stack(
            [
                self.hypotheses_M - lowest_D[:, None],
                highest_D[:, None] - self.hypotheses_M,
            ],
            axis=-1,
        )
        most_DMS = _MOST / np.maximum(loss_DMS, 1e-12)
        bets_DMSB = np.minimum(self.bets_DB[:, None, None, :], most_DMS[..., None])
        self.wealth_DMSB *= 1 + bets_DMSB * gain_DMS[..., None]
        np.minimum(self.wealth_DMSB, _LARGEST, out=self.wealth_DMSB)
        self.wealth_DMSB[self.wealth_DMSB < _SMALLEST] = 0.0
        np.maximum(self.peak_DMS, self.e_DMS, out=self.peak_DMS)
        self.scores_D += score_D
        self.squares_D += score_D**2
        self.sessions += 1


# Is a candidate better than what serves? A decision that holds however often one looks.
#
# Bets against "the candidate is not better than by the margin" and against "it is better by the
# effect that is worth finding" decide, session by session: promote, keep what serves, or not yet.
#
# What is assumed: rewards within the stated range; the arm of a session is drawn by a coin of known
# chance before anything of the session is known, and the chance may change from session to session;
# the difference stays what it is, while the rewards of both arms may drift together.


Arm = Literal["serving", "candidate"]
Verdict = Literal["promote", "keep", "not yet"]

_CALLED = {"serving": "what serves", "candidate": "the candidate"}
_FINE, _REACH, _COARSE = 12, 5, 40
"""Grid of the bounds: so many points an effect, so many effects around, and over the range."""


@dataclass(frozen=True)
class Plan:
    """What is to be proven, and how surely.

    Attributes:
        effect: The difference in reward that is worth finding: where it is true, the candidate is
            promoted with a chance of `power`.
        low, high: Between these lies every reward.
        alpha: The chance of a promotion that is wrong is at most this, however often one looks.
        power: The chance to keep what serves although the candidate is better by `effect` is at
            most 1 - power.
        margin: A promotion needs a difference above this; negative: the candidate may be so much
            worse (it is cheaper, say).
        share: The chance that a session is the candidate's.
    """

    effect: float
    low: float = 0.0
    high: float = 1.0
    alpha: float = 0.05
    power: float = 0.8
    margin: float = 0.0
    share: float = 0.5

    def __post_init__(self) -> None:
        numbers = asdict(self)
        if wrong := [name for name, value in numbers.items() if not math.isfinite(value)]:
            raise ProofError(f"plan: {wrong[0]} is {numbers[wrong[0]]}; give a finite number")
        if self.low >= self.high:
            raise ProofError(f"plan: low {self.low} is not below high {self.high}")
        if not 0 < self.alpha < 0.5:
            raise ProofError(f"plan: alpha {self.alpha} is not between 0 and 0.5, as 0.05")
        if not 0.5 <= self.power < 1:
            raise ProofError(f"plan: power {self.power} is not between 0.5 and 1, as 0.8")
        if not 0 < self.share < 1:
            raise ProofError(f"plan: share {self.share} is not between 0 and 1, as 0.5")
        if not -self.range < self.margin < self.effect < self.range:
            raise ProofError(
                f"plan: effect {self.effect} and margin {self.margin} do not go together: margin "
                f"is below effect, and both are differences of rewards in "
                f"[{self.low:g}, {self.high:g}], of less than {self.range:g}"
            )

    @property
    def range(self) -> float:
        return self.high - self.low

    def scaled(self, reward: float, whose: str) -> float:
        """A reward as a part of the range.

        Raises:
            ProofError: It is outside.
        """
        if not self.low <= reward <= self.high:  # nan included
            raise ProofError(
                f"reward {reward} of {whose} is outside of the plan's range [{self.low:g}, "
                f"{self.high:g}]: the proof holds for rewards within a range that is stated "
                "before; state one that holds all rewards that can come"
            )
        return (reward - self.low) / self.range

    def fixed_horizon(self, serving_sd: float, candidate_sd: float) -> int:
        """Sessions of both arms that a test with one look needs: the one-sided two-sample z-test.

        Args:
            serving_sd, candidate_sd: Standard deviations of the arms' rewards, which it must know.
        """
        spread = candidate_sd**2 / self.share + serving_sd**2 / (1 - self.share)
        z = NormalDist().inv_cdf(1 - self.alpha) + NormalDist().inv_cdf(self.power)
        return math.ceil(z**2 * spread / (self.effect - self.margin) ** 2)


def evidence_of(
    plan: Plan, hypotheses_M: Floats, *, comparisons: int = 1, paired: bool = False
) -> Evidence:
    """No evidence yet: the bets that a plan asks for.

    Args:
        hypotheses_M: Differences, as parts of the range.
        comparisons: How many are watched at once.
        paired: Whether they are of pairs.
    """
    arms = 1 / plan.share + 1 / (1 - plan.share)
    return Evidence(
        hypotheses_M,
        target=(plan.effect - plan.margin) / plan.range,
        spread=0.5 if paired else arms / 4,
        comparisons=comparisons,
    )


@dataclass(frozen=True)
class Decision:
    """What is proven so far.

    Attributes:
        verdict: "promote": the difference is above the margin. "keep": it is below the effect that
            is worth finding, or the candidate is worse. Else "not yet".
        estimate: The difference, candidate less serving; the mean score, which has no bias
            although the chance of the arms, or the rewards of both, change in the meantime.
        lower: The difference is above this, with a chance of alpha to be wrong at any look.
        upper: And below this, with a chance of 1 - power to be wrong at any look.
        sessions: How many there are, of both arms; pairs of an evaluation.
        expected_more: How many more a verdict takes if the difference is as it looks now; 0 where
            there is one, None where none is in sight.
        text: The same in a sentence.
        e_value: Wealth of the bets against "not above the margin": it is above E with a chance of
            1 / E at most where that is true.
        p_value: A p-value that holds at every look: 1 / the largest e-value so far.
    """

    verdict: Verdict
    estimate: float
    lower: float
    upper: float
    sessions: int
    expected_more: int | None
    text: str
    e_value: float
    p_value: float


class Comparison:
    """A candidate and what serves, session by session.

        comparison = Comparison(Plan(effect=0.05))
        comparison.add("candidate", 1.0)
        comparison.add("serving", 0.0)
        comparison.decision().verdict

    Args:
        plan: What is to be proven.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._paired: bool | None = None
        self._evidence = evidence_of(plan, _grid(plan))
        self._of_arms = {arm: [0.0, 0.0] for arm in _CALLED}

    def add(self, arm: Arm, reward: float, *, share: float | None = None) -> None:
        """A session that was judged.

        Args:
            arm: Whose it was, by a coin that was thrown before it began.
            reward: Its reward.
            share: The chance that it would be the candidate's; the plan's if not given.

        Raises:
            ProofError: The reward is outside of the plan's range, the share no chance, the arm none
                of the two, or there are pairs.
        """
        if arm not in _CALLED:
            raise ProofError(f"arm {arm!r} is neither 'serving' nor 'candidate'")
        chance = self.plan.share if share is None else share
        if not 0 < chance < 1:
            raise ProofError(f"share {chance} is not between 0 and 1")
        scaled = self.plan.scaled(reward, _CALLED[arm])
        self._is_paired(False)
        self._evidence.add_sessions(np.array([arm == "candidate"]), np.array([scaled]), chance)
        self._count(arm, reward)

    def add_pair(self, serving: float, candidate: float) -> None:
        """The rewards of both on one task, or their means over its rollouts.

        Tasks come in an order that has nothing to do with their rewards.

        Raises:
            ProofError: A reward is outside of the plan's range, or there are single sessions.
        """
        scaled = self.plan.scaled(candidate, _CALLED["candidate"])
        scaled -= self.plan.scaled(serving, _CALLED["serving"])
        self._is_paired(True)
        self._evidence.add_pairs(np.array([scaled]))
        self._count("serving", serving)
        self._count("candidate", candidate)

    def decision(self) -> Decision:
        """What the sessions so far prove."""
        plan, evidence = self.plan, self._evidence
        lower, upper = self._bounds()
        at_margin, at_effect = self._places()
        verdict: Verdict = "not yet"
        if evidence.peak_DMS[0, at_margin, 0] >= 1 / plan.alpha:
            verdict = "promote"
        elif evidence.peak_DMS[0, at_effect, 1] >= 1 / (1 - plan.power):
            verdict = "keep"
        estimate = float(evidence.scores_D[0]) / max(1, evidence.sessions) * plan.range
        more = 0 if verdict != "not yet" else self._expected_more()
        return Decision(
            verdict=verdict,
            estimate=estimate,
            lower=lower,
            upper=upper,
            sessions=evidence.sessions,
            expected_more=more,
            text=self._text(verdict, estimate, (lower, upper), more),
            e_value=float(evidence.e_DMS[0, at_margin, 0]),
            p_value=1 / float(evidence.peak_DMS[0, at_margin, 0]),
        )

    def state(self) -> dict[str, Any]:
        """All that is known, as JSON."""
        evidence = self._evidence
        return {
            "plan": asdict(self.plan),
            "paired": self._paired,
            "of_arms": {arm: list(counts) for arm, counts in self._of_arms.items()},
            "sessions": evidence.sessions,
            "rewards": evidence.rewards_D.tolist(),
            "scores": evidence.scores_D.tolist(),
            "squares": evidence.squares_D.tolist(),
            "wealth": evidence.wealth_DMSB.tolist(),
            "peak": evidence.peak_DMS.tolist(),
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Comparison:
        """A comparison as it was when `state` was asked for.

        Raises:
            ProofError: That was not by this version.
        """
        comparison = cls(Plan(**state["plan"]))
        if state["paired"] is not None:
            comparison._is_paired(state["paired"])
        comparison._of_arms = {arm: list(counts) for arm, counts in state["of_arms"].items()}
        evidence = comparison._evidence
        wealth_DMSB = np.array(state["wealth"])
        if wealth_DMSB.shape != evidence.wealth_DMSB.shape:
            raise ProofError(
                "the comparison was stored by another version of tuner, which bet otherwise: "
                "begin it anew"
            )
        evidence.wealth_DMSB, evidence.peak_DMS = wealth_DMSB, np.array(state["peak"])
        evidence.sessions = int(state["sessions"])
        evidence.rewards_D = np.array(state["rewards"])
        evidence.scores_D = np.array(state["scores"])
        evidence.squares_D = np.array(state["squares"])
        return comparison

    def _is_paired(self, paired: bool) -> None:
        if self._paired is None:
            self._paired = paired
            self._evidence = evidence_of(self.plan, _grid(self.plan), paired=paired)
        elif self._paired != paired:
            raise ProofError(
                "a comparison is of pairs (add_pair) or of single sessions (add), and this one has "
                f"{'pairs' if self._paired else 'sessions'}: make another one"
            )

    def _count(self, arm: str, reward: float) -> None:
        self._of_arms[arm][0] += 1
        self._of_arms[arm][1] += reward

    def _bounds(self) -> tuple[float, float]:
        """The largest refuted m of "at most m" and the smallest of "at least m", in rewards."""
        plan, grid_M = self.plan, self._evidence.hypotheses_M
        refuted_M = self._evidence.peak_DMS[0, :, 0] >= 1 / plan.alpha
        missed_M = self._evidence.peak_DMS[0, :, 1] >= 1 / (1 - plan.power)
        lower = grid_M[refuted_M].max(initial=-1.0) * plan.range
        upper = grid_M[missed_M].min(initial=1.0) * plan.range
        return float(lower), float(upper)

    def _places(self) -> tuple[int, int]:
        """Where margin and effect are among the hypotheses."""
        plan, grid_M = self.plan, self._evidence.hypotheses_M
        margin, effect = plan.margin / plan.range, plan.effect / plan.range
        return int(np.searchsorted(grid_M, margin)), int(np.searchsorted(grid_M, effect))

    def _expected_more(self) -> int | None:
        """Sessions until what is bet best wins, if the difference is the estimate, drawn to the
        planned effect while there are few sessions; about right, and more rather than less."""
        plan, evidence = self.plan, self._evidence
        margin, effect = plan.margin / plan.range, plan.effect / plan.range
        spread, bets_B = float(evidence.spread_D[0]), evidence.bets_DB[0]
        few = spread / (effect - margin) ** 2 / 2
        likely = (float(evidence.scores_D[0]) + few * effect) / (evidence.sessions + few)
        found = []
        for side, place, gain, chance in zip(
            (0, 1),
            self._places(),
            (likely - margin, effect - likely),
            (plan.alpha, 1 - plan.power),
            strict=True,
        ):
            missing = -math.log(chance * max(float(evidence.e_DMS[0, place, side]), 1e-300))
            growth = float((bets_B * gain - bets_B**2 * (spread + gain**2) / 2).max())
            found += [missing / growth] if growth > 0 else []
        return max(1, math.ceil(min(found))) if found else None

    def _text(
        self, verdict: Verdict, estimate: float, bounds: tuple[float, float], more: int | None
    ) -> str:
        plan, (lower, upper) = self.plan, bounds
        count = self._evidence.sessions
        if self._paired:
            seen = f"{count} pairs"
        else:
            seen = f"{count} sessions, {int(self._of_arms['candidate'][0])} of the candidate"
        means = ", ".join(
            f"{arm} {total / number:.3f}"
            for arm, (number, total) in self._of_arms.items()
            if number
        )
        said = {
            "promote": f"the candidate is better by more than {plan.margin:g}",
            "keep": "the candidate is worse"
            if upper <= 0
            else f"the candidate is not better by {plan.effect:g}",
            "not yet": "nothing is proven"
            + (f"; about {more} more would do" if more else "; no end is in sight"),
        }[verdict]
        return (
            f"{verdict}: {said}. Difference {estimate:+.4f}, above {lower:+.4f} "
            f"({1 - plan.alpha:.0%} sure at every look) and below {upper:+.4f} ({plan.power:.0%}); "
            f"{seen}{f' ({means})' if means else ''}"
        )


def _grid(plan: Plan) -> Floats:
    """The m, as parts of the range, in order; margin and effect are among them."""
    margin, effect = plan.margin / plan.range, plan.effect / plan.range
    near = np.arange(-_REACH * _FINE, (_REACH + 1) * _FINE + 1) / _FINE
    fine = margin + (effect - margin) * near
    all_M = np.concatenate([fine, np.linspace(-1, 1, _COARSE + 1)])
    apart = (np.abs(all_M - margin) > 1e-9) & (np.abs(all_M - effect) > 1e-9)
    inside = all_M[apart & (np.abs(all_M) <= 1)]
    return np.unique(np.concatenate([inside, [margin, effect]]))
