"""Reward functions in separate processes, with a time limit.

A function that hangs in C code, exhausts memory or kills its process affects nothing else: its
process is ended and replaced, and the rollout gets a typed outcome, never the reward 0.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import multiprocessing
import pickle
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, Generic, ParamSpec, TypeVar

from pebble import ProcessExpired, ProcessPool

from tuner.errors import FunctionError, RewardError, RewardTimeout

P = ParamSpec("P")
T = TypeVar("T")


def in_process(
    function: Callable[P, T], *, timeout: float = 15.0, workers: int = 2
) -> Callable[P, Awaitable[T]]:
    """An async version of the function that runs it in a separate process.

        score = in_process(math_equal, timeout=5)

        async def judge(task, response):
            return JudgeOutput(reward=await score(response, task["answer"]))

    The processes start with the first call, as new interpreters, and end with the program or with
    the function. Time spent waiting for a free one does not count. A cancelled call ends its
    process.

    Args:
        function: A plain function that a new interpreter can import; a script that has it needs
            `if __name__ == "__main__":` around the code that it runs.
        timeout: Seconds that one call may take.
        workers: Number of concurrent calls.

    Raises:
        FunctionError: It is async, or cannot be imported: a lambda, or defined in a function.
        ValueError: `timeout` or `workers` is not above 0.

    The async function raises RewardTimeout when time is over, and RewardError when the function
    raised, its process died, or its arguments or result cannot be pickled.
    """
    return _InProcess(function, timeout, workers)


class _InProcess(Generic[P, T]):
    """Result of `in_process`; pickled without its processes."""

    def __init__(self, function: Callable[P, T], timeout: float, workers: int) -> None:
        name = getattr(function, "__qualname__", repr(function))
        if inspect.iscoroutinefunction(function):
            raise FunctionError(
                f"in_process({name}): the function is async and already waits without blocking; "
                "call it directly, with asyncio.timeout for a limit"
            )
        try:
            pickle.dumps(function)
        except Exception as error:
            raise FunctionError(
                f"in_process({name}): another process cannot import it ({error}); define it at the "
                "top of a module"
            ) from None
        if not timeout > 0 or workers < 1:
            raise ValueError(f"timeout {timeout} and workers {workers} must be above 0")
        functools.update_wrapper(self, function)
        self._timeout, self._workers = timeout, workers
        self._function: Any = function
        self._name = name
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._pool: ProcessPool | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_lock", "_pool", "_finalizer")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._function = _Travelling(self._function)
        self._start()

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        pool = self._running_pool()
        future = pool.schedule(self._function, args=args, kwargs=kwargs, timeout=self._timeout)
        try:
            result: T = await asyncio.wrap_future(future)
        except TimeoutError:
            raise RewardTimeout(
                f"judge timed out: {self._name} took more than {self._timeout:g} s"
            ) from None
        except ProcessExpired as error:
            raise RewardError(
                f"the process of {self._name} died with exit code {error.exitcode}"
            ) from None
        except Exception as error:
            raise RewardError(f"{self._name} raised {type(error).__name__}: {error}") from error
        return result

    def _running_pool(self) -> ProcessPool:
        with self._lock:
            if self._pool is None:
                # New interpreters: a forked one would have this one's locks without their threads.
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPool(max_workers=self._workers, context=context)
                self._finalizer = weakref.finalize(self, _stop, self._pool)
            return self._pool


class _Travelling:
    """A function that came from another process, possibly by value, and is passed on in the same
    way."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __reduce__(self) -> tuple[Any, ...]:
        import cloudpickle

        return cloudpickle.loads, (cloudpickle.dumps(self._function),)


def _stop(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]  # pebble types its calls, not all of them
    pool.join()
