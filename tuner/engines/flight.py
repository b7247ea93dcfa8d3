"""A request at an engine over servers, which is sampled in parts."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import suppress
from dataclasses import dataclass

from tuner.engines.request import Progress


@dataclass(eq=False)
class Flight:
    """A request, and the part of it that is being sampled."""

    progress: Progress
    loop: asyncio.AbstractEventLoop
    wake: asyncio.Event
    part: asyncio.Task[None] | None = None

    def end_part(self) -> None:
        part = self.part
        if part is not None and not self.progress.sampling.grammar:
            with suppress(RuntimeError):  # its loop was closed: nobody waits
                self.loop.call_soon_threadsafe(part.cancel)

    def wake_up(self) -> None:
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.wake.set)

    @property
    def running(self) -> bool:
        return self.part is not None and not self.loop.is_closed()


def continued_seed(seed: int, done: int) -> int:
    """The seed of a part that begins after `done` tokens, in [0, 2**63).

    Another one for each part: with the first part's, the random numbers of its first tokens would
    come again.
    """
    if not done:
        return seed % 2**63
    digest = hashlib.blake2b(f"{seed}:{done}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 2**63
