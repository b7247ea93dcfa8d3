"""Advantages in trees of rollouts, against the exact gradient of bandits and against formulas."""

import random
from dataclasses import dataclass, field
from itertools import product
from math import exp

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.examples import few
from tuner.training.advantages import leave_one_out
from tuner.training.forks import Piece, Point, resolved, tree_advantages

TOKENS = 2  # of a call; each is one binary decision
DEPTH = 6
SEEDS = 2000


class Bandit:
    """A tree of binary decisions, two a call, each state with a logit of its own.

    Who takes 1 twice in the first call ends there: lengths hang on what is sampled.
    """

    def __init__(self, seed=0):
        dice = random.Random(seed)
        paths = [path for depth in range(DEPTH) for path in product((0, 1), repeat=depth)]
        states = [path for path in paths if path[:2] != (1, 1)]
        self.index = {path: number for number, path in enumerate(states)}
        self.p = {path: 1 / (1 + exp(-dice.gauss(0, 0.7))) for path in states}
        self.wins = {path: dice.random() ** 2 for path in product((0, 1), repeat=DEPTH)}
        self.wins[1, 1] = 0.9

    def value(self, path):
        if path in self.wins:
            return self.wins[path]
        return sum(self.odds(path, a) * self.value((*path, a)) for a in (0, 1))

    def odds(self, path, action):
        return self.p[path] if action else 1 - self.p[path]

    def gradient(self):
        """Of the expected reward, by the logit of every state."""
        found = np.zeros(len(self.index))

        def visit(path, reached):
            if path in self.wins:
                return
            gap = self.value((*path, 1)) - self.value((*path, 0))
            found[self.index[path]] = reached * self.p[path] * (1 - self.p[path]) * gap
            for action in (0, 1):
                visit((*path, action), reached * self.odds(path, action))

        visit((), 1.0)
        return found

    def play(self, dice, prefix=()):
        """A whole path and its reward, drawn behind a prefix."""
        path = tuple(prefix)
        while path not in self.wins:
            path += (int(dice.random() < self.p[path]),)
        return path, float(dice.random() < self.wins[path])


@dataclass
class Played:
    """Rollouts as the estimator is given them, and what they did."""

    bandit: Bandit
    dice: random.Random
    paths: dict = field(default_factory=dict)
    rewards: dict = field(default_factory=dict)
    origins: dict = field(default_factory=dict)
    groups: dict = field(default_factory=dict)

    def add(self, group, origin=None):
        """Play a trunk, or a branch; nobody where the rollout has no such point."""
        prefix = ()
        if origin is not None:
            prefix = self.paths[origin.rollout][: place(origin)]
            if len(self.paths[origin.rollout]) <= place(origin):
                return None
        id_ = len(self.paths)
        self.paths[id_], self.rewards[id_] = self.bandit.play(self.dice, prefix)
        self.groups[id_] = group
        if origin is not None:
            self.origins[id_] = origin
        return id_

    def fail(self, id_):
        """The rollout is not used; others may begin inside it."""
        del self.rewards[id_]

    def pieces(self):
        """Each token with whoever sampled it, calls whole or their rest."""
        found = []
        for id_, path in self.paths.items():
            start = place(self.origins[id_]) if id_ in self.origins else 0
            while start < len(path):
                stop = start - start % TOKENS + TOKENS
                found.append(Piece(id_, *divmod(start, TOKENS), stop - start))
                start = stop
        return found

    def gradients(self, **options):
        """The estimate of each group, shape [groups, states]."""
        pieces = self.pieces()
        found = tree_advantages(self.rewards, self.groups, self.origins, pieces, **options)
        estimates = np.zeros((max(self.groups.values()) + 1, len(self.bandit.index)))
        for piece, advantages, weights in zip(pieces, found.advantages, found.weights, strict=True):
            path, first = self.paths[piece.rollout], piece.call * TOKENS + piece.start
            group = self.groups[piece.rollout]
            for token, score in enumerate(advantages * weights / found.trunks[group]):
                state, action = path[: first + token], path[first + token]
                slope = action - self.bandit.p[state]
                estimates[group, self.bandit.index[state]] += score * slope
        return estimates


def place(point):
    return point.call * TOKENS + point.token


def played(plan, seeds=SEEDS):
    """A group a seed, each grown by `plan(played, group, dice)`."""
    found = Played(Bandit(), random.Random(1))
    dice = random.Random(2)
    for group in range(seeds):
        plan(found, group, dice)
    return found


