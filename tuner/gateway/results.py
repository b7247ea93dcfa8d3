"""`@tuner.recorded`: results of functions that belong to a rollout as its calls do.

A tool may cost money, change something, or answer differently tomorrow. Decorated with `recorded`,
its results are in the trace of the rollout that calls it, and a rollout that repeats that one gets
them back up to the point where the two part; the function itself does not run.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar, cast

from tuner.errors import FunctionError
from tuner.functions.calling import unwrapped, where
from tuner.functions.outputs import shown
from tuner.gateway.script import Script
from tuner.traces import FunctionResult

F = TypeVar("F", bound=Callable[..., Any])

_OPAQUE = "<not JSON>"


class Results:
    """The results of one rollout's recorded functions; in any thread.

    Args:
        script: What the rollout repeats, or None.
        committed: How many calls of the rollout are committed.
    """

    def __init__(self, script: Script | None, committed: Callable[[], int]) -> None:
        self._script = script
        self._committed = committed
        self._kept: list[FunctionResult] = []
        self._begun: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def kept(self) -> tuple[FunctionResult, ...]:
        """Those so far, in the order in which they were there."""
        return tuple(self._kept)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """While the block runs, and in tasks and threads that it begins, functions are its."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def begin(self, function: str, arguments: dict[str, Any]) -> _Begun:
        """A function is called."""
        key = json.dumps([function, arguments], sort_keys=True)
        with self._lock:
            occurrence = self._begun[key]
            self._begun[key] += 1
        return _Begun(self, function, arguments, occurrence)

    def given(
        self, function: str, arguments: dict[str, Any], occurrence: int
    ) -> FunctionResult | None:
        """What the script has of a call that begins."""
        if self._script is None:
            return None
        return self._script.result(function, arguments, occurrence)

    def keep(self, function: str, arguments: dict[str, Any], occurrence: int, value: Any) -> None:
        """Take note of a result."""
        self._kept.append(FunctionResult(function, arguments, occurrence, value, self._committed()))


class _Begun:
    """One call of a recorded function.

    Args:
        results: Where it belongs.
        function, arguments: Who is called with what.
        occurrence: How often it was before.
    """

    def __init__(
        self, results: Results, function: str, arguments: dict[str, Any], occurrence: int
    ) -> None:
        self._results = results
        self.function, self.arguments, self.occurrence = function, arguments, occurrence

    def given(self) -> tuple[Any] | None:
        """The value that the script gives, alone in a tuple, or None: run the function."""
        found = self._results.given(self.function, self.arguments, self.occurrence)
        if found is None:
            return None
        return (self.kept(json.loads(json.dumps(found.value))),)

    def kept(self, value: Any) -> Any:
        """`value`, which is kept as JSON has it now: whoever gets it may change it.

        Raises:
            FunctionError: JSON has no such value.
        """
        if (problem := _not_json(value)) is not None:
            raise FunctionError(
                f"{self.function} is decorated with @tuner.recorded and returned {problem}: what "
                "is recorded must be JSON, and come back from it as it was (None, bool, int, "
                "finite float, str, list, dict with str as keys)"
            )
        kept = json.loads(json.dumps(value))
        self._results.keep(self.function, self.arguments, self.occurrence, kept)
        return value


_CURRENT: ContextVar[Results | None] = ContextVar("tuner_results", default=None)


def recorded(function: F) -> F:
    """Keep what a function returns in the trace of the rollout that calls it, and give it back
    where the rollout is run again.

    Within the recorded part of a rollout that is run again (`tuner rerun`, `tuner.testing`,
    branches) the function does not run: it returns what it returned then, as long as the agent has
    done the same as then. Calls are matched by the function's file and qualified name, by their
    arguments, and of equal ones by how many were before. An argument that is no JSON (`self`, a
    client) is not compared. What raised an exception is not recorded, and runs again. Outside of a
    rollout the function is as it was.

        @tuner.recorded
        async def search(query: str) -> list[str]: ...

    Args:
        function: Async or plain. What it returns must be JSON, and equal to what JSON makes of it.

    Raises:
        FunctionError: It is no function, or yields; and when it is called in a rollout: it returned
            what JSON cannot hold.
    """
    inner = unwrapped(function)
    if not inspect.isroutine(inner) or isinstance(function, staticmethod | classmethod):
        raise FunctionError(
            f"@tuner.recorded is for functions, and got {shown(function)}: decorate the function "
            "itself, under @staticmethod or @classmethod"
        )
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise FunctionError(f"@tuner.recorded: {where(function)} yields; it must return")
    name, signature = _name(inner), inspect.signature(function)

    def begin(args: Any, kwargs: Any) -> _Begun | None:
        results = _collecting()
        if results is None:
            return None
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return results.begin(name, {key: _json(value) for key, value in bound.arguments.items()})

    if inspect.iscoroutinefunction(inner):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            if (begun := begin(args, kwargs)) is None:
                return await function(*args, **kwargs)
            if (given := begun.given()) is not None:
                return given[0]
            return begun.kept(await function(*args, **kwargs))

        return cast(F, awaited)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if (begun := begin(args, kwargs)) is None:
            return function(*args, **kwargs)
        if (given := begun.given()) is not None:
            return given[0]
        return begun.kept(function(*args, **kwargs))

    return cast(F, called)


def _collecting() -> Results | None:
    """Those of the rollout that runs. What `recorded` makes has hold of this, by its name, and not
    of the variable: so a function of a script can be sent to another process."""
    return _CURRENT.get()


def _name(function: Any) -> str:
    """File and qualified name: the same whether the file is imported, or run as a script."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    file = function.__module__ if code is None else Path(code.co_filename).stem
    return f"{file}.{function.__qualname__}"


def _json(value: Any) -> Any:
    """An argument as JSON has it now; the caller may change it later."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    try:
        return json.loads(json.dumps(value, sort_keys=True))
    except (TypeError, ValueError):
        return _OPAQUE


def _not_json(value: Any, place: str = "") -> str | None:
    """What of a value JSON does not give back as it was, and where; None where it does."""
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return None
    if kind is list:
        inside = ((f"{place}[{index}]", item) for index, item in enumerate(value))
    elif kind is dict and all(type(key) is str for key in value):
        inside = ((f"{place}[{key!r}]", item) for key, item in value.items())
    else:
        return f"{shown(value)}{place and f' at {place}'}"
    return next((found for at, item in inside if (found := _not_json(item, at))), None)
