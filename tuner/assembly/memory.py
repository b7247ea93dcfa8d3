"""The memory that a run is expected to need, before it needs it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from tuner.config import RunConfig
from tuner.engines.transformers.model_shape import head_width, layer_configs
from tuner.training.forward.activations import Activations
from tuner.training.forward.layouts import free_bytes

_ADAM = 4 + 4 + 4
"""Bytes of a float32 gradient and of Adam's two moments."""


@dataclass(frozen=True)
class Needs:
    """Bytes that a run expects to need.

    Attributes:
        trainer: Weights, gradients, optimizer state, reference, critic and auxiliary models.
        weights: The engine's own copy.
        request: Keys and values of one request of the greatest length.
        gradients: The part of `trainer` that is there during an update only.
        update: What an update takes beside `trainer`, where `trainer.max_token_len_per_gpu` says
            how long its micro-batches are; else 0.
    """

    trainer: int
    weights: int
    request: int
    gradients: int = 0
    update: int = 0


def needs_of(
    config: RunConfig,
    model: Any,
    max_model_len: int,
    *,
    references: int,
    critics: int,
    auxiliary: int = 0,
) -> Needs:
    """What a run of `model` expects to need.

    Args:
        model: The policy, loaded.
        max_model_len: Prompt and completion tokens of one request at most.
        references: Frozen copies of it.
        critics: Models of its size that are trained besides.
        auxiliary: Bytes of other models that are served on its device.
    """
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    parameters = sum(p.numel() for p in model.parameters())
    each = torch.finfo(model.dtype).bits // 8
    moments = _ADAM if config.tuner.optimizer_state == "float32" else 4 + 1 + 1
    masters = 4 if model.dtype != torch.float32 else 0
    update = moments + masters
    # Gradients stay on the device.
    kept = 4 if config.trainer.optimizer_offload else update
    settings = model.config.get_text_config(decoder=True)
    token = sum(
        2 * each * head_width(layer) * (getattr(layer, "num_key_value_heads", None) or heads)
        for layer in layer_configs(settings)
        if (heads := getattr(layer, "num_attention_heads", 0))
    )
    needs = Needs(
        trainer=(1 + references + critics) * each * parameters
        + kept * trained
        + update * critics * parameters
        + auxiliary,
        weights=each * parameters,
        request=token * max_model_len,
        gradients=4 * (trained + critics * parameters),
    )
    tokens = config.trainer.max_token_len_per_gpu
    if tokens is None:
        return needs
    return replace(needs, update=peak_of(config, model, needs, tokens) - needs.trainer)


def peak_of(
    config: RunConfig,
    model: Any,
    needs: Needs,
    tokens: int,
    *,
    sampled: int | None = None,
    alone: bool = False,
) -> int:
    """Bytes of a run at its peak, which is in an update.

    Args:
        model: The policy.
        needs: What it needs besides.
        tokens: Of the largest micro-batch.
        sampled: Those of them that are trained; not given: all.
        alone: Whether an update has one micro-batch.
    """
    compiled = config.tuner.compile
    kept = Activations.of(
        model,
        layout=config.tuner.layout,
        compiled=model.device.type == "cuda" if compiled is None else compiled,
    )

    def total(checkpointing: bool) -> int:
        update = kept.peak(
            tokens,
            checkpointing=checkpointing,
            gradients=needs.gradients,
            sampled=sampled,
            alone=alone,
        )
        return needs.trainer - needs.gradients + update

    asked = config.tuner.activation_checkpointing
    if asked != "auto":
        return total(asked)
    free, without = free_bytes(model.device), total(False)
    fits = free is None or without - needs.weights <= free
    return without if fits else total(True)


def micro_batch_tokens(config: RunConfig, max_model_len: int) -> int:
    """Tokens of a micro-batch, at most."""
    return config.trainer.max_token_len_per_gpu or 2 * max_model_len
