"""Log-probs of sampled tokens under the current weights, as a differentiable forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tuner.engines.grammar import Grammars
from tuner.engines.sampling import sampled_logprobs
from tuner.errors import TrainingError
from tuner.training.batch import Row


@dataclass(frozen=True)
class TokenLogprobs:
    """For the T completion tokens of some rows, in row order: log-prob and entropy, [T] each."""

    logp_T: Tensor
    entropy_T: Tensor


def completion_logprobs(
    model: nn.Module,
    rows: Sequence[Row],
    *,
    pad_id: int,
    with_entropy: bool,
    grammars: Grammars | None = None,
) -> TokenLogprobs:
    """Log-probs of every completion token of `rows`, of the distribution that was sampled.

    Rows are padded on the right; a causal model never looks there, so no mask is needed. Tokens
    outside a call's grammar are removed: which ones does not depend on the weights. Logits are
    divided by each call's temperature. Where a call was sampled with top_k or top_p, its
    distribution is cut and renormalised in the same way under the current weights, the sampled
    token always counted in: exact for the weights that sampled it, the natural continuation
    after an update.

    Args:
        model: A transformers causal LM.
        rows: B calls.
        pad_id: Any valid token id.
        with_entropy: Keep the graph of the entropy (else it is detached, for metrics only).
        grammars: The engine's; needed where a row was sampled within a grammar.

    Returns:
        T = total completion tokens, float32 at least.

    Raises:
        TrainingError: A row has a grammar, and there are no `grammars` to replay it with.
        GrammarError: A row's completion does not follow its grammar.
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
    logits_TV = _within_grammars(logits_TV, rows, grammars)
    logits_TV = _as_sampled(logits_TV, target_T, rows, rows_T)
    all_logp_TV = logits_TV.log_softmax(-1)
    logp_T = all_logp_TV.gather(1, target_T[:, None])[:, 0]
    kept = all_logp_TV if with_entropy else all_logp_TV.detach()
    # A token that the truncation removed has probability 0 and adds nothing: 0 * -inf is not 0.
    entropy_T = -(kept.exp() * kept.clamp(min=torch.finfo(kept.dtype).min)).sum(-1)
    return TokenLogprobs(logp_T, entropy_T)


def _within_grammars(logits_TV: Tensor, rows: Sequence[Row], grammars: Grammars | None) -> Tensor:
    """Logits with -inf for the tokens that a call's grammar did not allow at that position."""
    if not any(row.sampling.grammar for row in rows):
        return logits_TV
    if grammars is None:
        raise TrainingError(
            "a call was sampled within a grammar, but the trainer has none to replay it with: "
            "give it the engine's (PolicyTrainer(..., grammars=engine.grammars))"
        )
    removed_TV = torch.zeros_like(logits_TV, dtype=torch.bool)
    start = 0
    for row in rows:
        end = start + len(row.completion_ids)
        if row.sampling.grammar:
            allowed = grammars.allowed(
                row.sampling.grammar, row.completion_ids, logits_TV.shape[-1]
            )
            removed_TV[start:end] = ~allowed.to(logits_TV.device)
        start = end
    return logits_TV.masked_fill(removed_TV, -torch.inf)


def _as_sampled(logits_TV: Tensor, target_T: Tensor, rows: Sequence[Row], rows_T: Tensor) -> Tensor:
    """Logits of the distributions that were sampled: scaled, and -inf outside top_k and top_p."""
    sampling = [row.sampling for row in rows]
    if all(s.temperature == 1 and s.top_k <= 0 and s.top_p == 1 for s in sampling):
        return logits_TV
    device = logits_TV.device
    temperature_B = torch.tensor([s.temperature for s in sampling], device=device)
    scaled_TV = logits_TV / temperature_B.to(logits_TV.dtype)[rows_T, None]
    if all(s.top_k <= 0 and s.top_p == 1 for s in sampling):
        return scaled_TV
    top_k_T = torch.tensor([s.top_k for s in sampling], device=device)[rows_T]
    top_p_T = torch.tensor([s.top_p for s in sampling], device=device, dtype=torch.float64)[rows_T]
    with torch.no_grad():
        removed_TV = sampled_logprobs(scaled_TV, top_k=top_k_T, top_p=top_p_T) == -torch.inf
        removed_TV.scatter_(1, target_T[:, None], False)
    return scaled_TV.masked_fill(removed_TV, -torch.inf)
