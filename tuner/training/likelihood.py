"""Training on recorded data: answers to imitate (SFT), and pairs with a preferred answer (DPO).

Both are a weighted likelihood of the completions. For SFT the weights are those of
`loss_agg_mode`. For DPO a first pass without a gradient gives each pair's log-probs and with them
the slope of its loss, and a second one is the update: the gradient of `slope * (logp_chosen -
logp_rejected)`. That is exactly DPO's gradient, and a pair may be cut into several micro-batches,
while answers to the same prompt share it in the token tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tuner.config.algorithms import DPOLoss
from tuner.engines.base import SamplingParams
from tuner.errors import TrainingError
from tuner.traces.tree import HasIds
from tuner.training.batch import Batch, Row
from tuner.training.losses import dpo, row_weights
from tuner.training.trainer import PolicyTrainer

if TYPE_CHECKING:
    from tuner.training.trainer import PolicyTrainer


@dataclass(frozen=True)
class RecordedBatch:
    """The rows of one step on recorded data, one for each trained assistant turn.

    Attributes:
        rows: `Row.rollout` is the index of the turn's conversation; the better one of pair p is
            2p, the worse one 2p + 1.
    """

    rows: tuple[Row, ...]

    @staticmethod
    def of(conversations: Sequence[Sequence[HasIds]]) -> RecordedBatch:
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
    """One optimizer step on recorded data, with the loss of the trainer's configuration.

    Returns:
        Metrics: for SFT the loss, for DPO those of `dpo_update`; entropy, gradient norm and
        learning rate.

    Raises:
        TrainingError: The batch is empty, or loss or gradient is not finite.
    """
    if not batch.rows:
        raise TrainingError("a batch without a turn to train cannot be trained")
    if trainer.config.algorithm.policy_loss_fn == "dpo":
        return dpo_update(trainer, batch)
    # `L = -sum_t m_t logp_t`, with the weights m of `loss_agg_mode`.
    config = trainer.config
    weights_N = row_weights(
        config.algorithm.loss_agg_mode,
        torch.tensor([len(row.completion_ids) for row in batch.rows]),
        torch.tensor([row.rollout for row in batch.rows]),
        longest=config.longest_answer,
    )
    return trainer.likelihood_update(batch.rows, weights_N)


def dpo_update(trainer: PolicyTrainer, batch: RecordedBatch) -> dict[str, float]:
    """The mean of `tuner.training.losses.dpo` over the pairs of a step.

    Returns:
        Metrics before the update: loss; `accuracy`, the share of pairs whose better answer has the
        larger reward `beta * (logp - ref)`; `reward_margin` between the two, and `chosen_reward`,
        `rejected_reward`, `chosen_logp`, `rejected_logp`.
    """
    config = trainer.config
    logp_C, distance_C = pair_logps(trainer, batch)
    pairs, rollout_N = len(logp_C) // 2, torch.tensor([row.rollout for row in batch.rows])
    assert isinstance(config.algorithm.policy_loss, DPOLoss)
    found = dpo(distance_C[0::2], distance_C[1::2], config.algorithm.policy_loss)
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
    """Log-probs of the 2P conversations of P pairs, and their distance to the reference's, [2P]."""
    rollout_N = torch.tensor([row.rollout for row in batch.rows])
    conversations = 2 * (int(rollout_N.max()) // 2 + 1)
    if trainer.reference is None:
        raise TrainingError("dpo needs a reference (PolicyTrainer(reference=...))")

    def summed(logp: tuple[Tensor, ...]) -> Tensor:
        of_rows_N = torch.stack([logp_T.double().sum().cpu() for logp_T in logp])
        return torch.zeros(conversations, dtype=torch.float64).index_add(0, rollout_N, of_rows_N)

    logp_C = summed(trainer.compute_logp(batch))
    return logp_C, logp_C - summed(trainer.compute_logp(batch, model=trainer.reference))


# The effective number of samples, for weights that did not sample them.
#
# A token that was sampled with log-prob `recorded`, and that the current weights give `logp`, has
# the importance weight `w = exp(logp - recorded)`; a call or a rollout has the product of those of
# its trained tokens. `n` samples with such weights estimate about as well as
#
#     n_eff = (sum w)^2 / sum w^2                                    (Kong, 1992; Liu, 2001)
#
# samples of the current policy: n if all weights are equal, 1 if one outweighs the others.
#
# Tokens, calls and rollouts answer different questions. A loss with weights per token, as that of
# `micro_batch_loss`, has the variance given by `tokens`. A rollout's product is what an unbiased
# estimate of its return needs, and says little once rollouts are long: if the logarithm of a
# token's weight has variance s^2, that of T tokens has about T s^2, and of n rollouts `n exp(-T
# s^2)` are left: with s = 0.1 and 1,000 tokens less than one of a thousand. `calls` is between the
# two: the value of one decision of the agent, given what it had read.
#
# One token in 3,000 with a weight of 100 outweighs three quarters of the others. A loss that caps
# weights, as ours does, never sees it: its update has the noise given by `capped`, with the weights
# `min(w, cap)`, and a bias instead, from what the cap removes. The bias is small while most weights
# are near 1, which is when `capped` is near 1: tokens that the policy has abandoned have weights
# near 0, and those that it prefers instead at most the cap.


@dataclass(frozen=True)
class EffectiveSize:
    """Effective size of some samples.

    Attributes:
        size: (sum w)^2 / sum w^2, from 1 to `count`; 0 if there are none, or if the current weights
            make each of them impossible.
        count: Number of samples.
    """

    size: float
    count: int

    @property
    def share(self) -> float:
        """`size / count`, 1 for equal weights; 0 without samples."""
        return self.size / self.count if self.count else 0.0


@dataclass(frozen=True)
class EffectiveSamples:
    """Effective size of a batch for a policy.

    Attributes:
        tokens, calls, rollouts: Of its trained tokens, and of the calls and rollouts that have any.
        capped: Of its tokens with the weights of the loss: at most its cap, and 0 for rejected
            tokens. Equal to `tokens` without cap and rejection.
        logp: The policy's log-probs, N tensors [T_row]; `ScoredBatch.proximal` takes them, so that
            nothing is computed twice.
        log_weights: `logp - recorded` of each token, likewise, float64, on the CPU.
    """

    tokens: EffectiveSize
    calls: EffectiveSize
    rollouts: EffectiveSize
    capped: EffectiveSize
    logp: tuple[Tensor, ...]
    log_weights: tuple[Tensor, ...]


def effective_samples(trainer: PolicyTrainer, batch: Batch) -> EffectiveSamples:
    """Effective size of a batch for a trainer's current weights; takes a forward pass.

    Args:
        trainer: The trainer of the policy.
        batch: Rows with the log-probs that they were sampled with.

    Raises:
        TrainingError: A row has no log-probs, because it was not sampled.
    """
    config = trainer.config
    return effective_of(
        batch,
        trainer.compute_logp(batch),
        cap=config.tuner.algorithm.cap,
        rejection=config.tuner.algorithm.rejection,
    )


def effective_of(
    batch: Batch,
    logp: Iterable[Tensor],
    *,
    cap: float | None = None,
    rejection: tuple[float, float] | None = None,
) -> EffectiveSamples:
    """Like `effective_samples`, with known log-probs.

    Args:
        batch: N rows.
        logp: The policy's log-probs of them, N tensors [T_row].
        cap: The loss's upper bound of weights; None: unbounded.
        rejection: Bounds outside of which the loss drops tokens.

    Raises:
        TrainingError: A row has no log-probs that it was sampled with.
    """
    found = tuple(logp)
    for row in batch.rows:
        if len(row.logprobs) != len(row.completion_ids):
            raise TrainingError(
                f"call {row.call_id} has {len(row.completion_ids)} tokens and "
                f"{len(row.logprobs)} recorded log-probs: only sampled tokens have importance "
                "weights; train other text with sft or dpo"
            )
    log_weights = tuple(
        logp_T.detach().cpu().double() - torch.tensor(row.logprobs, dtype=torch.float64)
        for row, logp_T in zip(batch.rows, found, strict=True)
    )
    log_N = torch.tensor([float(each.sum()) for each in log_weights], dtype=torch.float64)
    rollout_N = torch.tensor([row.rollout for row in batch.rows], dtype=torch.long)
    log_T = torch.cat(log_weights) if log_weights else log_N
    return EffectiveSamples(
        tokens=effective_size(log_T),
        capped=effective_size(_as_in_the_loss(log_T, cap, rejection)),
        calls=effective_size(_sums(log_N, batch.call_N)),
        rollouts=effective_size(_sums(log_N, rollout_N)),
        logp=found,
        log_weights=log_weights,
    )


def effective_size(log_weights: Tensor) -> EffectiveSize:
    """(sum w)^2 / sum w^2, which is independent of a common factor of the weights.

    Args:
        log_weights: Logarithms of n weights, shape [n].
    """
    count = len(log_weights)
    if not count or not torch.isfinite(largest := log_weights.max()):
        return EffectiveSize(0.0, count)
    # The largest becomes 1, so that neither sum overflows or is 0.
    weights = (log_weights.double() - largest).exp()
    return EffectiveSize(float(weights.sum() ** 2 / (weights**2).sum()), count)


def _as_in_the_loss(
    log_T: Tensor, cap: float | None, rejection: tuple[float, float] | None
) -> Tensor:
    """Logarithms of the weights that the loss gives tokens (`tuner.training.losses`)."""
    if rejection is not None:
        low, high = rejection
        log_T = log_T.masked_fill((log_T.exp() < low) | (log_T.exp() > high), -math.inf)
    return log_T if cap is None else log_T.clamp(max=math.log(cap))


def _sums(values_N: Tensor, index_N: Tensor) -> Tensor:
    """The sum of the values of each index that occurs."""
    found, place_N = index_N.unique(return_inverse=True)
    return values_N.new_zeros(len(found)).index_add(0, place_N, values_N)


# Training on rollouts that other weights sampled, with their recorded log-probs.
#
# With `recorded` the log-prob that a token was sampled with and `old` that of the weights that a
# step begins with, the loss is that of `tuner.training.trainer` with `w = min(old / recorded,
# cap)`. `old` is always computed: versions of other runs say nothing here. Formulas that need the
# current policy's log-probs (the distance to a reference that is subtracted from rewards, a
# teacher's opinion of the student) get `old`.
#
# Before each update the effective size of the samples is checked (`tuner.training.likelihood`).


# No update of this run: versions of other runs are not this run's.
ELSEWHERE = -1


class TooFewEffective(TrainingError):
    """The weights have moved too far from those that sampled the data."""


@dataclass(frozen=True)
class OffPolicyBatch(Batch):
    """A batch whose rollouts were not sampled in this run.

    Attributes:
        least_effective: The update is refused if the effective share of its tokens is smaller.
    """

    least_effective: float = 0.0

    @staticmethod
    def of(batch: Batch, *, least_effective: float) -> OffPolicyBatch:
        """The same rollouts, with versions that belong to no weights of this run."""
        rows = tuple(
            replace(row, versions=(ELSEWHERE,) * len(row.completion_ids)) for row in batch.rows
        )
        return OffPolicyBatch(**{**vars(batch), "rows": rows}, least_effective=least_effective)


def off_policy_update(trainer: PolicyTrainer, batch: OffPolicyBatch) -> dict[str, float]:
    """The updates of one step, after checking the effective size of its samples.

    Returns:
        The metrics of `PolicyTrainer.ppo_update`; `effective_tokens`, `effective_calls`,
        `effective_rollouts`: effective shares before the first update.

    Raises:
        TooFewEffective: The effective share of the tokens is too small, and the algorithm uses
            importance weights; nothing has changed.
        TrainingError: As `ppo_update`.
    """
    effective = effective_of(batch, trainer.compute_logp(batch))
    found = effective.tokens
    weighs = trainer.config.algorithm.policy_loss.ratio_to != "nothing"
    if weighs and found.share < batch.least_effective:
        raise TooFewEffective(
            f"step {trainer.step + 1}: the {found.count} recorded tokens are worth only "
            f"{found.size:.0f} tokens of the current weights ({found.share:.1%}, less than "
            f"tuner.history.min_effective_samples {batch.least_effective:g}): these weights have "
            "moved too far from those that sampled. Take fewer steps or epochs, a smaller "
            "algorithm.optimizer.lr, or rollouts of more recent weights "
            "(tuner.history.min_version); or collect new ones"
        )
    now = replace(batch, rows=_as_now(batch, effective.logp))
    scored = trainer.compute_ref_logp(trainer.compute_advantages(now))
    computed = trainer.config.tuner.algorithm.proximal in ("auto", "recompute")
    scored = replace(scored, batch=batch, proximal=effective.logp if computed else None)
    return {**trainer.ppo_update(scored), **shares(effective)}


def _as_now(batch: Batch, logp: Sequence[Tensor]) -> tuple[Row, ...]:
    """The rows as if the current policy had sampled them."""
    return tuple(
        replace(row, logprobs=tuple(logp_T.double().tolist()))
        for row, logp_T in zip(batch.rows, logp, strict=True)
    )


def shares(effective: EffectiveSamples) -> dict[str, float]:
    """Effective shares of the samples."""
    return {
        "effective_tokens": effective.tokens.share,
        "effective_calls": effective.calls.share,
        "effective_rollouts": effective.rollouts.share,
    }


# Held-out data ------------------------------------------------------------------------------------


def held_out_rewards(trainer: PolicyTrainer, batch: Batch) -> dict[str, float]:
    """Estimated reward of the policy on rollouts sampled by others, by importance weights.

    With W the product of a rollout's weights, the estimate is `sum W r / sum W`, self-normalised:
    slightly biased, and always within the range of the rewards.

    Returns:
        `reward`, and `effective_rollouts`, the effective share of the rollouts; `recorded`, the
        mean of the recorded rewards.
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
        For answers `loss`, the mean of `-logp` over their tokens; for pairs `loss` and `accuracy`,
        the share of pairs whose better answer has the larger reward `beta * (logp - ref)`.
    """
    if not batch.rows:
        return {}
    if trainer.config.algorithm.policy_loss_fn != "dpo":
        logp_T = torch.cat([each.double().cpu() for each in trainer.compute_logp(batch)])
        return {"loss": -float(logp_T.mean())}
    _, distance_C = pair_logps(trainer, batch)
    assert isinstance(trainer.config.algorithm.policy_loss, DPOLoss)
    found = dpo(distance_C[0::2], distance_C[1::2], trainer.config.algorithm.policy_loss)
    margin_P = found.chosen_reward_P - found.rejected_reward_P
    return {
        "loss": float(found.loss_P.mean()),
        "accuracy": float((margin_P > 0).double().mean()),
    }
