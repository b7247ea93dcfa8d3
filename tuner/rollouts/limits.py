"""What can end an attempt at a rollout before its functions do, and containing their exceptions."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import signal
import sys
import threading
import time
import traceback
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from tuner.gateway import Session
from tuner.gateway.sessions import Access
from tuner.tasks.functions import LIBRARIES, OURS, in_thread, place_of, unwrapped
from tuner.traces.store import text_of

T = TypeVar("T")
logger = logging.getLogger("tuner.rollout")
GRACE = 5.0
"""Seconds that a cancelled function gets to end."""


class FunctionExit(Exception):
    """A function raised what would end the process: something that is no Exception, such as
    SystemExit or KeyboardInterrupt."""


async def contained(work: Coroutine[Any, Any, T], session: Access) -> T:
    """The result of a user's function, run in a separate task.

    If this is cancelled (a deadline, Ctrl-C) the session is sealed before the function learns of
        it:
    none of its calls is answered any more, whatever it does with its cancellation. One that does
    not end is abandoned, and the log names it.

    Raises:
        FunctionExit: It raised something that is no Exception, and that Ctrl-C did not cause.
        CancelledError: This task was cancelled (`cancelling()` tells), or the function's own was.
    """
    task = asyncio.ensure_future(without_exit(work))
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        session.seal()
        task.cancel()
        try:
            await asyncio.wait([task], timeout=GRACE)
        finally:  # even if cancelled once more, by Ctrl-C after a deadline
            if not task.done():
                logger.warning(
                    "%s was cancelled and continues: it catches CancelledError, perhaps by a bare "
                    "`except:`. It is abandoned, and its calls are rejected",
                    session.id,
                )
                # asyncio waits at its end for all tasks that it knows.
                asyncio.tasks._unregister_task(task)
            elif not task.cancelled():
                task.exception()  # nobody reads the result any more
        raise
    return task.result()


async def without_exit(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:  # it would end the event loop
        if _closes_or_interrupts(error):
            raise
        text = text_of(error, str)
        raise FunctionExit(f"{type(error).__name__}: {text}".removesuffix(": ")) from error


def _closes_or_interrupts(error: BaseException) -> bool:
    """Whether Python raised it to close the awaiting coroutine, or for Ctrl-C; else the function
    did."""
    place = error.__traceback__
    if isinstance(error, GeneratorExit):
        return place is None or place.tb_next is None
    if not isinstance(error, KeyboardInterrupt):
        return False
    if threading.current_thread() is not threading.main_thread():
        return False
    frames = [frame for frame, _ in traceback.walk_tb(place)]
    installed: Any = signal.getsignal(signal.SIGINT)
    handler = unwrapped(installed)
    # Python's own handler has no frame.
    return handler is signal.default_int_handler or (
        getattr(handler, "__code__", None) in {frame.f_code for frame in frames}
    )


class RolloutEnd:
    """Ends a rollout from outside, whatever it is doing; what it did so far is kept.

    Attributes:
        reason: Why it was ended; None if it was not.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._deadline: asyncio.Timeout | None = None

    def end(self, reason: str) -> None:
        """End it, or keep it from beginning."""
        if self.reason is None:
            self.reason = reason
            if self._deadline is not None:
                _expire(self._deadline)

    @contextmanager
    def of(self, deadline: asyncio.Timeout) -> Iterator[None]:
        """While the block runs, ending it is an early `deadline`."""
        self._deadline = deadline
        try:
            yield
        finally:
            self._deadline = None


