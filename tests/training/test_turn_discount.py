"""`turn_discount`: what calls lead to, along the tree of a rollout's calls, inside a group."""

from __future__ import annotations

import random
from dataclasses import replace
from math import sqrt
from statistics import mean

import pytest
import torch

from tests.kit.builders import call, trace
from tests.training.configured import training
from tests.training.test_trainer import random_batch, tiny_model
from tuner.config.algorithms import TURN_DISCOUNTED, GRPOAdvantage, KLPenalty
from tuner.runs.metrics import has_signal
from tuner.traces import Trace
from tuner.training.batch import Selection, build_batch
from tuner.training.trainer import PolicyTrainer

S, T, U, V = 10, 20, 30, 40
LONE = Selection(lone_rewards=True)


def one(name: str, prompt: list[int], completion: list[int], reward: float | None = None):
    return replace(call(name, prompt, completion, [-1.0] * len(completion)), reward=reward)


def agent(number: int, reward: float, own: float | None = None) -> Trace:
    """Turn a was answered twice, as b and c, of which b went on to d; e is a sub-agent."""
    return trace(
        0,
        number,
        [
            one(f"{number}a", [S, number], [1, 2], own),
            one(f"{number}b", [S, number, 1, 2, U], [3]),
            one(f"{number}e", [T], [6, number + 1]),
            one(f"{number}c", [S, number, 1, 2, U], [4]),
            one(f"{number}d", [S, number, 1, 2, U, 3, V], [5]),
        ],
        reward=reward,
    )


def short(number: int, reward: float) -> Trace:
    return trace(0, number, [one(f"{number}a", [S, number], [7])], reward=reward)


def advantages(traces: list[Trace], selection: Selection = LONE, **settings) -> dict[str, float]:
    batch = build_batch(traces, selection=selection)
    trainer = PolicyTrainer(tiny_model(), training(total_steps=1, **settings))
    values = trainer.compute_advantages(batch).advantages_N.tolist()
    return {row.call_id: value for row, value in zip(batch.rows, values, strict=True)}


# Returns at 0.5: d = c = e = 1, b = 0.5, a = 0.25 + 0.5 * (0.5 + 1) / 2.
RETURNS = {"a": 0.625, "b": 0.5, "c": 1.0, "d": 1.0, "e": 1.0}


def test_a_tree_with_a_branch_and_a_sub_agent_by_hand():
    traces = [agent(0, 1.0, own=0.25), short(1, 0.2), short(2, 0.0)]
    got = advantages(traces, advantage="rloo", turn_discount=0.5)
    for name, value in RETURNS.items():
        assert got[f"0{name}"] == pytest.approx(value - (0.2 + 0.0) / 2)
    assert got["1a"] == pytest.approx(0.2 - (mean(RETURNS.values()) + 0.0) / 2)

    got = advantages(traces, turn_discount=0.5)
    center = mean([mean(RETURNS.values()), 0.2, 0.0])
    squares = [mean((value - center) ** 2 for value in RETURNS.values())]
    spread = sqrt((squares[0] + (0.2 - center) ** 2 + center**2) / 2)
    for name, value in RETURNS.items():
        assert got[f"0{name}"] == pytest.approx((value - center) / (spread + 1e-6))


@pytest.mark.parametrize("advantage", sorted(TURN_DISCOUNTED))
def test_order_of_arrival_changes_nothing(advantage):
    traces = [agent(0, 1.0, own=0.3), agent(1, 0.4), short(2, 0.1)]
    straight = advantages(traces, advantage=advantage, turn_discount=0.7)
    dice = random.Random(0)
    for _ in range(5):
        mixed = [
            replace(item, calls=tuple(dice.sample(item.calls, len(item.calls))))
            for item in dice.sample(traces, len(traces))
        ]
        got = advantages(mixed, advantage=advantage, turn_discount=0.7)
        assert got == pytest.approx(straight, rel=1e-12)


@pytest.mark.parametrize("advantage", sorted(TURN_DISCOUNTED))
def test_with_one_call_each_it_is_what_it_is_without(advantage):
    traces = [short(number, reward) for number, reward in enumerate([0.9, 0.1, 0.4])]
    plain = advantages(traces, advantage=advantage)
    assert advantages(traces, advantage=advantage, turn_discount=0.3) == pytest.approx(plain)