def furthest(estimates, truth):
    """How many standard errors the mean is away: of the worst component, and along the truth."""
    errors = estimates - truth
    standard = errors.std(axis=0) / len(errors) ** 0.5
    along = errors @ truth
    return (
        abs(errors.mean(axis=0) / standard).max(),
        abs(along.mean()) / (along.std() / len(along) ** 0.5),
    )


def at_calls(found, group, dice):
    """The second call of every trunk, the third of the first, each so many times."""
    trunks = [found.add(group) for _ in range(3)]
    for trunk in trunks:
        found.add(group, Point(trunk, 1))
    for _ in range(2):
        found.add(group, Point(trunks[0], 2))


def nested(found, group, dice):
    trunks = [found.add(group) for _ in range(2)]
    branch = found.add(group, Point(trunks[0], 1))
    if branch is not None:
        inner = found.add(group, Point(branch, 2))
        found.add(group, Point(branch, 2))
        if inner is not None:
            found.add(group, Point(inner, 2, 1))
        # In what the branch was given: points of the trunk.
        found.add(group, Point(branch, 0, 1))
        found.add(group, Point(branch, 1))


def inside_calls(found, group, dice):
    for trunk in [found.add(group) for _ in range(3)]:
        found.add(group, Point(trunk, 0, 1))
        found.add(group, Point(trunk, 2, 1))


def at_the_beginning(found, group, dice):
    trunks = [found.add(group) for _ in range(2)]
    found.add(group, Point(trunks[0], 0))
    found.add(group, Point(trunks[1], 0, 1))


def failed(found, group, dice):
    """A trunk and a branch fail, by chance, and others began inside both."""
    trunks = [found.add(group) for _ in range(3)]
    branch = found.add(group, Point(trunks[0], 1))
    found.add(group, Point(trunks[0], 1))
    if branch is not None:
        found.add(group, Point(branch, 1, 1))
        if dice.random() < 0.5:
            found.fail(branch)
        if dice.random() < 0.6:
            found.fail(trunks[0])


def lone(found, group, dice):
    """Everything at a fork fails but one child, also below another fork."""
    trunks = [found.add(group) for _ in range(2)]
    branch = found.add(group, Point(trunks[0], 1))
    found.add(group, Point(trunks[1], 0, 1))
    found.fail(trunks[1])
    if branch is not None:
        found.add(group, Point(branch, 1, 1))
        found.fail(branch)


def by_others(found, group, dice):
    """Each where the other's reward says, and by what it did itself before that point."""
    one, other = (found.add(group) for _ in range(2))
    for trunk, known in ((one, other), (other, one)):
        for _ in range(2 if found.paths[trunk][0] else 1):
            found.add(group, Point(trunk, 1 if found.rewards[known] else 2))


def drawn_beforehand(found, group, dice):
    """Of three calls; a trunk that has no such call is left alone."""
    for trunk in [found.add(group) for _ in range(2)]:
        found.add(group, Point(trunk, dice.randrange(3)))


def on_success(found, group, dice):
    for trunk in [found.add(group) for _ in range(2)]:
        for _ in range(3 if found.rewards[trunk] else 0):
            found.add(group, Point(trunk, 1))


