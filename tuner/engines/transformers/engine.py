"""An engine over any transformers causal LM, using the weights that are being trained."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tuner.engines.base import (
    EngineError,
    EngineStats,
    Generation,
    SamplingParams,
    TokenSink,
)
from tuner.engines.request import Request, RequestEngine, end_ids_of
from tuner.engines.sampling import check_sampling
from tuner.engines.transformers.fixed_sizes import fixed_sizes
from tuner.engines.transformers.model_shape import cache_bytes, length_limit, probe_length
from tuner.engines.transformers.passes import (
    RowPass,
    SoloRunner,
    WeightsGuard,
    names_positions,
    row_pass_of,
    served_model,
)
from tuner.engines.transformers.row_adapters import RowAdapters
from tuner.engines.transformers.slot_rows import NO_LIMIT
from tuner.engines.transformers.slots import FEW_TOKENS, SlotRunner
from tuner.engines.transformers.threads import taking_turns
from tuner.engines.transformers.vision import vision_of
from tuner.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftModel

_log = logging.getLogger(__name__)

_SHORT_STEP = 0.02
"""Steps of at most this many seconds run on the event loop."""
_FEWEST_CACHED = 1024
"""Number of tokens whose keys and values may be stored however little memory is left."""
_POLL = 0.0005
"""Seconds between checks whether a step in the worker thread has ended."""


@dataclass(eq=False)
class _Driver:
    """The task that runs steps while an event loop has requests in flight."""

    wake: asyncio.Event
    task: asyncio.Task[None] | None = None
    in_flight: int = 0


class TransformersEngine(RequestEngine):
    """Generates with a transformers causal LM that may be training at the same time.

    There is one copy of the weights: the engine reads the modules it is given. Requests are
    admitted between any two tokens, each with its own sampling settings and random stream.

    Models with keys and values per token (full and sliding-window attention) serve many requests at
    once with prefix reuse (`SlotRunner`); all others serve one after the other (`SoloRunner`),
    which is logged and visible in `batched`. With `deterministic=True` results are bit-identical
    whatever else is in flight: passes have fixed sizes (`fixed_sizes`), or if a trial at start
    finds differences, requests are served one after the other.

    Steps run on the event loop while they are short (an estimate below 20 ms) and in a worker
    thread otherwise, so that agents stay responsive next to a large model; the thread takes turns
    with busy agents (`taking_turns`). For short steps the thread would be too slow:
    `benchmarks/engine.py` measures a third of the tokens per second next to busy agents.

    Any number of event loops may call `generate`, also at the same time from several threads; the
    weights may change only inside `pause()`.

    Args:
        model: Causal LM with "sdpa" or "eager" attention, optionally wrapped by peft for LoRA, in
            eval mode from now on. On a CPU passes in float32 have the adapters merged, if that
            changes log-probs by at most 1e-5 on average (`MergedAdapters`); the model itself stays
            unmerged.
        tokenizer: Its tokenizer, for end-of-sequence ids and stop strings.
        max_model_len: Maximum of prompt and completion tokens of one request.
        max_slots: Maximum of requests computed at once; unused rows keep finished requests as
            prefix cache. Memory is allocated as needed, per layer `2 * kv_heads * head_dim` numbers
            for each token: with prefixes (on a CPU) at most four times the tokens in rows,
            otherwise `max_slots` times the longest request, and never more than `limit_cache` says.
        deterministic: The same bits for equal requests, whatever else is in flight.
        version: Version of the current weights.
        prefill_tokens: Maximum of prompt tokens computed in one forward pass.
        enforce_eager: Record no CUDA graphs (`tuner.engines.transformers.passes`).
        adapters: peft's names of the adapters that requests may have; requests with different ones
            are computed together. Empty: all have what peft has switched on.

    Raises:
        ConfigError: A size is not positive; `max_model_len` is more than the model supports in
            batches (`length_limit`); the attention implementation takes no mask; the adapter
            modifies prompts; or the model is not generative (an encoder).
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_model_len: int,
        max_slots: int = 64,
        deterministic: bool = False,
        version: int = 0,
        prefill_tokens: int = 4096,
        enforce_eager: bool = False,
        adapters: Sequence[str] = (),
    ) -> None:
        sizes = {
            "max_model_len": max_model_len,
            "max_slots": max_slots,
            "prefill_tokens": prefill_tokens,
        }
        for name, value in sizes.items():
            if value < 1:
                raise ConfigError(f"{name} is {value}, but must be at least 1")
        self._model = served_model(model)
        limit = length_limit(self._model.config)
        if limit is not None and max_model_len > limit[0]:
            raise ConfigError(
                f"max_model_len is {max_model_len}, but {limit[1]}: set model.max_model_len to "
                f"{limit[0]} at most"
            )
        self._model.train(False)
        embeddings: Any = self._model.get_input_embeddings()
        super().__init__(
            tokenizer,
            end_ids=end_ids_of(self._model.generation_config, tokenizer),
            vocabulary=int(embeddings.weight.shape[0]),
            max_model_len=max_model_len,
            version=version,
            grammars=True,
            shares_weights=True,
            every_setting=True,
            goes_on="always",
            images=vision_of(self._model) is not None,
        )
        self._adapters = frozenset(adapters)
        self._guard = WeightsGuard(self._model)
        self._runner = self._make_runner(deterministic, max_slots, prefill_tokens, enforce_eager)
        self._lock = threading.Lock()  # held while a step runs
        self._in_flight: set[Request] = set()
        self._numbers = count()
        self._arrived: deque[Request] = deque()  # other threads may append while a step runs
        self._pauses = 0
        self._drivers: dict[asyncio.AbstractEventLoop, _Driver] = {}
        self._executor: ThreadPoolExecutor | None = None
        self._prompt_token_seconds = math.inf
        self._decode_seconds = math.inf

    def _make_runner(
        self, deterministic: bool, max_slots: int, prefill_tokens: int, enforce_eager: bool
    ) -> SlotRunner | SoloRunner:
        model = self._model
        row_pass, longest = row_pass_of(model), self._capabilities.max_model_len
        adapters = RowAdapters(model, self._adapters) if self._adapters else None
        sizes: tuple[int, ...] = ()
        if isinstance(row_pass, RowPass) and adapters is None:
            row_pass.merge_adapters()
        if deterministic and isinstance(row_pass, RowPass):
            if adapters is None:
                sizes, row_pass.shares = fixed_sizes(model, row_pass, longest)
            if not sizes:
                row_pass = "a row's numbers would depend on the rows that are computed with it"
        if isinstance(row_pass, RowPass) and adapters is not None:
            row_pass = row_pass.with_adapters(adapters)
        if isinstance(row_pass, RowPass):
            return SlotRunner(
                model,
                self._guard,
                self._stats,
                row_pass,
                max_slots=max_slots,
                max_model_len=longest,
                prefill_tokens=prefill_tokens,
                # The number of tokens that an adapter computes differs from pass to pass.
                enforce_eager=enforce_eager or self._capabilities.images or adapters is not None,
                sizes=sizes,
            )
        told = names_positions(model, probe_length(model.config))
        if isinstance(told, str):
            raise ConfigError(
                f"{type(model).__name__} does not generate what a plain forward pass gives: "
                f"{told}. If it is an encoder that can be a decoder, set is_decoder to true in its "
                "config.json"
            )
        _log.warning(
            "%s cannot be served from rows of keys and values: %s. Requests are generated one at "
            "a time, without prefix reuse.",
            type(model).__name__,
            row_pass,
        )
        return SoloRunner(model, self._guard, self._stats, names_positions=told, adapters=adapters)

    @property
    def failure(self) -> EngineError | None:
        """Always None: a failed request does not affect the next one."""
        return None

    @property
    def batched(self) -> bool:
        """Whether requests are computed together and reuse prefixes."""
        return isinstance(self._runner, SlotRunner)

    def limit_cache(self, size: int) -> int | None:
        """Limit the memory of keys and values, before any request.

        Requests that exceed it together wait for each other, and one that does alone fails.

        Args:
            size: Maximum number of bytes; less than those of 1,024 tokens is increased to them.

        Returns:
            The maximum number of tokens; None for an engine that serves one request at a time.
        """
        if isinstance(self._runner, SlotRunner):
            self._runner.cache_limit = max(_FEWEST_CACHED, size // cache_bytes(self._model))
        return self.cached_tokens

    @property
    def cached_tokens(self) -> int | None:
        """Maximum number of tokens whose keys and values are stored; None: no limit is set."""
        limit = self._runner.cache_limit if isinstance(self._runner, SlotRunner) else NO_LIMIT
        return None if limit == NO_LIMIT else limit

    @property
    def no_drafts(self) -> str:
        """Why no tokens are drafted (`tuner.engines.transformers.speculation`); empty if they are.

        `stats` counts drafted and accepted tokens.
        """
        return self._runner.no_drafts

    @property
    def stats(self) -> EngineStats:
        return replace(
            self._stats,
            running=len(self._runner.active),
            waiting=len(self._runner.waiting) + len(self._arrived),
        )

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
        check_sampling(sampling)
        if adapter is not None and adapter not in self._adapters:
            raise EngineError(f"there is no adapter {adapter!r}")
        form = await self._grammars.started(sampling.grammar) if sampling.grammar else None
        if self._closed:
            raise EngineError("the engine is closed")
        loop = asyncio.get_running_loop()
        own: dict[str, Any] = {"uniforms": Random(sampling.seed), "form": form}
        own |= {"future": loop.create_future(), "adapter": adapter, "number": next(self._numbers)}
        request = self._begun(Request, prompt_ids, sampling, sink, so_far, **own)
        driver = self._drivers.get(loop)
        if driver is None:
            driver = self._drivers[loop] = _Driver(asyncio.Event())
        driver.in_flight += 1
        self._in_flight.add(request)
        self._arrived.append(request)
        if driver.task is None:
            driver.task = loop.create_task(self._drive(loop, driver), name="tuner-engine")
        try:
            return await request.future
        finally:
            request.cancelled = True  # no effect on a finished one
            self._in_flight.discard(request)
            driver.in_flight -= 1

    @asynccontextmanager
    async def pause(self) -> AsyncIterator[None]:
        """Hold generation between two tokens while the block runs; may be nested."""
        while not self._lock.acquire(blocking=False):  # noqa: ASYNC110  # held by threads too
            await asyncio.sleep(_POLL)
        self._pauses += 1
        self._lock.release()
        try:
            yield
        finally:
            with self._lock:
                self._pauses -= 1
            if not self._pauses:
                for loop, driver in list(self._drivers.items()):
                    with suppress(RuntimeError):  # a closed loop has nobody to wake
                        loop.call_soon_threadsafe(driver.wake.set)

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Hold generation while the block runs, since the weights are the trainer's.

        They will change, so cached keys and values are useless; their memory is released before the
        update needs it.
        """
        async with self.pause():
            self._runner.evict()
            yield

    async def update_weights(self, version: int) -> None:
        """See `Engine.update_weights`. The next token of a request in flight is the first of the
        new version."""
        async with self.pause():
            self._runner.evict()
            self._guard.remember()
            self._version = version

    async def close(self) -> None:
        async with self.pause():
            self._closed = True
            self._fail(EngineError("the engine was closed while the request was in flight"))
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None

    # The loop of steps

    async def _drive(self, loop: asyncio.AbstractEventLoop, driver: _Driver) -> None:
        """Run steps until no request of this event loop is in flight."""
        try:
            while driver.in_flight and not self._closed:
                if self._pauses:
                    driver.wake.clear()
                    if self._pauses:
                        await driver.wake.wait()
                elif not self._lock.acquire(blocking=False):
                    await asyncio.sleep(_POLL)
                else:
                    expected = self._expected_seconds()
                    self._lock.release()
                    if expected > _SHORT_STEP:
                        if self._executor is None:
                            self._executor = ThreadPoolExecutor(1, "tuner-engine")
                        await taking_turns(loop.run_in_executor(self._executor, self._step))
                    else:
                        self._step()
                        await asyncio.sleep(0)
        except asyncio.CancelledError:
            for request in list(self._in_flight):
                if request.future.get_loop() is loop:
                    request.settle(EngineError("the engine's task was cancelled"))
            raise
        finally:
            driver.task = None
            with self._lock:
                self._take_in()
            if not driver.in_flight:
                self._drivers.pop(loop, None)
            for gone in [other for other in self._drivers if other.is_closed()]:
                del self._drivers[gone]

    def _expected_seconds(self) -> float:
        self._take_in()
        ahead = self._runner.tokens_ahead()
        return ahead * self._prompt_token_seconds if ahead else self._decode_seconds

    def _take_in(self) -> None:
        """Hand new requests to the runner and drop abandoned ones."""
        while self._arrived:
            self._runner.waiting.append(self._arrived.popleft())
        self._runner.drop_abandoned()

    def _step(self) -> None:
        """One forward pass; results go to the requests. Never raises an Exception."""
        with self._lock:
            if self._pauses or self._closed:
                return
            self._take_in()
            computed = self._stats.prompt_tokens_computed
            started, busy = time.perf_counter(), time.thread_time()
            try:
                finished = self._forward()
            except BaseException as error:
                self._fail(error)
                if not isinstance(error, Exception):
                    raise
                return
            self._stats.steps += 1
            self._stats.step_seconds += time.perf_counter() - started
            computed = self._stats.prompt_tokens_computed - computed
            self._measure(computed, time.thread_time() - busy)
            for request in finished:
                request.settle(request.error or request.generation())
            self._stats.requests += len(finished)

    def _forward(self) -> list[Request]:
        if self._model.training:
            self._model.train(False)
        if self._guard.changed():
            self._runner.evict()
            self._guard.remember()
            self._stats.unannounced_updates += 1
        # Not inference_mode: tensors that a model keeps from a pass could not be used in training.
        with torch.no_grad():
            return self._runner.step(self._version)

    def _measure(self, computed: int, seconds: float) -> None:
        """Update the estimate of how long the next step of this kind takes.

        Measured in CPU seconds of this thread: next to busy agents a step in the worker thread
        waits for the interpreter most of the time and would look too long for the event loop.
        """
        if computed:
            now = seconds / max(computed, FEW_TOKENS)
            self._prompt_token_seconds = _average(self._prompt_token_seconds, now)
        else:
            self._decode_seconds = _average(self._decode_seconds, seconds)

    def _fail(self, error: BaseException) -> None:
        """Fail every request in flight and drop all cached state."""
        self._runner.evict()
        self._runner.waiting.clear()
        self._runner.active.clear()
        self._arrived.clear()
        for request in list(self._in_flight):
            if isinstance(error, EngineError):
                mine = EngineError(*error.args)
            else:
                mine = EngineError(f"a forward pass failed: {type(error).__name__}: {error}")
            mine.__cause__ = error
            request.settle(mine)


def _average(known: float, now: float) -> float:
    return now if known == math.inf else 0.8 * known + 0.2 * now
