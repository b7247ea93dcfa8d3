"""How layers are computed: compiled, with checkpoints, and of how many tokens at once."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from tuner.errors import TrainingError

T = TypeVar("T")
_log = logging.getLogger(__name__)

_FEWEST = 256
"""Tokens of a micro-batch below which fewer would hardly take less."""


@cache
def kernel_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with one kernel for what is done to each number between two matrix products.

    Sizes are left open. It is compiled anew for each width, dtype and kind of layer, with and
    without a gradient; beyond torch's limit of these it would silently be as slow as before, and
    FlexAttention would compute all scores at once.
    """
    compiled = torch.compile(function, dynamic=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=256, fail_on_recompile_limit_hit=True):
            return compiled(*args, **kwargs)

    return call


@contextmanager
def prepared_layers(model: nn.Module, *, checkpointed: bool, compiled: bool) -> Iterator[None]:
    """A forward pass inside computes the same in another way.

    Args:
        checkpointed: Keep the inputs of the layers, and compute the rest again in the backward
            pass.
        compiled: One kernel for what is done to each number between two matrix products.
    """
    layers = list(layers_of(model)) if checkpointed or compiled else []
    for layer in layers:
        compute: Any = layer.forward
        if compiled:
            # Without transformers' own switch for checkpointing, which all models share.
            compute = MethodType(kernel_of(inspect.unwrap(type(layer).forward)), layer)
        layer.forward = partial(_checkpointed, compute) if checkpointed else compute
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The layers that transformers marks as those that a model repeats."""
    return (m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))


def _checkpointed(compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # No dropout, so no random numbers to restore.
    return checkpoint(
        partial(compute, **kwargs), *args, use_reentrant=False, preserve_rng_state=False
    )


class Room:
    """How many tokens a device has room for, as far as that is known."""

    def __init__(self) -> None:
        self._most: int | None = None
        self._used = 0

    def of(self, tokens: int) -> int:
        """At most so many tokens of a micro-batch."""
        self._used = tokens if self._most is None else min(tokens, self._most)
        return self._used

    def fitting(self, work: Callable[[], T]) -> T:
        """What `work` gives; from the beginning and with micro-batches of half the size where
        there was no room for it, which changes no gradient.

        Raises:
            TrainingError: There is no room for small ones either.
        """
        while True:
            try:
                return work()
            except torch.OutOfMemoryError as error:
                said = str(error).split(". ")[0]
            # Out of the handler, which keeps what was computed alive.
            if self._used // 2 < _FEWEST:
                raise TrainingError(
                    f"there is no room for {self._used} tokens ({said}): set "
                    "tuner.activation_checkpointing, trainer.optimizer_offload or tuner.dtype: "
                    "bfloat16, or take a smaller model (docs/training.md)"
                )
            self._most = self._used // 2
            _log.warning(
                "there is no room for micro-batches of %d tokens (%s): from here on they have %d, "
                "with the same gradient; trainer.max_token_len_per_gpu: %d begins with that",
                self._used,
                said,
                self._most,
                self._most,
            )
            torch.cuda.empty_cache()
