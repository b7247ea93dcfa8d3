"""Advantages, losses and KL against formulas written out in plain Python."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.examples import few
from tuner.config.algorithms import GRPOAdvantage, PPOLoss
from tuner.training.advantages import call_normalized, group_std
from tuner.training.losses import KL_ESTIMATORS, ppo_clip

finite = st.floats(-5, 5, allow_nan=False)


@given(st.lists(st.lists(finite, min_size=2, max_size=5), min_size=1, max_size=4), st.randoms())
@settings(max_examples=few(50), deadline=None)
def test_advantage_is_the_reward_normalised_in_its_group(groups, random):
    members = [(g, r) for g, rewards in enumerate(groups) for r in rewards]
    random.shuffle(members)
    rewards = torch.tensor([r for _, r in members], dtype=torch.float64)
    group = torch.tensor([g for g, _ in members])
    result = call_normalized(rewards, torch.arange(len(rewards)), group)
    for (g, reward), advantage in zip(members, result.tolist(), strict=True):
        mean, std = statistics.mean(groups[g]), statistics.stdev(groups[g])
        expected = (reward - mean) / (std + 1e-6)
        assert advantage == pytest.approx(expected, rel=1e-6, abs=1e-6)
    expected_std = [statistics.stdev(rewards) for rewards in groups]
    assert group_std(rewards, group).tolist() == pytest.approx(expected_std, abs=1e-9)


def test_batch_std_divides_by_the_spread_of_all_rewards():
    rewards = torch.tensor([0.0, 1.0, 0.0, 3.0], dtype=torch.float64)
    result = call_normalized(
        rewards, torch.arange(4), torch.tensor([0, 0, 1, 1]), GRPOAdvantage(std_cal_level="batch")
    )
    std = statistics.stdev([0, 1, 0, 3]) + 1e-6
    assert result.tolist() == pytest.approx([-0.5 / std, 0.5 / std, -1.5 / std, 1.5 / std])


def test_group_of_one_has_no_advantage():
    with pytest.raises(ValueError, match="group of one"):
        call_normalized(torch.tensor([1.0, 2.0, 3.0]), torch.arange(3), torch.tensor([0, 0, 1]))


@given(finite, finite, finite)
@settings(max_examples=few(200), deadline=None)
def test_ppo_clip_is_the_dual_clip_formula(logp, old, advantage):
    ratio = math.exp(logp - old)
    loss = max(-ratio * advantage, -min(max(ratio, 0.9), 1.3) * advantage)
    if advantage < 0:
        loss = min(loss, -2.0 * advantage)
    as_tensor = [torch.tensor([x], dtype=torch.float64) for x in (logp, old, advantage)]
    result = ppo_clip(
        *as_tensor, PPOLoss(clip_range_low=0.1, clip_range_high=0.3, clip_ratio_c=2.0)
    )
    assert float(result.loss_T) == pytest.approx(loss, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "clipped"),
    [(0.0, 1.0, False), (1.0, 1.0, True), (-1.0, 1.0, False), (-1.0, -1.0, True), (2.0, -1, True)],
)
def test_a_clipped_token_has_no_gradient(log_ratio, advantage, clipped):
    logp = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    result = ppo_clip(logp, torch.zeros(1).double(), torch.tensor([advantage]).double())
    result.loss_T.sum().backward()
    assert bool(result.clipped_T) is clipped
    assert (float(logp.grad) == 0) is clipped


def test_kl_estimators_are_schulmans():
    logp, ref = torch.tensor([-1.0]).double(), torch.tensor([-1.5]).double()
    expected = {"k1": 0.5, "k2": 0.125, "k3": math.exp(-0.5) + 0.5 - 1, "abs": 0.5}
    assert KL_ESTIMATORS.keys() == expected.keys()
    for name, value in expected.items():
        assert float(KL_ESTIMATORS[name](logp, ref)) == pytest.approx(value)
