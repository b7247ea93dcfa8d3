"""Activation checkpointing of a model that stays in eval mode and serves an engine at other times.

Transformers checkpoints its layers in train mode only, which would also turn dropout on and caches
off. Here the layers that it marks for checkpointing are wrapped for one forward pass, and are as
they were when it ends; the backward pass needs no wrapper any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from tuner.errors import ConfigError


def check_checkpointing(model: nn.Module) -> None:
    """Refuse a model without layers to checkpoint.

    Raises:
        ConfigError: Names the setting and the model.
    """
    if not any(_layers(model)):
        raise ConfigError(
            f"tuner.activation_checkpointing is true, but {type(model).__name__} has no layers "
            "that transformers marks for it; set it to false"
        )


@contextmanager
def checkpointed_layers(model: nn.Module, *, enabled: bool) -> Iterator[None]:
    """A forward pass inside keeps the inputs of the layers, and computes the rest again in its
    backward pass; the gradient is the same."""
    layers = list(_layers(model)) if enabled else []
    for layer in layers:
        layer.forward = partial(_forward, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    return (m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))


def _forward(compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # No dropout, so no random numbers to restore.
    return checkpoint(
        partial(compute, **kwargs), *args, use_reentrant=False, preserve_rng_state=False
    )
