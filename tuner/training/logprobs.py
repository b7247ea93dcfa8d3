"""Log-probs of sampled tokens under the current weights, as a differentiable forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tuner.training.batch import Row


@dataclass(frozen=True)
class TokenLogprobs:
    """For the T completion tokens of some rows, in row order: log-prob and entropy, [T] each."""

    logp_T: Tensor
    entropy_T: Tensor


def completion_logprobs(
    model: nn.Module, rows: Sequence[Row], *, pad_id: int, with_entropy: bool
) -> TokenLogprobs:
    """Log-probs of every completion token of `rows`, of the distribution that was sampled.

    Rows are padded on the right; a causal model never looks there, so no mask is needed. Logits
    are divided by each call's temperature. Where a call was sampled with top_k or top_p, its
    distribution is cut and renormalised in the same way under the current weights, the sampled
    token always counted in: exact for the weights that sampled it, the natural continuation
    after an update.

    Args:
        model: A transformers causal LM.
        rows: B calls.
        pad_id: Any valid token id.
        with_entropy: Keep the graph of the entropy (else it is detached, for metrics only).

    Returns:
        T = total completion tokens, float32 at least.
    """
    device = next(model.parameters()).device
    lengths = [len(row) for row in rows]
    width = max(lengths)
    ids_BS = torch.full((len(rows), width), pad_id, dtype=torch.long)
    row_T, position_T = [], []
    for b, row in enumerate(rows):
        ids_BS[b, : lengths[b]] = torch.tensor(row.prompt_ids + row.completion_ids)
        row_T.append(torch.full((len(row.completion_ids),), b))
        # The logits at position i - 1 predict the token at position i.
        position_T.append(torch.arange(len(row.prompt_ids) - 1, lengths[b] - 1))
    rows_T = torch.cat(row_T).to(device)
    predicts_T = torch.cat(position_T).to(device)
    ids_BS = ids_BS.to(device)
    first = int(predicts_T.min())
    # Only the positions from the first completion on need logits; a model that does not know
    # `logits_to_keep` returns all of them.
    logits_BKV = model(input_ids=ids_BS, use_cache=False, logits_to_keep=width - first).logits
    logits_TV = logits_BKV[rows_T, predicts_T - (width - logits_BKV.shape[1])]
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    target_T = ids_BS[rows_T, predicts_T + 1]
    temperature_B = torch.tensor([row.sampling.temperature for row in rows], device=device)
    if bool((temperature_B != 1).any()):
        logits_TV = logits_TV / temperature_B.to(logits_TV.dtype)[rows_T, None]
    if any(row.sampling.top_k > 0 or row.sampling.top_p < 1 for row in rows):
        logits_TV = _truncated(logits_TV, target_T, rows, rows_T)
    all_logp_TV = logits_TV.log_softmax(-1)
    logp_T = all_logp_TV.gather(1, target_T[:, None])[:, 0]
    kept = all_logp_TV if with_entropy else all_logp_TV.detach()
    # A token that the truncation removed has probability 0 and adds nothing: 0 * -inf is not 0.
    entropy_T = -(kept.exp() * kept.clamp(min=torch.finfo(kept.dtype).min)).sum(-1)
    return TokenLogprobs(logp_T, entropy_T)


def _truncated(logits_TV: Tensor, target_T: Tensor, rows: Sequence[Row], rows_T: Tensor) -> Tensor:
    """Logits with everything outside each call's top_k and top_p set to -inf."""
    with torch.no_grad():
        vocabulary = logits_TV.shape[1]
        sampling = [row.sampling for row in rows]
        top_k_T = torch.tensor(
            [s.top_k if s.top_k > 0 else vocabulary for s in sampling], device=logits_TV.device
        )[rows_T]
        top_p_T = torch.tensor([s.top_p for s in sampling], device=logits_TV.device)[rows_T]
        sorted_TV, order_TV = logits_TV.double().sort(dim=-1, descending=True)
        rank_V = torch.arange(vocabulary, device=logits_TV.device)
        sorted_TV = sorted_TV.masked_fill(rank_V >= top_k_T[:, None], -torch.inf)
        probability_TV = sorted_TV.softmax(-1)
        mass_before_TV = probability_TV.cumsum(-1) - probability_TV
        removed_sorted_TV = (mass_before_TV >= top_p_T[:, None].double()) & (rank_V > 0)
        removed_sorted_TV |= rank_V >= top_k_T[:, None]
        removed_sorted_TV &= (top_p_T < 1)[:, None] | (rank_V >= top_k_T[:, None])
        removed_TV = torch.zeros_like(removed_sorted_TV).scatter(1, order_TV, removed_sorted_TV)
        removed_TV.scatter_(1, target_T[:, None], False)
    return logits_TV.masked_fill(removed_TV, -torch.inf)
