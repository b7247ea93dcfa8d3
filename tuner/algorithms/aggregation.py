"""From one loss for each token to one number: what each token weighs.

A sequence is one call, as in verl and Trinity-RFT, where an experience is one row of training data;
a rollout with more calls has more sequences. `rollout-mean` counts rollouts instead. A call that a
mask cuts into several rows is one sequence, of the tokens that are left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tuner.algorithms.spec import Aggregation


def row_weights(
    mode: Aggregation,
    tokens_N: Tensor,
    rollout_N: Tensor,
    call_N: Tensor | None = None,
    *,
    longest: int | None = None,
) -> Tensor:
    """The weight of every token of each row; the loss of a step is `sum_t weight_t * loss_t`.

    With C calls and R rollouts that have any tokens, T of them:

        token-mean               1 / sum(T)
        seq-mean-token-mean      1 / (C T_call(n))
        seq-mean-token-sum       1 / C
        seq-mean-token-sum-norm  1 / (C longest)           Dr.GRPO (arXiv 2503.20783)
        rollout-mean             1 / (R T_rollout(n))

    They are those of the whole step, so a loss does not depend on where micro-batches are cut.

    Args:
        mode: Trinity-RFT's names, and `rollout-mean`.
        tokens_N: Trained tokens of each row, all above 0.
        rollout_N: Index of each row's rollout.
        call_N: Index of each row's call; None where each row is one.
        longest: The most tokens that an answer may have; `seq-mean-token-sum-norm` needs it.

    Returns:
        Shape [N], float64.

    Raises:
        ValueError: `longest` is missing.
    """
    tokens_N = tokens_N.double()
    ones_N = tokens_N.new_ones(len(tokens_N))
    if call_N is None:
        call_N = torch.arange(len(tokens_N))
    match mode:
        case "token-mean":
            return ones_N / tokens_N.sum()
        case "seq-mean-token-mean":
            return _mean_of_means(tokens_N, call_N)
        case "seq-mean-token-sum":
            return ones_N / len(call_N.unique())
        case "seq-mean-token-sum-norm":
            if longest is None:
                raise ValueError(f"{mode} needs the most tokens that an answer may have")
            return ones_N / (len(call_N.unique()) * longest)
        case "rollout-mean":
            return _mean_of_means(tokens_N, rollout_N)


def _mean_of_means(tokens_N: Tensor, owner_N: Tensor) -> Tensor:
    """`1 / (M T_m)`: each token's weight in the mean over M owners of the mean of their tokens."""
    _, index_N = owner_N.unique(return_inverse=True)
    owners = int(index_N.max()) + 1
    tokens_M = tokens_N.new_zeros(owners).index_add(0, index_N, tokens_N)
    return 1 / (owners * tokens_M[index_N])
