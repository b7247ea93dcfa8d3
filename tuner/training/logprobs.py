"""Log-probs of sampled tokens, and hidden states before them, over padded rows, one per call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from tuner.engines.grammar import Grammars
from tuner.engines.transfer import to_device
from tuner.traces.tree import IntArray
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
    if in_parts:
        causal = causal_model(model)
        head = OutputHead(causal)
        hidden_TD = completion_states(causal, rows, pad_id=pad_id)
        sampled = Sampled.of(rows, head.vocabulary, grammars)
        return logprobs_in_parts(head, hidden_TD, sampled, with_entropy=with_entropy)
    ids_BS, row_T, predicts_T = _padded(rows, pad_id)
    width, first = ids_BS.shape[1], int(predicts_T.min())
    # Only the positions from the first completion on need logits; a model that does not know
    # `logits_to_keep` returns all of them.
    logits_BKV = model(
        input_ids=to_device(ids_BS, device), use_cache=False, logits_to_keep=width - first
    ).logits
    predicts_T -= width - logits_BKV.shape[1]
    logits_TV = logits_BKV[to_device(row_T, device), to_device(predicts_T, device)]
    sampled = Sampled.of(rows, logits_TV.shape[-1], grammars)
    return sampled.logprobs(logits_TV, with_entropy=with_entropy)


def completion_states(model: nn.Module, rows: Sequence[Row], *, pad_id: int) -> Tensor:
    """Last hidden states before the completion tokens of `rows`, in row order, shape [T, D].

    Args:
        model: A transformers model without its output embedding.
        rows: B calls.
        pad_id: Any valid token id.
    """
    device = next(model.parameters()).device
    ids_BS, row_T, predicts_T = _padded(rows, pad_id)
    output: Any = body(causal_model(model))(input_ids=to_device(ids_BS, device), use_cache=False)
    states_TD: Tensor = output.last_hidden_state[
        to_device(row_T, device), to_device(predicts_T, device)
    ]
    return states_TD


def _padded(rows: Sequence[Row], pad_id: int) -> tuple[IntArray, IntArray, IntArray]:
    """Ids [B, S], padded on the right, and for each completion token its row and the position that
    predicts it, [T] each."""
    lengths = [len(row) for row in rows]
    ids_BS = np.full((len(rows), max(lengths)), pad_id, dtype=np.int64)
    for b, row in enumerate(rows):
        ids_BS[b, : lengths[b]] = row.prompt_ids + row.completion_ids
    row_T = np.repeat(np.arange(len(rows)), [len(row.completion_ids) for row in rows])
    # The logits at position i - 1 predict the token at position i.
    predicts_T = np.concatenate(
        [
            np.arange(len(row.prompt_ids) - 1, length - 1)
            for row, length in zip(rows, lengths, strict=True)
        ]
    )
    return ids_BS, row_T, predicts_T
