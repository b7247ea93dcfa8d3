"""Training on rollouts that other weights sampled, long ago or elsewhere, with their log-probs.

With `recorded` the log-prob that a token was sampled with and `old` that of the weights that a step
begins with, the loss is that of `tuner.training.trainer` with `w = min(old / recorded, cap)`. `old`
is always computed: weights of other runs have versions of their own, which say nothing here. Where
a formula needs the log-probs of the policy as it is (the distance to a reference that is taken off
rewards, what a teacher says of the student), it gets `old`.

Before each update it is known what the samples are still worth (`tuner.training.effective`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tuner.algorithms.losses import dpo
from tuner.algorithms.spec import DPOLoss
from tuner.errors import TrainingError
from tuner.training.batch import Batch, Row
from tuner.training.effective import Effective, effective_of, effective_size
from tuner.training.likelihood import RecordedBatch, pair_logps
from tuner.training.trainer import PolicyTrainer

# No update of this run: whatever sampled these tokens, its versions are not this run's.
ELSEWHERE = -1


class TooFewEffective(TrainingError):
    """The weights have gone too far from those that sampled what they learn from."""


@dataclass(frozen=True)
class OffPolicyBatch(Batch):
    """A batch whose rollouts were not sampled in this run.

    Attributes:
        least_effective: The update is refused where its tokens are worth a smaller share of as many
            new ones.
    """

    least_effective: float = 0.0

    @staticmethod
    def of(batch: Batch, *, least_effective: float) -> OffPolicyBatch:
        """The same rollouts, whose versions are nobody's."""
        rows = tuple(
            replace(row, versions=(ELSEWHERE,) * len(row.completion_ids)) for row in batch.rows
        )
        return OffPolicyBatch(**{**vars(batch), "rows": rows}, least_effective=least_effective)


def off_policy_update(trainer: PolicyTrainer, batch: OffPolicyBatch) -> dict[str, float]:
    """The updates of one step, once it is known that the samples are worth enough.

    Returns:
        Those of `PolicyTrainer.ppo_update`; `effective_tokens`, `effective_calls`,
        `effective_rollouts`, what the samples were worth before the first update, as shares.

    Raises:
        TooFewEffective: The tokens are worth less than they have to be, and the algorithm weighs
            them; nothing has changed.
        TrainingError: As `ppo_update`.
    """
    effective = effective_of(batch, trainer.compute_logp(batch))
    found = effective.tokens
    if trainer.settings.ratio_to != "nothing" and found.share < batch.least_effective:
        raise TooFewEffective(
            f"step {trainer.step + 1}: the {found.count} recorded tokens are worth "
            f"{found.size:.0f} of the weights that are trained ({found.share:.1%}, less than "
            f"tuner.history.min_effective_samples {batch.least_effective:g}): these weights have "
            "gone too far from those that sampled. Take fewer steps or epochs, a smaller "
            "algorithm.optimizer.lr, or rollouts of weights that are nearer "
            "(tuner.history.min_version); or collect new ones"
        )
    now = replace(batch, rows=_as_now(batch, effective.logp))
    scored = trainer.compute_ref_logp(trainer.compute_advantages(now))
    computed = trainer.settings.proximal in ("auto", "recompute")
    scored = replace(scored, batch=batch, proximal=effective.logp if computed else None)
    return {**trainer.ppo_update(scored), **shares(effective)}


def _as_now(batch: Batch, logp: Sequence[Tensor]) -> tuple[Row, ...]:
    """The rows as if the policy had sampled them as it is."""
    return tuple(
        replace(row, logprobs=tuple(logp_T.double().tolist()))
        for row, logp_T in zip(batch.rows, logp, strict=True)
    )


def shares(effective: Effective) -> dict[str, float]:
    """What samples are worth, as shares of as many new ones."""
    return {
        "effective_tokens": effective.tokens.share,
        "effective_calls": effective.calls.share,
        "effective_rollouts": effective.rollouts.share,
    }


# What is held out ---------------------------------------------------------------------------------


def held_out_rewards(trainer: PolicyTrainer, batch: Batch) -> dict[str, float]:
    """What the policy would get on rollouts that others sampled, by importance weights.

    With W the product of a rollout's weights, the estimate is `sum W r / sum W`, self-normalised:
    biased a little, and never outside of the rewards that there are.

    Returns:
        `reward`, and `effective_rollouts`, the share of the rollouts that carry it; `recorded`, the
        mean of the rewards as they were.
    """
    if not batch.rows:
        return {}
    effective = effective_of(batch, trainer.compute_logp(batch))
    count = len(batch.rewards_R)
    rollout_N = torch.tensor([row.rollout for row in batch.rows])
    log_N = torch.stack([each.sum() for each in effective.log_weights])
    log_R = torch.zeros(count, dtype=torch.float64).index_add(0, rollout_N, log_N)
    weights_R = (log_R - log_R.max()).exp()
    reward = float((weights_R * batch.rewards_R).sum() / weights_R.sum())
    return {
        "reward": reward,
        "recorded": float(batch.rewards_R.mean()),
        "effective_rollouts": effective_size(log_R).share,
    }


def held_out_loss(trainer: PolicyTrainer, batch: RecordedBatch) -> dict[str, float]:
    """The loss of recorded answers or pairs that are not trained.

    Returns:
        Of answers `loss`, the mean of `-logp` over their tokens; of pairs `loss` and `accuracy`,
        the share of pairs whose better answer has the larger reward `beta * (logp - ref)`.
    """
    if not batch.rows:
        return {}
    if trainer.settings.policy_loss != "dpo":
        logp_T = torch.cat([each.double().cpu() for each in trainer.compute_logp(batch)])
        return {"loss": -float(logp_T.mean())}
    _, distance_C = pair_logps(trainer, batch)
    assert isinstance(trainer.settings.policy_loss_spec, DPOLoss)
    found = dpo(distance_C[0::2], distance_C[1::2], trainer.settings.policy_loss_spec)
    margin_P = found.chosen_reward_P - found.rejected_reward_P
    return {
        "loss": float(found.loss_P.mean()),
        "accuracy": float((margin_P > 0).double().mean()),
    }
