"""The simple way of serving requests: one at a time."""

from __future__ import annotations

import inspect
from collections import deque
from typing import Any

import torch
from transformers import PreTrainedModel

from tuner.engines.base import EngineStats
from tuner.engines.request import Request, sample_next
from tuner.engines.sampling import SamplingBatch
from tuner.engines.transformers.weights import WeightsGuard


def forward_options(model: PreTrainedModel) -> dict[str, Any]:
    """Arguments that make `model` compute the logits of the last position only, if it can."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        return {"logits_to_keep": 1}
    return {}


class SoloRunner:
    """Serves requests in the order they come, each alone from its first token to its last.

    For two purposes. Models whose layers keep something else than keys and values per token
    (linear attention, state spaces, shared or compressed caches) cannot be served from rows. And
    a deterministic run needs numbers that do not depend on who else is in flight: every forward
    pass here has a batch of one and no reused prefix, so equal requests give bit-identical
    results. It costs the throughput of batching and every shared prefix.
    """

    def __init__(self, model: PreTrainedModel, guard: WeightsGuard, stats: EngineStats) -> None:
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        self._model = model
        self._guard = guard
        self._stats = stats
        self._options = forward_options(model)
        self._cache_name = (
            "cache_params"
            if "cache_params" in inspect.signature(model.forward).parameters
            else "past_key_values"
        )
        self._cache: Any = None

    def tokens_ahead(self) -> int:
        """How many prompt tokens the next step computes at most; 0 if it continues completions."""
        if self._cache is not None:
            return 0
        ahead = self.active or list(self.waiting)[:1]
        return sum(len(request.token_ids()) for request in ahead)

    def drop_abandoned(self) -> None:
        """Forget requests that nobody waits for."""
        self.waiting = deque(request for request in self.waiting if not request.abandoned)
        if self.active and self.active[0].abandoned:
            self.active = []
            self._cache = None

    def evict(self) -> None:
        """Forget what was computed under earlier weights; a request in flight starts it afresh."""
        self._cache = None

    def step(self, version: int) -> list[Request]:
        """Run one forward pass and sample; returns the requests that are finished."""
        if not self.active:
            if not self.waiting:
                return []
            self.active = [self.waiting.popleft()]
            self._cache = None
        request = self.active[0]
        tokens = request.token_ids()
        new = tokens if self._cache is None else tokens[-1:]
        ids = torch.tensor([new], device=self._model.device)
        output = self._model(
            input_ids=ids, use_cache=True, **{self._cache_name: self._cache}, **self._options
        )
        if self._guard.changed():
            return []
        if len(new) > 1 or not request.completion_ids:
            self._stats.prompt_tokens_computed += len(new)
        request.cached_tokens = 0
        self._cache = getattr(output, self._cache_name, None)
        batch = SamplingBatch.of([request.sampling], ids.device)
        _, finished = sample_next([request], batch, output.logits[:, -1], version)
        if finished:
            self.active = []
            self._cache = None
        self._stats.sampled_tokens += 1
        return [request] if finished else []
