"""The loss of pairs of answers of which one is preferred."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class Preference:
    """P pairs; shape [P] each, without a gradient.

    Attributes:
        loss_P: Loss of each pair.
        slope_P: Derivative of its loss by `chosen - rejected`, at most 0 without label smoothing.
        chosen_reward_P, rejected_reward_P: `beta * (logp - ref)` of the two answers.
    """

    loss_P: Tensor
    slope_P: Tensor
    chosen_reward_P: Tensor
    rejected_reward_P: Tensor


def dpo(
    chosen_P: Tensor, rejected_P: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> Preference:
    """DPO's loss of whole answers, and its derivative.

    With `d = logp - ref`, summed over an answer, and `m = beta * (d_chosen - d_rejected)`:

        L = -(1 - e) log sigmoid(m) - e log sigmoid(-m)

    The derivative is all that the update needs: the gradient of a step's loss is that of
    `sum_pairs slope * (logp_chosen - logp_rejected)` with constant slopes. So the answers of a pair
    need not be in one micro-batch.

    Source: DPO (arXiv 2305.18290) eq. 7; label smoothing is conservative DPO (Mitchell, 2023), as
    in Trinity-RFT and TRL.

    Args:
        chosen_P, rejected_P: d of the better and of the worse answer.
        beta: How strongly the preference is taken against the distance from the reference.
        label_smoothing: e, how often a preference is thought to be the wrong way round.
    """
    margin_P = beta * (chosen_P - rejected_P)
    right, wrong = 1 - label_smoothing, label_smoothing
    return Preference(
        loss_P=-right * logsigmoid(margin_P) - wrong * logsigmoid(-margin_P),
        slope_P=beta * (wrong * torch.sigmoid(margin_P) - right * torch.sigmoid(-margin_P)),
        chosen_reward_P=beta * chosen_P,
        rejected_reward_P=beta * rejected_P,
    )
