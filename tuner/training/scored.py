"""A batch with what its loss needs beside the model, and what of it a micro-batch's loss takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tuner.engines.transfer import to_device
from tuner.traces.tree import IntArray
from tuner.training.batch import Batch, Row
from tuner.training.loss import Tokens
from tuner.training.sampled import TokenLogprobs


@dataclass(frozen=True)
class ScoredBatch:
    """A batch with what the loss needs.

    Attributes:
        advantages: One tensor [T_row] for each of the N rows.
        ref_logp: N tensors of the reference's log-probs, one per row, of shape [T_row].
        proximal: Those of the policy that the step begins with, likewise, where they are known
            and not to be computed.
        values, returns: The critic's values and what they are trained towards, likewise; PPO's.
    """

    batch: Batch
    advantages: tuple[Tensor, ...]
    ref_logp: tuple[Tensor, ...] | None = None
    proximal: tuple[Tensor, ...] | None = None
    values: tuple[Tensor, ...] = ()
    returns: tuple[Tensor, ...] = ()

    @property
    def advantages_N(self) -> Tensor:
        """The mean advantage of each row's tokens, shape [N]; most algorithms give all the same."""
        if not self.advantages:
            return self.batch.rewards_R.new_zeros(0)
        return torch.stack([advantage_T.mean() for advantage_T in self.advantages])


def tokens_of(
    scored: ScoredBatch,
    indices: Sequence[int],
    current: TokenLogprobs,
    *,
    weights_N: Tensor,
    proximal: Sequence[Tensor] | None,
    step: int,
) -> Tokens:
    """What the loss of one micro-batch needs.

    Args:
        indices: Its rows. Where the loss looks at sequences, all rows of a call are among them.
        current: Log-probs of their completions under the weights that are trained.
        weights_N: What each token of each row of the batch weighs. They are those of the whole
            step, so the sum over micro-batches does not depend on where they were cut.
        proximal: Log-probs of the policy that the step began with, [T_row] for each row of the
            batch; None where they are those recorded.
        step: Updates that the weights of that policy had seen.
    """
    rows = [scored.batch.rows[i] for i in indices]
    logp_T, device = current.logp_T, current.logp_T.device
    lengths = [len(row.completion_ids) for row in rows]
    calls, call_N = np.unique(scored.batch.call_N.numpy()[list(indices)], return_inverse=True)

    def gathered(values: Sequence[Tensor] | None) -> Tensor | None:
        return None if values is None else torch.cat([values[i] for i in indices]).to(logp_T)

    def moved(values: Any) -> Tensor:
        return to_device(np.asarray(values, dtype=np.float64), device).to(logp_T.dtype)

    return Tokens(
        logp_T=logp_T,
        entropy_T=current.entropy_T,
        recorded_T=moved([p for row in rows for p in row.logprobs]),
        advantages_T=moved(torch.cat([scored.advantages[i] for i in indices])),
        weights_T=moved(np.repeat(weights_N.numpy()[list(indices)], lengths)),
        call_T=to_device(np.repeat(call_N, lengths), device),
        calls=len(calls),
        staleness_T=to_device(np.concatenate([_staleness(row, step) for row in rows]), device),
        proximal_T=gathered(proximal),
        ref_T=gathered(scored.ref_logp),
    )


def _staleness(row: Row, step: int) -> IntArray:
    """Steps between the policy that sampled each token and the one of `step`, shape [T]."""
    if not row.versions:
        return np.zeros(len(row.completion_ids), dtype=np.int64)
    return step - np.array(row.versions, dtype=np.int64)
