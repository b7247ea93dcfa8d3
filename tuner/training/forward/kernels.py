"""Compiled layers, and layers that keep only their inputs until the backward pass.

Transformers checkpoints activations in train mode only, which would also turn dropout on and caches
off. Here the layers that it marks for it are wrapped for one forward pass and restored at its end;
the backward pass does not need the wrapper.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


@cache
def kernel_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` into one kernel for the element-wise work between two matrix products.

    Sizes are left open. It is compiled again for each width, dtype and kind of layer, with and
    without a gradient; beyond torch's limit of these it would silently be as slow as before, and
    FlexAttention would compute all scores at once.
    """
    compiled = torch.compile(function, dynamic=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        with _compilable():
            return compiled(*args, **kwargs)

    return call


def _compilable() -> AbstractContextManager[None]:
    """Raise torch's limit of compilations in the block. A change of its settings takes as long as
    a compiled function's own call, so that a pass changes them once for all layers."""
    if torch._dynamo.config.fail_on_recompile_limit_hit:
        return nullcontext()
    limits = {"recompile_limit": 256, "fail_on_recompile_limit_hit": True}
    changed: AbstractContextManager[None] = torch._dynamo.config.patch(limits)
    return changed


STRETCH = 8
"""Layers of a forward pass after which freed memory is returned. After each layer it would take
more time. Without it a LoRA update with eight layers took a third more than what is in use."""


@contextmanager
def prepared_layers(
    model: nn.Module,
    *,
    checkpointed: bool,
    compiled: bool,
    between: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Compute forward passes in the block in another, equivalent way.

    Args:
        checkpointed: Keep the inputs of the layers, and recompute the rest in the backward pass.
        compiled: One kernel for the element-wise work between two matrix products.
        between: Called before the block, after every `STRETCH` layers, and in the backward pass
            when only the first layer is left.
    """
    layers = list(layers_of(model))
    calls = []
    if between is not None:
        between()
        ends = layers[STRETCH - 1 :: STRETCH]
        calls = [each.register_forward_hook(lambda *_: between()) for each in ends]
        calls += [each.register_forward_hook(partial(_at_gradient, between)) for each in layers[:1]]
    for layer in layers:
        compute: Any = layer.forward
        if compiled:
            # Without transformers' own switch for checkpointing, which all models share.
            compute = MethodType(kernel_of(inspect.unwrap(type(layer).forward)), layer)
        layer.forward = partial(_checkpointed, compute) if checkpointed else compute
    try:
        with _compilable() if compiled else nullcontext():
            yield
    finally:
        for call in calls:
            call.remove()
        for layer in layers:
            del layer.forward


def _at_gradient(call: Callable[[], None], layer: nn.Module, inputs: Any, output: Any) -> None:
    """Call it when the backward pass has the gradient of a layer's output."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    if hidden.requires_grad:
        hidden.register_hook(lambda _: call())


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The layers that transformers marks as repeated."""
    return (m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))


def _checkpointed(compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # No dropout, so no random numbers to restore.
    return checkpoint(
        partial(compute, **kwargs), *args, use_reentrant=False, preserve_rng_state=False
    )
