"""How many threads a step is computed with, one or all that torch uses; and steps beside a loop.

Threads wait for each other at every operation. A step of a small model has a thousand of them, each
of which takes less time than the waiting: one request of a model of 0.8M parameters is generated at
a third of the speed with two threads. A large model's products are worth it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean

import torch
from torch import nn

_WORTH_THREADS = 5e6
"""Floating-point operations of a matrix product from which on threads are worth their waiting.
Measured with two threads and products of 0.2 to 230 million: 0.4 to 0.9 times the speed of one
thread below it, 0.9 to 1.6 times above."""
_TURN, _LONG_TURN = 0.0002, 0.02
"""Seconds in which a loop with little to do goes round once, and those for which a loop waits for a
step at a time."""


class FewThreads:
    """Computes small steps of a model with one thread.

    Args:
        model: Whose matrix products they are.
    """

    def __init__(self, model: nn.Module) -> None:
        sizes = [part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear)]
        self._most_tokens = _WORTH_THREADS / (2 * fmean(sizes)) if sizes else 0.0

    @contextmanager
    def computing(self, tokens: int) -> Iterator[None]:
        """While the block runs this thread computes with as many threads as so many tokens are
        worth. What other threads have begun goes on as it was."""
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
    """Await a step of another thread, which has the interpreter as long as this loop's agents had.

    Where agents are busy all the time a loop gives the interpreter up for the moment in which it
    looks for events, and has it again before a thread that waits has woken up: a step would never
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
