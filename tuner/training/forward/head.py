"""From hidden states to the log-probs of the distributions that tokens were sampled from.

A row's tokens were sampled at some temperature, within some top_k and top_p, perhaps within a
grammar; the trainer computes the same quantity under the current weights.

Logits are made for some tokens at a time and made again in the backward pass, so memory does not
grow with vocabulary x tokens, in whichever layout the rows went through the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tuner.engines.grammar import Bits, Grammars, unpacked
from tuner.engines.sampling import sampled_logprobs
from tuner.engines.transfer import to_device
from tuner.engines.transformers.weights import causal_model
from tuner.errors import TrainingError
from tuner.traces.tree import IntArray
from tuner.training.batch import Row

FloatArray = np.ndarray[Any, Any]


@dataclass(frozen=True)
class TokenLogprobs:
    """For the T completion tokens of some rows, in row order: log-prob and entropy, [T] each."""

    logp_T: Tensor
    entropy_T: Tensor


@dataclass(frozen=True)
class Sampled:
    """T sampled tokens with the settings they were sampled with; None where all are "off".

    They stay in main memory until `logprobs` needs them, which asks the device nothing.

    Attributes:
        target_T: Their ids, shape [T].
        temperature_T, top_k_T, top_p_T: Shape [T], or None.
        bits: For each of the C tokens sampled within a grammar the tokens that it allowed there,
            shape [C, bytes] or None.
        bits_T: Which of the C each token is, -1 where there was no grammar, shape [T] or None.
    """

    target_T: IntArray
    temperature_T: FloatArray | None
    top_k_T: IntArray | None
    top_p_T: FloatArray | None
    bits: Bits | None
    bits_T: IntArray | None

    @staticmethod
    def of(rows: Sequence[Row], vocabulary: int, grammars: Grammars | None) -> Sampled:
        """The completion tokens of `rows`, in row order.

        Args:
            vocabulary: Number of logits of the model.
            grammars: The engine's; needed where a row was sampled within a grammar.

        Raises:
            TrainingError: A row has a grammar, and there are no `grammars` to replay it with.
            GrammarError: A row's completion does not follow its grammar.
        """
        sampling = [row.sampling for row in rows]
        counts = [len(row.completion_ids) for row in rows]

        def each(values: list[Any], dtype: type) -> np.ndarray[Any, Any]:
            return np.repeat(np.array(values, dtype=dtype), counts)

        temperature_T = top_k_T = top_p_T = None
        if any(s.temperature != 1 for s in sampling):
            temperature_T = each([s.temperature for s in sampling], np.float32)
        if any(s.top_k > 0 or s.top_p != 1 for s in sampling):
            top_k_T = each([s.top_k for s in sampling], np.int64)
            top_p_T = each([s.top_p for s in sampling], np.float64)
        bits, bits_T = _replayed(rows, vocabulary, grammars)
        return Sampled(
            np.array([id_ for row in rows for id_ in row.completion_ids], dtype=np.int64),
            temperature_T,
            top_k_T,
            top_p_T,
            bits,
            bits_T,
        )

    def take(self, places: IntArray | slice) -> Sampled:
        """Some of the tokens."""

        def of(values: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any] | None:
            return None if values is None else values[places]

        return Sampled(
            self.target_T[places],
            of(self.temperature_T),
            of(self.top_k_T),
            of(self.top_p_T),
            self.bits,
            of(self.bits_T),
        )

    def logprobs(self, logits_TV: Tensor, *, with_entropy: bool) -> TokenLogprobs:
        """Log-probs of the distributions that were sampled.

        Tokens outside a grammar are removed: which ones does not depend on the weights. Logits are
        divided by the temperature. With top_k or top_p the distribution is cut and renormalised in
        the same way under the current weights, the sampled token always counted in: exact for the
        weights that sampled it, the natural continuation after an update.

        Args:
            logits_TV: What the model gives for each token; taken up to float32 at least.
            with_entropy: Keep the graph of the entropy (else it is detached, for metrics only).
        """
        logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
        target_T = to_device(self.target_T, logits_TV.device)
        logits_TV = self._as_sampled(self._within_grammars(logits_TV), target_T)
        all_logp_TV = logits_TV.log_softmax(-1)
        logp_T = all_logp_TV.gather(1, target_T[:, None])[:, 0]
        kept = all_logp_TV if with_entropy else all_logp_TV.detach()
        # A token that was removed has probability 0 and adds nothing: 0 * -inf is not 0.
        entropy_T = -(kept.exp() * kept.masked_fill(kept == -torch.inf, 0)).sum(-1)
        return TokenLogprobs(logp_T, entropy_T)

    def _within_grammars(self, logits_TV: Tensor) -> Tensor:
        """Logits with -inf for the tokens that a grammar did not allow at that position."""
        if self.bits is None or self.bits_T is None:
            return logits_TV
        places = np.flatnonzero(self.bits_T >= 0)
        if not len(places):
            return logits_TV
        allowed = unpacked(self.bits[self.bits_T[places]], logits_TV.shape[-1], logits_TV.device)
        removed_TV = torch.zeros_like(logits_TV, dtype=torch.bool)
        removed_TV.index_copy_(0, to_device(places, logits_TV.device), ~allowed)
        return logits_TV.masked_fill(removed_TV, -torch.inf)

    def _as_sampled(self, logits_TV: Tensor, target_T: Tensor) -> Tensor:
        """Logits scaled, and -inf outside top_k and top_p."""
        if self.temperature_T is not None:
            heat_T = to_device(self.temperature_T, logits_TV.device).to(logits_TV.dtype)
            logits_TV = logits_TV / heat_T[:, None]
        if self.top_k_T is None or self.top_p_T is None:
            return logits_TV
        with torch.no_grad():
            cut_TV = sampled_logprobs(
                logits_TV,
                top_k=to_device(self.top_k_T, logits_TV.device),
                top_p=to_device(self.top_p_T, logits_TV.device),
                largest_k=int(self.top_k_T.max(initial=0)),
            )
            removed_TV = cut_TV == -torch.inf
            removed_TV.scatter_(1, target_T[:, None], False)
        return logits_TV.masked_fill(removed_TV, -torch.inf)


def _replayed(
    rows: Sequence[Row], vocabulary: int, grammars: Grammars | None
) -> tuple[Bits | None, IntArray | None]:
    """`Sampled.bits` and `Sampled.bits_T` of the completion tokens of `rows`."""
    if not any(row.sampling.grammar for row in rows):
        return None, None
    if grammars is None:
        raise TrainingError(
            "a call was sampled within a grammar, but the trainer has none to replay it with: "
            "give it the engine's (PolicyTrainer(..., grammars=engine.grammars))"
        )
    masks, places, count = [], [], 0
    for row in rows:
        length = len(row.completion_ids)
        if row.sampling.grammar and length:
            masks.append(grammars.replay(row.sampling.grammar, row.completion_ids, vocabulary))
            places.append(np.arange(count, count + length))
            count += length
        else:
            places.append(np.full(length, -1))
    if not masks:
        return None, None
    width = max(mask.shape[1] for mask in masks)
    padded = [np.pad(mask, ((0, 0), (0, width - mask.shape[1]))) for mask in masks]
    return np.concatenate(padded), np.concatenate(places)


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
