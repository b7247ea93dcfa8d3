"""Small models with a LoRA adapter."""

from __future__ import annotations

import torch
from peft import PeftModel
from torch import nn

from tuner.config.schema import LoraSection
from tuner.runs.models import add_adapter


def wrapped(model: nn.Module, *, new: bool = False, **settings: object) -> PeftModel:
    """`model` with an adapter that has been trained already, or that is new."""
    section = LoraSection(**{"lora_rank": 4, **settings})  # type: ignore[arg-type]
    adapted = add_adapter(model, section, model_path="org/base", seed=0).model  # type: ignore[arg-type]
    if not new:
        change_adapter(adapted)
    return adapted


@torch.no_grad()
def change_adapter(model: nn.Module, seed: int = 1) -> None:
    """What an optimizer does: change every trained parameter in place."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter) * 0.05)
