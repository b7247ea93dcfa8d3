"""Importance weights: exact on a small tree, intervals that hold, and refusals."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.errors import ProofError
from tuner.run.betting import lower_bounds
from tuner.run.offpolicy import LoggedSession, _robust, effective, off_policy
from tuner.run.proof import Plan

PLAN = Plan(effect=0.1)
DEPTH = 3
LEAVES = list(product((0, 1), repeat=DEPTH))


def log_probs(logits):
    """Of each leaf, of each decision: logits are by the number of the state, from 1."""
    found = []
    for leaf in LEAVES:
        state, of_leaf = 1, []
        for action in leaf:
            of_leaf.append(-np.logaddexp(0, -logits[state] if action else logits[state]))
            state = 2 * state + action
        found.append(of_leaf)
    return np.array(found)


LOGITS = st.lists(st.floats(-2, 2), min_size=8, max_size=8).map(np.array)


@settings(max_examples=30, deadline=None)
@given(LOGITS, LOGITS, st.lists(st.floats(0, 1), min_size=8, max_size=8), st.integers(0, 2**32))
def test_doubly_robust_has_no_bias_whatever_the_values(logged, candidate, chances, seed):
    """The mean over all that could be logged is the candidate's value, exactly."""
    ratios = log_probs(candidate) - log_probs(logged)
    random = np.random.default_rng(seed)
    of_states = random.uniform(-3, 3, 8)  # nonsense, but a value of the state before each call
    mean = 0.0
    for leaf, of_leaf, chance in zip(LEAVES, ratios, np.exp(log_probs(logged).sum(1)), strict=True):
        states = [1]
        for action in leaf[:-1]:
            states.append(2 * states[-1] + action)
        values = tuple(of_states[state] for state in states)
        session = LoggedSession("t", 0.0, tuple(of_leaf), values)
        won = chances[LEAVES.index(leaf)]
        mean += chance * won * _robust(replace(session, reward=1.0))
        mean += chance * (1 - won) * _robust(session)
    truth = float(np.exp(log_probs(candidate).sum(1)) @ np.array(chances))
    assert mean == pytest.approx(truth, abs=1e-9)


