"""The number of threads for a step (one, or all that torch uses), steps next to an event loop, and
memory that the process returns to the system.

Threads wait for each other at every operation. A step of a small model has a thousand operations,
each shorter than the waiting: with two threads, one request of a model of 0.8M parameters is
generated at a third of the speed. For a large model's products threads pay off.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean

import torch
from torch import nn

_WORTH_THREADS = 5e6
"""Floating-point operations of a matrix product from which threads pay off. Measured with two
threads and products of 0.2 to 230 million: 0.4 to 0.9 times the speed of one thread below it,
0.9 to 1.6 times above."""
_TURN, _LONG_TURN = 0.0002, 0.02
"""Seconds of one round of an idle loop, and of one wait of a loop for a step."""


def return_memory() -> None:
    """Return freed memory to the system.

    glibc keeps freed blocks of up to 32 MB, of each thread apart and often in fragments; other C
    libraries return memory themselves.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class FewThreads:
    """Computes small steps of a model with one thread.

    Args:
        model: The model whose matrix products are computed.
    """

    def __init__(self, model: nn.Module) -> None:
        sizes = [part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear)]
        self._most_tokens = _WORTH_THREADS / (2 * fmean(sizes)) if sizes else 0.0

    @contextmanager
    def computing(self, tokens: int) -> Iterator[None]:
        """While the block runs, compute with the number of threads that `tokens` tokens are worth.
        Operations already running in other threads are not affected."""
        threads = torch.get_num_threads()
        if threads == 1 or tokens > self._most_tokens:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


async def taking_turns(step: asyncio.Future[None]) -> None:
    """Await a step in another thread, giving it the interpreter for as long as this loop's agents
    had it.

    Where agents are always busy, a loop gives up the interpreter only for the moment in which it
    polls for events, and takes it back before a waiting thread has woken up: a step would never
    end.
    """
    while not step.done():
        started = time.perf_counter()
        await asyncio.sleep(0)
        taken = time.perf_counter() - started
        if taken > _TURN:
            time.sleep(min(taken, _LONG_TURN))  # noqa: ASYNC251  # nobody here has a turn
        else:
            await asyncio.wait([step], timeout=_LONG_TURN)
    await step