@pytest.mark.parametrize("advantage", sorted(TURN_DISCOUNTED))
def test_undiscounted_it_is_what_it_is_without(advantage):
    """Calls that do not go on from each other are leaves, each of which gains the reward."""
    traces = random_batch(0)
    plain = advantages(traces, advantage=advantage)
    got = advantages(traces, advantage=advantage, turn_discount=1.0)
    assert got == pytest.approx(plain, rel=1e-9)
    args = GRPOAdvantage(std_threshold=0.3) if advantage in ("grpo", "step_wise_grpo") else None
    quiet = advantages(traces, advantage=advantage, turn_discount=1.0, advantage_args=args)
    assert quiet == pytest.approx(advantages(traces, advantage=advantage, advantage_args=args))


def test_a_reward_of_its_own_needs_no_other_to_be_compared_with():
    traces = [agent(0, 1.0, own=0.25), short(1, 0.2)]
    assert "0a" not in advantages(traces, Selection(), advantage="rloo", turn_discount=0.5)
    assert "0a" in advantages(traces, advantage="rloo", turn_discount=0.5)


def test_a_rollout_without_trained_calls_does_not_count_in_the_baseline():
    greedy = trace(0, 1, [call("1a", [S], [7], [0.0], temperature=0.0)], reward=0.5)
    members = [agent(0, 1.0), greedy, short(2, 0.25)]
    got = advantages(members, advantage="rloo", turn_discount=0.5)
    assert got["0d"] == pytest.approx(1.0 - 0.25)
    assert len(got) == 6


def test_a_call_pays_for_its_own_distance_to_the_reference():
    """And those before it pay a discounted share, as it is part of what they led to."""
    traces = [agent(0, 1.0), short(1, 0.0)]
    batch = build_batch(traces, selection=LONE)
    settings = training(
        total_steps=1,
        advantage="reinforce",
        turn_discount=0.5,
        kl_penalty="k1",
        kl_penalty_args=KLPenalty(kl_coef=1),
    )
    trainer = PolicyTrainer(tiny_model(), settings, reference=tiny_model(seed=1))
    ref_logp = trainer.compute_logp(batch, model=trainer.reference)
    paid = {
        row.call_id: float((-1.0 - ref_T).sum())
        for row, ref_T in zip(batch.rows, ref_logp, strict=True)
    }
    values = trainer.compute_advantages(batch).advantages_N.tolist()
    got = {row.call_id: value for row, value in zip(batch.rows, values, strict=True)}
    d = 1.0 - paid["0d"]
    b = -paid["0b"] + 0.5 * d
    c = 1.0 - paid["0c"]
    assert got["0a"] == pytest.approx(-paid["0a"] + 0.5 * (b + c) / 2, rel=1e-5)


def test_rollouts_that_lead_to_the_same_give_no_signal():
    same = build_batch([agent(0, 1.0), agent(1, 1.0)], selection=LONE)
    assert not has_signal(same, "grpo", 0.5)
    assert has_signal(build_batch([agent(0, 1.0), agent(1, 0.5)], selection=LONE), "grpo", 0.5)
    # Equal rewards, one of them after fewer calls.
    assert has_signal(build_batch([agent(0, 1.0), short(1, 1.0)], selection=LONE), "grpo", 0.5)
    assert not has_signal(build_batch([agent(0, 1.0), short(1, 1.0)], selection=LONE), "grpo")


def test_advantages_stay_small_where_rollouts_lead_to_the_same():
    got = advantages([agent(0, 1.0), agent(1, 1.0), agent(2, 1.0)], turn_discount=0.9)
    assert max(map(abs, got.values())) < 3
    assert torch.tensor(list(got.values())).abs().max() > 0


def parted(number: int, reward: float, masks: tuple[tuple[int, int], ...]) -> Trace:
    """Two calls, the first one of five tokens with a reward of its own, a part of it masked."""
    first = replace(one(f"{number}a", [S, number], [1, 2, 3, 4, 5], 0.25 * number), masked=masks)
    then = one(f"{number}b", [S, number, 1, 2, 3, 4, 5, U], [6], 0.1)
    return trace(0, number, [first, then], reward=reward)


@pytest.mark.parametrize("discount", [None, 0.5])
@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
def test_a_mask_that_cuts_a_call_in_two_changes_no_advantage(advantage, discount):
    rewards = [1.0, 0.0, 0.5]
    whole, cut = (
        advantages(
            [parted(number, reward, masks) for number, reward in enumerate(rewards)],
            advantage=advantage,
            turn_discount=discount,
        )
        for masks in ((), ((1, 3),))
    )
    assert cut == pytest.approx(whole)
    assert len({round(value, 6) for value in whole.values()}) > 2
