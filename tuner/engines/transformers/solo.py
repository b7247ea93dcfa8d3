"""The simple way of serving requests: one at a time."""

from __future__ import annotations

import inspect
from collections import deque
from typing import Any

import torch
from torch import Tensor
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


def continued(
    model: PreTrainedModel, ids: Tensor, cache: Any, first: int | None
) -> tuple[Tensor, Any]:
    """Logits after the last of `ids` [1, C], which continue what is cached, [1, V]; and the cache
    with them, None where the model keeps none.

    Args:
        first: Position of the first of them; None where the model knows it from the cache.
    """
    names = inspect.signature(model.forward).parameters
    name = "cache_params" if "cache_params" in names else "past_key_values"
    options = forward_options(model) | {name: cache}
    if first is not None:
        places = torch.arange(first, first + ids.shape[1], device=ids.device)
        options["position_ids"] = places[None]
    output = model(input_ids=ids, use_cache=True, **options)
    return output.logits[:, -1], getattr(output, name, None)


@torch.no_grad()
def names_positions(model: PreTrainedModel, length: int) -> bool | str:
    """Compare generation with a plain forward pass over `length` tokens.

    Returns:
        Whether a pass that continues a cache has to be told its positions (Bamba takes them to
        begin at 0 otherwise); or what differs either way.
    """
    ids = torch.arange(length, device=model.device) * 7 + 3
    ids = ids[None] % model.config.get_text_config(decoder=True).vocab_size
    why = ""
    for told in (False, True):
        try:
            wanted = model(input_ids=ids, use_cache=False).logits[0, length - 3 :]
            got, cache = [], None
            for end in range(length - 2, length + 1):
                first = 0 if cache is None else end - 1
                logits, cache = continued(model, ids[:, first:end], cache, first if told else None)
                got.append(logits)
            found = differ(torch.cat(got), wanted)
        except Exception as error:  # whatever a model's own code makes of a cache
            found = f"its forward pass fails ({type(error).__name__}: {error})"
        if found is None:
            return told
        why = why or found
    return why


def differ(got: Tensor, wanted: Tensor) -> str | None:
    """Whether logits [T, V] are others than rounding makes them."""
    allowed = 1e-3 if got.dtype in (torch.float32, torch.float64) else 0.25
    difference = float((got.float() - wanted.float()).abs().max() / wanted.float().std())
    if difference > allowed:
        return f"its logits would differ by {difference:.2g} standard deviations"
    return None


class SoloRunner:
    """Serves requests in the order they come, each alone from its first token to its last.

    For two purposes. Models whose layers keep something else than keys and values per token
    (linear attention, state spaces, shared or compressed caches) cannot be served from rows. And
    a deterministic run needs numbers that do not depend on who else is in flight: every forward
    pass here has a batch of one and no reused prefix, so equal requests give bit-identical
    results. It costs the throughput of batching and every shared prefix.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        guard: WeightsGuard,
        stats: EngineStats,
        *,
        names_positions: bool = False,
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        self._model = model
        self._guard = guard
        self._stats = stats
        self._names_positions = names_positions
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
        first = len(tokens) - len(new) if self._names_positions else None
        logits, cache = continued(self._model, ids, self._cache, first)
        if self._guard.changed():
            return []
        if len(new) > 1 or not request.completion_ids:
            self._stats.prompt_tokens_computed += len(new)
        request.cached_tokens = 0
        self._cache = cache
        batch = SamplingBatch.of([request.sampling], ids.device)
        _, finished = sample_next([request], batch, logits, version)
        if finished:
            self.active = []
            self._cache = None
        self._stats.sampled_tokens += 1
        return [request] if finished else []
