"""vLLM as part of this process: no server in between.

vLLM itself still computes in processes of its own; what runs here is its asynchronous front, in a
thread with an event loop that is its own, because it belongs to one loop and agents to any.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import torch

from tuner.engines.base import EngineLostError, SamplingParams
from tuner.engines.token_server import Sampled, Weights
from tuner.engines.vllm.core import TransferVerb, VllmSettings
from tuner.engines.vllm.direct import DirectSender, TrainerWeights
from tuner.engines.vllm.server import VllmHost

_T = TypeVar("_T")
_Item = Sampled | BaseException | None


class InProcessVllm:
    """A `TokenServer` in this process.

    Args:
        settings: With which vLLM is run.
        trained: Where new weights are taken from once it runs; None: from folders alone.
    """

    def __init__(self, settings: VllmSettings, trained: TrainerWeights | None = None) -> None:
        self._settings = settings
        self._sender = None if trained is None else DirectSender(trained, self._transfer)
        self._host = VllmHost()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """What messages call it."""
        return "vLLM in this process"

    def start(self, weights: Weights) -> None:
        """See `TokenServer.start`."""
        if self._sender is not None:
            self._sender.forget()
        self._call(self._host.load(self._settings, weights))

    def load(self, weights: Weights) -> None:
        """See `TokenServer.load`."""
        if self._settings.sleeps:
            # What training has freed is vLLM's again.
            torch.cuda.empty_cache()
        if weights.folder is None:
            assert self._sender is not None
            self._sender.send(weights.label)
        else:
            self._call(self._host.load(self._settings, weights))

    def sleep(self) -> None:
        """See `TokenServer.sleep`."""
        self._call(self._host.sleep())

    def serves(self, label: str) -> bool:
        """No: there is no connection that could break."""
        return False

    def _transfer(self, verb: TransferVerb, info: dict[str, Any]) -> None:
        self._call(self._host.transfer(verb, info))

    def stop(self) -> None:
        """End vLLM's processes."""
        if self._thread.is_alive():
            self._call(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _close(self) -> None:
        self._host.close()

    def _call(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def stream(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, label: str
    ) -> AsyncGenerator[Sampled, None]:
        """See `TokenServer.stream`."""
        here = asyncio.get_running_loop()
        items: asyncio.Queue[_Item] = asyncio.Queue()

        def hand_over(item: _Item) -> None:
            if not here.is_closed():
                here.call_soon_threadsafe(items.put_nowait, item)

        async def pump() -> None:
            try:
                async with aclosing(self._host.stream(prompt_ids, sampling, label)) as stream:
                    async for one in stream:
                        hand_over(one)
            except BaseException as error:
                hand_over(error)
                raise
            hand_over(None)

        work = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while (item := await items.get()) is not None:
                if isinstance(item, asyncio.CancelledError):
                    raise EngineLostError(f"{self.name} was stopped")
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            work.cancel()
