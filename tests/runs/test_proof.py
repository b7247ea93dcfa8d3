"""Promotions that hold however often one looks: exact expectations, and 1,000 deployments."""

import json
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.examples import few
from tuner.errors import ProofError
from tuner.runs.statistics import Comparison, Plan, evidence_of

PLAN = Plan(effect=0.1)
SHARES = st.sampled_from([0.1, 0.5, 0.8])


def bernoulli(serving, candidate):
    return lambda random, _, chosen: random.random(len(chosen)) < _of(chosen, serving, candidate)


def _of(chosen, serving, candidate):
    return np.where(chosen, candidate, serving)


def drift(random, session, chosen):
    return random.random(len(chosen)) < 0.4 + 0.3 * np.sin(session / 100)


def ties(random, _, chosen):
    return np.where(random.random(len(chosen)) < 0.9, 0.5, random.integers(2, size=len(chosen)))


def skewed(random, _, chosen):
    return np.minimum(random.exponential(0.05, len(chosen)), 1.0)


def continuous(random, _, chosen):
    return random.beta(2, 2, len(chosen))


def deployments(plan, draw, *, sessions, count=1000, paired=False, share=None):
    """When each was promoted and when it was kept, inf for never; looking after every session."""
    random = np.random.default_rng(5)
    hypotheses = np.array([plan.margin, plan.effect]) / plan.range
    evidence = evidence_of(plan, hypotheses, comparisons=count, paired=paired)
    promoted, kept = np.full(count, np.inf), np.full(count, np.inf)
    for session in range(1, sessions + 1):
        chance = plan.share if share is None else share(session)
        chosen = random.random(count) < chance
        reward = draw(random, session, chosen) * 1.0
        if paired:
            evidence.add_pairs(reward)
        else:
            evidence.add_sessions(chosen, reward, chance)
        won = evidence.peak_DMS[:, 0, 0] >= 1 / plan.alpha
        lost = evidence.peak_DMS[:, 1, 1] >= 1 / (1 - plan.power)
        promoted = np.where(won, np.minimum(promoted, session), promoted)
        kept = np.where(lost, np.minimum(kept, session), kept)
    return promoted, kept


@pytest.mark.long
@pytest.mark.parametrize(
    ("draw", "plan"),
    [
        pytest.param(bernoulli(0.5, 0.5), PLAN, id="no difference"),
        pytest.param(bernoulli(0.5, 0.45), PLAN, id="worse"),
        pytest.param(ties, replace(PLAN, effect=0.05), id="ties"),
        pytest.param(drift, PLAN, id="both drift"),
        pytest.param(bernoulli(0.02, 0.02), replace(PLAN, effect=0.02), id="rare"),
        pytest.param(skewed, replace(PLAN, effect=0.02), id="skewed"),
        pytest.param(continuous, PLAN, id="continuous"),
        pytest.param(bernoulli(0.5, 0.5), replace(PLAN, share=0.1), id="canary"),
        pytest.param(bernoulli(0.5, 0.55), replace(PLAN, margin=0.05), id="at the margin"),
    ],
)
def test_of_1000_deployments_fewer_than_5_percent_are_promoted_wrongly_though_one_always_looks(
    draw, plan
):
    promoted, _ = deployments(plan, draw, sessions=1200)
    assert np.isfinite(promoted).mean() < plan.alpha


def test_a_share_that_grows_while_both_arms_get_better_promotes_nobody_wrongly():
    """A mean of each arm would show a difference of 0.1: the candidate came late."""

    def draw(random, session, chosen):
        return random.random(len(chosen)) < 0.3 + 0.4 * session / 1200

    promoted, _ = deployments(
        PLAN, draw, sessions=1200, share=lambda session: 0.05 + 0.9 * session / 1200
    )
    assert np.isfinite(promoted).mean() < PLAN.alpha


