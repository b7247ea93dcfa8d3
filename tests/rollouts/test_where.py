"""The rules that choose points look at nothing that comes after them."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from tests.kit.builders import call as make_call
from tuner.config.schema import BranchingSection
from tuner.errors import FunctionError
from tuner.rollouts.branching import GrowingGroup, PointSelector, Shares, exploring
from tuner.traces import Origin, Outcome, RolloutId, Trace

IDS = [RolloutId(1, 0, number) for number in range(4)]
SHARES = Shares(4, 4)


def trace(id_, calls, reward=0.0, tokens=5, origin=None):
    ids = range(3, 3 + tokens)
    found = tuple(make_call(f"c{n}-0", [1, 2], ids, [-0.5] * tokens) for n in range(calls))
    return Trace(id_, {}, found, Outcome.COMPLETED, reward, origin=origin)


def grown(*traces):
    return GrowingGroup([t.id for t in traces], {t.id: t for t in traces})


def rule(**section):
    return PointSelector(BranchingSection(**section), 16)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("where", ["spread", "uncertain", "best"])
def test_a_point_does_not_hang_on_what_its_rollout_becomes(where, inside):
    """Whatever a trunk turns out to be, its own points are the same."""
    dice = random.Random(0)
    for seed in range(200):
        rest = [trace(id_, dice.randint(1, 6), float(dice.randint(0, 1))) for id_ in IDS[1:]]
        found = set()
        for calls, reward, tokens in ((2, 0.0, 3), (5, 1.0, 30), (9, 7.0, 1)):
            group = grown(trace(IDS[0], calls, reward, tokens), *rest)
            points = rule(where=where, inside=inside).points(group, 4, random.Random(seed), SHARES)
            found.add(tuple(point for point in points if point and point.rollout == IDS[0]))
        assert len(found) == 1


def test_points_do_not_hang_on_the_trunk_that_a_branch_shares():
    for seed in range(100):
        found = set()
        for calls in (3, 12):
            origin = Origin(IDS[0], 1, 1)
            trunk, other = trace(IDS[0], calls), trace(IDS[1], 4)
            branch = trace(RolloutId(1, 0, 2), 4, origin=origin)
            points = rule().points(grown(trunk, other, branch), 1, random.Random(seed), SHARES)
            found.add(tuple(points))
        assert len(found) == 1


def test_spread_goes_wherever_the_others_get_to():
    group = grown(*(trace(id_, 5) for id_ in IDS))
    drawn = [
        point
        for seed in range(200)
        for point in rule().points(group, 4, random.Random(seed), SHARES)
    ]
    assert {point.call for point in drawn} == {1, 2, 3, 4}
    assert Counter(point.rollout for point in drawn) == dict.fromkeys(IDS, 200)


def test_best_explores_each_position_for_about_as_many_tokens():
    group = grown(*(trace(id_, 5) for id_ in IDS))
    where = rule(where="best")
    drawn = Counter(
        point.call
        for seed in range(500)
        for point in where.points(group, 4, random.Random(seed), SHARES)
    )
    behind = {call: drawn[call] * (5 - call) for call in (1, 2, 3, 4)}
    assert max(behind.values()) < 1.25 * min(behind.values())


def test_uncertain_goes_where_the_others_answers_were_unlikely():
    def unsure(id_):
        calls = trace(id_, 4).calls
        less = replace(calls[2], logprobs=tuple(10 * p for p in calls[2].logprobs))
        return replace(trace(id_, 4), calls=(*calls[:2], less, *calls[3:]))

    group = grown(*map(unsure, IDS))
    drawn = Counter(
        point.call
        for seed in range(200)
        for point in rule(where="uncertain").points(group, 4, random.Random(seed), SHARES)
    )
    assert drawn[2] > 0.7 * sum(drawn.values())


def test_a_function_is_asked_before_each_call_with_what_was_until_then():
    asked = []

    def hazard(calls):
        asked.append(len(calls))
        return float(len(calls) == 2)

    where = PointSelector(BranchingSection(where="a:b"), 16, hazard)
    points = where.points(grown(trace(IDS[0], 5), trace(IDS[1], 2)), 2, random.Random(0), SHARES)
    assert points[0] is None
    assert points[1].call == 2
    assert asked == [1, 1, 2]
    wrong = PointSelector(BranchingSection(where="a:b"), 16, lambda calls: "often")
    with pytest.raises(FunctionError, match="a:b returned 'often'; return the probability"):
        wrong.points(grown(trace(IDS[0], 3)), 1, random.Random(0), SHARES)


@pytest.mark.parametrize(
    ("repeat", "trunks", "ends"),
    [(3, 2, 2), (4, 2, 2), (6, 3, 2), (8, 4, 2), (16, 4, 4), (32, 6, 5)],
)
def test_groups_that_explore_have_about_as_many_trunks_as_ends(repeat, trunks, ends):
    assert exploring(repeat) == Shares(trunks, ends)
    assert (
        PointSelector(BranchingSection(where="best"), repeat).shares(random.Random(0)).ends == ends
    )


def group_of(step, task, decisive):
    """Four trunks of five calls, two branches before call `decisive` of each; what came after it
    decides."""
    dice = random.Random(f"{step} {task}")
    found = []
    for number in range(4):
        id_ = RolloutId(step, task, number)
        found.append(trace(id_, 5, float(dice.random() < 0.5), tokens=20))
        for more in range(2):
            other = RolloutId(step, task, 4 + 2 * number + more)
            origin = Origin(id_, 1, decisive)
            found.append(trace(other, 5, float(dice.random() < 0.5), 20, origin))
    return found


def explored(where, seeds=100):
    """How many of so many groups explore."""
    return sum(where.shares(random.Random(seed)).call is None for seed in range(seeds))


def test_best_explores_while_it_knows_little():
    where = PointSelector(BranchingSection(where="best"), 16)
    assert explored(where) == 100
    where.learn([replace(trace(RolloutId(1, 0, n), 5), reward=0.0) for n in range(8)])
    assert explored(where) == 100  # nothing was seen of what decides
    where.learn([t for task in range(2) for t in group_of(2, task, 4)])
    few = explored(where)
    for step in range(3, 10):
        where.learn([t for task in range(4) for t in group_of(step, task, 4)])
    assert 100 > few > 2 * explored(where) > 0


def test_one_step_is_enough_to_begin_where_the_end_decides():
    """Four groups that explored, as the first step of a run has them."""
    found = []
    for seed in range(20):
        where = PointSelector(BranchingSection(where="best"), 16)
        where.learn([t for at in range(1, 5) for t in group_of(1, 10 * seed + at, at)])
        found.append(where.advice())
    assert sum(one.call == 4 for one in found) > 14


def test_best_begins_where_the_end_decides_once_it_has_seen_it():
    where = PointSelector(BranchingSection(where="best"), 16)
    assert where.advice() is None
    for step in range(1, 13):
        where.learn([t for task in range(2) for t in group_of(step, task, 4)])
    advice = where.advice()
    assert advice.call == 4
    assert advice.ends > 1
    assert advice.gain > 1.5
    divided = Counter(where.shares(random.Random(seed)).call for seed in range(320))
    assert divided[4] > 10 * divided[None] > 0  # it goes on looking elsewhere, too
    shares = Shares(advice.trunks, advice.ends, advice.call)
    group = grown(*(trace(RolloutId(1, 0, n), 5) for n in range(advice.trunks)))
    points = where.points(group, advice.trunks, random.Random(0), shares)
    assert [point.call for point in points] == [4] * advice.trunks


def test_what_was_learned_is_kept_as_json():
    import json

    where = PointSelector(BranchingSection(where="best"), 16)
    for step in range(1, 8):
        where.learn(group_of(step, 0, 2))
    again = PointSelector(BranchingSection(where="best"), 16).restored(
        json.loads(json.dumps(where.state()))
    )
    assert again.state() == where.state()
    for one in (where, again):
        one.learn(group_of(9, 0, 2))
    assert again.state() == where.state()
