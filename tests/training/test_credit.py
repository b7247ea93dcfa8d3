"""Calls with rewards of their own, and calls that are not to be trained."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from statistics import mean, stdev

import pytest
import torch

from tests.kit.builders import call, trace
from tests.training.configured import training
from tests.training.test_trainer import tiny_model
from tuner.runs.metrics import has_signal
from tuner.traces import Trace
from tuner.training.advantages import call_normalized
from tuner.training.batch import build_batch
from tuner.training.trainer import PolicyTrainer


def rollout(number: int, reward: float, *calls: tuple[str | None, float | None]) -> Trace:
    """A rollout whose calls have these roles and rewards of their own."""
    return trace(
        0,
        number,
        [
            replace(
                call(f"{number}-{i}", [1, 2, number], [3, i + 4], [-1.0, -1.0]),
                role=role,
                reward=own,
            )
            for i, (role, own) in enumerate(calls)
        ],
        reward=reward,
    )


def advantages(traces: list[Trace]) -> dict[str, float]:
    batch = build_batch(traces)
    trainer = PolicyTrainer(tiny_model(), training(total_steps=1))
    values = trainer.compute_advantages(batch).advantages_N.tolist()
    return {row.call_id: value for row, value in zip(batch.rows, values, strict=True)}


def test_calls_without_rewards_share_their_rollouts_advantage_whatever_their_role() -> None:
    plain = advantages([rollout(0, 1, (None, None), (None, None)), rollout(1, 0, (None, None))])
    named = advantages([rollout(0, 1, ("a", None), ("b", None)), rollout(1, 0, ("a", None))])
    assert plain == named
    assert plain["0-0"] == plain["0-1"] == -plain["1-0"] > 0


def test_a_calls_own_reward_is_compared_with_its_role_in_the_other_rollouts() -> None:
    got = advantages(
        [
            rollout(0, 1.0, ("planner", 0.9), ("planner", 0.5), ("solver", None)),
            rollout(1, 0.0, ("planner", 0.2), ("solver", None)),
            rollout(2, 0.0, ("planner", 0.4), ("solver", None)),
        ]
    )
    values = [
        0.7,
        0.2,
        0.4,
    ]  # each rollout counts once, with the mean of its calls, also of their squares
    center = mean(values)
    own = mean([(0.9 - center) ** 2, (0.5 - center) ** 2])
    squares = [own, (0.2 - center) ** 2, (0.4 - center) ** 2]
    for name, reward in {"0-0": 0.9, "0-1": 0.5, "1-0": 0.2, "2-0": 0.4}.items():
        expected = (reward - center) / (sqrt(sum(squares) / 2) + 1e-6)
        assert got[name] == pytest.approx(expected)
    solver = (1.0 - mean([1, 0, 0])) / (stdev([1, 0, 0]) + 1e-6)
    assert got["0-2"] == pytest.approx(solver)


def test_one_call_a_rollout_with_its_own_reward_is_like_the_rollouts_reward() -> None:
    rewards = torch.tensor([0.1, 0.7, 0.4, 1.0], dtype=torch.float64)
    group = torch.tensor([0, 0, 1, 1])
    expected = [far / (stdev([0.1, 0.7]) + 1e-6) for far in (-0.3, 0.3, -0.3, 0.3)]
    assert call_normalized(rewards, torch.arange(4), group).tolist() == pytest.approx(expected)


def test_a_reward_that_no_other_rollout_can_be_compared_with_is_dropped_and_counted() -> None:
    batch = build_batch([rollout(0, 1, ("a", 0.5), (None, None)), rollout(1, 0, (None, None))])
    assert batch.dropped_tokens == {"reward_without_peer": 2}
    assert batch.sampled_tokens == batch.trained_tokens + 2
    with pytest.raises(ValueError, match="no baseline"):
        call_normalized(torch.tensor([1.0]), torch.tensor([0]), torch.tensor([0]))


def test_excluded_and_undelivered_calls_are_dropped_and_counted() -> None:
    first = rollout(0, 1, (None, None), (None, None))
    excluded, undelivered = first.calls
    first = replace(
        first,
        calls=(replace(excluded, excluded=True), replace(undelivered, undelivered=True)),
    )
    batch = build_batch([first, *(rollout(number, 0, (None, None)) for number in (1, 2))])
    assert batch.dropped_tokens == {"excluded_call": 2, "undelivered_call": 2}
    assert [row.call_id for row in batch.rows] == ["1-0", "2-0"]


def test_an_excluded_call_is_no_peer() -> None:
    other = rollout(1, 0, ("a", 0.1))
    other = replace(other, calls=tuple(replace(c, excluded=True) for c in other.calls))
    batch = build_batch([rollout(0, 1, ("a", 0.5)), other])
    assert batch.dropped_tokens == {"excluded_call": 2, "reward_without_peer": 2}


def test_rewards_of_calls_are_a_signal_where_the_rollouts_rewards_are_equal() -> None:
    assert has_signal(build_batch([rollout(0, 1, ("a", 0.5)), rollout(1, 1, ("a", 0.2))]))
    assert not has_signal(build_batch([rollout(0, 1, ("a", 0.5)), rollout(1, 1, ("a", 0.5))]))
    assert not has_signal(build_batch([rollout(0, 1, (None, None)), rollout(1, 1, (None, None))]))
