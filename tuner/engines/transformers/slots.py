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
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tuner.engines.base import EngineStats
from tuner.engines.request import Request, sample_next
from tuner.engines.sampling import SamplingBatch
from tuner.engines.transformers.cascade import MASK_ELEMENTS
from tuner.engines.transformers.graphs import PassGraphs
from tuner.engines.transformers.kv_cache import Level, Placement
from tuner.engines.transformers.row_pass import RowPass
from tuner.engines.transformers.rows import Ints, Rows
from tuner.engines.transformers.threads import FewThreads
from tuner.engines.transformers.weights import WeightsGuard

_PASS_STEPS = 5
"""Recorded decode steps that take about as long as a pass over prompts that is not recorded."""
_LONGEST_WAIT = 24
"""Recorded decode steps for which a request waits at most where others are decoded."""
FEW_TOKENS = 64
"""A pass over fewer tokens of prompts takes about as long as one over this many."""
_WORTH_WAITING = 16
"""Tokens that must be shared with a prompt being computed before another waits to reuse them."""


class SlotRunner:
    """Serves up to `max_slots` requests at once from rows of keys and values.

    A new request takes the longest token prefix that any row shares with it, be its request active
    or finished, and computes the rest. Requests that share much with a prompt which is about to be
    computed wait for it: of a group with one prompt, one computes it and the others copy.

    Args:
        row_pass: The model's forward pass.
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
        row_pass: RowPass,
        *,
        max_slots: int,
        max_model_len: int,
        prefill_tokens: int,
        enforce_eager: bool = False,
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        self._decoding = 0
        self._device: torch.device = model.device
        self._row_pass = row_pass
        self._guard = guard
        self._stats = stats
        self._max_slots = max_slots
        self._max_model_len = max_model_len
        self._prefill_tokens = prefill_tokens
        self._rows = Rows(row_pass.layers, max_slots, max_model_len, shares=row_pass.shares)
        self._cache = self._rows.cache
        self._levels: tuple[Level, ...] | None = None
        self._batch: SamplingBatch | None = None
        self._waited = 0
        self._pass_steps = (
            _PASS_STEPS  # decode steps that a pass over prompts takes, by the last one
        )
        self._threads = FewThreads(model)
        self._graphs: PassGraphs | None = None
        if self._device.type == "cuda" and not enforce_eager:
            self._graphs = PassGraphs(self._pass, self._cache, self._device)
            self._graphs.forget(self._guard.places())

    def tokens_ahead(self) -> int:
        """How many prompt tokens the next step computes at most; 0 if it continues completions."""
        if self._decoding < len(self.active):
            block = slice(self._decoding, len(self.active))
            ahead = int((self._rows.length[block] - self._rows.computed[block]).sum())
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
        self._decoding = 0
        self._changed()
        self._rows.clear()
        if self._graphs is not None:
            self._graphs.forget(self._guard.places())

    def step(self, version: int) -> list[Request]:
        """Run one forward pass and sample; returns the requests that are finished."""
        if self._decoding == len(self.active) and self._admits():
            self._admit()
        if not self.active:
            return []
        with self._threads.computing(self.tokens_ahead() or len(self.active)):
            return self._advance(version)

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
            common = self._rows.common_prefix(ids)
            usable = np.minimum(common, self._rows.computed[: self._rows.count])
            source = int(usable.argmax()) if len(usable) else 0
            reused = min(int(usable[source]), len(ids) - 1) if len(usable) else 0
            coming = slice(self._decoding, len(self.active))
            # What rows that are about to be computed will have of this prompt.
            promised = min(int(common[coming].max(initial=0)), len(ids) - 1)
            gain = promised - reused
            if gain >= _WORTH_WAITING and 4 * gain >= len(ids) - reused:
                put_off.append(request)
            elif not self._fits(len(ids), len(ids) - reused):
                self.waiting.appendleft(request)
                break
            elif self._wastes(len(ids) - reused):
                put_off.append(request)
            else:
                self._place(request, ids, source, reused)
        self.waiting.extendleft(reversed(put_off))

    def _fits(self, length: int, pending: int) -> bool:
        """Whether a request can join the next prefill pass (alone it always can, in parts)."""
        block = slice(self._decoding, len(self.active))
        count = len(self.active) - self._decoding + 1
        if count == 1 or pending == 1:
            return True
        rows = self._rows
        length_B, computed_B = rows.length[block], rows.computed[block]
        in_parts = int((length_B - rows.base[block]).max()) > self._cache.capacity
        if in_parts or not rows.may_have(len(self.active), pending + 1):
            return False
        longest = max(pending, int((length_B - computed_B).max()))
        reach = max(length, int(length_B.max()))
        padded = count * longest
        return padded <= self._prefill_tokens and padded * reach <= MASK_ELEMENTS

    def _wastes(self, pending: int) -> bool:
        """Whether a request's prompt is so much shorter or longer than those of the next prefill
        pass that padding would cost more than a pass of its own. Passes on a GPU cost much."""
        block = slice(self._decoding, len(self.active))
        count = len(self.active) - self._decoding
        if not count or pending == 1 or self._device.type != "cpu":
            return False
        longest = int((self._rows.length[block] - self._rows.computed[block]).max())
        return (count + 1) * max(longest, pending) > count * longest + pending + FEW_TOKENS

    def _place(self, request: Request, ids: Ints, source: int, reused: int) -> None:
        """Make a row for `request` behind the active ones, which begins with the reused prefix."""
        rows, row = self._rows, len(self.active)
        self._reserve(rows.count, len(ids) + 1, 0)
        # Where a finished row holds this prefix and no more, nothing is lost by taking it over;
        # where all rows are taken, less than another row holds is lost with some more.
        spare = reused if rows.count == self._max_slots else 0
        if source >= row and reused and rows.computed[source] - reused <= spare:
            self._swap(source, row)
            source = row
        else:
            source = self._vacate(row, source)
        rows.begin(row, ids, source, reused, shared=source < row)
        if reused:
            rows.touch(source)
        rows.bound(row, row + 1)
        own = len(ids) + 1 - int(rows.base[row])
        if row > self._decoding or rows.may_have(row, own):
            self._reserve(0, 0, own)
        self.active.append(request)
        self._changed()
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
        rows = self._rows
        if rows.count < self._max_slots:
            target = rows.count
            self._reserve(target + 1, 0, 0)
            rows.count += 1
            if target == row:
                return source
        else:
            target = row + int(rows.used[row : rows.count].argmin())
            if target == source:
                # The prefix is in the row that would be given up: take that row over.
                self._swap(row, target)
                return row
        if target != row:
            rows.move(row, target)
        return target if source == row else source

    def _reserve(self, rows: int, length: int, own: int) -> None:
        if self._rows.reserve(rows, length, own) and self._graphs is not None:
            self._graphs.forget()

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
        self._changed()
        self._rows.length[last] = self._rows.computed[last]
        self._rows.touch(last)

    def _swap(self, one: int, other: int) -> None:
        """Exchange two rows, whatever they hold."""
        if one == other:
            return
        self._rows.swap(one, other)
        if max(one, other) < len(self.active):
            self.active[one], self.active[other] = self.active[other], self.active[one]
        self._changed()

    def _changed(self) -> None:
        """Other rows decode, or in another order, than in the step before."""
        self._batch = self._levels = None

    # Forward passes

    def _advance(self, version: int) -> list[Request]:
        """Compute what is left of the prompts in [decoding, active), or the newest token of all.

        Right-aligned, so that the last column holds the last token of every row and only its
        logits are computed. A single prompt that is too long for one pass is computed in parts.
        """
        rows = self._rows
        prompts, last = self._decoding < len(self.active), len(self.active)
        first = self._decoding if prompts else 0
        if self._row_pass.shares and not prompts and self._levels is None:
            rows.even_out(last)
        computed = rows.computed[first:last]
        counts = rows.length[first:last] - computed
        if last - first == 1:
            reach = int(rows.length[first])
            part = min(self._prefill_tokens, max(1, MASK_ELEMENTS // reach))
            if reach - rows.base[first] > self._cache.capacity:
                rows.seal(first)
                part = min(part, self._cache.capacity)
            counts = np.minimum(counts, part)
        width = int(counts.max())
        columns = np.arange(width) - (width - counts[:, None])
        real = columns >= 0
        base = rows.base[first:last, None]
        # Padding repeats the first place, which exists and attends to itself, and is written
        # nowhere.
        positions = np.where(real, columns + computed[:, None], base)
        ids = np.take_along_axis(rows.tokens[first:last], positions, axis=1)
        logits = None
        if self._graphs is not None:
            logits = self._graphs.logits(first, ids, positions, real)
        if prompts:
            self._pass_steps = _PASS_STEPS if logits is None else 1
        if logits is None:
            own = positions - base
            target = (np.arange(first, last)[:, None] * self._cache.width + own)[real]
            source = None if real.all() else self._tensor(np.flatnonzero(real))
            reach = int(own.max()) + 1
            place = Placement(slice(first, last), reach, self._tensor(target), source)
            if self._row_pass.shares:
                levels = None if prompts else self._levels
                if levels is None:
                    levels = rows.levels(first, last)
                self._levels = None if prompts else levels
                place = replace(place, own=self._tensor(own), levels=levels)
            logits = self._pass(self._tensor(ids), self._tensor(positions), place)
        if self._guard.changed():
            return []
        rows.computed[first:last] += counts
        self._stats.prompt_tokens_computed += int(counts.sum()) if prompts else 0
        if rows.computed[first] < rows.length[first]:
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
        return self._row_pass.logits(self._cache, ids, positions, placement)

    def _sample(
        self, first: int, last: int, batch: SamplingBatch, logits: Tensor, version: int
    ) -> list[Request]:
        """Sample for rows [first, last), store the tokens, retire what is finished."""
        requests = self.active[first:last]
        ids, places = sample_next(requests, batch, logits, version)
        self._stats.sampled_tokens += len(ids)
        finished = [requests[place] for place in places]
        rows, block = self._rows, slice(first, last)
        if rows.bound(first, last):
            self._levels = None
        going_on = rows.length[block] + 1
        self._reserve(0, int(going_on.max()), int((going_on - rows.base[block]).max()))
        stored = np.minimum(going_on, rows.tokens.shape[1]) - 1
        rows.tokens[np.arange(first, last), stored] = ids
        rows.length[block] = stored + 1
        for place in reversed(places):
            self._retire(first + place)
        return finished
