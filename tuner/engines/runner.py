"""What the two ways of serving requests have in common."""

from __future__ import annotations

import inspect
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedModel

from tuner.engines.request import Request


@dataclass
class EngineStats:
    """What an engine has done since it was made, and what it is doing now.

    Attributes:
        prompt_tokens_computed: Tokens computed before the first sampled one, and those computed
            again after the weights changed under a request in flight.
        prompt_tokens_reused: Tokens whose keys and values were taken from another request.
        sampled_tokens: Tokens sampled.
        requests: Requests finished.
        steps: Forward passes.
        step_seconds: Seconds in those passes, sampling and bookkeeping included.
        unannounced_updates: Times the weights had changed without `update_weights`. The cache was
            forgotten in time, but the recorded versions are those of the last announced weights.
        running: Requests that hold a slot now.
        waiting: Requests that wait for one now.
    """

    prompt_tokens_computed: int = 0
    prompt_tokens_reused: int = 0
    sampled_tokens: int = 0
    requests: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    unannounced_updates: int = 0
    running: int = 0
    waiting: int = 0


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
