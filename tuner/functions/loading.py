"""The functions and modules that a configuration names."""

from __future__ import annotations

import gc
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from tuner.errors import ConfigError

# Begins the names of modules that were loaded from a file given by its path.
FILE_MODULE = "tuner_file_"
_LOADING: ContextVar[str | None] = ContextVar("loading", default=None)
"""What is being imported for its functions."""


@contextmanager
def without_collection() -> Iterator[None]:
    """While the block runs, which imports, Python's garbage collector does not: nothing of what
    imports make becomes garbage, and to look through it time and again takes a fifth of them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def require_nothing_loads(called: str = "tune()") -> None:
    """Refuse to begin because a script is imported, whose functions are all that is asked for.

    Args:
        called: What would begin, as the message names it.

    Raises:
        ConfigError: It is called from the top of a module that is being loaded.
    """
    if (module := _LOADING.get()) is not None:
        raise ConfigError(
            f"{module} calls {called} when it is imported for its functions: put the call under "
            '`if __name__ == "__main__":`'
        )


def load_function(reference: str, *, setting: str) -> Callable[..., Any]:
    """The function that a configuration names.

    Args:
        reference: `package.module:function` (the current folder is looked in as well) or
            `path/file.py:function`.
        setting: The key that holds it, for error messages.

    Raises:
        ConfigError: It cannot be imported, or is not there.
    """
    function = load_named(reference, setting=setting)
    if not callable(function):
        module_name, _, name = reference.rpartition(":")
        raise ConfigError(
            f"{setting} is {reference!r}: {module_name} has something else as function {name!r}"
        )
    return cast("Callable[..., Any]", function)


def function_of(given: Any, *, setting: str) -> Any:
    """What was given, or, where that is a text, the function that it names.

    Raises:
        ConfigError: As `load_function`.
    """
    return load_function(given, setting=setting) if isinstance(given, str) else given


def load_named(reference: str, *, setting: str, kind: str = "function") -> Any:
    """Whatever a configuration names in the form of `load_function`, a function or not.

    Args:
        reference, setting: As there.
        kind: What it should be, for error messages.

    Raises:
        ConfigError: It cannot be imported, or is not there.
    """
    module_name, colon, name = reference.rpartition(":")
    if not colon or not module_name or not name:
        raise ConfigError(
            f"{setting} is {reference!r}: write package.module:{kind} or path/file.py:{kind}"
        )
    try:
        module = _loaded(module_name)
    except FileNotFoundError:
        raise ConfigError(f"{setting} is {reference!r}: there is no file {module_name}") from None
    except Exception as error:
        raise ConfigError(
            f"{setting} is {reference!r}: importing {module_name} failed{_line(error)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    found = getattr(module, name, None)
    if found is None:
        raise ConfigError(f"{setting} is {reference!r}: {module_name} has no {kind} {name!r}")
    return found


def import_module_or_file(reference: str, *, setting: str) -> ModuleType:
    """The module `package.module`, or the one in `path/file.py`.

    Raises:
        ConfigError: It cannot be imported.
    """
    try:
        return _loaded(reference)
    except FileNotFoundError:
        raise ConfigError(f"{setting} is {reference!r}: there is no such file") from None
    except Exception as error:
        raise ConfigError(
            f"{setting} is {reference!r}: importing it failed: {type(error).__name__}: {error}"
        ) from error


def _line(error: Exception) -> str:
    """Where an import failed, but in what Python and this module do for it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    inside = last.filename.startswith("<frozen") or last.filename == __file__
    return "" if inside else f" in {last.filename}:{last.lineno}"


def _loaded(reference: str) -> ModuleType:
    loading = _LOADING.set(reference)
    try:
        return _load_file(reference) if reference.endswith(".py") else _load(reference)
    finally:
        _LOADING.reset(loading)


def _load(module: str) -> ModuleType:
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(module)


def _load_file(file: str) -> ModuleType:
    """A file as a module, always the same one; it can import its neighbours, as a script can."""
    path = Path(file).resolve(strict=True)
    name = f"{FILE_MODULE}{hashlib.sha1(str(path).encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
