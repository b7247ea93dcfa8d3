"""What the two ways of serving requests have in common."""

from __future__ import annotations

import inspect
from collections import deque
from typing import Any, Protocol

from transformers import PreTrainedModel

from tuner.engines.request import Request


class Runner(Protocol):
    """Turns waiting requests into finished ones, one forward pass at a time."""

    waiting: deque[Request]
    active: list[Request]

    def step(self, version: int) -> list[Request]: ...

    def tokens_ahead(self) -> int: ...

    def drop_abandoned(self) -> None: ...

    def evict(self) -> None: ...


def forward_options(model: PreTrainedModel) -> dict[str, Any]:
    """Arguments that make `model` compute the logits of the last position only, if it can."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        return {"logits_to_keep": 1}
    return {}
