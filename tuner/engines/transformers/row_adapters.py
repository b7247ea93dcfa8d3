"""LoRA adapters in the engine's passes: one for each row, or one merged into the weights.

peft computes a pass with the adapters that are switched on. Here each token has the adapter of its
request, or none:

    row 0   writer    a b c          base(x) + writer(x) for the tokens of rows 0 and 2,
    row 1   critic    . . d          base(x) + critic(x) for that of row 1,
    row 2   writer    . e f          base(x) for row 3
    row 3             g h i

A layer sees the tokens of a pass in one of three forms, told apart by their number: all columns,
those without padding, or the last column (an output layer). A layer that sees another number, such
as an expert that gets only some tokens, raises RuntimeError.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tuner.engines.transformers.kv_cache import Placement
from tuner.errors import ConfigError

_log = logging.getLogger(__name__)

Parts = list[tuple[str, Tensor | None]]
"""Adapters, and the tokens that each computes; None for all."""


class RowAdapters:
    """Makes a model's layers compute each row with its own adapter, inside `of_rows`.

    Args:
        model: The transformers model with peft's layers. Outside of `of_rows` they compute as peft
            says.
        names: peft's names of the adapters that rows may have.

    Raises:
        ConfigError: An adapter is on a layer that is not linear.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        from peft.tuners.lora import Linear, LoraLayer

        self.names = frozenset(names)
        self._rows: Sequence[str | None] | None = None
        self._parts: dict[int, Parts] = {}
        self._device = next(model.parameters()).device
        for name, module in model.named_modules():
            if not isinstance(module, LoraLayer):
                continue
            if not isinstance(module, Linear):
                raise ConfigError(
                    f"model.adapters: the layer {name} is a {type(module.base_layer).__name__}, in "
                    "which requests of different roles cannot be computed together: remove it from "
                    "target_modules"
                )
            module.forward = self._forward_of(module, module.forward)

    def _forward_of(self, layer: Any, usual: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self._rows is None:
                return usual(x, *args, **kwargs)
            result: Tensor = layer.base_layer(x, *args, **kwargs)
            dtype, shape = result.dtype, result.shape
            flat_x, result = x.reshape(-1, x.shape[-1]), result.reshape(-1, shape[-1])
            for name, places in self._parts_of(len(flat_x)):
                if name not in layer.lora_A:
                    continue
                first, second = layer.lora_A[name], layer.lora_B[name]
                read = flat_x if places is None else flat_x[places]
                change = second(first(read.to(first.weight.dtype))) * layer.scaling[name]
                if places is None:
                    result = (result + change).to(dtype)
                else:
                    changed = (result[places] + change).to(dtype)
                    result = result.index_copy(0, places, changed)
            return result.reshape(shape)

        return forward

    def _parts_of(self, tokens: int) -> Parts:
        assert self._rows is not None
        if (only := set(self._rows)) == {self._rows[0]}:
            return [(name, None) for name in only if name is not None]
        if (found := self._parts.get(tokens)) is None:
            raise RuntimeError(
                f"a layer with adapters got {tokens} tokens of a pass over {sorted(self._parts)}"
            )
        return found

    @contextmanager
    def of_rows(
        self,
        rows: Sequence[str | None],
        columns: int = 1,
        placement: Placement | None = None,
    ) -> Iterator[None]:
        """Compute a pass in the block, with these adapters.

        Args:
            rows: Of each row, m of them; None for the model without an adapter.
            columns: Number C of columns.
            placement: Of the tokens.
        """
        of_rows = np.array([name or "" for name in rows])
        of_tokens = of_rows.repeat(columns)
        source = None if placement is None else placement.source
        forms = [of_tokens, of_rows]
        if source is not None:
            forms.append(of_tokens[source.cpu().numpy()])
        self._parts = {len(form): self._divided(form) for form in forms}
        self._rows = rows
        try:
            yield
        finally:
            self._rows = None

    def _divided(self, names: Any) -> Parts:
        return [
            (name, torch.from_numpy(np.flatnonzero(names == name)).to(self._device))
            for name in sorted(set(names.tolist()) - {""})
        ]


MERGED_ERROR = 1e-5
"""Maximum by which merging may change the log-prob of a sampled token, on average. In a model of 30
layers (SmolLM2) it changes by 5e-6 to 1e-5 on average, and by up to 2.5e-5 at single positions. The
error of float32, beside float64, is as large, with and without merging."""


class MergedAdapters:
    """Makes a model's layers compute with the adapters that are on added to their weights, inside
    `in_use`.

    A layer takes one product of matrices in place of three. The sums are made again for new weights
    and only for layers of float32 on a CPU; the model's own weights stay as they are.

    Args:
        model: The transformers model with peft's layers.
        logits: Computes logits of it, to compare both ways.
    """

    def __init__(self, model: nn.Module, logits: Callable[[], Tensor]) -> None:
        self._logits = logits
        self._weights: dict[int, Tensor] = {}
        self._this = threading.local()  # another thread may train the model
        self._agree: bool | None = None
        self.layers = 0
        for module in model.modules():
            if _merges(module):
                module.forward = self._forward_of(module, module.forward)
                self.layers += 1

    def _forward_of(self, layer: Any, usual: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not getattr(self._this, "on", False) or layer.disable_adapters or layer.merged:
                return usual(x, *args, **kwargs)
            weight = self._weights.get(id(layer))
            if weight is None:
                weight = layer.base_layer.weight
                for name in layer.active_adapters:
                    if name in layer.lora_A:
                        first, second = layer.lora_A[name].weight, layer.lora_B[name].weight
                        weight = torch.addmm(weight, second, first, alpha=layer.scaling[name])
                self._weights[id(layer)] = weight = weight.detach()
            return F.linear(x, weight, layer.base_layer.bias)

        return forward

    def forget(self) -> None:
        """Release the sums: the weights have changed, or their memory is needed."""
        self._weights.clear()
        self._agree = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Compute with sums in the block, if they give the same log-probs."""
        if self._agree is None:
            self._agree = self._compared() <= MERGED_ERROR
            if not self._agree:
                self._weights.clear()
        self._this.on = self._agree
        try:
            yield
        finally:
            self._this.on = False

    @torch.no_grad()
    def _compared(self) -> float:
        wanted = self._logits().log_softmax(-1)
        self._this.on = True
        try:
            change = (self._logits().log_softmax(-1) - wanted).abs()
        finally:
            self._this.on = False
        difference = float((wanted.exp() * change).sum(-1).mean())
        if difference > MERGED_ERROR:
            _log.warning(
                "Adapters are not merged for generation: log-probs would differ by %.1e", difference
            )
        return difference


def _merges(module: nn.Module) -> bool:
    """Whether the sum of a layer's weights and its adapters' is all that it computes."""
    if not hasattr(module, "_disable_adapters"):
        return False
    from peft.tuners.lora import Linear

    if not isinstance(module, Linear) or type(module.base_layer) is not nn.Linear:
        return False
    weights = [module.base_layer.weight, *module.lora_A.parameters(), *module.lora_B.parameters()]
    plain = not (module.lora_variant or any(module.lora_bias.values()) or module.fan_in_fan_out)
    return plain and all(w.dtype == torch.float32 and w.device.type == "cpu" for w in weights)
