"""What ends an attempt at a rollout before its functions do; and what those may end besides."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from tuner.gateway import Session
from tuner.gateway.access import Access

T = TypeVar("T")
logger = logging.getLogger("tuner.rollout")
GRACE = 5.0
"""Seconds that a function which was cancelled may take to end."""


class Exited(Exception):
    """A function raised what would end the process: SystemExit, or what is no Exception."""


async def contained(work: Coroutine[Any, Any, T], session: Access) -> T:
    """The result of a user's function, which runs in a task of its own.

    When this is cancelled (a deadline, Ctrl-C) the session is sealed before the function hears of
    it: none of its calls is answered any more, whatever it makes of its cancellation. One that does
    not end is left behind, and the log names it.

    Raises:
        Exited: It raised SystemExit, or what is neither an Exception nor an interrupt.
        CancelledError: This task was cancelled (`cancelling()` tells), or the function's own was.
    """
    task = asyncio.ensure_future(_without_exit(work))
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        session.seal()
        task.cancel()
        try:
            await asyncio.wait([task], timeout=GRACE)
        finally:  # also where this is cancelled once more, by Ctrl-C after a deadline
            if not task.done():
                logger.warning(
                    "%s was cancelled and goes on: it catches CancelledError, perhaps by a bare "
                    "`except:`. It is left behind, and its calls are refused",
                    session.id,
                )
                # At its end asyncio waits for all tasks that it knows.
                asyncio.tasks._unregister_task(task)
            elif not task.cancelled():
                task.exception()  # nobody asks any more
        raise
    return task.result()


async def _without_exit(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # it would end the event loop
        raise Exited(f"{type(error).__name__}: {error}") from error


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
        started = time.perf_counter() - self.session.in_flight.seconds
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
