"""Models whose arithmetic is all in the dtype of their weights."""

from __future__ import annotations

import types

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def all_float64(model: PreTrainedModel) -> PreTrainedModel:
    """`model` in float64, its norms too, which transformers computes in float32.

    With those, a gradient depends by 1e-7 on the order in which it is added up.
    """
    model.double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(_rms_norm, module)
    return model


def _rms_norm(self: nn.Module, states: Tensor) -> Tensor:
    epsilon = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
    offset = 1.0 if type(self).__name__.startswith("Gemma") else 0.0
    scaled = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + epsilon)
    return scaled * (offset + self.weight)
