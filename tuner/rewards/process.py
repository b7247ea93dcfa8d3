"""Reward functions in separate processes, with a time limit.

A function that hangs in C code, exhausts memory or kills its process affects nothing else: its
process is ended and replaced, and the rollout gets a typed outcome, never the reward 0.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
import sys
import threading
import traceback
import weakref
from collections.abc import Awaitable, Callable
from multiprocessing import spawn
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, Generic, ParamSpec, TypeVar, cast

from pebble import ProcessExpired, ProcessPool

from tuner.errors import FunctionError, RewardError, RewardTimeout
from tuner.tasks.loading import FILE_MODULE, culprit
from tuner.traces.store import text_of

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
        function: A plain function at the top of a module or of the script, which no process runs
            again: a script's function goes there with the globals that it uses.
        timeout: Seconds that one call may take.
        workers: Number of concurrent calls.

    Raises:
        FunctionError: It is async, or cannot be imported: a lambda, or defined in a function. From
            a call: a global that a script's function uses cannot be sent.
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
        self._sent: bytes | None = None

    def __getstate__(self) -> dict[str, Any]:
        own = ("_lock", "_pool", "_sent", "_finalizer")
        return {k: v for k, v in vars(self).items() if k not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        import cloudpickle

        if self._sent is None:
            self._sent = _by_value(self._function, self._name)
        try:
            arguments = cloudpickle.dumps((args, kwargs))
            call = self._running_pool().schedule(
                _called, args=(self._sent, arguments), timeout=self._timeout
            )
            result, failed = cloudpickle.loads(await asyncio.wrap_future(call))
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
        if failed is not None:
            raised = RewardError(f"{self._name} raised {failed[0]}")
            raised.add_note(failed[1])
            raise raised
        return cast("T", result)

    def _running_pool(self) -> ProcessPool:
        with self._lock:
            if self._pool is None:
                self._pool = ProcessPool(max_workers=self._workers, context=_NewInterpreters())
                self._finalizer = weakref.finalize(self, _stop, self._pool)
            return self._pool


def _by_value(function: Callable[..., Any], name: str) -> bytes:
    """A function for another process; one of the script, or of a file that a configuration names,
    with what it refers to there."""
    import cloudpickle

    module = sys.modules.get(function.__module__)
    of_file = module is not None and module.__name__.startswith(FILE_MODULE)
    if of_file:
        cloudpickle.register_pickle_by_value(module)
    try:
        data: bytes = cloudpickle.dumps(function)
    except Exception as error:
        raise FunctionError(
            f"in_process({name}): another process cannot get it: {culprit(function, error)}; "
            "create that inside the function, or move the function into a module beside the script"
        ) from error
    finally:
        if of_file:
            cloudpickle.unregister_pickle_by_value(module)
    return data


_RECEIVED: dict[bytes, Callable[..., Any]] = {}


def _called(sent: bytes, arguments: bytes) -> bytes:
    """In the process of a function: its result, or its error in one line and with its places."""
    import cloudpickle

    if sent not in _RECEIVED:
        _RECEIVED[sent] = cloudpickle.loads(sent)
    args, kwargs = cloudpickle.loads(arguments)
    ended: tuple[Any, tuple[str, str] | None]
    try:
        ended = _RECEIVED[sent](*args, **kwargs), None
    except BaseException as error:  # its class may be unknown to the other process
        line = f"{type(error).__name__}: {text_of(error, str)}"
        ended = None, (line, traceback.format_exc())
    data: bytes = cloudpickle.dumps(ended)
    return data


_STARTING = threading.Lock()


class _NewInterpreter(SpawnProcess):
    """A process that does not run the main module again, as those of `spawn` do: without
    `if __name__ == "__main__":` there, it would start the run, and its processes, once more."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        starting = threading.get_ident()

        def without_main(name: str) -> dict[str, Any]:
            data = whole(name)
            if threading.get_ident() != starting:  # another library's process
                return data
            return {key: value for key, value in data.items() if "init_main" not in key}

        with _STARTING:
            whole = spawn.get_preparation_data
            spawn.get_preparation_data = without_main
            try:
                return SpawnProcess._Popen(process_obj)
            finally:
                spawn.get_preparation_data = whole


class _NewInterpreters(SpawnContext):
    """A forked process would have this one's locks without their threads."""

    Process = _NewInterpreter


def _stop(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]  # pebble types its calls, not all of them
    pool.join()
