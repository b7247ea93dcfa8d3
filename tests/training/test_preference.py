"""DPO's loss and slope against the formula in plain Python, and the slope against autograd."""

import math
import random

import pytest
import torch

from tuner.config.algorithms import DistillAdvantage, DPOLoss
from tuner.training.advantages import distilled
from tuner.training.losses import dpo


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_is_the_formula_and_its_slope_is_the_derivative(smoothing):
    rng = random.Random(0)
    chosen = torch.tensor([rng.gauss(0, 8) for _ in range(9)], dtype=torch.float64)
    rejected = torch.tensor([rng.gauss(0, 8) for _ in range(9)], dtype=torch.float64)
    found = dpo(chosen, rejected, DPOLoss(beta=0.3, label_smoothing=smoothing))
    for i, (better, worse) in enumerate(zip(chosen.tolist(), rejected.tolist(), strict=True)):
        right = 1 / (1 + math.exp(-0.3 * (better - worse)))
        wanted = -(1 - smoothing) * math.log(right) - smoothing * math.log(1 - right)
        assert float(found.loss_P[i]) == pytest.approx(wanted, rel=1e-9)
        assert float(found.chosen_reward_P[i]) == pytest.approx(0.3 * better)
        assert float(found.rejected_reward_P[i]) == pytest.approx(0.3 * worse)
    chosen.requires_grad_()
    dpo(chosen, rejected, DPOLoss(beta=0.3, label_smoothing=smoothing)).loss_P.sum().backward()
    torch.testing.assert_close(found.slope_P, chosen.grad, rtol=1e-12, atol=0)


def test_dpo_does_not_overflow_where_an_answer_is_hopeless():
    found = dpo(torch.tensor([-1e4]), torch.tensor([0.0]), DPOLoss(beta=1.0))
    assert found.loss_P.tolist() == [1e4]
    assert found.slope_P.tolist() == [-1.0]


def test_distillation_rewards_what_the_teacher_likes_better():
    teacher, student = torch.tensor([-0.5, -3.0]), torch.tensor([-1.0, -1.0])
    assert distilled(teacher, student, DistillAdvantage(kl_coef=2.0)).tolist() == [1.0, -4.0]
