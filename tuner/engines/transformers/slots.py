"""Continuous batching over rows of a slot cache, with prefix reuse.

Row r of the cache belongs to `active[r]`; rows behind the active ones keep what finished requests
left, as prefix cache:

        rows   0 ......... decoding ......... active ......... rows ......... max_slots
               one token   prompt still to    finished:        not allocated
               to compute  be computed        prefix cache

Every step is one forward pass over one contiguous block of rows: over the middle block if there is
one (prefill), otherwise over the first (decode). When a request finishes, its row is exchanged with
the last active one.
"""

from __future__ import annotations

from collections import deque
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from tuner.engines.base import EngineStats
from tuner.engines.request import Request, sample_next
from tuner.engines.sampling import SamplingBatch
from tuner.engines.transformers.graphs import PassGraphs
from tuner.engines.transformers.kv_cache import (
    MASK_ELEMENTS,
    Placement,
    SlotCache,
    attention_mask,
)
from tuner.engines.transformers.solo import forward_options
from tuner.engines.transformers.weights import WeightsGuard

_FIRST_SLOTS = 4
_FIRST_CAPACITY = 128
_PASS_STEPS = 5
"""Recorded decode steps that take about as long as a pass over prompts that is not recorded."""
_LONGEST_WAIT = 24
"""Recorded decode steps for which a request waits at most where others are decoded."""
_WORTH_WAITING = 16
"""Tokens that must be shared with a prompt being computed before another waits to reuse them."""

Ints: TypeAlias = NDArray[np.int64]


