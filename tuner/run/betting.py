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

import numpy as np
from numpy.typing import NDArray

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
