"""The numbers of a step, and what a run that cannot learn says."""

from dataclasses import replace

import pytest

from tests.kit.builders import call, trace
from tuner.runs.metrics import (
    batch_metrics,
    evaluation_metrics,
    has_signal,
    rollout_metrics,
    time_split,
)
from tuner.traces import Outcome
from tuner.training.batch import build_batch


def group(task, rewards):
    return [
        trace(task, i, [call(f"{task}-{i}", [1, 2], [3], [-1.0])], reward=reward)
        for i, reward in enumerate(rewards)
    ]


def failed(task, rollout, error="KeyError: 'x'"):
    return trace(task, rollout, [], outcome=Outcome.WORKFLOW_ERROR, error=error)


def test_rollout_metrics_count_outcomes_and_average_what_there_is():
    traces = [
        *group(0, [0.0, 1.0]),
        failed(0, 2),
        trace(0, 2, [], outcome=Outcome.TIMEOUT, final=False, attempt=0),
        trace(1, 0, [call("m", [1], [2, 3, 4], [-1] * 3)], reward=0.5, metrics={"turns": 3}),
    ]
    metrics = rollout_metrics(traces)
    assert metrics["reward/mean"] == 0.5
    assert (metrics["reward/min"], metrics["reward/max"]) == (0.0, 1.0)
    assert metrics["rollouts/completed"] == 3
    assert metrics["rollouts/workflow_error"] == 1
    assert metrics["rollouts/retried"] == 1
    assert metrics["calls/completion_tokens"] == pytest.approx(5 / 3)
    assert metrics["workflow/turns"] == 3


def test_a_call_that_was_given_back_counts_for_the_rollout_that_sampled_it():
    whole = call("a", [1, 2], [3, 4, 5, 6], [-1.0] * 4)
    other = call("b", [1], [2, 3], [-1.0] * 2)
    calls = [replace(whole, replayed=4, malformed_tool_calls=1), replace(other, replayed=1)]
    metrics = rollout_metrics([trace(0, 1, calls, reward=1.0)])
    assert metrics["calls/completion_tokens"] == 2
    assert metrics["calls/malformed_tool_calls"] == 0
    assert metrics["calls/per_rollout"] == 2


def test_what_the_reasoning_policy_costs_is_summed_over_the_calls():
    one, two = (call(name, [1, 2], [3], [-1.0]) for name in "ab")
    branched = [trace(0, 0, [one, replace(two, recomputed_ids=7)], reward=1.0)]
    assert rollout_metrics(branched)["tokens/recomputed"] == 7
    kept = [
        replace(one, reasoning_policy="keep"),
        replace(two, reasoning_policy="keep", kept_reasoning_ids=5),
    ]
    metrics = rollout_metrics([trace(0, 0, kept, reward=1.0)] * 2)
    assert metrics["tokens/kept_reasoning"] == 10
    assert "tokens/recomputed" not in metrics


def test_batch_metrics_say_where_every_token_went():
    batch = build_batch([*group(0, [1.0, 1.0]), *group(1, [0.0, 1.0]), *group(2, [1.0])])
    metrics = batch_metrics(batch)
    assert metrics["tokens/sampled"] == 5
    assert metrics["tokens/trained"] == 4
    assert metrics["tokens/row"] == 12
    assert metrics["tokens/dropped/group_of_one"] == 1
    assert metrics["groups/zero_variance"] == 0.5
    assert has_signal(batch)


def test_batch_metrics_say_how_many_tokens_are_shared():
    # Two turns of one conversation, and another answer to its first: 1 2 [3], 1 2 3 4 [5], 1 2 [6].
    turns = [call("a", [1, 2], [3], [-1.0]), call("b", [1, 2, 3, 4], [5], [-1.0])]
    other = [call("c", [1, 2], [6], [-1.0])]
    batch = build_batch([trace(0, 0, turns, reward=1.0), trace(0, 1, other, reward=0.0)])
    metrics = batch_metrics(batch)
    assert metrics["tokens/row"] == 11
    assert metrics["tokens/unique"] == 6
    assert metrics["tokens/merge_ratio"] == 11 / 6