@dataclass(eq=False)
class ToolTime:
    """Measures the seconds of an attempt during which none of its calls is in flight.

    Args:
        seconds: The maximum; None: any.
        session: The attempt's session.

    Attributes:
        exceeded: Whether the maximum was exceeded.
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
            # Calls only postpone it.
            await asyncio.sleep(seconds - spent)


def _expire(deadline: asyncio.Timeout) -> None:
    if not deadline.expired():
        deadline.reschedule(asyncio.get_running_loop().time())


# Reporting what holds rollouts up: which line blocks their event loop, what a quiet one waits for.


EVERY = 1.0
"""Seconds from one check to the next."""
BLOCKED = 5.0
"""Seconds that the event loop may be blocked."""
QUIET = 60.0
"""Seconds after which it is logged what a rollout waits for."""

# Unused, and ignored by default. SIGINT would be asyncio's, or ignored in a shell's background.
_WAKES = getattr(signal, "SIGURG", None)
_ANSWERING = tuple(str(Path(OURS, room)) for room in ("gateway", "engines"))


class Standstill(BaseException):
    """Raised inside code that has blocked the event loop for longer than a rollout may take."""


@dataclass(eq=False)
class RunningFunction:
    """A running function of the user.

    Attributes:
        role: "workflow" or "judge".
        sessions: The attempt's, then those of its auxiliary models.
        work: The awaited task.
        began: When, on the clock of `time.perf_counter`.
    """

    role: str
    sessions: Sequence[Access]
    work: Any
    began: float = field(default_factory=time.perf_counter)


_RUNNING: ContextVar[RunningFunction | None] = ContextVar("tuner_running", default=None)


@dataclass(eq=False)
class Watchdog:
    """Watches the functions of one event loop, from a thread, while any of them runs.

    Args:
        limit: Seconds after which code that blocks the event loop is interrupted.

    Attributes:
        apart: Roles whose functions would block the event loop forever: they must run in threads.
    """

    limit: float
    apart: set[str] = field(default_factory=set)
    _running: set[RunningFunction] = field(default_factory=set)
    _said: set[str] = field(default_factory=set)
    _ended: threading.Event = field(default_factory=threading.Event)
    _awake: ExitStack = field(default_factory=ExitStack)

    @contextmanager
    def watching(self, running: RunningFunction) -> Iterator[None]:
        """Watch this function while the block runs, with the tasks created inside it."""
        token = _RUNNING.set(running)
        if not self._running:
            self._ended = threading.Event()
            self._awake = _wakes()
            of = asyncio.get_running_loop(), threading.get_ident(), self._ended
            threading.Thread(
                target=self._watch, args=of, name="tuner-watchdog", daemon=True
            ).start()
        self._running.add(running)
        try:
            yield
        finally:
            _RUNNING.reset(token)
            self._running.discard(running)
            if not self._running:
                self._ended.set()
                self._awake.close()

    def _watch(self, loop: asyncio.AbstractEventLoop, thread: int, ended: threading.Event) -> None:
        while not ended.wait(EVERY):
            ran = threading.Event()
            try:
                loop.call_soon_threadsafe(self._look, ran)
            except RuntimeError:  # the loop is closed
                return
            if not ran.wait(EVERY):
                self._stands_still(thread, ran)

    def _stands_still(self, thread: int, ran: threading.Event) -> None:
        """Find what blocks the loop's thread, until it runs again."""
        keeper: RunningFunction | None = None
        since, told, broken_off = 0.0, False, False
        with ExitStack() as refusing:
            while not ran.is_set():
                running, frame = _keeping(sys._current_frames().get(thread)) or (None, None)
                if running is not keeper:
                    refusing.close()
                    keeper, since = running, time.perf_counter()
                    told = broken_off = False
                kept = time.perf_counter() - since
                if keeper is not None and frame is not None and kept >= BLOCKED:
                    if not told:
                        told = True
                        self._say(place_of(frame), _kept_by(keeper, frame))
                        why = partial(self._refuse, keeper, thread)
                        for host in {session.host for session in keeper.sessions}:
                            keys = [s.key for s in keeper.sessions if s.host is host]
                            refusing.enter_context(host.refusing(keys, why))
                    if kept >= self.limit and not ran.is_set():
                        self.apart.add(keeper.role)
                        _break_off(thread, again=broken_off)
                        broken_off = True
                ran.wait(EVERY)

    def _look(self, ran: threading.Event) -> None:
        """In the loop, which runs: log what is waited for if nothing has happened for long."""
        ran.set()
        now = time.perf_counter()
        for running in list(self._running):
            moved = max(running.began, *(s.in_flight.moved for s in running.sessions))
            if now - moved < QUIET:
                continue
            place = _waits_in(running)
            self._say(
                place,
                f"rollout {running.sessions[0].id} has waited for {now - moved:.0f} s: {place}; "
                f"it may take {self.limit:g} s (explorer.max_timeout)",
            )

    def _say(self, place: str, sentence: str) -> None:
        if place not in self._said:
            self._said.add(place)
            logger.warning("%s", sentence)

    def _refuse(self, keeper: RunningFunction, thread: int) -> str:
        """The message for a call that waits for the loop which its own caller blocks."""
        self.apart.add(keeper.role)
        found = _keeping(sys._current_frames().get(thread))
        sentence = (
            f"{_kept_by(*found) if found else 'The event loop is blocked'}. It called a model of "
            "this very process, which could never answer: the call is rejected, and the "
            f"{keeper.role} runs in threads from now on"
        )
        keeper.sessions[0].errors.append(FunctionExit(sentence))
        return sentence


