"""Decode steps of few shapes, recorded once as CUDA graphs and replayed from then on.

A step of one token per request is a thousand small kernels, and asking for them one by one takes
Python longer than they take the GPU. A graph is asked for at once, but has fixed shapes and places
in memory. So rows and length are rounded up:

    3 requests, the longest of 130 tokens      computed: 4 rows, 256 positions

A row too many has a token that is read by nobody, and its keys and values go to the place behind
the last position of the row, which nothing attends to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tuner.engines.transfer import to_device
from tuner.engines.transformers.kv_cache import Placement, SlotCache

_log = logging.getLogger(__name__)

_SHORTEST = 128
"""Positions that every graph attends to at least."""


@dataclass(frozen=True)
class _Recorded:
    """Attributes:
    inputs: Ids, positions and places of the new tokens, shape [3, rows].
    logits: Shape [rows, V], written by each replay.
    """

    inputs: Tensor
    logits: Tensor
    graph: torch.cuda.CUDAGraph


class DecodeGraphs:
    """One graph for each number of rows and positions that has been needed.

    Args:
        compute: Ids and positions [m, 1], and where they are -> logits [m, V].
        cache: Where keys and values are; `forget` when it has grown.
        device: A GPU. On a CPU the same shapes are computed, and nothing is recorded.
    """

    def __init__(
        self,
        compute: Callable[[Tensor, Tensor, Placement], Tensor],
        cache: SlotCache,
        device: torch.device,
    ) -> None:
        self._compute = compute
        self._cache = cache
        self._device = device
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self._holds: Hashable = None
        self._pool: Any = None
        self._usable = True

    def forget(self, holds: Hashable = None) -> None:
        """Drop the graphs; not those of weights that are where they were, as `holds` says."""
        if holds is None or holds != self._holds:
            self._recorded.clear()
            self._pool = None  # one that all graphs have left cannot be used again
        self._holds = holds or self._holds

    def logits(self, ids: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor | None:
        """Logits after one more token in each of the first m rows, [m] and [m] -> [m, V].

        They are overwritten by the next step. None where the model's code cannot be recorded,
        which is found out at the first step.
        """
        cache, count = self._cache, len(ids)
        rows = min(_rounded(count), cache.slots)
        length = min(max(_SHORTEST, _rounded(int(positions.max()) + 1)), cache.capacity)
        inputs = np.zeros((3, rows), dtype=np.int64)
        inputs[:2, :count] = ids, positions
        inputs[2] = np.arange(rows) * cache.width + cache.capacity
        inputs[2, :count] += positions - cache.capacity
        values = to_device(inputs, self._device)
        if self._device.type != "cuda":
            return self._step(values, length)[:count]
        if not self._usable:
            return None
        recorded = self._recorded.get((rows, length))
        if recorded is None:
            try:
                recorded = self._record(values, length)
            except Exception as error:  # whatever a model's own code asks the GPU for
                _log.warning(
                    "generation is slower than it could be: the model's decode step cannot be "
                    "recorded as a CUDA graph (%s: %s)",
                    type(error).__name__,
                    error,
                )
                self._usable = False
                self._recover_generator()
                return None
            self._recorded[rows, length] = recorded
        recorded.inputs.copy_(values)
        recorded.graph.replay()
        return recorded.logits[:count]

    def _step(self, inputs: Tensor, length: int) -> Tensor:
        ids, positions, target = inputs
        placement = Placement(0, inputs.shape[1], length, target, None)
        return self._compute(ids[:, None], positions[:, None], placement)

    def _record(self, inputs: Tensor, length: int) -> _Recorded:
        # What libraries set up at first use must not be part of the graph. A step may be repeated:
        # it writes the same again.
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step(inputs, length)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._step(inputs, length)
        return _Recorded(inputs, logits, graph)

    def _recover_generator(self) -> None:
        """A recording that fails leaves torch's generator of the device unusable."""
        generator = torch.cuda.default_generators[self._device.index or 0]
        fresh = torch.Generator(self._device)
        fresh.manual_seed(generator.initial_seed())
        generator.graphsafe_set_state(fresh.graphsafe_get_state())


def _rounded(number: int) -> int:
    """The power of two that is not smaller."""
    return 1 << (number - 1).bit_length()
