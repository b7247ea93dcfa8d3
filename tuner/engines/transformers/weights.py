"""Noticing that shared weights have changed, so that no cached key or value outlives them.

peft puts an adapter's layers inside the model, so the transformers model inside the wrapper already
computes with the adapter; the engine and the trainer work on that one and stay free of peft.

The engine shares its weights with a trainer, which changes them in place. A trainer that forgets
`update_weights` must not get keys and values of the old weights mixed with the new ones, so the
weights are looked at before and after every forward pass. What catches which change (checked by
tests):

| change | caught by |
|---|---|
| `p.add_()`, `p.copy_()`, `load_state_dict`, AdamW (for-loop and foreach) | version counter |
| `module.weight = new`, `load_state_dict(assign=True)` | identity |
| `p.data = new` | address |
| AdamW (fused), `p.data.add_()`, kernels writing through a pointer | probe of the values |
| an adapter switched on or off, merged, scaled | the layers' switches |

The probe is the first elements of every parameter that is being trained: a change that leaves all
of those as they were and touches no version counter goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tuner.errors import ConfigError


def causal_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside one that is wrapped for LoRA, or the model itself."""
    inner: Any = model
    found: PreTrainedModel = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    return found


def served_model(model: nn.Module) -> PreTrainedModel:
    """The `causal_model` of one that an engine can serve.

    Raises:
        ConfigError: The adapter works from outside the model's layers (learned prompts, or LoRA
            that is switched on by tokens), so the model inside would generate without it.
    """
    adapter: Any = getattr(model, "active_peft_config", None)
    if adapter is not None and (
        adapter.is_prompt_learning or getattr(adapter, "alora_invocation_tokens", None)
    ):
        raise ConfigError(
            f"the model's adapter, a {type(adapter).__name__}, acts on prompts and not in the "
            "layers alone, which the engine does not serve; use LoRA without "
            "alora_invocation_tokens"
        )
    return causal_model(model)


_PROBE = 4
"""Elements looked at in each trained parameter."""


class WeightsGuard:
    """Remembers the weights of `model` without copying them; about 20 us per look on a CPU."""

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[dict[str, Any], str]] = [
            (module._parameters, name)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._adapted: list[Any] = [
            module for module in model.modules() if hasattr(module, "_disable_adapters")
        ]
        self.remember()

    def remember(self) -> None:
        """Take the weights as they are now for unchanged."""
        # Held, so that the id of a parameter cannot become another one's.
        self._parameters = [place[name] for place, name in self._places]
        self._state = self._look()
        self._on = self._switches()
        trained = [p for p in self._parameters if p.requires_grad] or self._parameters
        self._views = [p.detach().view(-1)[:_PROBE] for p in trained if p.is_contiguous()]
        self._probe = self._values()

    def changed(self) -> bool:
        """Whether the weights differ from those last remembered."""
        return (
            self._look() != self._state
            or self._switches() != self._on
            or not torch.equal(self._values(), self._probe)
        )

    def places(self) -> Hashable:
        """Equal as long as a recorded computation would read the same memory in the same way."""
        return tuple((id_, address) for id_, _, address in self._look()), tuple(self._switches())

    def _look(self) -> list[tuple[int, int, int]]:
        parameters = (place[name] for place, name in self._places)
        return [(id(p), p._version, p.data_ptr()) for p in parameters]

    def _switches(self) -> list[Hashable]:
        """Equal as long as the same adapters are on, at the same strength, merged or not; none of
        the parameters changes when they are switched."""
        return [
            (
                layer._disable_adapters,
                str(layer._active_adapter),
                tuple(getattr(layer, "merged_adapters", ())),
                tuple(getattr(layer, "scaling", {}).items()),
            )
            for layer in self._adapted
        ]

    def _values(self) -> Tensor:
        # Compared as bytes, because NaN is not equal to itself.
        return torch.cat(self._views).view(torch.uint8)
