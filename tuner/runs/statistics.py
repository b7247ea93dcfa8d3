"""Bets against hypotheses about a difference: the winnings are the evidence against them.

For a series of scores with mean mu, each hypothesis "mu <= m" has a gambler who bets against it
(Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS-B 86(1),
2024, arXiv 2010.09686):

    K_t(m) = sum_k w_k prod_{i<=t} (1 + lambda_ik (score_i - m)),      lambda_ik >= 0

where lambda_ik depends only on earlier scores. If the hypothesis is true, this is a supermartingale
that begins at 1, so it ever reaches 1 / alpha with probability at most alpha (Ville's inequality):
K is an e-value at every look. The refuted m end at a lower bound that holds at every look; bets on
the other side give the upper bound.

The score of a session that was assigned to the candidate with probability p (else to the serving
model) is

    score_i = (reward_i - c_i) * (1 / p  if the candidate's, else  -1 / (1 - p))

with c_i the mean reward of all earlier sessions of both arms (the augmented inverse-probability
score with a predictable baseline: Waudby-Smith, Wu, Ramdas, Karampatziakis and Mineiro,
"Anytime-valid off-policy inference for contextual bandits", arXiv 2210.10768). Its mean is
candidate - serving for any c, and its variance is that of the difference of the arms' means, times
the number of sessions: nothing is lost compared with a test of the means.

The bets are lambda_k = k * target / E[score^2]. With k = 1 the bet grows fastest if the target is
the true difference, as in Wald's sequential probability ratio test; smaller and larger k, each with
a part of the wealth, cover a wrong target.
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
"""Multiples of the target's bet, and the initial wealth of each, by side. Against "at most m" a
fifth is never bet: this takes a few more sessions, and keeps the error by chance clear of
alpha."""
_MOST = 0.8
"""Maximum share of the wealth that is bet against the worst possible score."""
_BELIEVED = 4
"""Number of sessions for which the spread of scores counts as the largest usual one."""
_LARGEST, _SMALLEST = 1e300, 1e-200
"""Wealth above the first is cut, below the second is lost: proven is proven, and processors are
slow with such numbers."""


class Evidence:
    """Wealth of the bets against M hypotheses in D comparisons at once.

    Axes: D comparisons, M hypotheses, S sides (0: the difference is at most m; 1: at least m),
    B bets. Rewards and differences are fractions of the range.

    Args:
        hypotheses_M: The m.
        target: Distance of the mean from a hypothesis for which the bets are optimal.
        spread: Largest usual mean square of scores, for the first bets.
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
        self.rewards_D = np.full(comparisons, 0.5)  # counts one session in the middle of the range
        self.scores_D = np.zeros(comparisons)
        self.squares_D = np.full(comparisons, _BELIEVED * spread)
        self._target = target

    @property
    def bets_DB(self) -> Floats:
        """The next bets, limited by the worst possible score."""
        bets_DB: Floats = (self._target / self.spread_D)[:, None] * _BETS
        return bets_DB

    @property
    def spread_D(self) -> Floats:
        """Mean square of the scores."""
        spread: Floats = self.squares_D / (_BELIEVED + self.sessions)
        return spread

    @property
    def e_DMS(self) -> Floats:
        """Current e-value against each hypothesis."""
        e_values: Floats = self.wealth_DMSB.sum(axis=-1)
        return e_values

    def add_sessions(self, candidate_D: NDArray[np.bool_], reward_D: Floats, share: float) -> None:
        """Add one session to each comparison.

        Args:
            candidate_D: Whether it was the candidate's.
            reward_D: Its reward.
            share: Probability that it was assigned to the candidate.
        """
        centre_D = self.rewards_D / (1 + self.sessions)
        score_D = (reward_D - centre_D) * np.where(candidate_D, 1 / share, -1 / (1 - share))
        self.rewards_D += reward_D
        # For the candidate's rewards 0 and 1, and for those of the serving model.
        lowest_D = -np.maximum(centre_D / share, (1 - centre_D) / (1 - share))
        highest_D = np.maximum((1 - centre_D) / share, centre_D / (1 - share))
        self._add(score_D, lowest_D, highest_D)

    def add_pairs(self, difference_D: Floats) -> None:
        """Add one pair to each comparison: the candidate's reward minus the serving model's."""
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


