"""Continuous batching over rows of a slot cache, with prefix reuse.

Row r of the cache belongs to `active[r]`; rows behind the active ones keep the tokens of finished
requests as prefix cache:

        rows   0 ......... decoding ......... active ......... rows ......... max_slots
               one token   prompt still to    finished:        not allocated
               to compute  be computed        prefix cache

Every step is one forward pass over one contiguous block of rows: the middle block if it is not
empty (prefill), otherwise the first (decode). When a request finishes, its row is exchanged with
the last active one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tuner.engines.base import EngineStats
from tuner.engines.request import Request, sample_next
from tuner.engines.sampling import SamplingBatch
from tuner.engines.transformers import speculation
from tuner.engines.transformers.cascade import BLOCK, LANES, MASK_ELEMENTS, rounded
from tuner.engines.transformers.kv_cache import Level, Placement
from tuner.engines.transformers.passes import PassGraphs, RowPass, WeightsGuard
from tuner.engines.transformers.slot_rows import NO_LIMIT, Ints, Rows, no_room
from tuner.engines.transformers.threads import FewThreads

_PASS_STEPS = 5
"""Recorded decode steps that take about as long as an unrecorded pass over prompts."""
_LONGEST_WAIT = 24
"""Maximum number of recorded decode steps for which a request waits while others decode."""
FEW_TOKENS = 64
"""A pass over fewer prompt tokens takes about as long as one over this many."""
_WORTH_WAITING = 16
"""Tokens that must be shared with a prompt being computed before another waits to reuse them."""
_PASS = 64
"""Padding tokens of a pass that take about as long as another pass."""


class SlotRunner:
    """Serves up to `max_slots` requests at once from rows of keys and values.

    A new request reuses the longest token prefix that any row shares with it, whether that row's
    request is active or finished, and computes the rest. Requests that share much with a prompt
    that is about to be computed wait for it: of a group with one prompt, one computes it and the
    others copy.

    Args:
        row_pass: The model's forward pass.
        max_slots: Maximum number of rows, active and prefix cache together.
        max_model_len: Maximum number of tokens of one row.
        prefill_tokens: Maximum of prompt tokens of one forward pass, padding included.
        enforce_eager: Record no CUDA graphs.
        sizes: Numbers of tokens that passes are padded to, ascending, as `fixed_sizes` has found
            them; empty: passes of any size.
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
        sizes: Sequence[int] = (),
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
        self._sizes = sizes
        self._prefill_tokens = sizes[-1] if sizes else prefill_tokens
        self._rows = Rows(
            row_pass.layers,
            max_slots,
            rounded(max_model_len, LANES) if sizes else max_model_len,
            shares=row_pass.shares,
            block=BLOCK if sizes else 0,
        )
        self._cache = self._rows.cache
        self._levels: dict[int, tuple[Level, ...]] = {}  # of each pass that decodes
        self._batch: SamplingBatch | None = None
        self._drafts = speculation.Drafts()
        self._waited = 0
        self._blocked = False  # the next waiting request has no room until another has ended
        self._pass_steps = _PASS_STEPS  # duration of the last pass over prompts, in decode steps
        self._threads = FewThreads(model)
        self._graphs: PassGraphs | None = None
        if self._device.type == "cuda" and not enforce_eager:
            self._graphs = PassGraphs(self._pass, self._cache, self._device)
            self._graphs.forget(self._guard.places())

    @property
    def no_drafts(self) -> str:
        """Why no tokens are drafted (`speculation`); empty if they are."""
        if self._sizes:
            return "a deterministic engine computes passes of fixed sizes"
        if self._graphs is not None or self._device.type != "cpu":
            return "drafts are computed on a CPU only"
        return "ids of images' tokens cannot be drafted" if self._row_pass.reads_images else ""

    def tokens_ahead(self) -> int:
        """Maximum of prompt tokens that the next step computes; 0 if it continues completions."""
        if self._decoding < len(self.active):
            block = slice(self._decoding, len(self.active))
            ahead = int((self._rows.length[block] - self._rows.computed[block]).sum())
        elif len(self.active) < self._max_slots and not self._blocked:
            ahead = sum(len(request.token_ids()) for request in self.waiting)
        else:
            ahead = 0
        return min(ahead, self._prefill_tokens)

    def drop_abandoned(self) -> None:
        """Free the rows of abandoned requests; what they computed stays as cache."""
        if any(request.abandoned for request in self.waiting):
            self.waiting = deque(request for request in self.waiting if not request.abandoned)
            self._blocked = False
        for row in reversed(range(len(self.active))):
            if self.active[row].abandoned:
                self._retire(row)

    @property
    def cache_limit(self) -> int:
        """Maximum number of tokens with memory for keys and values; set before any request."""
        return self._rows.limit

    @cache_limit.setter
    def cache_limit(self, tokens: int) -> None:
        self._rows.limit = tokens

    def evict(self) -> None:
        """Clear every row; requests in flight recompute prompt and completion."""
        self.waiting.extendleft(reversed(self.active))
        self.active = []
        self._decoding = 0
        self._blocked = False
        self._changed()
        self._rows.clear()
        if self._row_pass.merged is not None:
            self._row_pass.merged.forget()
        if self._graphs is not None:
            self._graphs.forget(self._guard.places())

    def step(self, version: int) -> list[Request]:
        """Run one forward pass and sample; returns the finished requests."""
        if self._decoding == len(self.active) and self._admits():
            self._admit()
        if (failed := self._give_way()) or not self.active:
            return failed
        prompts = self._decoding < len(self.active)
        if self._row_pass.shares and not prompts and not self._levels:
            self._rows.even_out(len(self.active))
        if self._sizes:  # each pass has its own number of threads
            return self._advance(version)
        drafts = [] if prompts else self._drafted()
        tokens = len(self.active) + sum(map(len, drafts))
        with self._threads.computing(self.tokens_ahead() or tokens):
            return self._verify(drafts, version) if drafts else self._advance(version)

    # Admission

    def _admits(self) -> bool:
        """Whether to compute the waiting prompts now.

        All active requests pause meanwhile. If that takes as long as many decode steps, and answers
        end at different times, prompts that arrive one by one are computed together: as soon as
        they have waited as long as the others would pause.
        """
        self._waited = self._waited + 1 if self.waiting and self.active else 0
        due = self._pass_steps * len(self.active)
        if self._graphs is None or self._waited * len(self.waiting) >= due:
            return True
        return not self.active or self._waited >= _LONGEST_WAIT

    def _admit(self) -> None:
        """Give rows to as many waiting requests as one prefill pass may compute."""
        self._waited = 0
        if self._blocked and self.active:
            return
        put_off: list[Request] = []
        while self.waiting and len(self.active) < self._max_slots:
            request = self.waiting.popleft()
            ids = np.array(request.token_ids(), dtype=np.int64)
            common = self._rows.common_prefix(ids, request.adapter)
            usable = np.minimum(common, self._rows.computed[: self._rows.count])
            source = int(usable.argmax()) if len(usable) else 0
            reused = min(int(usable[source]), len(ids) - 1) if len(usable) else 0
            coming = slice(self._decoding, len(self.active))
            # Tokens of this prompt in rows that are about to be computed.
            promised = min(int(common[coming].max(initial=0)), len(ids) - 1)
            gain = promised - reused
            if gain >= _WORTH_WAITING and 4 * gain >= len(ids) - reused:
                put_off.append(request)
            elif not self._fits(len(ids), len(ids) - reused):
                self.waiting.appendleft(request)
                break
            elif self._wastes(len(ids) - reused):
                put_off.append(request)
            elif (room := self._room(ids, source, reused)) is None:
                self.waiting.appendleft(request)
                self._blocked = True
                break
            else:
                self._place(request, ids, *room)
        self.waiting.extendleft(reversed(put_off))

    def _room(self, ids: Ints, source: int, reused: int) -> tuple[int, int, bool] | None:
        """Make room for a request with these tokens; rows of finished ones give way if they must.

        Returns:
            The row to reuse tokens of, how many, and whether the request takes the row of a
            finished one; None if there is no room beside the active requests.
        """
        rows, active, slots = self._rows, len(self.active), self._max_slots
        if rows.limit == NO_LIMIT:
            return source, reused, rows.count == slots
        if not active and not self._fits_beside(ids, source, reused):
            source = reused = 0
            while rows.drop(0) is not None:
                pass
        elif not self._fits_beside(ids, source, reused):
            return None
        capacity, more = rows.needs(active, self._decoding, len(ids), source, reused)

        def fits(count: int) -> bool:
            return count <= slots and rows.fits(count, capacity, more, range(rows.count))

        while not (fits(rows.count + 1) or (rows.count > active and fits(rows.count))):
            moved = rows.drop(active, source if reused else -1)
            if moved is None:
                break
            source = max(moved, 0)
        full = rows.count > active and not fits(rows.count + 1)
        if rows.resize(rows.count + (not full), more) and self._graphs is not None:
            self._graphs.forget()
        return source, reused, full

    def _fits_beside(self, ids: Ints, source: int, reused: int) -> bool:
        """Whether a request fits beside the active ones and the finished one that it reuses."""
        rows, active = self._rows, len(self.active)
        capacity, more = rows.needs(active, self._decoding, len(ids), source, reused)
        kept = {source} if reused else set[int]()
        return rows.fits(active + 1, capacity, more, {*range(active), *kept})

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
        """Whether a prompt differs so much in length from those of the next prefill pass that
        padding would cost more than a separate pass. Passes on a GPU cost much."""
        block = slice(self._decoding, len(self.active))
        count = len(self.active) - self._decoding
        if not count or pending == 1 or self._device.type != "cpu":
            return False
        longest = int((self._rows.length[block] - self._rows.computed[block]).max())
        return (count + 1) * max(longest, pending) > count * longest + pending + FEW_TOKENS

    def _place(self, request: Request, ids: Ints, source: int, reused: int, full: bool) -> None:
        """Make a row for `request` behind the active ones, beginning with the reused prefix; if all
        rows are `full`, in the place of a finished one."""
        rows, row = self._rows, len(self.active)
        self._reserve(rows.count, len(ids) + 1, 0)
        # If a finished row holds exactly this prefix, taking it over loses nothing; if all rows are
        # taken, taking over a row with some more tokens loses less than evicting another.
        spare = reused if full else 0
        if source >= row and reused and rows.computed[source] - reused <= spare:
            self._swap(source, row)
            source = row
        else:
            source = self._vacate(row, source, full)
        rows.begin(row, ids, source, reused, shared=source < row, adapter=request.adapter)
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
            # It depends on the other requests, so a deterministic engine does not say it.
            request.cached_tokens = 0 if self._sizes else reused
        # With one token left to compute it needs no prefill and joins the block that decodes.
        if len(ids) - reused == 1:
            self._swap(row, self._decoding)
            self._decoding += 1

    def _vacate(self, row: int, source: int, full: bool) -> int:
        """Free `row`, moving its content to a new or the oldest row.

        Returns where the content of row `source` is afterwards.
        """
        rows = self._rows
        if not full:
            target = rows.count
            self._reserve(target + 1, 0, 0)
            rows.count += 1
            if target == row:
                return source
        else:
            target = row + int(rows.used[row : rows.count].argmin())
            if target == source:
                # The prefix is in the row that would be evicted: take that row over.
                self._swap(row, target)
                return row
        if target != row:
            rows.move(row, target)
        return target if source == row else source

    def _reserve(self, rows: int, length: int, own: int) -> None:
        if self._rows.reserve(rows, length, own) and self._graphs is not None:
            self._graphs.forget()

    # Completion of a request

    def _give_way(self) -> list[Request]:
        """Take the rows of the requests that came last until each row of the next pass may have one
        token more. They are computed again when there is room.

        Returns:
            The last request that was left, with its error, if even that has no room.
        """
        rows = self._rows
        while self.active:
            first = self._decoding if self._decoding < len(self.active) else 0
            if rows.may_grow(first, len(self.active)):
                break
            if rows.drop(len(self.active)) is not None:
                continue
            row = max(range(len(self.active)), key=lambda row: self.active[row].number)
            request, length = self.active[row], int(rows.length[row])
            self._retire(row)
            if not self.active:
                request.error = no_room(length, rows.limit)
                return [request]
            self.waiting.appendleft(request)
            self._stats.preempted += 1
        return []

    def _retire(self, row: int) -> None:
        """Remove an active row; what it computed stays as prefix cache."""
        if row < self._decoding:
            self._decoding -= 1
            self._swap(row, self._decoding)
            row = self._decoding
        last = len(self.active) - 1
        self._swap(row, last)
        self.active.pop()
        self._blocked = False
        self._changed()
        self._rows.length[last] = self._rows.computed[last]
        self._rows.touch(last)

    def _swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        if one == other:
            return
        self._rows.swap(one, other)
        if max(one, other) < len(self.active):
            self.active[one], self.active[other] = self.active[other], self.active[one]
        self._changed()

    def _changed(self) -> None:
        """Note that other rows decode, or in another order, than in the step before."""
        self._batch = None
        self._levels = {}

    # Forward passes

    def _advance(self, version: int) -> list[Request]:
        """Compute the rest of the prompts in [decoding, active), or the newest token of all rows.

        Right-aligned, so that the last column holds the last token of every row and only its logits
        are computed. A single prompt that is too long for one pass is computed in parts. In passes
        of fixed sizes, a prompt's last token is computed with those of the rows that decode.
        """
        rows = self._rows
        prompts, last = self._decoding < len(self.active), len(self.active)
        first = self._decoding if prompts else 0
        computed = rows.computed[first:last]
        counts = rows.length[first:last] - computed
        if prompts and self._sizes:
            counts -= 1
        needed = int(counts[0])
        if last - first == 1:
            reach = int(rows.length[first])
            part = min(self._prefill_tokens, max(1, MASK_ELEMENTS // reach))
            if reach - rows.base[first] > self._cache.capacity:
                rows.seal(first)
                part = min(part, self._cache.capacity - int(computed[0] - rows.base[first]))
            counts = np.minimum(counts, part)
        parts = [
            self._compute(start, end, counts[start - first : end - first], tokens)
            for start, end, tokens in self._passes(first, last, counts)
        ]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self._guard.changed():
            return []
        rows.computed[first:last] += counts
        self._stats.prompt_tokens_computed += int(counts.sum()) if prompts else 0
        if counts[0] < needed:
            return []
        self._decoding = last
        if prompts and self._sizes:
            self._stats.prompt_tokens_computed += last - first  # the last ones, in the next pass
            self._changed()
            return []
        batch = self._settings(self.active[first:])
        return self._sample(first, last, batch, logits, version)

    def _settings(self, requests: Sequence[Request]) -> SamplingBatch:
        """The settings of active requests; kept from step to step for all of them."""
        if len(requests) < len(self.active):
            return SamplingBatch.of([r.sampling for r in requests], self._device)
        if self._batch is None:
            self._batch = SamplingBatch.of([r.sampling for r in requests], self._device)
        return self._batch

    def _drafted(self) -> list[Ints]:
        """A draft for each of the active rows; none if all are empty."""
        rows, count = self._rows, len(self.active)
        if self.no_drafts or count > speculation.FEW_REQUESTS:
            return []
        drafts = [
            self._drafts.of(request, rows.tokens[row, : rows.length[row]])
            for row, request in enumerate(self.active)
        ]
        if not any(map(len, drafts)):
            return []
        own = (rows.length - rows.base)[:count]
        room = np.minimum(self._cache.capacity - own, rows.tokens.shape[1] - rows.length[:count])
        if room.min() < 1:  # the step grows the rows
            return []
        return [draft[: most - 1] for draft, most in zip(drafts, room.tolist(), strict=True)]

    def _verify(self, drafts: Sequence[Ints], version: int) -> list[Request]:
        """Compute the newest token of each active row and the draft behind it; sample as long as
        the sampled tokens are those of the draft.

        What is computed of wrong tokens stays behind the computed tokens of a row, where nothing
        attends to it and the next ones are written.
        """
        rows, requests = self._rows, list(self.active)
        before = rows.length[: len(requests)].copy()
        for row, draft in enumerate(drafts):
            rows.tokens[row, rows.length[row] :][: len(draft)] = draft
        counts = np.array([1 + len(draft) for draft in drafts])
        logits = self._compute(0, len(requests), counts, 0, every=True)
        if self._guard.changed():
            return []
        first = counts.cumsum() - counts
        finished: set[int] = set()
        left = np.arange(len(requests))
        for column in range(int(counts.max())):
            chosen = [requests[row] for row in left]
            batch = self._settings(chosen)
            of_rows = logits[self._tensor(first[left] + column)]
            ids, places = sample_next(chosen, batch, of_rows, version)
            rows.tokens[left, rows.length[left]] = ids
            rows.length[left] += 1
            rows.computed[left] += 1
            self._stats.sampled_tokens += len(ids)
            finished.update(int(left[place]) for place in places)
            left = np.array(
                [
                    row
                    for row, token in zip(left.tolist(), ids, strict=True)
                    if column < len(drafts[row])
                    and token == drafts[row][column]
                    and row not in finished
                    and not requests[row].cancelled
                ],
                dtype=np.int64,
            )
            if not len(left):
                break
        rights = rows.length[: len(requests)] - before - 1
        for request, draft, right in zip(requests, drafts, rights.tolist(), strict=True):
            self._drafts.judge(request, len(draft), right)
        self._stats.drafted_tokens += sum(map(len, drafts))
        self._stats.accepted_tokens += int(rights.sum())
        for row in sorted(finished, reverse=True):
            self._retire(row)
        return [requests[row] for row in sorted(finished)]

    def _passes(self, first: int, last: int, counts: Ints) -> Iterator[tuple[int, int, int]]:
        """The passes over rows [first, last) with `counts` new tokens each: their rows, and the
        number of tokens to pad to, 0 for none."""
        if not self._sizes or self._decoding < last:
            yield first, last, self._size(int(counts.sum()))
            return
        while first < last:
            count = last - first
            size = self._size(count)
            if not size or size - count > _PASS:  # another pass takes less than so much padding
                size = max((some for some in self._sizes if some <= count), default=size)
            yield first, min(first + size, last), size
            first += size

    def _size(self, tokens: int) -> int:
        """The smallest size that holds so many tokens; 0 if passes have any size."""
        return next((size for size in self._sizes if size >= tokens), 0)

    def _compute(
        self, first: int, last: int, counts: Ints, tokens: int, *, every: bool = False
    ) -> Tensor:
        """One pass over `counts` new tokens of rows [first, last) -> logits after the last of each,
        [m, V], or after every one, [N, V]."""
        rows, prompts = self._rows, self._decoding < last
        computed = rows.computed[first:last]
        width = int(counts.max())
        if tokens and prompts:
            width = rounded(width, LANES)
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
        if logits is not None:
            return logits
        own = positions - base
        target = (np.arange(first, last)[:, None] * self._cache.width + own)[real]
        source = None if real.all() else self._tensor(np.flatnonzero(real))
        reach = int(own.max()) + 1
        if tokens:
            reach = rounded(reach, LANES)
        place = Placement(
            slice(first, last), reach, self._tensor(target), source, tokens=tokens, every=every
        )
        if self._row_pass.shares:
            levels = None if prompts else self._levels.get(first)
            if levels is None:
                levels = rows.levels(first, last)
            if not prompts:
                self._levels[first] = levels
            place = replace(place, own=self._tensor(own), levels=levels)
        if (shift := self._row_pass.shift(rows.tokens[first:last], positions)) is not None:
            place = replace(place, shift=self._tensor(shift))
        adapters = [request.adapter for request in self.active[first:last]]
        with self._threads.computing(tokens) if tokens else nullcontext():
            return self._pass(self._tensor(ids), self._tensor(positions), place, adapters)

    def _tensor(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    def _pass(
        self,
        ids: Tensor,
        positions: Tensor,
        placement: Placement,
        adapters: Sequence[str | None] = (),
    ) -> Tensor:
        return self._row_pass.logits(self._cache, ids, positions, placement, adapters)

    def _sample(
        self, first: int, last: int, batch: SamplingBatch, logits: Tensor, version: int
    ) -> list[Request]:
        """Sample for rows [first, last), store the tokens, retire finished requests."""
        requests = self.active[first:last]
        ids, places = sample_next(requests, batch, logits, version)
        self._stats.sampled_tokens += len(ids)
        finished = [requests[place] for place in places]
        rows, block = self._rows, slice(first, last)
        if rows.bound(first, last):
            self._levels = {}
        going_on = rows.length[block] + 1
        self._reserve(0, int(going_on.max()), int((going_on - rows.base[block]).max()))
        stored = np.minimum(going_on, rows.tokens.shape[1]) - 1
        rows.tokens[np.arange(first, last), stored] = ids
        rows.length[block] = stored + 1
        for place in reversed(places):
            self._retire(first + place)
        return finished
