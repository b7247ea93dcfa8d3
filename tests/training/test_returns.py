"""Returns and advantages along trees of calls, against formulas written out in plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from tuner.config.algorithms import PPOAdvantage
from tuner.training.advantages import gae, turn_returns, whitened

# a ─┬─ b ── d,  e
#    └─ c
AFTER = ((1, 2), (3,), (), (), ())
LENGTHS = (3, 1, 2, 4, 2)


def test_turn_returns_of_a_branch_and_a_sub_agent_by_hand():
    gained = torch.tensor([0.5, 0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    # d, c and e are leaves; b = 0 + 0.9 * 1; a = 0.5 + 0.9 * (0.9 + 1) / 2
    assert turn_returns(gained, AFTER, [0.9] * 5).tolist() == pytest.approx(
        [1.355, 0.9, 1.0, 1.0, 1.0]
    )


def test_a_discount_of_1_without_rewards_on_the_way_gives_all_calls_the_leaves_mean():
    gained = torch.tensor([0.0, 0.0, 1.0, 0.5, 2.0], dtype=torch.float64)
    assert turn_returns(gained, AFTER, [1.0] * 5).tolist() == [0.75, 0.5, 1.0, 0.5, 2.0]


def numbers(seed):
    rng = random.Random(seed)
    return [torch.tensor([rng.gauss(0, 1) for _ in range(n)]).double() for n in LENGTHS]


def branches(after, call):
    """Every way from a call to a leaf, with its share."""
    if not after[call]:
        return [((call,), 1.0)]
    share = 1 / len(after[call])
    return [
        ((call, *path), share * weight)
        for follow in after[call]
        for path, weight in branches(after, follow)
    ]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7), (0.95, 0.0), (1.0, 0.5)])
def test_gae_is_the_mean_over_branches_of_discounted_temporal_differences(gamma, lam):
    """Eq. 16 of the paper, as a sum over each way to a leaf; the values where calls branch are the
    means of the first values behind, so the differences there are taken to those."""
    rewards, values = numbers(0), numbers(1)
    advantages, returns = gae(rewards, values, AFTER, PPOAdvantage(gamma=gamma, lam=lam))
    for call, length in enumerate(LENGTHS):
        for t in range(length):
            expected = 0.0
            for path, weight in branches(AFTER, call):
                sequence = []
                for one in path:
                    behind = [float(values[f][0]) for f in AFTER[one]]
                    following = [*values[one].tolist()[1:], sum(behind) / max(1, len(behind))]
                    for r, v, nxt in zip(
                        rewards[one].tolist(), values[one].tolist(), following, strict=True
                    ):
                        sequence.append(r + gamma * nxt - v)
                tail = sequence[t:]
                expected += weight * sum((gamma * lam) ** k * d for k, d in enumerate(tail))
            assert float(advantages[call][t]) == pytest.approx(expected, rel=1e-12)
            assert float(returns[call][t]) == pytest.approx(
                expected + float(values[call][t]), rel=1e-12
            )


def test_lambda_1_returns_are_what_is_gained_and_lambda_0_the_next_value():
    rewards, values = numbers(2), numbers(3)
    _, gained = gae(rewards, values, AFTER)
    assert float(gained[1][0]) == pytest.approx(float(rewards[1].sum() + rewards[3].sum()))
    _, next_value = gae(rewards, values, AFTER, PPOAdvantage(lam=0.0))
    assert float(next_value[0][2]) == pytest.approx(
        float(rewards[0][2] + (values[1][0] + values[2][0]) / 2)
    )


def test_order_of_calls_changes_nothing():
    rewards, values = numbers(4), numbers(5)
    straight = gae(rewards, values, AFTER, PPOAdvantage(gamma=0.9, lam=0.8))[0]
    order = [4, 2, 0, 3, 1]
    place = {call: i for i, call in enumerate(order)}
    after = [tuple(place[f] for f in AFTER[call]) for call in order]
    shuffled = gae(
        [rewards[c] for c in order],
        [values[c] for c in order],
        after,
        PPOAdvantage(gamma=0.9, lam=0.8),
    )[0]
    assert all(torch.equal(shuffled[place[c]], straight[c]) for c in range(5))


def test_whitened_numbers_have_mean_0_and_variance_1_over_all_tokens():
    rows = numbers(6)
    everything = torch.cat(whitened(rows))
    assert float(everything.mean()) == pytest.approx(0, abs=1e-12)
    assert float(everything.var()) == pytest.approx(1, rel=1e-6)
    assert whitened([torch.tensor([3.0])])[0].tolist() == [0.0]
