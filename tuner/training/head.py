"""From a transformers causal LM's last hidden states to log-probs, without all logits in memory.

Logits are made for some tokens at a time and made again in the backward pass, so memory does not
grow with vocabulary x tokens, in whichever layout the rows went through the layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tuner.training.sampled import Sampled, TokenLogprobs

LOGITS = {"cpu": 1 << 23, "cuda": 1 << 27}
"""Logits that are in memory at once, by kind of device."""


def causal_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside one that is wrapped for LoRA, or the model itself."""
    inner: Any = model
    found: PreTrainedModel = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    return found


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
    does anything else is found out by comparison (`tuner.training.forward`).
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
