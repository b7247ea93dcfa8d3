"""From hidden states to the log-probs of sampled tokens.

Logits are made for some tokens at a time and made again in the backward pass, so memory does not
grow with vocabulary x tokens, in whichever layout the rows went through the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tuner.engines.grammar import Grammars
from tuner.engines.transfer import to_device
from tuner.engines.transformers.weights import causal_model
from tuner.traces.tree import IntArray
from tuner.training.batch import Row
from tuner.training.forward.sampled import Sampled, TokenLogprobs

LOGITS = {"cpu": 1 << 23, "cuda": 1 << 27}
"""Logits that are in memory at once, by kind of device."""


def body(model: PreTrainedModel) -> nn.Module:
    """What is below the output embedding, and gives `last_hidden_state`; of a critic all of it."""
    found = model.base_model
    # Llama 4's text model names a part that only its multimodal one has, and so finds itself.
    inner: nn.Module = getattr(model, "model", model) if found is model else found
    return inner


class OutputHead:
    """From a causal LM's last hidden states to its logits, as its own `forward` does it.

    That is its output embedding, and what some models do to the logits behind it: Gemma's
    `final_logit_softcapping`, Granite's `logits_scaling`, Cohere's `logit_scale`. Whether a model
    does anything else is found out by comparison (`tuner.training.forward.layouts`).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._project: Any = model.get_output_embeddings()
        self.vocabulary = int(self._project.weight.shape[0])
        config = model.config.get_text_config(decoder=True)
        self._cap = getattr(config, "final_logit_softcapping", None)
        self._factor = getattr(config, "logit_scale", None) or 1.0
        self._factor /= getattr(config, "logits_scaling", None) or 1.0

    def __call__(self, hidden_TD: Tensor) -> Tensor:
        """[T, D] -> [T, V]"""
        logits_TV: Tensor = self._project(hidden_TD)
        if self._factor != 1:
            logits_TV = logits_TV * self._factor
        if self._cap is not None:
            logits_TV = torch.tanh(logits_TV / self._cap) * self._cap
        return logits_TV


def logprobs_in_parts(
    head: OutputHead, hidden_TD: Tensor, sampled: Sampled, *, with_entropy: bool
) -> TokenLogprobs:
    """Log-probs of T tokens; their logits are never all in memory, nor kept for the backward.

    Args:
        hidden_TD: Last hidden states where each of the tokens was sampled, shape [T, D].
        sampled: The tokens.
        with_entropy: Keep the graph of the entropy (else it is detached, for metrics only).
    """

    def of_part(hidden_CD: Tensor, part: Sampled) -> tuple[Tensor, Tensor]:
        found = part.logprobs(head(hidden_CD), with_entropy=with_entropy)
        return found.logp_T, found.entropy_T

    size = max(1, LOGITS[hidden_TD.device.type] // head.vocabulary)
    if len(hidden_TD) <= size:
        return TokenLogprobs(*of_part(hidden_TD, sampled))
    parts = []
    for start, hidden_CD in zip(range(0, len(hidden_TD), size), hidden_TD.split(size), strict=True):
        part = sampled.take(slice(start, start + size))
        parts.append(
            checkpoint(of_part, hidden_CD, part, use_reentrant=False, preserve_rng_state=False)
            if torch.is_grad_enabled()
            else of_part(hidden_CD, part)
        )
    logp, entropy = zip(*parts, strict=True)
    return TokenLogprobs(torch.cat(logp), torch.cat(entropy))


def completion_logprobs(
    model: nn.Module,
    rows: Sequence[Row],
    *,
    with_entropy: bool,
    grammars: Grammars | None = None,
    in_parts: bool = False,
) -> TokenLogprobs:
    """Log-probs of every completion token of `rows`, of the distribution that was sampled.

    Rows are padded on the right; a causal model never looks there, so no mask is needed.

    Args:
        model: A transformers causal LM.
        rows: B calls.
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
        head = OutputHead(causal_model(model))
        sampled = Sampled.of(rows, head.vocabulary, grammars)
        states_TD = completion_states(model, rows)
        return logprobs_in_parts(head, states_TD, sampled, with_entropy=with_entropy)
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
    return sampled.logprobs(logits_TV, with_entropy=with_entropy)


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