def over_own_calls(found, group, dice):
    for trunk in [found.add(group) for _ in range(2)]:
        call = dice.randrange(len(found.paths[trunk]) // TOKENS)
        for _ in range(3):
            found.add(group, Point(trunk, call))


def flat(found, group, dice):
    for _ in range(3):
        found.add(group)


PREDICTABLE = [
    flat,
    at_calls,
    nested,
    inside_calls,
    at_the_beginning,
    failed,
    lone,
    by_others,
    drawn_beforehand,
]


@pytest.mark.long
@pytest.mark.parametrize("plan", PREDICTABLE)
def test_the_mean_over_seeds_is_the_true_gradient(plan):
    found = played(plan)
    worst, along = furthest(found.gradients(), found.bandit.gradient())
    assert worst < 4
    assert along < 3


@pytest.mark.long
@pytest.mark.parametrize("plan", [on_success, over_own_calls])
def test_points_that_hang_on_what_comes_after_them_are_biased(plan):
    found = played(plan)
    worst, along = furthest(found.gradients(), found.bandit.gradient())
    assert max(worst, along) > 6


CALLS, LENGTH = 3, 4


@st.composite
def trees(draw):
    """Rollouts of some tasks, all equally long: rewards, groups, origins; and trunks in each."""
    count = draw(st.integers(2, 14))
    groups, origins, trunks = {}, {}, {}
    for id_ in range(count):
        inside = draw(st.booleans()) if id_ > 3 else False
        if inside:
            parent = draw(st.integers(0, id_ - 1))
            call, token = draw(st.integers(0, CALLS - 1)), draw(st.integers(0, LENGTH - 1))
            origins[id_], groups[id_] = Point(parent, call, token), groups[parent]
        else:
            groups[id_] = id_ % 2 if count > 3 else 0
            trunks[groups[id_]] = trunks.get(groups[id_], 0) + 1
    rewards = {id_: draw(st.integers(-4, 4)) / 2 for id_ in range(count)}
    return rewards, groups, origins, trunks


def sampled(rollouts, origins):
    """A piece for each call of each rollout, as far as it sampled that itself."""
    found = []
    for id_ in rollouts:
        begin = resolved(origins)[id_].position if id_ in origins else (0, 0)
        for call in range(begin[0], CALLS):
            start = begin[1] if call == begin[0] else 0
            found.append(Piece(id_, call, start, LENGTH - start))
    return found


@settings(max_examples=few(60), deadline=None)
@given(trees())
def test_weights_at_each_depth_sum_to_the_number_of_trunks(tree):
    rewards, groups, origins, trunks = tree
    pieces = sampled(rewards, origins)
    found = tree_advantages(rewards, groups, origins, pieces)
    assert found.trunks == trunks
    sums = {group: np.zeros((CALLS, LENGTH)) for group in trunks}
    for piece, weights in zip(pieces, found.weights, strict=True):
        sums[groups[piece.rollout]][piece.call, piece.start :] += weights
    for group, sum_ in sums.items():
        assert sum_ == pytest.approx(trunks[group])


@settings(max_examples=few(60), deadline=None)
@given(trees(), st.randoms(use_true_random=False), st.booleans())
def test_the_order_of_rollouts_does_not_matter(tree, dice, normalized):
    rewards, groups, origins, _ = tree
    options = {"normalize_forks": normalized, "normalize_trunks": normalized}

    def shuffled(table):
        return dict(dice.sample(list(table.items()), len(table)))

    pieces = sampled(rewards, origins)
    moved = dice.sample(pieces, len(pieces))
    one = tree_advantages(rewards, groups, origins, pieces, **options)
    other = tree_advantages(
        shuffled(rewards), shuffled(groups), shuffled(origins), moved, **options
    )
    for piece, advantages, weights in zip(pieces, one.advantages, one.weights, strict=True):
        place_ = moved.index(piece)
        assert other.advantages[place_] == pytest.approx(advantages, abs=1e-9)
        assert other.weights[place_] == pytest.approx(weights)


@settings(max_examples=few(60), deadline=None)
@given(st.lists(st.lists(st.floats(-3, 3), min_size=2, max_size=9), min_size=1, max_size=4))
def test_without_branches_it_is_the_leave_one_out_advantage(sets):
    rewards = {(s, r): one for s, values in enumerate(sets) for r, one in enumerate(values)}
    groups = {id_: id_[0] for id_ in rewards}
    found = tree_advantages(rewards, groups, {}, [Piece(id_, 0, 0, 1) for id_ in rewards])
    set_C = torch.tensor([s for s, _ in rewards])
    expected = leave_one_out(
        torch.tensor(list(rewards.values()), dtype=torch.float64), torch.arange(len(set_C)), set_C
    )
    assert [float(one[0]) for one in found.advantages] == expected.tolist()
    assert all(one == 1 for one in found.weights)


# The picture of the module: b begins in call 1 of a, c in call 2 behind a token.
REWARDS = {"a": 1.0, "b": 0.0, "c": 0.0, "d": 0.0}
ORIGINS = {"b": Point("a", 1), "c": Point("a", 2, 1)}
GROUPS = dict.fromkeys("abcd", "task")


def advantages(pieces, rewards=REWARDS, origins=ORIGINS, **options):
    groups = {id_: GROUPS[id_] for id_ in rewards}
    found = tree_advantages(rewards, groups, origins, [Piece(*one) for one in pieces], **options)
    return [one.tolist() for one in found.advantages], [one.tolist() for one in found.weights]


def test_a_token_is_compared_with_its_siblings_at_the_nearest_fork_above():
    found, weights = advantages([("a", 0, 0, 1), ("a", 1, 0, 2), ("a", 2, 0, 3), ("b", 1, 0, 1)])
    assert found == [[0.25], [0.5, 0.5], [0.5, 1.0, 1.0], [-0.5]]
    assert weights == [[1.0], [0.5, 0.5], [0.5, 0.25, 0.25], [0.5]]


def test_a_trunk_that_failed_still_has_its_forks():
    left = {id_: REWARDS[id_] for id_ in "bcd"} | {"c": 1.0}
    pieces = [("a", 0, 0, 1), ("a", 2, 0, 3), ("b", 1, 0, 1), ("c", 2, 1, 2)]
    found, weights = advantages(pieces, left)
    # Behind call 2's first token c is alone: it is compared as the stretch before is, with b.
    assert found == [[0.5], [1.0, 0.0, 0.0], [-1.0], [1.0, 1.0]]
    assert weights == [[1.0], [0.5, 0.0, 0.0], [0.5], [0.5, 0.5]]


def test_what_was_given_back_is_scored_as_where_it_was_sampled():
    own = advantages([("a", 0, 0, 2), ("a", 1, 0, 2), ("a", 2, 0, 1), ("c", 2, 1, 3)])
    given_back = advantages([("c", 0, 0, 2), ("c", 1, 0, 2), ("c", 2, 0, 4)])
    joined = [[*own[of][:2], own[of][2] + own[of][3]] for of in (0, 1)]
    assert list(given_back) == joined


def test_what_was_given_back_is_cut_where_others_began_inside_it():
    origins = ORIGINS | {"b": Point("a", 2)}
    (before, behind), _ = advantages([("c", 1, 0, 1), ("c", 2, 0, 2)], origins=origins)
    assert (before, behind) == ([0.25], [0.5, -1.0])
    origins |= {"b": Point("a", 2, 1), "c": Point("a", 2, 2)}
    assert advantages([("c", 2, 0, 3)], origins=origins)[0] == [[0.25, 0.5, -1.0]]


def test_a_point_in_what_a_branch_was_given_is_one_of_whom_it_was_given_by():
    origins = {"b": Point("a", 2, 1), "c": Point("b", 1), "d": Point("b", 2, 1), "e": Point("d", 3)}
    assert resolved(origins) == {
        "b": Point("a", 2, 1),
        "c": Point("a", 1),
        "d": Point("a", 2, 1),
        "e": Point("d", 3),
    }


def test_differences_are_divided_by_the_standard_deviation_where_that_is_wanted():
    pieces = [("a", 0, 0, 1), ("a", 1, 0, 1)]
    forks, _ = advantages(pieces, normalize_forks=True, epsilon=0.0)
    assert forks == [[0.25], pytest.approx([0.5 / (0.5 / 2**0.5)])]
    trunks, _ = advantages(pieces, normalize_trunks=True, epsilon=0.0)
    assert trunks == [pytest.approx([0.25 / (0.25 / 2**0.5)]), [0.5]]
    alike, _ = advantages(pieces, dict.fromkeys("abcd", 1.0), normalize_forks=True)
    assert alike == [[0.0], [0.0]]


def test_one_tree_alone_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match="start at least two rollouts of a task"):
        advantages([("a", 0, 0, 1)], {"a": 1.0, "b": 0.0})


def test_a_token_in_two_pieces_is_refused():
    with pytest.raises(ValueError, match="token 1 of call 1 of rollout a is in two pieces"):
        advantages([("a", 1, 0, 3), ("c", 1, 1, 1)])


def test_rollouts_that_begin_inside_each_other_are_refused():
    with pytest.raises(ValueError, match="begin inside each other"):
        advantages([], origins={"b": Point("c", 1), "c": Point("b", 2)})


def test_a_tree_of_two_tasks_is_refused():
    with pytest.raises(ValueError, match="branches from one of group task"):
        tree_advantages(REWARDS, GROUPS | {"b": "other"}, ORIGINS, [])


def test_nothing_is_compared_where_nothing_is_used():
    found = tree_advantages({}, {}, ORIGINS, [Piece("a", 0, 0, 2)])
    assert found.weights[0].tolist() == [0.0, 0.0]
