"""From one loss for each token to one number: what each token weighs.

A sequence is one call, as in verl and Trinity-RFT, where an experience is one row of training data;
a rollout with more calls has more sequences. `rollout-mean` counts rollouts instead.
"""

from __future__ import annotations

from torch import Tensor

from tuner.algorithms.table import Aggregation


def row_weights(
    mode: Aggregation, tokens_N: Tensor, rollout_N: Tensor, *, longest: int | None = None
) -> Tensor:
    """The weight of every token of each row; the loss of a step is `sum_t weight_t * loss_t`.

    With N rows, T_n their tokens and R rollouts that have any:

        token-mean               1 / sum(T)
        seq-mean-token-mean      1 / (N T_n)
        seq-mean-token-sum       1 / N
        seq-mean-token-sum-norm  1 / (N longest)           Dr.GRPO (arXiv 2503.20783)
        rollout-mean             1 / (R T_rollout(n))

    They are those of the whole step, so a loss does not depend on where micro-batches are cut.

    Args:
        mode: Trinity-RFT's names, and `rollout-mean`.
        tokens_N: Trained tokens of each row, all above 0.
        rollout_N: Index of each row's rollout.
        longest: The most tokens that an answer may have; `seq-mean-token-sum-norm` needs it.

    Returns:
        Shape [N], float64.

    Raises:
        ValueError: `longest` is missing.
    """
    tokens_N = tokens_N.double()
    ones_N = tokens_N.new_ones(len(tokens_N))
    match mode:
        case "token-mean":
            return ones_N / tokens_N.sum()
        case "seq-mean-token-mean":
            return 1 / (len(tokens_N) * tokens_N)
        case "seq-mean-token-sum":
            return ones_N / len(tokens_N)
        case "seq-mean-token-sum-norm":
            if longest is None:
                raise ValueError(f"{mode} needs the most tokens that an answer may have")
            return ones_N / (len(tokens_N) * longest)
        case "rollout-mean":
            _, index_N = rollout_N.unique(return_inverse=True)
            rollouts = int(index_N.max()) + 1
            tokens_R = tokens_N.new_zeros(rollouts).index_add(0, index_N, tokens_N)
            return 1 / (rollouts * tokens_R[index_N])
