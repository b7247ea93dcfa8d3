"""From hidden states to the log-probs of the distributions that tokens were sampled from.

A row's tokens were sampled with some temperature, penalties, cuts and possibly a grammar; the
trainer computes the same quantity under the current weights.

Logits are computed for some tokens at a time and recomputed in the backward pass, so memory does
not grow with vocabulary x tokens, in any layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tuner.engines.grammar import Bits, Grammars, to_device, unpacked
from tuner.engines.sampling import Edit, LogitEdits, edited, kept_ids, sampled_logprobs
from tuner.engines.transformers.vision import decoder_of, vision_of
from tuner.errors import TrainingError
from tuner.traces.tree import IntArray
from tuner.training.batch import Row
from tuner.training.forward import kernels

FloatArray = np.ndarray[Any, Any]
Objects = np.ndarray[Any, Any]


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-prob and entropy of the T completion tokens of some rows, in row order, [T] each."""

    logp_T: Tensor
    entropy_T: Tensor


@dataclass(frozen=True)
class TokenTargets:
    """T sampled tokens with their sampling settings; None if a setting is off for all.

    They stay in main memory until `logprobs` needs them, without synchronising with the device.

    Attributes:
        target_T: Their ids, shape [T].
        temperature_T: Shape [T], or None.
        top_k_T, top_p_T, min_p_T: Cuts of tokens whose kept set is unknown; all of shape [T], or
            None.
        kept_T: The kept tokens (`tuner.engines.sampling`), or "", shape [T] or None.
        edits_T: Changes of single logits, or None, shape [T] or None.
        bits: For each of the C tokens sampled with a grammar the tokens that it allowed there,
            shape [C, bytes] or None.
        bits_T: Which of the C each token is, -1 without a grammar, shape [T] or None.
    """

    target_T: IntArray
    temperature_T: FloatArray | None
    top_k_T: IntArray | None
    top_p_T: FloatArray | None
    min_p_T: FloatArray | None
    kept_T: Objects | None
    edits_T: Objects | None
    bits: Bits | None
    bits_T: IntArray | None

    @staticmethod
    def of(rows: Sequence[Row], vocabulary: int, grammars: Grammars | None) -> TokenTargets:
        """The completion tokens of `rows`, in row order.

        Args:
            vocabulary: Number of logits of the model.
            grammars: The engine's; required if a row was sampled with a grammar.

        Raises:
            TrainingError: A row has a grammar, and there are no `grammars` to replay it with; or it
                has a token that its bad words forbid.
            GrammarError: A row's completion does not follow its grammar.
        """
        sampling = [row.sampling for row in rows]
        counts = [len(row.completion_ids) for row in rows]

        def each(values: list[Any], dtype: type) -> np.ndarray[Any, Any]:
            return np.repeat(np.array(values, dtype=dtype), counts)

        temperature_T = top_k_T = top_p_T = min_p_T = kept_T = None
        if any(s.temperature != 1 for s in sampling):
            temperature_T = each([s.temperature for s in sampling], np.float32)
        if any(row.kept for row in rows):
            kept = [row.kept or ("",) * len(row.completion_ids) for row in rows]
            kept_T = _objects([one for of_row in kept for one in of_row])
        if any(s.cuts for s in sampling):
            known_T = np.zeros(sum(counts), dtype=bool) if kept_T is None else kept_T != ""
            top_k_T = np.where(known_T, -1, each([s.top_k for s in sampling], np.int64))
            top_p_T = np.where(known_T, 1.0, each([s.top_p for s in sampling], np.float64))
            min_p_T = np.where(known_T, 0.0, each([s.min_p for s in sampling], np.float64))
            if known_T.all():
                top_k_T = top_p_T = min_p_T = None
        bits, bits_T = _replayed(rows, vocabulary, grammars)
        return TokenTargets(
            np.array([id_ for row in rows for id_ in row.completion_ids], dtype=np.int64),
            temperature_T,
            top_k_T,
            top_p_T,
            min_p_T,
            kept_T,
            _edits(rows),
            bits,
            bits_T,
        )

    def take(self, places: IntArray | slice) -> TokenTargets:

        def of(values: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any] | None:
            return None if values is None else values[places]

        return TokenTargets(
            self.target_T[places],
            of(self.temperature_T),
            of(self.top_k_T),
            of(self.top_p_T),
            of(self.min_p_T),
            of(self.kept_T),
            of(self.edits_T),
            self.bits,
            of(self.bits_T),
        )

    def logprobs(
        self, logits_TV: Tensor, *, with_entropy: bool, compiled: bool = False
    ) -> TokenLogprobs:
        """Log-probs of the distributions that were sampled.

        Tokens outside a grammar are removed, and bias and penalties applied: neither depends on the
        weights. Logits are divided by the temperature. If top_k, top_p or min_p cut the
        distribution, the tokens that were kept when it was sampled are kept. If these are not
        known, it is cut again under the current weights, the sampled token always included: exact
        for the weights that sampled it, an approximation after an update.

        Args:
            logits_TV: The model's logits for each token; raised to float32 at least.
            with_entropy: Keep the graph of the entropy (otherwise it is detached, for metrics
                only).
            compiled: Whether the last part is compiled.

        Raises:
            TrainingError: A sampled token is not among the kept ones.
        """
        target_T = to_device(self.target_T, logits_TV.device)
        if self._changes_logits:
            logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
            logits_TV = self._edited(self._within_grammars(logits_TV))
            logits_TV = self._within_kept(self._as_sampled(logits_TV, target_T))
        compute = kernels.kernel_of(_logprobs) if compiled else _logprobs
        return TokenLogprobs(*compute(logits_TV, target_T, with_entropy))

    @property
    def _changes_logits(self) -> bool:
        """Whether any token was sampled from a distribution other than the model's own."""
        changes = self.temperature_T, self.top_k_T, self.kept_T, self.edits_T, self.bits_T
        return any(change is not None for change in changes)

    def _within_grammars(self, logits_TV: Tensor) -> Tensor:
        """Logits with -inf for tokens that a grammar did not allow at that position."""
        if self.bits is None or self.bits_T is None:
            return logits_TV
        places = np.flatnonzero(self.bits_T >= 0)
        if not len(places):
            return logits_TV
        allowed = unpacked(self.bits[self.bits_T[places]], logits_TV.shape[-1], logits_TV.device)
        removed_TV = torch.zeros_like(logits_TV, dtype=torch.bool)
        removed_TV.index_copy_(0, to_device(places, logits_TV.device), ~allowed)
        return logits_TV.masked_fill(removed_TV, -torch.inf)

    def _edited(self, logits_TV: Tensor) -> Tensor:
        """Logits with bias and penalties."""
        if self.edits_T is None:
            return logits_TV
        found = [(place, edit()) for place, edit in enumerate(self.edits_T) if edit is not None]
        return edited(logits_TV, found) if found else logits_TV

    def _within_kept(self, logits_TV: Tensor) -> Tensor:
        """Logits with -inf for tokens removed by a cut."""
        if self.kept_T is None:
            return logits_TV
        size = logits_TV.shape[-1]
        places = np.flatnonzero(self.kept_T != "")
        left = np.zeros((len(places), size), dtype=bool)
        for row, place in zip(left, places, strict=True):
            try:
                row[kept_ids(self.kept_T[place])] = True
            except (ValueError, IndexError) as error:
                raise TrainingError(
                    f"the kept set of token {self.target_T[place]} (top_k, top_p, min_p) cannot "
                    f"be read: {error}: the trace is damaged, or of another model"
                ) from error
            if not row[self.target_T[place]]:
                raise TrainingError(
                    f"token {self.target_T[place]} was sampled but is not in the set kept by "
                    "top_k, top_p and min_p: the trace is damaged"
                )
        removed_TV = torch.zeros_like(logits_TV, dtype=torch.bool)
        removed_TV.index_copy_(
            0, to_device(places, logits_TV.device), to_device(~left, logits_TV.device)
        )
        return logits_TV.masked_fill(removed_TV, -torch.inf)

    def _as_sampled(self, logits_TV: Tensor, target_T: Tensor) -> Tensor:
        """Logits scaled, with -inf outside cuts whose kept set is unknown."""
        if self.temperature_T is not None:
            heat_T = to_device(self.temperature_T, logits_TV.device).to(logits_TV.dtype)
            logits_TV = logits_TV / heat_T[:, None]
        if self.top_k_T is None or self.top_p_T is None or self.min_p_T is None:
            return logits_TV
        with torch.no_grad():
            cut_TV = sampled_logprobs(
                logits_TV,
                top_k=to_device(self.top_k_T, logits_TV.device),
                top_p=to_device(self.top_p_T, logits_TV.device),
                min_p=to_device(self.min_p_T, logits_TV.device),
                largest_k=int(self.top_k_T.max(initial=0)),
            )
            removed_TV = cut_TV == -torch.inf
            removed_TV.scatter_(1, target_T[:, None], False)
        return logits_TV.masked_fill(removed_TV, -torch.inf)