@pytest.mark.long
@pytest.mark.parametrize(
    ("serving", "effect", "share"), [(0.5, 0.1, 0.5), (0.2, 0.1, 0.5), (0.5, 0.2, 0.1)]
)
@pytest.mark.parametrize(("times", "most"), [(1, 1.2), (2, 0.5)])
def test_a_verdict_takes_as_few_sessions_as_promised_and_has_the_power(
    serving, effect, share, times, most
):
    plan = Plan(effect=effect, share=share)
    deviations = [math.sqrt(p * (1 - p)) for p in (serving, serving + effect)]
    one_look = plan.fixed_horizon(*deviations)
    draw = bernoulli(serving, serving + times * effect)
    promoted, kept = deployments(plan, draw, sessions=6 * one_look, count=300)
    sessions = np.minimum(np.minimum(promoted, kept), 6 * one_look)
    assert sessions.mean() <= most * one_look
    assert (promoted < kept).mean() >= plan.power


def test_the_one_look_is_the_textbooks():
    """0.5 against 0.6, one-sided 5 %, power 80 %: 303 in each arm (Fleiss, without correction)."""
    sessions = PLAN.fixed_horizon(0.5, math.sqrt(0.24))
    assert 600 <= sessions <= 612


def expected_wealth(share, rewards, chances, hypotheses, sessions=4):
    """E[e-value] by enumeration: every sequence of arms and rewards is a deployment.

    chances: Of each reward, for what serves and for the candidate.
    """
    outcomes = [(arm, n) for arm in (0, 1) for n in range(len(rewards))]
    paths = list(product(outcomes, repeat=sessions))
    arms = np.array([[arm for arm, _ in path] for path in paths], bool)
    drawn = np.array([[rewards[n] for _, n in path] for path in paths])
    chance = np.array(
        [
            math.prod((share if arm else 1 - share) * chances[arm][n] for arm, n in path)
            for path in paths
        ]
    )
    plan = Plan(effect=0.3, share=share)
    evidence = evidence_of(plan, np.array(hypotheses), comparisons=len(paths))
    for session in range(sessions):
        evidence.add_sessions(arms[:, session], drawn[:, session], share)
    return np.einsum("d,dms->ms", chance, evidence.e_DMS)


@settings(max_examples=few(30), deadline=None)
@given(
    SHARES,
    st.tuples(*[st.floats(0.01, 1)] * 3),
    st.tuples(*[st.floats(0.01, 1)] * 3),
    st.floats(0, 1),
)
def test_an_e_value_is_one_in_the_mean_exactly_whatever_the_rewards_and_the_coin(
    share, serving, candidate, middle
):
    """A martingale at the true difference, a supermartingale at what is true beside it."""
    rewards = (0.0, middle, 1.0)
    chances = [np.array(one) / sum(one) for one in (serving, candidate)]
    difference = float((chances[1] - chances[0]) @ np.array(rewards))
    beside = [max(-0.99, difference - 0.1), difference, min(0.99, difference + 0.1)]
    found = expected_wealth(share, rewards, chances, beside)
    assert found[1] == pytest.approx([1.0, 1.0], rel=1e-9)
    assert found[2, 0] <= 1 + 1e-9  # "at most difference + 0.1" is true
    assert found[0, 1] <= 1 + 1e-9  # "at least difference - 0.1" is, too


@settings(max_examples=few(40), deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1)), min_size=1, max_size=30), SHARES)
def test_the_bets_are_those_of_the_formula(sessions, share):
    """Against a loop over sessions and bets, in plain Python."""
    plan = Plan(effect=0.2, share=share)
    evidence = evidence_of(plan, np.array([0.0]))
    wealth = {0: 0.2, 0.25: 0.04, 0.5: 0.12, 1: 0.4, 2: 0.16, 4: 0.08}
    seen, squares = [0.5], [(1 / share + 1 / (1 - share)) / 4] * 4
    most = 1.0
    for candidate, reward in sessions:
        evidence.add_sessions(np.array([candidate]), np.array([reward]), share)
        centre = sum(seen) / len(seen)
        score = (reward - centre) * (1 / share if candidate else -1 / (1 - share))
        worst = max(centre / share, (1 - centre) / (1 - share))
        for multiple in wealth:
            bet = min(multiple * 0.2 / (sum(squares) / len(squares)), 0.8 / worst)
            wealth[multiple] *= 1 + bet * score
        seen.append(reward)
        squares.append(score**2)
        most = max(most, sum(wealth.values()))
    assert evidence.e_DMS[0, 0, 0] == pytest.approx(sum(wealth.values()), rel=1e-9)
    assert evidence.peak_DMS[0, 0, 0] == pytest.approx(most, rel=1e-9)


