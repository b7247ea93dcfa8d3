"""What is held of open shares, against draws from the same belief and forks of known shares."""

import numpy as np
import pytest

from tuner.rollouts.allocation import _GRID, ALIKE, ForkResults, openness

SCORES = np.array([1.0, 3.0, 2.0, 2.0])


def shown(*forks, size=4):
    """Of forks as (position, o, d)."""
    sums = np.zeros((6, size))
    for at, o, d in forks:
        sums[:, at] += (1, o, d, o * o, o * d, d * d)
    return ForkResults(*sums)


def forks(at, share, count, dice, size=0.5):
    """So many forks at a position, whose o and d are off by about `size` of the variance, 1."""
    return [
        (at, *(np.array([share, 1 - share]) + size * dice.standard_normal(2))) for _ in range(count)
    ]


def drawn(scores, seen, count=200_000):
    """The mean shares of a sample of the belief, weighted by the likelihood."""
    draws = np.random.default_rng(0).dirichlet(ALIKE * scores / scores.sum(), count)
    shares = np.flip(np.flip(draws, 1).cumsum(1), 1)
    chances = seen.likelihoods(1.0)
    weights = np.prod(
        [np.interp(shares[:, at], _GRID, chances[at]) for at in range(1, len(scores))], axis=0
    )
    return weights @ shares / weights.sum()


def test_without_forks_calls_decide_as_much_as_their_scores():
    found = openness(SCORES, 1.0, shown())
    assert found.shares == pytest.approx([1, 7 / 8, 4 / 8, 2 / 8], abs=0.01)
    assert found.unknown == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("true", [(1, 1, 1, 1), (1, 0.75, 0.5, 0.25), (1, 0.9, 0.2, 0.1)])
@pytest.mark.parametrize("count", [2, 10, 40])
def test_it_is_what_a_sample_of_the_belief_says(true, count):
    dice = np.random.default_rng(1)
    seen = shown(*(one for at in (1, 2, 3) for one in forks(at, true[at], count, dice)))
    assert openness(SCORES, 1.0, seen).shares == pytest.approx(drawn(SCORES, seen), abs=0.02)


@pytest.mark.parametrize("true", [(1, 1, 1, 1), (1, 0.75, 0.5, 0.25), (1, 0.6, 0.6, 0.0)])
def test_many_forks_tell_the_shares(true):
    dice = np.random.default_rng(2)
    seen = shown(*(one for at in (1, 2, 3) for one in forks(at, true[at], 2000, dice)))
    found = openness(SCORES, 1.0, seen)
    assert found.shares == pytest.approx(true, abs=0.03)
    assert found.unknown < 0.01


def test_a_position_says_something_of_its_neighbours():
    dice = np.random.default_rng(3)
    late = openness(SCORES, 1.0, shown(*forks(3, 1.0, 20, dice)))
    assert min(late.shares) > 0.85
    early = openness(SCORES, 1.0, shown(*forks(1, 0.0, 20, dice)))
    assert max(early.shares[1:]) < 0.15


def test_forks_that_show_nothing_say_nothing():
    dice = np.random.default_rng(4)
    some = forks(2, 0.5, 6, dice)
    found, nothing = (openness(SCORES, 1.0, shown(*some, *more)) for more in ((), [(3, 0, 0)] * 50))
    assert nothing.shares == pytest.approx(found.shares)
    assert nothing.unknown == pytest.approx(found.unknown)


def test_the_fewer_forks_the_less_is_known():
    dice = np.random.default_rng(5)
    unknown = [
        openness(SCORES, 1.0, shown(*(one for at in (1, 2, 3) for one in forks(at, 0.5, n, dice))))
        for n in (0, 2, 8, 100)
    ]
    falling = [one.unknown for one in unknown]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] > 0.95 > 0.1 > falling[-1]


def test_two_forks_that_agree_are_not_certain():
    found = openness(SCORES, 1.0, shown((2, 1.0, 0.0), (2, 1.0, 0.0)))
    assert 0.5 < found.shares[2] < 0.9


def test_what_a_certain_call_leads_to_may_decide():
    """A tool that draws, say: forks are believed more than scores."""
    dice = np.random.default_rng(6)
    seen = shown(*(one for at in (1, 2, 3) for one in forks(at, 0.0, 500, dice)))
    found = openness(np.array([0.0, 0.0, 1.0, 1.0]), 1.0, seen)
    assert found.shares[1] < 0.05


@pytest.mark.parametrize("scores", [[0.0], [1.0], [0.0, 0.0, 0.0]])
def test_where_nothing_is_open_it_is_still_a_number(scores):
    found = openness(np.array(scores), 0.0, shown(size=len(scores)))
    assert found.shares[0] == pytest.approx(1)
    assert np.isfinite([*found.shares, found.unknown]).all()
