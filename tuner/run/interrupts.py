"""A run inside a running event loop, as in a notebook: in a thread, and an interrupt ends it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class _Waited:
    """A call in a thread, for which another thread waits.

    Attributes:
        interrupted: Whether it is to end.
        task: What it awaits, in the event loop of its own.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self.task: asyncio.Task[Any] | None = None

    def interrupt(self) -> None:
        """End it as Ctrl-C ends a script: what it awaits is cancelled, and closes what is open."""
        self.interrupted = True
        if self.task is not None:
            self.task.get_loop().call_soon_threadsafe(self.task.cancel)


_WAITED: contextvars.ContextVar[_Waited | None] = contextvars.ContextVar("waited", default=None)


def outside_event_loop(call: Callable[[], T]) -> T:
    """`call()`, in a thread of its own if an event loop is running here, as in a notebook.

    Raises:
        KeyboardInterrupt: It was interrupted here, and what it awaited by `run_async` has ended; a
            second interrupt does not wait for that.
    """
    if not _in_event_loop():  # what `call` raises has nothing to do with that
        return call()
    future: Future[T] = Future()
    waited, context = _Waited(), contextvars.copy_context()
    context.run(_WAITED.set, waited)

    def run() -> None:
        try:
            future.set_result(context.run(call))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="tuner", daemon=True).start()
    try:
        return future.result()
    except KeyboardInterrupt:
        waited.interrupt()
        return future.result()


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run(work)`, which an interrupt of `outside_event_loop` ends, too.

    Raises:
        KeyboardInterrupt: It was.
    """
    waited = _WAITED.get()
    if waited is None:
        return asyncio.run(work)

    async def known() -> T:
        waited.task = asyncio.current_task()
        if waited.interrupted:
            work.close()
            raise asyncio.CancelledError
        return await work

    try:
        return asyncio.run(known())
    except asyncio.CancelledError:
        if waited.interrupted:
            raise KeyboardInterrupt from None
        raise