def draw(random, logged, candidate, chances, sessions, of_task=1):
    chance = np.exp(log_probs(logged).sum(1))
    ratios = log_probs(candidate) - log_probs(logged)
    leaves = random.choice(8, p=chance / chance.sum(), size=sessions)
    return [
        LoggedSession(
            str(number // of_task), float(random.random() < chances[leaf]), tuple(ratios[leaf])
        )
        for number, leaf in enumerate(leaves)
    ]


def test_the_interval_holds_the_difference_and_finds_a_better_candidate():
    random = np.random.default_rng(0)
    logged, chances = random.normal(0, 0.5, 8), 0.5 + random.random(8) / 2
    candidate = logged + random.normal(0, 0.7, 8)
    policies = [np.exp(log_probs(one).sum(1)) @ chances for one in (logged, candidate)]
    difference = policies[1] - policies[0]
    found = [off_policy(draw(random, logged, candidate, chances, 300), PLAN) for _ in range(200)]
    held = [one.lower <= difference <= one.upper for one in found]
    assert np.mean(held) >= 0.95
    assert np.mean([one.estimate for one in found]) == pytest.approx(difference, abs=0.01)
    plain = np.std([one.plain for one in found])
    assert np.std([one.doubly_robust for one in found]) < plain


def test_one_value_for_all_states_is_a_baseline():
    """What a session says with the mean of the others, and with that as its values."""
    random = np.random.default_rng(1)
    logged, chances = random.normal(0, 0.5, 8), random.random(8)
    sessions = draw(random, logged, logged + 0.3, chances, 60, of_task=1)
    rewards = np.array([one.reward for one in sessions])
    others = (rewards.sum() - rewards) / 59
    told = [
        replace(one, values=(float(mean),) * DEPTH)
        for one, mean in zip(sessions, others, strict=True)
    ]
    assert off_policy(told, PLAN).estimate == pytest.approx(off_policy(sessions, PLAN).estimate)


def test_an_interval_of_heavy_weights_holds_too():
    """Scores of which one in fifty is large: where a bootstrap's interval is too short."""
    random = np.random.default_rng(3)
    scores = np.where(random.random((1000, 100)) < 0.02, 10.0, -0.2)
    truth = 0.02 * 10 - 0.98 * 0.2
    assert np.mean(lower_bounds(scores, alpha=0.05) > truth) < 0.05


def test_bounds_come_near_the_mean_with_many_scores():
    random = np.random.default_rng(4)
    few, many = (
        lower_bounds(random.uniform(-0.5, 0.5, (20, number)) + 0.2, alpha=0.05).mean()
        for number in (50, 2000)
    )
    assert few < many < 0.2
    assert many > 0.17


def test_the_policy_that_logged_is_not_better_than_itself():
    random = np.random.default_rng(5)
    logits = random.normal(0, 1, 8)
    found = off_policy(draw(random, logits, logits, random.random(8), 400), PLAN)
    assert found.estimate == pytest.approx(0, abs=1e-12)
    assert found.effective_sessions == pytest.approx(400)
    assert found.mean_weight == pytest.approx(1)
    assert -0.05 < found.lower <= 0 <= found.upper < 0.05
    assert found.verdict == "keep"


def test_a_session_that_is_there_ten_times_says_it_once():
    """Sessions of one task are not independent: the interval is that of the tasks."""
    random = np.random.default_rng(6)
    logits = random.normal(0, 1, 8)
    candidate = logits + 0.5
    once = draw(random, logits, candidate, random.random(8), 200)
    often = [one for one in once for _ in range(10)]
    first, second = off_policy(once, PLAN), off_policy(often, PLAN)
    assert (second.sessions, second.tasks) == (2000, 200)
    assert (second.lower, second.upper) == pytest.approx((first.lower, first.upper))


def test_clipping_is_off_by_no_more_than_is_said():
    random = np.random.default_rng(7)
    logits = random.normal(0, 1, 8)
    sessions = draw(random, logits, logits + random.normal(0, 1, 8), random.random(8), 400)
    found = off_policy(sessions, PLAN, clip=1.5)
    assert found.lost > 0
    assert found.plain - found.lost <= found.clipped <= found.plain


def test_weights_that_say_nothing_are_refused_with_the_numbers():
    random = np.random.default_rng(8)
    sessions = [
        LoggedSession(str(n), 1.0, (float(ratio),))
        for n, ratio in enumerate(random.normal(-8, 4, 500))
    ]
    found = off_policy(sessions, PLAN)
    assert found.refused.startswith("the weights say nothing: effective sample size ")
    assert " of 500, and 20 are wanted; collect live sessions" in found.refused
    assert (found.verdict, found.estimate, found.lower) == ("not yet", None, None)
    assert off_policy(sessions, PLAN, least_effective=1e-3).refused is not None  # their mean is low


def test_even_weights_of_a_candidate_that_does_something_else_are_refused():
    """All of them are tiny: the effective sample size sees nothing of it."""
    sessions = [LoggedSession(str(n), 1.0, (-6.0,)) for n in range(500)]
    found = off_policy(sessions, PLAN)
    assert found.effective_sessions == pytest.approx(500)
    assert "their mean is 0.0025 where it should be 1" in found.refused


def test_the_limit_is_the_users():
    random = np.random.default_rng(9)
    logits = random.normal(0, 1, 8)
    sessions = draw(random, logits, logits + 0.1, random.random(8), 60)
    assert off_policy(sessions, PLAN).refused is None
    assert "and 1000 are wanted" in off_policy(sessions, PLAN, least_effective=1000).refused


@given(st.lists(st.floats(-700, 700), min_size=1, max_size=50))
def test_an_effective_sample_size_is_between_one_and_all(log_weights):
    assert 1 - 1e-9 <= effective(np.array(log_weights)) <= len(log_weights) + 1e-9


@pytest.mark.parametrize(
    ("sessions", "message"),
    [
        ([LoggedSession("a", 1.0, (0.0,))], "1 logged sessions say nothing"),
        ([LoggedSession("a", 2.0, (0.0,))] * 2, "reward 2.0 of a logged session is outside"),
        ([LoggedSession("a", 1.0, (float("nan"),))] * 2, "log-ratio that is nan"),
        ([LoggedSession("a", 1.0, (0.0, 0.0), (0.5,))] * 2, "2 calls and 1 values"),
    ],
)
def test_what_cannot_be_weighed_is_refused(sessions, message):
    with pytest.raises(ProofError, match=message):
        off_policy(sessions, PLAN)
