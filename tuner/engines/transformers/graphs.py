"""Passes over few tokens of each row, of few shapes, recorded once as CUDA graphs and replayed.

A step of one token per request is a thousand small kernels, and asking for them one by one takes
Python longer than they take the GPU. A graph is asked for at once, but has fixed shapes and places
in memory. So rows, columns and length are rounded up:

    3 requests, the longest of 130 tokens      computed: 4 rows, 256 positions
    the next turn of 3 agents, 20 tokens each            4 rows of 32 columns, 256 positions

A token too many is read by nobody, and its keys and values go to the place behind the last position
of the row, which nothing attends to. Decoded are always the first rows of the cache; prompts are in
any rows, whose keys and values a graph copies together.
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
from tuner.engines.transformers.cascade import MASK_ELEMENTS
from tuner.engines.transformers.kv_cache import Placement, SlotCache

_log = logging.getLogger(__name__)

_SHORTEST = 128
"""Positions that every graph attends to at least."""
_PROMPTS = 4, 16
"""Rows and columns that a graph over prompts has at least."""
_TOKENS = 1 << 12
"""Tokens that a graph computes at most; a pass over more takes the GPU longer than Python."""


@dataclass(frozen=True)
class _Recorded:
    """Attributes:
    inputs: Ids, positions, places and rows of the new tokens, shape [4, rows, columns].
    logits: Shape [rows, V], written by each replay.
    """

    inputs: Tensor
    logits: Tensor
    graph: torch.cuda.CUDAGraph


class PassGraphs:
    """One graph for each number of rows, columns and positions that has been needed.

    Args:
        compute: Ids and positions [m, C], and where they are -> logits [m, V].
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
        self._recorded: dict[tuple[int, ...], _Recorded] = {}
        self._holds: Hashable = None
        self._pool: Any = None
        self._usable = True

    def forget(self, holds: Hashable = None) -> None:
        """Drop the graphs; not those of weights that are where they were, as `holds` says."""
        if holds is None or holds != self._holds:
            self._recorded.clear()
            self._pool = None  # one that all graphs have left cannot be used again
        self._holds = holds or self._holds

    def logits(
        self,
        first: int,
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        real: NDArray[np.bool_],
    ) -> Tensor | None:
        """Logits after the last of C more tokens in each of m rows, [m, C] each -> [m, V].

        They are overwritten by the next step. None where there are too many tokens for it to be
        worth while, or the model's code cannot be recorded, which is found out at the first step.

        Args:
            first: Of these rows in the cache; 0 if C is 1.
            positions: 0 for tokens that are not `real`, which come first in a row.
        """
        cache, (count, width) = self._cache, ids.shape
        decodes = first == 0 and width == 1
        least = (1, 1) if decodes else _PROMPTS
        rows, columns = max(least[0], _rounded(count)), max(least[1], _rounded(width))
        rows = min(rows, cache.slots)
        length = min(max(_SHORTEST, _rounded(int(positions.max()) + 1)), cache.capacity)
        few = rows * columns <= _TOKENS and rows * columns * length <= MASK_ELEMENTS
        if not (self._usable and (decodes or few)):
            return None
        inputs = np.zeros((4, rows, columns), dtype=np.int64)
        # Rows too many are others of the cache.
        inputs[3] = (np.arange(first, first + rows) % cache.slots)[:, None]
        inputs[2] = inputs[3] * cache.width + cache.capacity
        inputs[:2, :count, -width:] = ids, positions
        inputs[2, :count, -width:] += np.where(real, positions - cache.capacity, 0)
        values = to_device(inputs, self._device)
        if self._device.type != "cuda":
            return self._step(values, length, decodes=decodes)[:count]
        shape = (rows, 0 if decodes else columns, length)
        recorded = self._recorded.get(shape)
        if recorded is None:
            try:
                recorded = self._record(values, length, decodes=decodes)
            except Exception as error:  # whatever a model's own code asks the GPU for
                _log.warning(
                    "generation is slower than it could be: the model's pass cannot be "
                    "recorded as a CUDA graph (%s: %s)",
                    type(error).__name__,
                    error,
                )
                self._usable = False
                self._recover_generator()
                return None
            self._recorded[shape] = recorded
        recorded.inputs.copy_(values)
        recorded.graph.replay()
        return recorded.logits[:count]

    def _step(self, inputs: Tensor, length: int, *, decodes: bool) -> Tensor:
        ids, positions, target, row = inputs
        rows = slice(0, len(row)) if decodes else row[:, 0]
        placement = Placement(rows, length, target.flatten(), None)
        return self._compute(ids, positions, placement)

    def _record(self, inputs: Tensor, length: int, *, decodes: bool) -> _Recorded:
        # What libraries set up at first use must not be part of the graph; for later graphs it is
        # there. A step may be repeated: it writes the same again.
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(1 if self._pool else 2):
                self._step(inputs, length, decodes=decodes)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._step(inputs, length, decodes=decodes)
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
