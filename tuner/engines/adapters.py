"""What an engine must know of models that peft has wrapped.

peft puts an adapter's layers inside the model, so the transformers model inside the wrapper already
computes with the adapter; the engine and the trainer work on that one and stay free of peft.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tuner.errors import ConfigError


def served_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside one that is wrapped for LoRA, or the model itself.

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
    inner: Any = model
    found: PreTrainedModel = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    return found


class AdapterSwitches:
    """Which adapters of a model are on; none of its parameters changes when they are switched."""

    def __init__(self, model: nn.Module) -> None:
        self._layers: list[Any] = [
            module for module in model.modules() if hasattr(module, "_disable_adapters")
        ]

    def look(self) -> list[Hashable]:
        """Equal as long as the same adapters are on, at the same strength, merged or not."""
        return [
            (
                layer._disable_adapters,
                str(layer._active_adapter),
                tuple(getattr(layer, "merged_adapters", ())),
                tuple(getattr(layer, "scaling", {}).items()),
            )
            for layer in self._layers
        ]