def _kept_by(keeper: RunningFunction, frame: FrameType) -> str:
    return (
        f"{place_of(frame)} has blocked the event loop for {BLOCKED:g} s, and no rollout can "
        f"continue: an `async def` {keeper.role} must not wait without `await`; make the "
        f"{keeper.role} a plain `def`, which runs in a thread, or use an async client there"
    )


def _keeping(frame: FrameType | None) -> tuple[RunningFunction, FrameType] | None:
    """The user's function that blocks an event loop, and its innermost frame.

    Args:
        frame: The current frame of the loop's thread.

    Returns:
        None if nothing blocks the loop, or the code that answers calls does.
    """
    stack = _stack(frame)
    at = next((i for i, f in enumerate(stack) if f.f_code is asyncio.Handle._run.__code__), 0)
    if not (inner := stack[:at]):
        return None
    # A task has the context that it was created in, including tasks created by the function.
    running = stack[at].f_locals["self"]._context.get(_RUNNING)
    if running is None or inner[0].f_code.co_filename.startswith(_ANSWERING):
        return None
    return running, _own(inner)


def _own(stack: Sequence[FrameType]) -> FrameType:
    """The innermost frame of the user's own code; a library's if there is none."""
    for frame in stack:
        if not frame.f_code.co_filename.startswith(LIBRARIES):
            return frame
    return stack[0]


def _waits_in(running: RunningFunction) -> str:
    """What a function waits for: one that is suspended, or that runs in a thread."""
    if any(session.in_flight.tasks for session in running.sessions):
        return "for an answer of the model"
    awaited, stack = running.work, list[FrameType]()  # the innermost first
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        stack.insert(0, frame)
        awaited = awaited.cr_await
    if stack and stack[0].f_code is in_thread.__code__:
        stack = _stack(sys._current_frames().get(stack[0].f_locals["thread"].ident))
    return f"its {running.role} is in {place_of(_own(stack))}" if stack else f"its {running.role}"


def _stack(frame: FrameType | None) -> list[FrameType]:
    """A frame and its callers, the innermost first."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _wakes() -> ExitStack:
    """Until closed, a signal can bring the main thread out of a system call."""
    stack = ExitStack()
    main = threading.current_thread() is threading.main_thread()
    if _WAKES is not None and main and signal.getsignal(_WAKES) is signal.SIG_DFL:
        stack.callback(signal.signal, _WAKES, signal.signal(_WAKES, _woken))
    return stack


def _woken(number: int, frame: FrameType | None) -> None:
    """Raises `Standstill`."""


def _break_off(thread: int, *, again: bool) -> None:
    """Raise `Standstill` in a thread.

    Args:
        again: Whether that did not help before: the thread is in a system call, out of which a
            signal brings the main thread.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Standstill))
    main = thread == threading.main_thread().ident
    if again and main and _WAKES is not None and signal.getsignal(_WAKES) is _woken:
        signal.pthread_kill(thread, _WAKES)
