"""How many samples recorded ones still are worth to weights that did not sample them.

A token that was sampled with log-prob `recorded`, and that the current weights give `logp`, has the
importance weight `w = exp(logp - recorded)`; a call or a rollout has the product of those of its
trained tokens. `n` samples with such weights estimate about as well as

    n_eff = (sum w)^2 / sum w^2                                    (Kong, 1992; Liu, 2001)

samples of the current policy do: n where all weights are equal, 1 where one outweighs the others.

Tokens, calls and rollouts answer different questions. A loss whose weights are those of tokens, as
that of `tuner.training.loss`, has the variance that `tokens` says. A rollout's product is what an
unbiased estimate of its return needs, and says little once rollouts are long: if the logarithm of
a token's weight has variance s^2, that of T tokens has about T s^2, and of n rollouts
`n exp(-T s^2)` are left: with s = 0.1 and 1,000 tokens not one of a thousand. `calls` is between
the two: what one decision of the agent is worth, given what it had read.

One token in 3,000 whose weight is 100 leaves a quarter of all the others. A loss that caps weights,
as ours does, never sees it: its update has the noise that `capped` says, with the weights `min(w,
cap)`, and a bias instead, by what the cap takes away. That is small while most weights are near 1,
which is when `capped` is near 1: a token that the policy has left has a weight near 0, and each one
that it took up in its place at most the cap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tuner.errors import TrainingError
from tuner.training.batch import Batch

if TYPE_CHECKING:
    from tuner.training.trainer import PolicyTrainer


@dataclass(frozen=True)
class EffectiveSize:
    """What some samples are worth.

    Attributes:
        size: (sum w)^2 / sum w^2, from 1 to `count`; 0 where there are none, or where the current
            weights make each of them impossible.
        count: How many there are.
    """

    size: float
    count: int

    @property
    def share(self) -> float:
        """`size / count`, 1 where the weights are equal; 0 where there are no samples."""
        return self.size / self.count if self.count else 0.0


@dataclass(frozen=True)
class Effective:
    """What a batch is worth to a policy.

    Attributes:
        tokens, calls, rollouts: Of its trained tokens, and of the calls and rollouts that have any.
        capped: Of its tokens with the weights that the loss gives them: at most its cap, and 0
            where it rejects them. Without either as `tokens`.
        logp: The policy's log-probs, N tensors [T_row]; `ScoredBatch.proximal` takes them, so that
            nothing is computed twice.
        log_weights: Of each token `logp - recorded`, likewise, float64, on the CPU.
    """

    tokens: EffectiveSize
    calls: EffectiveSize
    rollouts: EffectiveSize
    capped: EffectiveSize
    logp: tuple[Tensor, ...]
    log_weights: tuple[Tensor, ...]


def effective_samples(trainer: PolicyTrainer, batch: Batch) -> Effective:
    """What a batch's samples are worth to a trainer's current weights; takes a forward pass.

    Args:
        trainer: Whose policy it is.
        batch: Rows with the log-probs that they were sampled with.

    Raises:
        TrainingError: A row has none: nobody sampled it.
    """
    settings = trainer.settings
    return effective_of(
        batch,
        trainer.compute_logp(batch),
        cap=settings.importance_cap,
        rejection=settings.rejection,
    )


def effective_of(
    batch: Batch,
    logp: Iterable[Tensor],
    *,
    cap: float | None = None,
    rejection: tuple[float, float] | None = None,
) -> Effective:
    """As `effective_samples`, of log-probs that are known.

    Args:
        batch: N rows.
        logp: The policy's log-probs of them, N tensors [T_row].
        cap: What the loss bounds weights by; None: by nothing.
        rejection: Bounds beyond which it leaves tokens out.

    Raises:
        TrainingError: A row has no log-probs that it was sampled with.
    """
    found = tuple(logp)
    for row in batch.rows:
        if len(row.logprobs) != len(row.completion_ids):
            raise TrainingError(
                f"call {row.call_id} has {len(row.completion_ids)} tokens and "
                f"{len(row.logprobs)} recorded log-probs: only what was sampled has importance "
                "weights; train what was not with sft or dpo"
            )
    log_weights = tuple(
        logp_T.detach().cpu().double() - torch.tensor(row.logprobs, dtype=torch.float64)
        for row, logp_T in zip(batch.rows, found, strict=True)
    )
    log_N = torch.tensor([float(each.sum()) for each in log_weights], dtype=torch.float64)
    rollout_N = torch.tensor([row.rollout for row in batch.rows], dtype=torch.long)
    log_T = torch.cat(log_weights) if log_weights else log_N
    return Effective(
        tokens=effective_size(log_T),
        capped=effective_size(_as_in_the_loss(log_T, cap, rejection)),
        calls=effective_size(_sums(log_N, batch.call_N)),
        rollouts=effective_size(_sums(log_N, rollout_N)),
        logp=found,
        log_weights=log_weights,
    )


def effective_size(log_weights: Tensor) -> EffectiveSize:
    """(sum w)^2 / sum w^2, which no common factor of the weights changes.

    Args:
        log_weights: Logarithms of n weights, shape [n].
    """
    count = len(log_weights)
    if not count or not torch.isfinite(largest := log_weights.max()):
        return EffectiveSize(0.0, count)
    # The largest is 1, so that neither sum overflows or is 0.
    weights = (log_weights.double() - largest).exp()
    return EffectiveSize(float(weights.sum() ** 2 / (weights**2).sum()), count)


def _as_in_the_loss(
    log_T: Tensor, cap: float | None, rejection: tuple[float, float] | None
) -> Tensor:
    """Logarithms of the weights that the loss gives tokens (`tuner.training.loss`)."""
    if rejection is not None:
        low, high = rejection
        log_T = log_T.masked_fill((log_T.exp() < low) | (log_T.exp() > high), -math.inf)
    return log_T if cap is None else log_T.clamp(max=math.log(cap))


def _sums(values_N: Tensor, index_N: Tensor) -> Tensor:
    """The sum of the values of each index that there is."""
    found, place_N = index_N.unique(return_inverse=True)
    return values_N.new_zeros(len(found)).index_add(0, place_N, values_N)