def test_batch_metrics_count_the_trained_tokens_whose_cut_is_made_again():
    sampled = [1, 2], [3, 4, 5], [-1.0] * 3
    listed = replace(call("a", *sampled, top_k=2), kept=("i3", "", "i5"))  # its 4 is not known
    again = replace(call("b", *sampled, top_p=0.5), masked=((1, 2),))  # two of its are trained
    calls = [listed, again, call("c", *sampled)]
    batch = build_batch([trace(0, i, [one], reward=float(i)) for i, one in enumerate(calls)])
    assert batch_metrics(batch)["tokens/cut_again"] == 3
    known = replace(listed, kept=("i3", "i4", "i5"))
    batch = build_batch([trace(0, i, [known], reward=float(i)) for i in range(2)])
    assert "tokens/cut_again" not in batch_metrics(batch)


def test_batch_metrics_of_nothing_to_train_have_no_unique_tokens():
    metrics = batch_metrics(build_batch([failed(0, 0)]))
    assert metrics["tokens/unique"] == 0
    assert metrics["tokens/merge_ratio"] == 1


@pytest.mark.parametrize("traces", [group(0, [1.0, 1.0]), [failed(0, 0), failed(0, 1)]])
def test_no_signal_without_different_rewards_in_a_group(traces):
    assert not has_signal(build_batch(traces))


def test_time_is_split_over_the_parts_and_adds_up():
    seconds = {"workflow": 4, "generation": 3, "judge": 1, "queue": 2}
    traces = [trace(0, i, [], reward=1, seconds=seconds) for i in range(2)]
    split = time_split(traces, 5.0, 2.0, 0.5)
    assert split == {
        "time/generation": 3.0,
        "time/agent": 1.0,
        "time/judge": 1.0,
        "time/idle": 5.0,
        "time/training": 2.0,
        "time/sync": 0.5,
        "rollout_seconds/generation": 3.0,
        "rollout_seconds/agent": 1.0,
        "rollout_seconds/judge": 1.0,
        "rollout_seconds/queue": 2.0,
    }


def held_out(task, rewards):
    return [replace(one, id=replace(one.id, split="held")) for one in group(task, rewards)]


def test_an_evaluation_of_repeated_tasks_says_how_often_one_and_all_pass():
    traces = [*held_out(0, [1.0, 0.0]), *held_out(1, [1.0, 1.0]), *held_out(2, [0.0, 0.0])]
    assert evaluation_metrics("held", traces) == {
        "eval/held/reward": 0.5,
        "eval/held/reward_low": 0.0,
        "eval/held/reward_high": 1.0,
        "eval/held/pass_at_2": pytest.approx(2 / 3),
        "eval/held/pass_hat_2": pytest.approx(1 / 3),
        "eval/held/failed": 0,
    }
    assert evaluation_metrics("held", traces, pass_reward=2.0)["eval/held/pass_at_2"] == 0
    # One of task 1 failed: one reward says nothing of two tries, and the mean is over tasks.
    traces[3] = failed(1, 1)
    assert evaluation_metrics("held", traces) == {
        "eval/held/reward": 0.5,
        "eval/held/reward_low": 0.0,
        "eval/held/reward_high": 1.0,
        "eval/held/pass_at_2": 0.5,
        "eval/held/pass_hat_2": 0.0,
        "eval/held/failed": 1,
    }


def test_an_evaluation_without_repeats_has_the_mean_and_its_interval_alone():
    traces = [*held_out(0, [1.0]), *held_out(1, [0.5])]
    assert evaluation_metrics("held", traces) == {
        "eval/held/reward": 0.75,
        "eval/held/reward_low": 0.5,
        "eval/held/reward_high": 1.0,
        "eval/held/failed": 0,
    }
    # A single task says nothing of others.
    assert evaluation_metrics("held", traces[:1]) == {
        "eval/held/reward": 1.0,
        "eval/held/failed": 0,
    }
