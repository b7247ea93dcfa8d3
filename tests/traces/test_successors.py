"""Which call goes on from which, by ids."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings

from tests.kit.builders import call
from tests.kit.examples import few
from tests.traces.agents import batches
from tuner.traces import successors

S, T, U, V = 10, 20, 30, 40


def calls_of(*pairs):
    return [
        call(str(i), prompt, completion, [-1.0] * len(completion))
        for i, (prompt, completion) in enumerate(pairs)
    ]


# The tree of the module's docstring: a, b, c, d, e.
EXAMPLE = calls_of(
    ([S], [1, 2]),
    ([S, 1, 2, U], [3]),
    ([S, 1, 2, U], [4]),
    ([S, 1, 2, U, 3, V], [5]),
    ([T], [6]),
)


def test_branches_and_sub_agents_are_told_apart_by_ids():
    assert successors(EXAMPLE, [0] * 5) == ((1, 2), (3,), (), (), ())


def test_order_of_arrival_does_not_matter():
    for seed in range(10):
        order = random.Random(seed).sample(range(5), 5)
        found = successors([EXAMPLE[i] for i in order], [0] * 5)
        after = {order[i]: {order[j] for j in follow} for i, follow in enumerate(found)}
        assert after == {0: {1, 2}, 1: {3}, 2: set(), 3: set(), 4: set()}


def test_calls_of_another_rollout_are_not_followed():
    assert successors(EXAMPLE, [0, 1, 0, 1, 0]) == ((2,), (3,), (), (), ())


def test_what_goes_on_from_equal_calls_goes_on_from_each():
    calls = calls_of(([S], [1]), ([S], [1]), ([S, 1], [2]))
    assert successors(calls, [0] * 3) == ((2,), (2,), ())


def test_a_history_that_was_rewritten_is_a_new_beginning():
    calls = calls_of(([S], [1, 2]), ([S, 1, U], [3]), ([S, 1, 2], [4]), ([1, 2], [5]))
    assert successors(calls, [0] * 4) == ((2,), (), (), ())


def ids(one):
    return one.prompt_ids + one.completion_ids


@settings(max_examples=few(100), deadline=None, derandomize=True)
@given(calls=batches)
def test_each_call_goes_on_from_the_longest_that_its_prompt_begins_with(calls):
    calls = [one for one in calls if one.completion_ids]
    rollouts = [i % 2 for i in range(len(calls))]
    expected = [set() for _ in calls]
    for child, one in enumerate(calls):
        before = [
            i
            for i, other in enumerate(calls)
            if rollouts[i] == rollouts[child] and one.prompt_ids[: len(ids(other))] == ids(other)
        ]
        longest = max((len(ids(calls[i])) for i in before), default=0)
        for i in before:
            if len(ids(calls[i])) == longest:
                expected[i].add(child)
    assert [set(found) for found in successors(calls, rollouts)] == expected


def test_an_id_that_is_none_is_refused():
    with pytest.raises(ValueError, match="not a token id"):
        successors(calls_of(([-1], [2])), [0])
