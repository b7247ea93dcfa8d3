"""Log-probs of sampled tokens, and hidden states before them, over padded rows, one per call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tuner.engines.grammar import Grammars
from tuner.training.batch import Row
from tuner.training.head import OutputHead, body, causal_model, logprobs_in_parts
from tuner.training.sampled import Sampled, TokenLogprobs


def completion_logprobs(
    model: nn.Module,
    rows: Sequence[Row],
    *,
    pad_id: int,
    with_entropy: bool,
    grammars: Grammars | None = None,
    in_parts: bool = False,
) -> TokenLogprobs:
    """Log-probs of every completion token of `rows`, of the distribution that was sampled.

    Rows are padded on the right; a causal model never looks there, so no mask is needed.

    Args:
        model: A transformers causal LM.
        rows: B calls.
        pad_id: Any valid token id.
        with_entropy: Keep the graph of the entropy (else it is detached, for metrics only).
        grammars: The engine's; needed where a row was sampled within a grammar.
        in_parts: Make the logits of some tokens at a time, with `OutputHead` in place of what the
            model's own `forward` does.

    Returns:
        T = total completion tokens, float32 at least.

    Raises:
        TrainingError: A row has a grammar, and there are no `grammars` to replay it with.
        GrammarError: A row's completion does not follow its grammar.
    """
    device = next(model.parameters()).device
    ids_BS, rows_T, predicts_T = _padded(rows, pad_id, device)
    if in_parts:
        causal = causal_model(model)
        head = OutputHead(causal)
        output: Any = body(causal)(input_ids=ids_BS, use_cache=False)
        hidden_TD: Tensor = output.last_hidden_state[rows_T, predicts_T]
        sampled = Sampled.of(rows, head.vocabulary, device, grammars)
        return logprobs_in_parts(head, hidden_TD, sampled, with_entropy=with_entropy)
    width, first = ids_BS.shape[1], int(predicts_T.min())
    # Only the positions from the first completion on need logits; a model that does not know
    # `logits_to_keep` returns all of them.
    logits_BKV = model(input_ids=ids_BS, use_cache=False, logits_to_keep=width - first).logits
    logits_TV = logits_BKV[rows_T, predicts_T - (width - logits_BKV.shape[1])]
    sampled = Sampled.of(rows, logits_TV.shape[-1], device, grammars)
    return sampled.logprobs(logits_TV, with_entropy=with_entropy)


def completion_states(model: nn.Module, rows: Sequence[Row], *, pad_id: int) -> Tensor:
    """Last hidden states before the completion tokens of `rows`, in row order, shape [T, D].

    Args:
        model: A transformers model without its output embedding.
        rows: B calls.
        pad_id: Any valid token id.
    """
    ids_BS, rows_T, predicts_T = _padded(rows, pad_id, next(model.parameters()).device)
    output: Any = body(causal_model(model))(input_ids=ids_BS, use_cache=False)
    states_TD: Tensor = output.last_hidden_state[rows_T, predicts_T]
    return states_TD


def _padded(
    rows: Sequence[Row], pad_id: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [B, S], padded on the right, and for each completion token its row and the position that
    predicts it, [T] each."""
    lengths = [len(row) for row in rows]
    ids_BS = torch.full((len(rows), max(lengths)), pad_id, dtype=torch.long)
    row_T, position_T = [], []
    for b, row in enumerate(rows):
        ids_BS[b, : lengths[b]] = torch.tensor(row.prompt_ids + row.completion_ids)
        row_T.append(torch.full((len(row.completion_ids),), b))
        # The logits at position i - 1 predict the token at position i.
        position_T.append(torch.arange(len(row.prompt_ids) - 1, lengths[b] - 1))
    return ids_BS.to(device), torch.cat(row_T).to(device), torch.cat(position_T).to(device)
