"""Which groups are trained, and with which rewards; every token that is not has a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kit.builders import call, trace
from tuner.errors import TrainingError
from tuner.runs.metrics import batch_metrics, has_signal
from tuner.training.batch import Overlong, Selection, build_batch


def group(task, *rewards, tokens=2):
    return [
        trace(
            task,
            i,
            [call(f"{task}-{i}", [1], [2] * tokens, [-1.0] * tokens)],
            reward=reward,
        )
        for i, reward in enumerate(rewards)
    ]


GROUPS = [
    *group(0, 0, 0, 0, 0),
    *group(1, 1, 0, 0, 0),
    *group(2, 1, 1, 1, 0),
    *group(3, 1, 1, 1, 1),
]


def tasks(batch):
    return sorted({one.task for one in batch.ids})


def test_groups_outside_the_success_rates_are_dropped_and_counted():
    batch = build_batch(GROUPS, selection=Selection(success_rate=(0.25, 0.5)))
    assert tasks(batch) == [1]
    assert batch.dropped_tokens == {"success_rate_too_high": 16, "success_rate_too_low": 8}
    assert batch.dropped_rollouts == {"success_rate_too_high": 8, "success_rate_too_low": 4}
    assert tasks(build_batch(GROUPS, selection=Selection())) == [0, 1, 2, 3]


def test_dynamic_sampling_drops_groups_of_equal_rewards():
    batch = build_batch(GROUPS, selection=Selection(varied_only=True))
    assert tasks(batch) == [1, 2]
    assert batch.dropped_tokens == {"equal_rewards": 16}
    assert batch_metrics(batch)["groups/zero_variance"] == 0


def test_dynamic_sampling_keeps_groups_whose_calls_have_rewards_of_their_own():
    traces = [
        replace(item, calls=(replace(item.calls[0], reward=float(i), role="a"),))
        for i, item in enumerate(group(0, 1, 1))
    ]
    assert len(build_batch(traces, selection=Selection(varied_only=True)).rows) == 2


def test_only_the_best_rollouts_are_imitated():
    traces = [*group(0, 0.2, 0.9, 0.9), *group(1, 0.5, 0.5), *group(2, 0.1, 0.7)]
    batch = build_batch(traces, selection=Selection(best_only=True))
    assert [row.call_id for row in batch.rows] == ["0-1", "0-2", "2-1"]
    assert batch.dropped_tokens == {"equal_rewards": 4, "not_best_of_group": 4}
    assert has_signal(batch, "best_of_group")
    assert batch_metrics(batch)["groups/used"] == 2


def test_best_of_group_refuses_rewards_of_calls():
    traces = group(0, 0, 1)
    traces[0] = replace(traces[0], calls=(replace(traces[0].calls[0], reward=1.0),))
    with pytest.raises(TrainingError, match="rewards of single calls"):
        build_batch(traces, selection=Selection(best_only=True))


def test_rewards_are_shifted_and_scaled_after_the_filters():
    traces = group(0, 1.0, 0.0)
    traces = [
        replace(item, calls=(replace(item.calls[0], reward=0.5, role="a"),)) for item in traces
    ]
    shaped = Selection(success_rate=(0.5, 0.5), bias=-0.5, scale=10)
    batch = build_batch(traces, selection=shaped)
    assert batch.rewards_R.tolist() == [5.0, -5.0]
    assert [row.reward for row in batch.rows] == [0.0, 0.0]


@pytest.mark.parametrize(("tokens", "lost"), [(6, 0.0), (7, 0.125), (10, 0.5), (12, 0.5)])
def test_long_answers_lose_reward_over_the_buffer(tokens, lost):
    selection = Selection(overlong=Overlong(longest=10, buffer=4, penalty=0.5))
    traces = [*group(0, 1.0, tokens=tokens), replace(group(0, 1.0)[0], id=group(0, 0, 0)[1].id)]
    assert build_batch(traces, selection=selection).rewards_R.tolist() == [1.0 - lost, 1.0]


def test_an_answer_that_was_cut_off_is_punished_in_full():
    traces = group(0, 1.0, 1.0)
    traces[0] = replace(traces[0], calls=(replace(traces[0].calls[0], finish_reason="length"),))
    selection = Selection(overlong=Overlong(longest=10, buffer=4))
    assert build_batch(traces, selection=selection).rewards_R.tolist() == [0.0, 1.0]


def test_algorithms_that_compare_all_rewards_of_a_step_see_signal_between_groups():
    batch = build_batch([*group(0, 0, 0), *group(1, 1, 1)])
    assert not has_signal(batch)
    assert has_signal(batch, "reinforceplusplus")
    assert not has_signal(build_batch(group(0, 1, 1)), "reinforce")