def played(plan, serving, candidate, sessions, *, seed=3, on=False):
    """A comparison until there is a verdict, or on to the end."""
    random, comparison = np.random.default_rng(seed), Comparison(plan)
    for _ in range(sessions):
        arm = "candidate" if random.random() < plan.share else "serving"
        chance = candidate if arm == "candidate" else serving
        comparison.add(arm, plan.low + plan.range * float(random.random() < chance))
        if not on and comparison.decision().verdict != "not yet":
            break
    return comparison.decision()


def test_a_better_candidate_is_promoted_and_the_interval_holds_the_difference():
    decision = played(PLAN, 0.4, 0.7, 2000)
    assert decision.verdict == "promote"
    assert 0 <= decision.lower < 0.3 < decision.upper
    assert decision.p_value <= 0.05
    assert decision.e_value >= 20
    assert decision.expected_more == 0
    assert decision.text.startswith("promote: the candidate is better by more than 0.")
    assert f"{decision.sessions} sessions" in decision.text


def test_a_candidate_that_is_no_better_or_worse_is_not_promoted():
    same, worse = played(PLAN, 0.5, 0.5, 5000), played(PLAN, 0.8, 0.3, 500, on=True)
    assert (same.verdict, worse.verdict) == ("keep", "keep")
    assert 0 < same.upper <= PLAN.effect
    assert -0.5 < worse.upper < 0
    assert worse.text.startswith("keep: the candidate is worse.")
    assert same.text.startswith("keep: the candidate is not better by 0.1.")


def test_bounds_and_rewards_are_in_the_users_units():
    """The same coins, once as 0 and 1, once as -5 and 15."""
    small = played(PLAN, 0.4, 0.7, 400)
    large = played(Plan(effect=2.0, low=-5.0, high=15.0), 0.4, 0.7, 400)
    assert large.sessions == small.sessions
    for name in ("estimate", "lower", "upper"):
        assert getattr(large, name) == pytest.approx(20 * getattr(small, name), abs=1e-9)


def test_verdict_and_bounds_agree_with_the_bets_that_are_simulated():
    """A Comparison and the deployments of the tests above decide in the same session."""
    random, comparison = np.random.default_rng(2), Comparison(PLAN)
    evidence = evidence_of(PLAN, np.array([0.0, 0.1]))
    for _ in range(600):
        candidate = bool(random.random() < 0.5)
        reward = float(random.random() < (0.6 if candidate else 0.5))
        comparison.add("candidate" if candidate else "serving", reward)
        evidence.add_sessions(np.array([candidate]), np.array([reward]), 0.5)
        decision = comparison.decision()
        promoted = evidence.peak_DMS[0, 0, 0] >= 20
        assert (decision.verdict == "promote") == promoted
        assert (decision.lower >= 0) == promoted
        assert (decision.upper <= 0.1) == (evidence.peak_DMS[0, 1, 1] >= 1 / (1 - 0.8))
        assert decision.p_value == pytest.approx(1 / evidence.peak_DMS[0, 0, 0])


@pytest.mark.parametrize("paired", [False, True])
def test_a_comparison_goes_on_after_a_restart_as_if_there_had_been_none(paired):
    random, plan = np.random.default_rng(4), Plan(effect=0.1, share=0.3, low=-1.0)

    def add(comparison):
        values = random.uniform(-1, 1, 2).tolist()
        if paired:
            comparison.add_pair(*values)
        else:
            comparison.add("candidate" if random.random() < 0.3 else "serving", values[0])

    whole = Comparison(plan)
    for _ in range(30):
        add(whole)
    again = Comparison.restored(json.loads(json.dumps(whole.state())))
    assert again.decision() == whole.decision()
    for _ in range(30):
        before = random.bit_generator.state
        add(whole)
        random.bit_generator.state = before
        add(again)
    assert again.decision() == whole.decision()
    assert again.state() == whole.state()


