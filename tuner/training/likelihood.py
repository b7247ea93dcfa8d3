"""Training on recorded data: answers that are imitated, and pairs of which one is preferred.

Both are a weighted likelihood of the completions. For SFT the weights are those of
`loss_agg_mode`. For DPO a first pass without a gradient gives each pair's log-probs and with them
the slope of its loss, and a second one is the update: the gradient of `slope * (logp_chosen -
logp_rejected)`. That is exactly DPO's gradient, and a pair may be cut into several micro-batches,
while answers to the same prompt share it in the token tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tuner.algorithms.losses import dpo, row_weights
from tuner.algorithms.spec import DPOLoss
from tuner.engines.base import SamplingParams
from tuner.errors import TrainingError
from tuner.traces.tree import HasIds
from tuner.training.batch import Row
from tuner.training.trainer import PolicyTrainer


@dataclass(frozen=True)
class RecordedBatch:
    """The rows of one step on recorded data, one for each assistant turn that is trained.

    Attributes:
        rows: `Row.rollout` is the index of the turn's conversation; of pair p the better one is
            2p, the worse one 2p + 1.
    """

    rows: tuple[Row, ...]

    @staticmethod
    def of(conversations: Sequence[Sequence[HasIds]]) -> RecordedBatch:
        """From the trained turns of each conversation."""
        return RecordedBatch(
            tuple(
                Row(
                    call_id=f"{index}-{number}",
                    rollout=index,
                    prompt_ids=tuple(turn.prompt_ids),
                    completion_ids=tuple(turn.completion_ids),
                    logprobs=(),
                    sampling=SamplingParams(max_tokens=len(turn.completion_ids)),
                )
                for index, turns in enumerate(conversations)
                for number, turn in enumerate(turns)
            )
        )

    @property
    def trained_tokens(self) -> int:
        return sum(len(row.completion_ids) for row in self.rows)


def recorded_update(trainer: PolicyTrainer, batch: RecordedBatch) -> dict[str, float]:
    """One optimizer step on recorded data, with the loss of the trainer's settings.

    Returns:
        Metrics: of SFT the loss, of DPO those of `dpo_update`; entropy, gradient norm and
        learning rate.

    Raises:
        TrainingError: The batch is empty, or loss or gradient is not finite.
    """
    if not batch.rows:
        raise TrainingError("a batch without a single turn to train cannot be trained")
    if trainer.settings.policy_loss == "dpo":
        return dpo_update(trainer, batch)
    # `L = -sum_t m_t logp_t`, with the weights m of `loss_agg_mode`.
    settings = trainer.settings
    weights_N = row_weights(
        settings.aggregation,
        torch.tensor([len(row.completion_ids) for row in batch.rows]),
        torch.tensor([row.rollout for row in batch.rows]),
        longest=settings.max_completion,
    )
    return trainer.likelihood_update(batch.rows, weights_N)


def dpo_update(trainer: PolicyTrainer, batch: RecordedBatch) -> dict[str, float]:
    """The mean of `tuner.algorithms.losses.dpo` over the pairs of a step.

    Returns:
        Metrics: loss; `accuracy`, the share of pairs whose better answer has the larger reward
        `beta * (logp - ref)`; `reward_margin` between the two, and `chosen_reward`,
        `rejected_reward`, `chosen_logp`, `rejected_logp`; all before the update.
    """
    settings = trainer.settings
    logp_C, distance_C = pair_logps(trainer, batch)
    pairs, rollout_N = len(logp_C) // 2, torch.tensor([row.rollout for row in batch.rows])
    assert isinstance(settings.policy_loss_spec, DPOLoss)
    found = dpo(distance_C[0::2], distance_C[1::2], settings.policy_loss_spec)
    slope_P = found.slope_P / pairs
    weights_C = torch.stack([-slope_P, slope_P], dim=1).flatten()
    metrics = trainer.likelihood_update(batch.rows, weights_C[rollout_N])
    margin_P = found.chosen_reward_P - found.rejected_reward_P
    return metrics | {
        "loss": float(found.loss_P.mean()),
        "accuracy": float((margin_P > 0).double().mean()),
        "reward_margin": float(margin_P.mean()),
        "chosen_reward": float(found.chosen_reward_P.mean()),
        "rejected_reward": float(found.rejected_reward_P.mean()),
        "chosen_logp": float(logp_C[0::2].mean()),
        "rejected_logp": float(logp_C[1::2].mean()),
    }


def pair_logps(trainer: PolicyTrainer, batch: RecordedBatch) -> tuple[Tensor, Tensor]:
    """Log-probs of the 2P conversations of P pairs, and their distance to the reference's, [2P].

    Raises:
        TrainingError: There is no reference.
    """
    rollout_N = torch.tensor([row.rollout for row in batch.rows])
    conversations = 2 * (int(rollout_N.max()) // 2 + 1)
    if trainer.reference is None:
        raise TrainingError("dpo needs a reference (TrainerSettings.policy_loss)")

    def summed(logp: tuple[Tensor, ...]) -> Tensor:
        of_rows_N = torch.stack([logp_T.double().sum().cpu() for logp_T in logp])
        return torch.zeros(conversations, dtype=torch.float64).index_add(0, rollout_N, of_rows_N)

    logp_C = summed(trainer.compute_logp(batch))
    return logp_C, logp_C - summed(trainer.compute_logp(batch, model=trainer.reference))
