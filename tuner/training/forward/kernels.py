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
_SURE = 0.9
"""Part of what is free that can be had in the pieces that are asked for."""


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


def free_bytes(device: torch.device) -> int | None:
    """Bytes of a GPU that can be had, those that PyTorch has and does not use included; None of
    any other device."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


class Room:
    """How many tokens a device has room for, as far as that is known."""

    def __init__(self) -> None:
        self._most: int | None = None
        self._used = 0
        self._warned = False

    def of(self, tokens: int) -> int:
        """At most so many tokens of a micro-batch."""
        self._used = tokens if self._most is None else min(tokens, self._most)
        return self._used

    def lacks(self, needed: int, tokens: int, device: torch.device) -> bool:
        """Whether a GPU has less room than a pass over so many tokens needs; said once."""
        free = free_bytes(device)
        if free is None or needed <= free * _SURE:
            return False
        if not self._warned:
            _log.warning(
                "a pass over %d tokens would keep %.2f GiB for its backward pass, and %.2f are "
                "free: its layers keep their inputs and are computed again, with the same "
                "gradient (tuner.activation_checkpointing: auto); a smaller "
                "trainer.max_token_len_per_gpu takes less time",
                tokens,
                needed / 2**30,
                free / 2**30,
            )
        self._warned = True
        return True

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