# Sequential test whether a candidate is better than the serving model; valid however often one
# looks.
#
# Bets against "the candidate is not better by more than the margin" and against "it is better by
# the effect worth finding" decide after each session: promote, keep the serving model, or not yet.
#
# Assumptions: rewards are within the stated range; each session is assigned to an arm at random,
# with a known probability, before anything about the session is known (the probability may change
# between sessions); the difference is constant, while the rewards of both arms may drift together.


Arm = Literal["serving", "candidate"]
Verdict = Literal["promote", "keep", "not yet"]

_CALLED = {"serving": "what serves", "candidate": "the candidate"}
_FINE, _REACH, _COARSE = 12, 5, 40
"""Grid of the bounds: points per effect, number of effects around, and points over the range."""


@dataclass(frozen=True)
class Plan:
    """The hypotheses and the error probabilities of a test.

    Attributes:
        effect: The difference in reward that is worth finding: if it is true, the candidate is
            promoted with probability `power`.
        low, high: Range of the rewards.
        alpha: Maximum probability of a wrong promotion, however often one looks.
        power: The probability of keeping the serving model although the candidate is better by
            `effect` is at most 1 - power.
        margin: A promotion needs a difference above this. Negative: the candidate may be worse by
            this much (because it is cheaper, for example).
        share: Probability that a session is the candidate's.
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
            raise ProofError(f"plan: alpha {self.alpha} is not between 0 and 0.5; use 0.05")
        if not 0.5 <= self.power < 1:
            raise ProofError(f"plan: power {self.power} is not between 0.5 and 1; use 0.8")
        if not 0 < self.share < 1:
            raise ProofError(f"plan: share {self.share} is not between 0 and 1; use 0.5")
        if not -self.range < self.margin < self.effect < self.range:
            raise ProofError(
                f"plan: effect {self.effect} and margin {self.margin} do not fit together: margin "
                f"must be below effect, and both are differences of rewards in "
                f"[{self.low:g}, {self.high:g}], so less than {self.range:g}"
            )

    @property
    def range(self) -> float:
        return self.high - self.low

    def scaled(self, reward: float, whose: str) -> float:
        """A reward as a fraction of the range; raises ProofError if it is outside."""
        if not self.low <= reward <= self.high:  # nan included
            raise ProofError(
                f"reward {reward} of {whose} is outside the plan's range [{self.low:g}, "
                f"{self.high:g}]: the proof needs a range that is stated in advance; state one "
                "that covers all possible rewards"
            )
        return (reward - self.low) / self.range

    def fixed_horizon(self, serving_sd: float, candidate_sd: float) -> int:
        """Sessions of both arms needed by a test with one look: the one-sided two-sample z-test.

        Args:
            serving_sd, candidate_sd: Standard deviations of the arms' rewards, which this test must
                know.
        """
        spread = candidate_sd**2 / self.share + serving_sd**2 / (1 - self.share)
        z = NormalDist().inv_cdf(1 - self.alpha) + NormalDist().inv_cdf(self.power)
        return math.ceil(z**2 * spread / (self.effect - self.margin) ** 2)


def evidence_of(
    plan: Plan, hypotheses_M: Floats, *, comparisons: int = 1, paired: bool = False
) -> Evidence:
    """Evidence before the first session, with the bets of a plan.

    Args:
        hypotheses_M: Differences, as fractions of the range.
        comparisons: Number of simultaneous comparisons.
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
    """Result so far.

    Attributes:
        verdict: "promote": the difference is above the margin. "keep": it is below the effect
            worth finding, or the candidate is worse. Else "not yet".
        estimate: The difference, candidate minus serving: the mean score, which is unbiased even if
            the probability of the arms or the rewards of both change in the meantime.
        lower: The difference is above this; wrong at any look with probability at most alpha.
        upper: The difference is below this; wrong at any look with probability at most 1 - power.
        sessions: Number of sessions of both arms, or of pairs of an evaluation.
        expected_more: Expected number of further sessions until a verdict if the difference is the
            current estimate; 0 if there is a verdict, None if none is in sight.
        text: The same in a sentence.
        e_value: Wealth of the bets against "not above the margin"; if that is true, it is above E
            with probability at most 1 / E.
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
    """Compares a candidate with the serving model, session by session.

        comparison = Comparison(Plan(effect=0.05))
        comparison.add("candidate", 1.0)
        comparison.add("serving", 0.0)
        comparison.decision().verdict

    Args:
        plan: The test.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._paired: bool | None = None
        self._evidence = evidence_of(plan, _grid(plan))
        self._of_arms = {arm: [0.0, 0.0] for arm in _CALLED}

    def add(self, arm: Arm, reward: float, *, share: float | None = None) -> None:
        """Add a judged session.

        Args:
            arm: Its arm, drawn at random before the session began.
            reward: Its reward.
            share: Probability that it was assigned to the candidate; the plan's by default.

        Raises:
            ProofError: The reward is outside the plan's range, the share is not a probability, the
                arm is unknown, or the comparison has pairs.
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
        """Add the rewards of both arms on one task, or their means over its rollouts.

        The order of the tasks must not depend on their rewards.

        Raises:
            ProofError: A reward is outside the plan's range, or the comparison has single sessions.
        """
        scaled = self.plan.scaled(candidate, _CALLED["candidate"])
        scaled -= self.plan.scaled(serving, _CALLED["serving"])
        self._is_paired(True)
        self._evidence.add_pairs(np.array([scaled]))
        self._count("serving", serving)
        self._count("candidate", candidate)

    def decision(self) -> Decision:
        """Decision after the sessions so far."""
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
        """The complete state, as JSON."""
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
        """Restore a comparison from its `state`.

        Raises:
            ProofError: Another version wrote it.
        """
        comparison = cls(Plan(**state["plan"]))
        if state["paired"] is not None:
            comparison._is_paired(state["paired"])
        comparison._of_arms = {arm: list(counts) for arm, counts in state["of_arms"].items()}
        evidence = comparison._evidence
        wealth_DMSB = np.array(state["wealth"])
        if wealth_DMSB.shape != evidence.wealth_DMSB.shape:
            raise ProofError(
                "the comparison was stored by another version of tuner, which used other bets: "
                "start a new one"
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
                "a comparison has either pairs (add_pair) or single sessions (add), and this one "
                f"has {'pairs' if self._paired else 'sessions'}: create another one"
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
        """Indices of margin and effect among the hypotheses."""
        plan, grid_M = self.plan, self._evidence.hypotheses_M
        margin, effect = plan.margin / plan.range, plan.effect / plan.range
        return int(np.searchsorted(grid_M, margin)), int(np.searchsorted(grid_M, effect))

    def _expected_more(self) -> int | None:
        """Sessions until the best bet wins if the difference is the estimate, which is shrunk
        towards the planned effect while there are few sessions; approximate, and rather too
        large than too small."""
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
            + (f"; about {more} more are expected to decide" if more else "; no end is in sight"),
        }[verdict]
        return (
            f"{verdict}: {said}. Difference {estimate:+.4f}, above {lower:+.4f} "
            f"({1 - plan.alpha:.0%} sure at every look) and below {upper:+.4f} ({plan.power:.0%}); "
            f"{seen}{f' ({means})' if means else ''}"
        )


def _grid(plan: Plan) -> Floats:
    """The m, as fractions of the range, in order; includes margin and effect."""
    margin, effect = plan.margin / plan.range, plan.effect / plan.range
    near = np.arange(-_REACH * _FINE, (_REACH + 1) * _FINE + 1) / _FINE
    fine = margin + (effect - margin) * near
    all_M = np.concatenate([fine, np.linspace(-1, 1, _COARSE + 1)])
    apart = (np.abs(all_M - margin) > 1e-9) & (np.abs(all_M - effect) > 1e-9)
    inside = all_M[apart & (np.abs(all_M) <= 1)]
    return np.unique(np.concatenate([inside, [margin, effect]]))
