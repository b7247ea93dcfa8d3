"""Tokens that are too old are not trained, and counted; their rollouts' rewards still compare."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.kit.builders import call, trace
from tuner.training.batch import build_batch


def aged(id, versions, masked=()):
    made = call(id, [1, 2], list(range(3, 3 + len(versions))), [-1.0] * len(versions))
    return replace(made, versions=tuple(versions), masked=masked)


def group(*versions):
    return [
        trace(0, number, [aged(f"c{number}", v)], reward=float(number))
        for number, v in enumerate(versions)
    ]


def test_the_old_beginning_of_an_answer_becomes_its_prompt():
    batch = build_batch(group([0, 0, 1, 2], [2, 2]), oldest=1)
    first, second = batch.rows
    assert (first.prompt_ids, first.completion_ids) == ((1, 2, 3, 4), (5, 6))
    assert first.versions == (1, 2)
    assert second.completion_ids == (3, 4)
    assert batch.dropped_tokens == {"stale": 2}
    assert batch.dropped_rollouts == {}


def test_a_rollout_of_old_tokens_alone_is_counted_and_still_compared():
    batch = build_batch(group([0, 0], [2], [2]), oldest=1)
    assert [row.rollout for row in batch.rows] == [1, 2]
    assert batch.rewards_R.tolist() == [0.0, 1.0, 2.0]
    assert batch.dropped_rollouts == {"stale": 1}


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=8).map(sorted),
    st.integers(0, 6),
    st.integers(0, 8),
    st.integers(0, 8),
)
def test_masked_stale_and_trained_add_up(versions, oldest, a, b):
    start, stop = sorted((min(a, len(versions)), min(b, len(versions))))
    masked = ((start, stop),) if start < stop else ()
    traces = [
        trace(0, 0, [aged("c", versions, masked)], reward=1.0),
        trace(0, 1, [aged("d", [6])], reward=0.0),
        trace(0, 2, [aged("e", [6])], reward=0.0),
    ]
    batch = build_batch(traces, oldest=oldest)
    trained = [v for row in batch.rows for v in row.versions]
    assert min(trained) >= oldest
    left = [v for place, v in enumerate(versions) if not start <= place < stop]
    assert sorted(trained) == sorted([v for v in left if v >= oldest] + [6, 6])


def test_a_group_that_was_ended_early_can_be_left_out():
    batch = build_batch(group([0], [0]), unfinished={(1, 0)})
    assert not batch.rows
    assert batch.dropped_tokens == {"unfinished_group": 2}
    assert batch.dropped_rollouts == {"unfinished_group": 2}


def test_a_call_whose_peers_are_all_too_old_has_no_peer():
    traces = [
        replace(one, calls=tuple(replace(c, reward=float(n)) for c in one.calls))
        for n, one in enumerate(group([0], [1], [1]))
    ]
    batch = build_batch(traces[:2], oldest=1)
    assert batch.dropped_tokens == {"group_of_one": 1, "reward_without_peer": 1}
    assert len({row.peers for row in build_batch(traces, oldest=1).rows}) == 1
