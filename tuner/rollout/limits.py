"""What ends an attempt at a rollout before its functions do, besides `explorer.max_timeout`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tuner.gateway import Session


class Ending:
    """Ends a rollout from outside, whatever it is doing; what it did so far is kept.

    Attributes:
        reason: Why it was ended; None while it was not.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._deadline: asyncio.Timeout | None = None

    def end(self, reason: str) -> None:
        """End it, or see that it does not begin."""
        if self.reason is None:
            self.reason = reason
            if self._deadline is not None:
                _expire(self._deadline)

    @contextmanager
    def of(self, deadline: asyncio.Timeout) -> Iterator[None]:
        """While the block runs, an end is an early `deadline`."""
        self._deadline = deadline
        try:
            yield
        finally:
            self._deadline = None


@dataclass(eq=False)
class ToolTime:
    """The seconds of an attempt during which none of its calls is in flight.

    Args:
        seconds: The most there may be; None: any.
        session: The attempt's.

    Attributes:
        exceeded: Whether there were more.
    """

    seconds: float | None
    session: Session
    exceeded: bool = False

    @contextmanager
    def limiting(self, deadline: asyncio.Timeout) -> Iterator[None]:
        """While the block runs, too much time in tools is an early `deadline`."""
        if self.seconds is None:
            yield
            return
        watch = asyncio.ensure_future(self._watch(self.seconds, deadline))
        try:
            yield
        finally:
            watch.cancel()

    async def _watch(self, seconds: float, deadline: asyncio.Timeout) -> None:
        started = time.perf_counter()
        while True:
            spent = time.perf_counter() - started - self.session.in_flight.seconds
            if spent >= seconds:
                self.exceeded = True
                _expire(deadline)
                return
            # Calls only put the moment off.
            await asyncio.sleep(seconds - spent)


def _expire(deadline: asyncio.Timeout) -> None:
    if not deadline.expired():
        deadline.reschedule(asyncio.get_running_loop().time())
