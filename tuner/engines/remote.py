"""An engine over server processes that hold copies of the weights.

A request is sampled in parts. A pause ends the current part; the next part takes prompt and
completion so far as its prompt, and is sampled with the weights current at that time:

    prompt ─▶ a b c │ pause, new weights │ prompt a b c ─▶ d e f <end>
    version   0 0 0                                        1 1 1

so every token is sampled with exactly one version, and recomputing it with that version gives its
log-prob. Stop strings are detected here, in the ids, and may span two parts. A completion with a
grammar, or whose own tokens are counted (penalties, bad words), cannot be split, because the second
part would treat the first as prompt: a pause waits for it to end.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tuner.engines.base import (
    EngineError,
    EngineLostError,
    EngineStats,
    Generation,
    SamplingParams,
    TokenSink,
)
from tuner.engines.request import Flight, Progress, RequestEngine
from tuner.engines.sampling import check_sampling, packed_kept
from tuner.engines.servers import Fleet, SampledTokens, Seat, TokenServer

_POLL = 0.0005
"""Seconds between checks whether the parts in flight have ended."""
_SESSIONS = 65536
"""Number of sessions whose server is remembered."""


class ServedEngine(RequestEngine):
    """Generates on one or more `TokenServer`s that hold copies of the trained weights.

    All turns of a session go to one server, so that they find their prefix in its cache; a new
    session goes to the server with the fewest requests. If a server dies, its requests fail and
    the next request restarts it with the weights that the engine serves, up to `max_restarts`
    times in total; after that every request fails with the cause. `generate` may be called from
    any number of event loops.

    Args:
        servers: Started by the first request, or by `start()`.
        save: Writes the current weights into a folder.
        folder: Where weights are handed over; every server must see it. Emptied at the end.
        direct: Whether running servers take new weights from the trainer's memory instead.
        sleeps: Whether servers release the device's memory while the weights are trained.
        tokenizer: For stop strings and grammars.
        end_ids: Token ids that end a completion.
        vocabulary: Number of token ids that the model knows.
        max_model_len: Maximum of prompt and completion tokens of one request.
        grammars: Whether the servers follow our grammars exactly.
        every_setting: As in `EngineCapabilities`.
        check: Rejects sampling settings that the servers do not support.
        version: Version of the current weights.
        max_restarts: Maximum number of restarts of dead servers, in total.
    """

    def __init__(
        self,
        servers: Sequence[TokenServer],
        *,
        save: Callable[[Path], None],
        folder: Path,
        tokenizer: Any,
        end_ids: frozenset[int],
        vocabulary: int,
        max_model_len: int,
        direct: bool = False,
        sleeps: bool = False,
        grammars: bool = False,
        every_setting: bool = False,
        check: Callable[[SamplingParams], None] = check_sampling,
        version: int = 0,
        max_restarts: int = 3,
    ) -> None:
        super().__init__(
            tokenizer,
            end_ids=end_ids,
            vocabulary=vocabulary,
            max_model_len=max_model_len,
            version=version,
            grammars=grammars,
            shares_weights=False,
            every_setting=every_setting,
            goes_on="in_parts",
        )
        self._fleet = Fleet(
            servers, save=save, folder=folder, direct=direct, max_restarts=max_restarts
        )
        self._sleeps = sleeps
        self._unfinished = False  # the weights are being changed and belong to no version
        self._check = check
        self._flights: set[Flight] = set()
        self._sessions: OrderedDict[str, Seat] = OrderedDict()
        self._gate = threading.Lock()  # held while a part or a pause begins
        self._pauses = 0
        # One thread, so that starting, loading and stopping happen one after the other.
        self._executor = ThreadPoolExecutor(1, "tuner-engine")

    @property
    def stats(self) -> EngineStats:
        with self._gate:
            self._stats.restarts = self._fleet.restarts
            running = sum(flight.part is not None for flight in self._flights)
            return replace(self._stats, running=running, waiting=len(self._flights) - running)

    @property
    def failure(self) -> EngineError | None:
        return self._fleet.failure

    # Generating

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        session: str,
        sink: TokenSink | None = None,
        so_far: Generation | None = None,
        adapter: str | None = None,
    ) -> Generation:
        """See `Engine.generate`."""
        self._check(sampling)
        if sampling.grammar:
            if not self._capabilities.grammars:
                raise EngineError("this engine cannot hold a completion to a grammar")
            await self._grammars.started(sampling.grammar)
        own = {"loop": asyncio.get_running_loop(), "wake": asyncio.Event(), "adapter": adapter}
        flight = self._begun(Flight, prompt_ids, sampling, sink, so_far, **own)
        with self._gate:
            self._flights.add(flight)
        try:
            while flight.finish_reason is None:
                await self._part(flight, session)
        finally:
            with self._gate:
                self._flights.discard(flight)
                self._stats.requests += flight.finish_reason is not None
        return flight.generation()

    async def _part(self, flight: Flight, session: str) -> None:
        """Sample until the completion ends or a pause begins."""
        seat = await self._seat(session)
        with self._gate:
            if self._closed:
                raise EngineError("the engine is closed")
            paused = self._pauses > 0 or (not seat.up and self._must_wait)
            flight.wake.clear()
            if not paused and seat.up:
                weights = self._fleet.weights
                assert weights is not None
                work = self._sample(flight, seat, weights.label, self._version)
                flight.part = part = flight.loop.create_task(work)
                seat.load += 1
        if paused:
            await flight.wake.wait()
            return
        if not seat.up:
            return
        try:
            await asyncio.wait({part})
        except asyncio.CancelledError:
            part.cancel()
            await asyncio.wait({part})
            raise
        finally:
            seat.load -= 1
            flight.part = None
        if part.cancelled():
            if flight.cancelled:  # the sink is full
                raise asyncio.CancelledError
            if self._closed:
                raise EngineError("the engine was closed while the request was in flight")
        else:
            part.result()

    async def _sample(self, progress: Progress, seat: Seat, label: str, version: int) -> None:
        done = len(progress.completion_ids)
        prompt = progress.token_ids()
        asked = replace(
            progress.sampling,
            max_tokens=progress.limit - done,
            seed=continued_seed(progress.sampling.seed, done),
            stop=(),
        )
        first = True
        try:
            async with aclosing(
                seat.server.stream(prompt, asked, label, progress.adapter)
            ) as stream:
                async for sampled in stream:
                    if first and sampled.cached_tokens >= 0:
                        first = False
                        self._count_prompt(progress, len(prompt), sampled.cached_tokens)
                    if self._take(progress, sampled, version):
                        return
        except EngineLostError as error:
            seat.lose(error, doubtful=True)
            raise
        raise EngineError(
            f"{seat.server.name} ended a completion after {len(progress.completion_ids)} tokens, "
            "before its end"
        )

    def _count_prompt(self, progress: Progress, tokens: int, cached: int) -> None:
        with self._gate:
            self._stats.prompt_tokens_reused += cached
            self._stats.prompt_tokens_computed += tokens - cached
        if progress.cached_tokens < 0:
            progress.cached_tokens = cached

    def _take(self, progress: Progress, sampled: SampledTokens, version: int) -> bool:
        """Hand tokens over; True when the completion is finished."""
        before = len(progress.completion_ids)
        try:
            for place, (token_id, logprob) in enumerate(
                zip(sampled.ids, sampled.logprobs, strict=True)
            ):
                finished = progress.push(token_id, logprob, version)
                if progress.cancelled:
                    raise asyncio.CancelledError
                if progress.sampling.top_logprobs:
                    progress.top_logprobs.append(sampled.top_logprobs[place])
                if sampled.kept:
                    left = np.array(sampled.kept[place], dtype=np.int64)
                    progress.kept.append(packed_kept(left, self._vocabulary) if len(left) else "")
                if finished:
                    return True
        finally:
            with self._gate:
                self._stats.sampled_tokens += len(progress.completion_ids) - before
        if sampled.finish_reason == "stop" and progress.sampling.grammar:
            progress.finish_reason = "stop"  # nothing can follow
            return True
        return False

    async def _seat(self, session: str) -> Seat:
        """The session's server, started if necessary."""
        with self._gate:
            seat = self._sessions.pop(session, None)
            if seat is None:
                seat = min(self._fleet.seats, key=lambda one: (one.load, one.sessions))
                seat.sessions += 1
            self._sessions[session] = seat
            if len(self._sessions) > _SESSIONS:
                self._sessions.popitem(last=False)[1].sessions -= 1
        if not seat.up:
            await self._locked(self._bring_up, seat)
        return seat

    # Pauses and weights

    @asynccontextmanager
    async def pause(self) -> AsyncIterator[None]:
        """Hold generation between two tokens while the block runs; may be nested."""
        with self._gate:
            self._pauses += 1
            flights = list(self._flights)
        try:
            for flight in flights:
                if not flight.sampling.in_one_part:
                    flight.end_part()
            while any(flight.running for flight in flights):  # noqa: ASYNC110  # on several loops
                await asyncio.sleep(_POLL)
            yield
        finally:
            with self._gate:
                self._pauses -= 1
            self._wake_flights()

    def _wake_flights(self) -> None:
        with self._gate:
            waiting = [] if self._pauses else list(self._flights)
        for flight in waiting:
            flight.wake_up()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """See `TrainingEngine.training`.

        A server that must be started meanwhile gets the weights of `update_weights`, unless the
        weights that it should serve exist as a folder.
        """
        async with AsyncExitStack() as held:
            if self._sleeps:
                await held.enter_async_context(self.pause())
            await self._locked(self._begin_training)
            try:
                yield
                if self._unfinished and self._sleeps:  # nothing was trained
                    await self._locked(self._change_weights, self._version)
            finally:
                self._unfinished = False
                self._wake_flights()

    def _begin_training(self) -> None:
        self._unfinished = True
        if self._sleeps:
            self._fleet.sleep()

    @property
    def _must_wait(self) -> bool:
        """Whether no server can be started, for lack of complete weights."""
        return self._unfinished and not self._fleet.can_start

    def _bring_up(self, seat: Seat) -> None:
        if not self._must_wait:
            self._fleet.bring_up(seat, self._version)

    async def start(self) -> None:
        """Start every server that is not running.

        Raises:
            EngineError: One does not start.
        """
        for seat in self._fleet.seats:
            await self._locked(self._bring_up, seat)

    async def update_weights(self, version: int) -> None:
        """See `Engine.update_weights`. A server that died, before or meanwhile, is started with
        them."""
        async with self.pause():
            started = time.perf_counter()
            await self._locked(self._change_weights, version)
            self._stats.update_seconds = time.perf_counter() - started

    async def close(self) -> None:
        with self._gate:
            self._closed = True
            flights = list(self._flights)
        for flight in flights:
            flight.end_part()
            flight.wake_up()
        await self._locked(self._fleet.stop)
        self._executor.shutdown(wait=False)

    async def _locked(self, work: Callable[..., None], *args: Any) -> None:
        """Run `work` in the thread where servers are started, loaded and stopped."""
        if self._closed and work != self._fleet.stop:
            raise EngineError("the engine is closed")
        await asyncio.get_running_loop().run_in_executor(self._executor, work, *args)

    def _change_weights(self, version: int) -> None:
        self._version, self._unfinished = version, False
        self._fleet.change_weights(version)


def continued_seed(seed: int, done: int) -> int:
    """Seed of a part that begins after `done` tokens, in [0, 2**63).

    Each part needs a different one: with the first part's seed its random numbers would repeat.
    """
    if not done:
        return seed % 2**63
    digest = hashlib.blake2b(f"{seed}:{done}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 2**63
