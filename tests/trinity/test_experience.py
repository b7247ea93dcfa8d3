"""Calls become sequences in which each sampled token is trained exactly once."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.kit.builders import call
from tuner.trinity.experience import merged, one_per_call


def made(id, prompt, completion):
    return call(id, prompt, completion, [-0.5 - token for token in completion])


def test_a_conversation_becomes_one_sequence_whose_mask_leaves_the_users_turns_out():
    first, second = made("a", [1, 2], [3, 4]), made("b", [1, 2, 3, 4, 5], [6, 7])
    (sequence,) = merged([first, second])
    assert sequence.tokens == (1, 2, 3, 4, 5, 6, 7)
    assert sequence.prompt_length == 2
    assert sequence.action_mask == (True, True, False, True, True)
    assert sequence.logprobs == (-3.5, -4.5, 0.0, -6.5, -7.5)
    assert sequence.calls == (first, second)


def test_a_branch_has_the_shared_turns_as_context_and_trains_only_its_own():
    calls = [made("a", [1], [2]), made("b", [1, 2, 3], [4]), made("c", [1, 2, 5], [6])]
    main, branch = merged(calls)
    assert (main.tokens, main.action_mask) == ((1, 2, 3, 4), (True, False, True))
    assert (branch.tokens, branch.prompt_length) == ((1, 2, 5, 6), 3)
    assert branch.action_mask == (True,)


def test_equal_samples_of_one_prompt_are_two_samples():
    twice = [made("a", [1, 2], [3]), made("b", [1, 2], [3])]
    assert [sequence.tokens for sequence in merged(twice)] == [(1, 2, 3), (1, 2, 3)]


def test_a_rewritten_history_is_not_merged():
    calls = [made("a", [1, 2], [3, 4]), made("b", [1, 2, 3, 9], [5])]
    assert [sequence.tokens for sequence in merged(calls)] == [(1, 2, 3, 4), (1, 2, 3, 9, 5)]


def test_calls_that_arrive_out_of_order_are_merged_as_in_order():
    calls = [made("a", [1], [2]), made("b", [1, 2, 3], [4]), made("c", [1, 2, 3, 4, 5], [6])]
    (there,), (back,) = merged(calls), merged(calls[::-1])
    assert there == back


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=1, max_size=5),
            st.lists(st.integers(0, 2), min_size=1, max_size=3),
        ),
        max_size=8,
    )
)
def test_every_sampled_token_is_trained_once_with_its_own_log_prob(drawn):
    calls = [
        call(f"c{i}", prompt, completion, [-float(10 * i + at) for at in range(len(completion))])
        for i, (prompt, completion) in enumerate(drawn)
    ]
    for make in (merged, one_per_call):
        trained = Counter()
        for sequence in make(calls):
            assert len(sequence.logprobs) == len(sequence.action_mask)
            assert len(sequence.tokens) == sequence.prompt_length + len(sequence.action_mask)
            for at, sampled in enumerate(sequence.action_mask):
                if sampled:
                    place = sequence.prompt_length + at
                    trained[sequence.tokens[: place + 1], sequence.logprobs[at]] += 1
        expected = Counter(
            (one.prompt_ids + one.completion_ids[: at + 1], logprob)
            for one in calls
            for at, logprob in enumerate(one.logprobs)
        )
        assert trained == expected
    assert sum(len(s.calls) for s in merged(calls)) == len(calls)
