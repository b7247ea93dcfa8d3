"""Log-probs of sampled tokens by one forward pass over rows padded to the longest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from tuner.engines.grammar import Grammars
from tuner.engines.transfer import to_device
from tuner.engines.transformers.weights import causal_model
from tuner.traces.tree import IntArray
from tuner.training.batch import Row
from tuner.training.forward.head import (
    OutputHead,
    Sampled,
    TokenLogprobs,
    body,
    logprobs_in_parts,
)


def completion_logprobs(
    model: nn.Module,
    rows: Sequence[Row],
    *,
    with_entropy: bool,
    grammars: Grammars | None = None,
    compiled: bool = False,
    in_parts: bool = False,
) -> TokenLogprobs:
    """Log-probs of every completion token of `rows`, of the distribution that was sampled.

    Rows are padded on the right; a causal model never looks there, so no mask is needed.

    Args:
        model: A transformers causal LM.
        rows: B calls.
        with_entropy: Keep the graph of the entropy (else it is detached, for metrics only).
        grammars: The engine's; needed where a row was sampled within a grammar.
        compiled: Whether what is done to the logits is compiled.
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
        head = OutputHead(causal_model(model))
        sampled = Sampled.of(rows, head.vocabulary, grammars)
        states_TD = completion_states(model, rows)
        return logprobs_in_parts(
            head, states_TD, sampled, with_entropy=with_entropy, compiled=compiled
        )
    ids_BS, row_T, predicts_T = _padded(rows)
    width, first = ids_BS.shape[1], int(predicts_T.min())
    # Only the positions from the first completion on need logits; a model that does not know
    # `logits_to_keep` returns all of them.
    logits_BKV = model(
        input_ids=to_device(ids_BS, device), use_cache=False, logits_to_keep=width - first
    ).logits
    predicts_T -= width - logits_BKV.shape[1]
    logits_TV = logits_BKV[to_device(row_T, device), to_device(predicts_T, device)]
    sampled = Sampled.of(rows, logits_TV.shape[-1], grammars)
    return sampled.logprobs(logits_TV, with_entropy=with_entropy, compiled=compiled)


def completion_states(model: nn.Module, rows: Sequence[Row]) -> Tensor:
    """Last hidden states before the completion tokens of `rows`, in row order, shape [T, D].

    Args:
        model: A transformers causal LM, or one without its output embedding.
        rows: B calls.
    """
    device = next(model.parameters()).device
    ids_BS, row_T, predicts_T = _padded(rows)
    output: Any = body(causal_model(model))(input_ids=to_device(ids_BS, device), use_cache=False)
    states_TD: Tensor = output.last_hidden_state[
        to_device(row_T, device), to_device(predicts_T, device)
    ]
    return states_TD


def _padded(rows: Sequence[Row]) -> tuple[IntArray, IntArray, IntArray]:
    """Ids [B, S], padded on the right, and for each completion token its row and the position that
    predicts it, [T] each."""
    lengths = [len(row) for row in rows]
    ids_BS = np.zeros((len(rows), max(lengths)), dtype=np.int64)
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
