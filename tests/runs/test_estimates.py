"""Means with intervals, and how often k tries solve a task, against computations by hand."""

from itertools import combinations
from statistics import NormalDist, fmean, stdev

import numpy as np
import pytest

from tuner.runs.estimates import estimate, pass_at_k, pass_hat_k, passes, spearman


@pytest.mark.parametrize(
    ("tries", "passed"), [(5, 0), (5, 1), (5, 3), (5, 5), (8, 2), (1, 1), (4, 4)]
)
def test_passes_are_the_share_of_all_ways_to_choose_k_tries(tries, passed):
    outcomes = [True] * passed + [False] * (tries - passed)
    for k in range(1, tries + 1):
        chosen = list(combinations(outcomes, k))
        assert pass_at_k(tries, passed, k) == pytest.approx(fmean(map(any, chosen)))
        assert pass_hat_k(tries, passed, k) == pytest.approx(fmean(map(all, chosen)))


def test_tasks_with_fewer_rewards_than_k_tell_nothing_of_k():
    rewards = [[1.0, 0.0], [1.0], [], [0.5, 0.4]]
    assert passes(rewards, 2, 1.0) == ([1.0, 0.0], [0.0, 0.0])
    assert passes(rewards, 2, 0.5) == ([1.0, 1.0], [0.0, 0.0])
    assert passes(rewards, 2, 0.4)[1] == [0.0, 1.0]
    assert passes(rewards, 1, 1.0)[0] == [0.5, 1.0, 0.0]
    assert passes(rewards, 3, 1.0) == ([], [])


def test_the_interval_of_many_tasks_is_that_of_the_normal_distribution():
    values = np.random.default_rng(1).normal(0.3, 2.0, size=2000).tolist()
    found = estimate(values)
    half = NormalDist().inv_cdf(0.975) * stdev(values) / len(values) ** 0.5
    assert (found.mean, found.tasks) == (pytest.approx(fmean(values)), 2000)
    assert found.low == pytest.approx(found.mean - half, abs=0.1 * half)
    assert found.high == pytest.approx(found.mean + half, abs=0.1 * half)
    assert estimate(values) == found


def test_the_interval_of_two_tasks_is_all_there_is():
    # A quarter of the resamples is [0, 0] and a quarter [1, 1]: far more than 2.5 % at each end.
    found = estimate([0.0, 1.0])
    assert (found.low, found.mean, found.high) == (0.0, 0.5, 1.0)


@pytest.mark.long
def test_about_95_of_100_intervals_hold_the_true_mean():
    random = np.random.default_rng(2)
    draws = random.binomial(1, 0.3, size=(200, 100)).astype(float)
    held = [one.low <= 0.3 <= one.high for one in map(estimate, draws.tolist())]
    assert 0.90 <= fmean(held) <= 0.99


def test_one_task_has_no_interval_and_none_no_mean():
    assert estimate([]) is None
    assert estimate([0.5]).low is None
    assert estimate([0.5]).text() == "0.500"
    assert estimate([1.0, 1.0, 1.0]).text(".1f") == "1.0 [1.0, 1.0]"


def test_rank_correlation_with_ties_is_pearsons_of_the_mean_ranks():
    first, second = [0.75, 0.25, 0, 0, 0.5, 0.5, 0.5], [0.75, 0.25, 0, 0.5, 0.75, 0.75, 0.75]
    ranks = [7, 3, 1.5, 1.5, 5, 5, 5], [5.5, 2, 1, 3, 5.5, 5.5, 5.5]
    assert spearman(first, second) == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert spearman([1, 2, 3], [10, 100, 1000]) == pytest.approx(1)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2], [1, 1]) is None