class SlotRunner:
    """Serves up to `max_slots` requests at once from rows of keys and values.

    A new request takes the longest token prefix that any row shares with it, be its request active
    or finished, and computes the rest. Requests that share much with a prompt which is about to be
    computed wait for it: of a group with one prompt, one computes it and the others copy.

    Args:
        windows: For each kind of layer ("full_attention", "sliding_attention") in the model its
            window, None for unlimited.
        layers: Number of layers.
        max_slots: Rows at most, active and prefix cache together.
        max_model_len: Tokens of one row at most.
        prefill_tokens: Prompt tokens of one forward pass at most, padding included.
        enforce_eager: Record no CUDA graphs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        guard: WeightsGuard,
        stats: EngineStats,
        *,
        windows: dict[str, int | None],
        layers: int,
        max_slots: int,
        max_model_len: int,
        prefill_tokens: int,
        enforce_eager: bool = False,
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        self._decoding = 0
        self._rows = 0
        self._model = model
        self._device: torch.device = model.device
        self._dtype: torch.dtype = model.dtype
        self._guard = guard
        self._stats = stats
        self._windows = windows
        self._max_slots = max_slots
        self._max_model_len = max_model_len
        self._prefill_tokens = prefill_tokens
        self._options = forward_options(model)
        slots = min(_FIRST_SLOTS, max_slots)
        capacity = min(_FIRST_CAPACITY, max_model_len)
        self._cache = SlotCache(layers, slots, capacity)
        self._tokens: Ints = np.zeros((slots, capacity), dtype=np.int64)
        self._length: Ints = np.zeros(slots, dtype=np.int64)
        self._computed: Ints = np.zeros(slots, dtype=np.int64)
        self._used: Ints = np.zeros(slots, dtype=np.int64)
        self._clock = 0
        self._batch: SamplingBatch | None = None
        self._waited = 0
        self._pass_steps = (
            _PASS_STEPS  # decode steps that a pass over prompts takes, by the last one
        )
        self._graphs: PassGraphs | None = None
        if self._device.type == "cuda" and not enforce_eager:
            self._graphs = PassGraphs(self._pass, self._cache, self._device)
            self._graphs.forget(self._guard.places())

    def tokens_ahead(self) -> int:
        """How many prompt tokens the next step computes at most; 0 if it continues completions."""
        if self._decoding < len(self.active):
            block = slice(self._decoding, len(self.active))
            ahead = int((self._length[block] - self._computed[block]).sum())
        elif len(self.active) < self._max_slots:
            ahead = sum(len(request.token_ids()) for request in self.waiting)
        else:
            ahead = 0
        return min(ahead, self._prefill_tokens)

    def drop_abandoned(self) -> None:
        """Free the rows of requests that nobody waits for; what they computed stays as cache."""
        if any(request.abandoned for request in self.waiting):
            self.waiting = deque(request for request in self.waiting if not request.abandoned)
        for row in reversed(range(len(self.active))):
            if self.active[row].abandoned:
                self._retire(row)

    def evict(self) -> None:
        """Forget every row; requests in flight wait to compute prompt and completion afresh."""
        self.waiting.extendleft(reversed(self.active))
        self.active = []
        self._decoding = self._rows = 0
        self._batch = None
        self._cache.clear()
        if self._graphs is not None:
            self._graphs.forget(self._guard.places())

    def step(self, version: int) -> list[Request]:
        """Run one forward pass and sample; returns the requests that are finished."""
        if self._decoding == len(self.active) and self._admits():
            self._admit()
        return self._advance(version) if self.active else []

    # Admission

    def _admits(self) -> bool:
        """Whether to compute the waiting prompts now.

        All active requests stand still meanwhile. Where that takes as long as many decode steps,
        and answers end at different times, prompts that come one by one are computed together: as
        soon as they have waited as long as the others would stand still.
        """
        self._waited = self._waited + 1 if self.waiting and self.active else 0
        due = self._pass_steps * len(self.active)
        if self._graphs is None or self._waited * len(self.waiting) >= due:
            return True
        return not self.active or self._waited >= _LONGEST_WAIT

    def _admit(self) -> None:
        """Give rows to waiting requests, as many as one prefill pass may compute."""
        self._waited = 0
        put_off: list[Request] = []
        while self.waiting and len(self.active) < self._max_slots:
            request = self.waiting.popleft()
            ids = np.array(request.token_ids(), dtype=np.int64)
            common = self._common_prefix(ids)
            usable = np.minimum(common, self._computed[: self._rows])
            source = int(usable.argmax()) if self._rows else 0
            reused = min(int(usable[source]), len(ids) - 1) if self._rows else 0
            coming = slice(self._decoding, len(self.active))
            # What rows that are about to be computed will have of this prompt.
            promised = min(int(common[coming].max(initial=0)), len(ids) - 1)
            gain = promised - reused
            if gain >= _WORTH_WAITING and 4 * gain >= len(ids) - reused:
                put_off.append(request)
            elif self._fits(len(ids), len(ids) - reused):
                self._place(request, ids, source, reused)
            else:
                self.waiting.appendleft(request)
                break
        self.waiting.extendleft(reversed(put_off))

    def _common_prefix(self, ids: Ints) -> Ints:
        """Leading tokens that each row shares with `ids`: [rows]. Not all need be computed."""
        if not self._rows:
            return np.zeros(0, dtype=np.int64)
        width = min(len(ids), self._tokens.shape[1])
        equal = self._tokens[: self._rows, :width] == ids[:width]
        common: Ints = np.where(equal.all(axis=1), width, equal.argmin(axis=1))
        return np.minimum(common, self._length[: self._rows])

    def _fits(self, length: int, pending: int) -> bool:
        """Whether a request can join the next prefill pass (alone it always can, in parts)."""
        block = slice(self._decoding, len(self.active))
        count = len(self.active) - self._decoding + 1
        if count == 1 or pending == 1:
            return True
        longest = max(pending, int((self._length[block] - self._computed[block]).max()))
        reach = max(length, int(self._length[block].max()))
        padded = count * longest
        return padded <= self._prefill_tokens and padded * reach <= MASK_ELEMENTS

    def _place(self, request: Request, ids: Ints, source: int, reused: int) -> None:
        """Make a row for `request` behind the active ones and copy the reused prefix into it."""
        self._reserve(self._rows, len(ids) + 1)
        row = len(self.active)
        # Where a finished row holds this prefix and no more, nothing is lost by taking it over;
        # where all rows are taken, less than another row holds is lost with some more.
        spare = reused if self._rows == self._max_slots else 0
        if source >= row and reused and self._computed[source] - reused <= spare:
            self._swap(source, row)
        else:
            source = self._vacate(row, source)
            if reused and source != row:
                self._cache.copy(source, row, reused)
        if reused:
            self._touch(source)
        self._tokens[row, : len(ids)] = ids
        self._length[row] = len(ids)
        self._computed[row] = reused
        self.active.append(request)
        self._batch = None
        self._stats.prompt_tokens_reused += reused
        if request.cached_tokens < 0:
            request.cached_tokens = reused
        # With one token left to compute it needs no prefill, and joins the block that decodes.
        if len(ids) - reused == 1:
            self._swap(row, self._decoding)
            self._decoding += 1

    def _vacate(self, row: int, source: int) -> int:
        """Free `row`, moving what it keeps to a new or the oldest row.

        Returns where the content of row `source` is afterwards.
        """
        if row == self._rows:
            self._reserve(row + 1, 0)
            self._rows += 1
            return source
        if self._rows < self._max_slots:
            target = self._rows
            self._reserve(target + 1, 0)
            self._rows += 1
        else:
            target = row + int(self._used[row : self._rows].argmin())
            if target == source:
                # The prefix is in the row that would be given up: take that row over.
                self._swap(row, target)
                return row
        if target != row:
            self._cache.copy(row, target, int(self._computed[row]))
            for array in (self._tokens, self._length, self._computed, self._used):
                array[target] = array[row]
        return target if source == row else source

    def _reserve(self, rows: int, length: int) -> None:
        """Grow rows and capacity, by doubling, to hold `rows` rows of `length` tokens."""
        slots, capacity = self._tokens.shape
        while slots < rows:
            slots = min(2 * slots, self._max_slots)
        while capacity < min(length, self._max_model_len):
            capacity = min(2 * capacity, self._max_model_len)
        if (slots, capacity) == self._tokens.shape and self._cache.together:
            return
        self._cache.grow(slots, capacity)
        if self._graphs is not None:
            self._graphs.forget()
        more = (slots - self._tokens.shape[0], capacity - self._tokens.shape[1])
        self._tokens = np.pad(self._tokens, ((0, more[0]), (0, more[1])))
        self._length, self._computed, self._used = (
            np.pad(array, (0, more[0])) for array in (self._length, self._computed, self._used)
        )

    # The end of a request

    def _retire(self, row: int) -> None:
        """Take an active row out of the active ones; what it computed stays as prefix cache."""
        if row < self._decoding:
            self._decoding -= 1
            self._swap(row, self._decoding)
            row = self._decoding
        last = len(self.active) - 1
        self._swap(row, last)
        self.active.pop()
        self._batch = None
        self._length[last] = self._computed[last]
        self._touch(last)

    def _touch(self, row: int) -> None:
        """Mark a row as the most recently used one."""
        self._clock += 1
        self._used[row] = self._clock

    def _swap(self, one: int, other: int) -> None:
        """Exchange two rows, whatever they hold."""
        if one == other:
            return
        pair, exchanged = [one, other], [other, one]
        self._cache.swap(one, other, int(self._computed[pair].max()))
        for array in (self._tokens, self._length, self._computed, self._used):
            array[pair] = array[exchanged]
        if max(pair) < len(self.active):
            self.active[one], self.active[other] = self.active[other], self.active[one]
        self._batch = None

    # Forward passes

    def _advance(self, version: int) -> list[Request]:
        """Compute what is left of the prompts in [decoding, active), or the newest token of all.

        Right-aligned, so that the last column holds the last token of every row and only its
        logits are computed. A single prompt that is too long for one pass is computed in parts.
        """
        prompts, last = self._decoding < len(self.active), len(self.active)
        first = self._decoding if prompts else 0
        computed = self._computed[first:last]
        counts = self._length[first:last] - computed
        if last - first == 1:
            reach = int(self._length[first])
            part = min(self._prefill_tokens, max(1, MASK_ELEMENTS // reach))
            counts = np.minimum(counts, part)
        width = int(counts.max())
        columns = np.arange(width) - (width - counts[:, None])
        real = columns >= 0
        # Padding repeats position 0, which exists and attends to itself, and is written nowhere.
        positions = np.where(real, columns + computed[:, None], 0)
        ids = np.take_along_axis(self._tokens[first:last], positions, axis=1)
        logits = None
        if self._graphs is not None:
            logits = self._graphs.logits(first, ids, positions, real)
        if prompts:
            self._pass_steps = _PASS_STEPS if logits is None else 1
        if logits is None:
            target = (np.arange(first, last)[:, None] * self._cache.width + positions)[real]
            source = None if real.all() else self._tensor(np.flatnonzero(real))
            reach = int(positions.max()) + 1
            place = Placement(slice(first, last), reach, self._tensor(target), source)
            logits = self._pass(self._tensor(ids), self._tensor(positions), place)
        if self._guard.changed():
            return []
        self._computed[first:last] += counts
        self._stats.prompt_tokens_computed += int(counts.sum()) if prompts else 0
        if self._computed[first] < self._length[first]:
            return []
        self._decoding = last
        batch = None if prompts else self._batch
        if batch is None:
            batch = SamplingBatch.of([r.sampling for r in self.active[first:]], logits.device)
        self._batch = None if prompts else batch
        return self._sample(first, last, batch, logits, version)

    def _tensor(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    def _pass(self, ids: Tensor, positions: Tensor, placement: Placement) -> Tensor:
        """Logits of the last column: ids and positions [m, C] -> [m, V]."""
        self._cache.placement = placement
        masks: dict[str, Any] = {
            kind: attention_mask(positions, placement.kv_length, window, self._dtype)
            for kind, window in self._windows.items()
        }
        output = self._model(
            input_ids=ids,
            position_ids=positions,
            # Models with one kind of layer take a tensor, those with several a dict.
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            past_key_values=self._cache,
            use_cache=True,
            **self._options,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _sample(
        self, first: int, last: int, batch: SamplingBatch, logits: Tensor, version: int
    ) -> list[Request]:
        """Sample for rows [first, last), store the tokens, retire what is finished."""
        requests = self.active[first:last]
        ids, places = sample_next(requests, batch, logits, version)
        self._stats.sampled_tokens += len(ids)
        finished = [requests[place] for place in places]
        going_on = int(self._length[first:last].max()) + 1
        if going_on > self._tokens.shape[1]:
            self._reserve(0, going_on)
        stored = np.minimum(self._length[first:last], self._tokens.shape[1] - 1)
        self._tokens[np.arange(first, last), stored] = ids
        self._length[first:last] = stored + 1
        for place in reversed(places):
            self._retire(first + place)
        return finished
