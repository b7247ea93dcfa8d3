"""Weights that the engine serves while others are trained."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel


class ServedCopy:
    """A second copy of what is trained; what is frozen is shared.

    Args:
        model: The model that is trained. Of its parameters those that require a gradient are
            copied, with LoRA only the adapter's.

    Attributes:
        model: The copy. It changes in `update` only.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
        self.model: PreTrainedModel = copy.deepcopy(model, frozen)
        sources = {name: p for name, p in model.named_parameters() if p.requires_grad}
        targets = dict(self.model.named_parameters())
        self._pairs = [(targets[name], source) for name, source in sources.items()]
        for target, _ in self._pairs:
            target.requires_grad_(False)

    @torch.no_grad()
    def update(self) -> None:
        """Take over the weights as they are now. Nobody may compute with the copy meanwhile."""
        for target, source in self._pairs:
            target.copy_(source)