def _logprobs(logits_TV: Tensor, target_T: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and entropies, of logits in which removed tokens are -inf."""
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    all_logp_TV = logits_TV.log_softmax(-1)
    logp_T = all_logp_TV.gather(1, target_T[:, None])[:, 0]
    kept = all_logp_TV if with_entropy else all_logp_TV.detach()
    # A removed token has probability 0 and must add nothing: 0 * -inf is not 0.
    entropy_T = -(kept.exp() * kept.masked_fill(kept == -torch.inf, 0)).sum(-1)
    return logp_T, entropy_T


def _divided(row: Row) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The prompt of a row's call, and the tokens that it sampled up to the end of the row."""
    border = len(row.prompt_ids) - row.begun
    return row.prompt_ids[:border], row.prompt_ids[border:] + row.completion_ids


def _edits(rows: Sequence[Row]) -> Objects | None:
    """`TokenTargets.edits_T` of the completion tokens of `rows`."""
    if not any(row.sampling.edits_logits for row in rows):
        return None
    found: list[partial[Edit] | None] = []
    for row in rows:
        if row.sampling.edits_logits:
            edits = LogitEdits(row.sampling, *_divided(row))
            for place, token in enumerate(row.completion_ids, row.begun):
                if token in edits.banned(place):
                    raise TrainingError(
                        f"call {row.call_id!r}: token {place} is {token}, which completes one of "
                        "its bad_words: the trace is damaged"
                    )
                found.append(partial(edits.after, place))
        else:
            found += [None] * len(row.completion_ids)
    return _objects(found)


def _objects(items: Sequence[Any]) -> Objects:
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array


def _replayed(
    rows: Sequence[Row], vocabulary: int, grammars: Grammars | None
) -> tuple[Bits | None, IntArray | None]:
    """`TokenTargets.bits` and `TokenTargets.bits_T` of the completion tokens of `rows`."""
    if not any(row.sampling.grammar for row in rows):
        return None, None
    if grammars is None:
        raise TrainingError(
            "a call was sampled with a grammar, but the trainer has no grammars to replay it: "
            "give it the engine's (PolicyTrainer(..., grammars=engine.grammars))"
        )
    masks, places, count = [], [], 0
    for row in rows:
        length = len(row.completion_ids)
        if row.sampling.grammar and length:
            _, sampled = _divided(row)
            masks.append(grammars.replay(row.sampling.grammar, sampled, vocabulary)[row.begun :])
            places.append(np.arange(count, count + length))
            count += length
        else:
            places.append(np.full(length, -1))
    if not masks:
        return None, None
    width = max(mask.shape[1] for mask in masks)
    padded = [np.pad(mask, ((0, 0), (0, width - mask.shape[1]))) for mask in masks]
    return np.concatenate(padded), np.concatenate(places)


LOGITS = {"cpu": 1 << 25, "cuda": 1 << 27}
"""Number of logits in memory at once, by kind of device. Each part writes and adds the gradient of
the output embedding, which is most of the cost of a small part: on a CPU 176 tokens of 151,936
(width 1024, bfloat16) took 2.5 times as long in parts of 55 as at once."""


def body(model: PreTrainedModel) -> nn.Module:
    """The model below the output embedding, which takes `decoder_inputs` and gives
    `last_hidden_state`; all of a critic."""
    if vision_of(model) is not None:
        return decoder_of(model)
    found = model.base_model
    # Llama 4's text model names a part that only its multimodal one has, and so finds itself.
    inner: nn.Module = getattr(model, "model", model) if found is model else found
    return inner


class OutputHead:
    """From a causal LM's last hidden states to its logits, as its own `forward` computes them.

    The output embedding, and what some models apply to the logits after it: Gemma's
    `final_logit_softcapping`, Granite's `logits_scaling`, Cohere's `logit_scale`. Anything else a
    model does is detected by comparison (`tuner.training.forward.layouts`).
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
    head: OutputHead,
    hidden_TD: Tensor,
    sampled: TokenTargets,
    *,
    with_entropy: bool,
    compiled: bool = False,
) -> TokenLogprobs:
    """Log-probs of T tokens; their logits are never all in memory, nor kept for the backward.

    Args:
        hidden_TD: Last hidden states where each of the tokens was sampled, shape [T, D].
        sampled: The tokens.
        with_entropy: Keep the graph of the entropy (otherwise it is detached, for metrics only).
        compiled: Whether the computation on the logits is compiled.
    """

    def of_part(hidden_CD: Tensor, part: TokenTargets) -> tuple[Tensor, Tensor]:
        found = part.logprobs(head(hidden_CD), with_entropy=with_entropy, compiled=compiled)
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