def test_a_state_of_other_bets_is_refused():
    state = Comparison(PLAN).state()
    state["wealth"] = [[[[0.0]]]]
    with pytest.raises(ProofError, match="another version of tuner"):
        Comparison.restored(state)


@pytest.mark.long
def test_how_many_more_it_takes_is_about_what_it_takes():
    """In the mean over deployments, from a hundred sessions on."""
    random = np.random.default_rng(8)
    foretold, taken = [], []
    for _ in range(60):
        comparison, decided = Comparison(Plan(effect=0.2)), False
        for session in range(3000):
            arm = "candidate" if random.random() < 0.5 else "serving"
            comparison.add(arm, float(random.random() < (0.7 if arm == "candidate" else 0.5)))
            if session < 49 or (decided and session > 49):
                continue
            decision = comparison.decision()
            if session == 49:
                first = decision
            decided = decision.verdict != "not yet"
            if decided:
                break
        if first.verdict == "not yet":
            foretold.append(first.expected_more)
            taken.append(session - 49)
    assert 0.5 < np.median(foretold) / np.median(taken) < 2


def test_without_a_session_what_is_expected_is_what_the_plan_takes():
    decision = Comparison(PLAN).decision()
    assert (decision.verdict, decision.sessions, decision.estimate) == ("not yet", 0, 0.0)
    assert (decision.lower, decision.upper) == (-1.0, 1.0)
    assert 200 < decision.expected_more < 1200
    assert "about" in decision.text


def test_pairs_take_fewer_tasks_than_sessions_where_tasks_differ():
    """Every candidate's reward is that of what serves, and a tenth of the tasks is better."""
    random, comparison = np.random.default_rng(1), Comparison(PLAN)
    for _ in range(200):
        serving = float(random.random() < 0.5)
        comparison.add_pair(serving, 1.0 if random.random() < 0.2 else serving)
    decision = comparison.decision()
    assert decision.verdict == "promote"
    assert "200 pairs" in decision.text
    assert decision.lower <= 0.1 <= decision.upper


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c: c.add("candidate", 1.5), r"reward 1.5 of the candidate .* range \[0, 1\]"),
        (lambda c: c.add("serving", math.nan), "reward nan of what serves"),
        (lambda c: c.add("other", 1.0), "arm 'other' is neither"),
        (lambda c: c.add("candidate", 1.0, share=1.0), "share 1.0 is not between"),
        (lambda c: c.add_pair(0.0, -0.1), "reward -0.1 of the candidate"),
        (lambda c: (c.add("serving", 1.0), c.add_pair(0.0, 1.0)), "this one has sessions"),
        (lambda c: (c.add_pair(0.0, 1.0), c.add("serving", 1.0)), "this one has pairs"),
    ],
)
def test_what_the_proof_does_not_hold_for_is_refused_and_changes_nothing(spoil, message):
    comparison = Comparison(PLAN)
    with pytest.raises(ProofError, match=message):
        spoil(comparison)
    assert comparison.decision().sessions <= 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"effect": 0.0}, "effect 0.0 and margin 0.0 do not fit together"),
        ({"effect": 0.1, "margin": 0.1}, "effect 0.1 and margin 0.1"),
        ({"effect": 1.0}, "so less than 1"),
        ({"effect": math.inf}, "effect is inf"),
        ({"effect": 0.1, "low": 1.0}, "low 1.0 is not below high 1.0"),
        ({"effect": 0.1, "alpha": 0.0}, "alpha 0.0"),
        ({"effect": 0.1, "power": 1.0}, "power 1.0"),
        ({"effect": 0.1, "share": 0.0}, "share 0.0"),
    ],
)
def test_a_plan_that_proves_nothing_is_refused(fields, message):
    with pytest.raises(ProofError, match=message):
        Plan(**fields)
