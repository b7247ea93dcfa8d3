"""Loading the functions and modules that a configuration names."""

from __future__ import annotations

import base64
import gc
import hashlib
import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from tuner.errors import ConfigError, FunctionError
from tuner.tasks.functions import unwrapped, where

# Prefix of the names of modules loaded from a file path.
FILE_MODULE = "tuner_file_"
_LOADING: ContextVar[str | None] = ContextVar("loading", default=None)
"""The module being imported for its functions."""


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable Python's garbage collector while modules and models are loaded: nothing of what that
    creates becomes garbage, and scanning it repeatedly takes a fifth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def require_nothing_loads(called: str = "tune()") -> None:
    """Refuse to start because a script is being imported only for its functions.

    Args:
        called: What would start, for the message.

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
        reference: `package.module:function` (also relative to the current folder) or
            `path/file.py:function`.
        setting: The key that holds it, for error messages.

    Raises:
        ConfigError: It cannot be imported, or does not exist.
    """
    function = load_named(reference, setting=setting)
    if not callable(function):
        module_name, _, name = reference.rpartition(":")
        raise ConfigError(
            f"{setting} is {reference!r}: {name!r} in {module_name} is not a function"
        )
    return cast("Callable[..., Any]", function)


def function_of(given: Any, *, setting: str) -> Any:
    """`given`, or the function that it names if it is text.

    Raises:
        ConfigError: As `load_function`.
    """
    return load_function(given, setting=setting) if isinstance(given, str) else given


def load_named(reference: str, *, setting: str, kind: str = "function") -> Any:
    """The object that a configuration names in the form of `load_function`.

    Args:
        reference, setting: As there.
        kind: Its expected kind, for error messages.

    Raises:
        ConfigError: It cannot be imported, or does not exist.
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
    """The place where an import failed, without the frames of Python and this module."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    inside = last.filename.startswith("<frozen") or last.filename == __file__
    return "" if inside else f" in {last.filename}:{last.lineno}"


def _loaded(reference: str) -> ModuleType:
    loading = _LOADING.set(reference)
    try:
        with without_collection():
            return _load_file(reference) if reference.endswith(".py") else _load(reference)
    finally:
        _LOADING.reset(loading)


def _load(module: str) -> ModuleType:
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(module)


def _load_file(file: str) -> ModuleType:
    """Load a file as a module, once; it can import its neighbours, as a script can."""
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


# Sending the user's functions to another process: as a text that names them.
#
# A configuration names a function in one of two forms, both text, so that it can be saved, loaded
# and run again:
#
#     package.module:function     the module is installed in this Python environment
#     pickle:gAWVxwEAAAAAAACM...  anything else: the function with all it refers to that is not
#
# A Python process that sees neither the script's folder nor PYTHONPATH, like a worker on another
# machine, decides whether a module is installed. What is sent by value is loaded once in another
# process before anything else begins.


PICKLE = "pickle:"
TOGETHER = "with the workflow"
"""Names a judge that is in the workflow's text."""
# Every task carries its functions to a worker.
LARGEST = 8 * 2**20
_READ_BACK = "import sys, cloudpickle; cloudpickle.loads(sys.stdin.buffer.read())"
_FIND = (
    "import sys, importlib.util as u; "
    "found = u.find_spec(sys.argv[1].partition('.')[0]) and u.find_spec(sys.argv[1]); "
    "found or sys.exit(1); "
    "print(*(found.submodule_search_locations or [found.origin]), sep='\\n')"
)


def ship(func: Callable[..., Any], *, role: str, read_back: bool = True) -> str:
    """The text that names `func` for a worker; `load` returns the function.

    Args:
        func: Function, callable object, partial or bound method.
        role: "workflow" or "judge", for error messages.
        read_back: Whether to try loading it as the worker will.

    Raises:
        FunctionError: It cannot be imported there and cannot be sent by value; names the cause.
    """
    return _reference(func) or _by_value(func, role, read_back)


def ship_together(
    workflow: Callable[..., Any], judge: Callable[..., Any] | None
) -> tuple[str, str | None]:
    """The texts that name both functions for one process, where they share what both refer to.

    They are not loaded as a test: whoever starts the process learns at once whether it can.

    Raises:
        FunctionError: As `ship`.
    """

    def alone(func: Callable[..., Any], role: str) -> str:
        return ship(func, role=role, read_back=False)

    if judge is None:
        return alone(workflow, "workflow"), None
    if _reference(workflow) or _reference(judge):
        return alone(workflow, "workflow"), alone(judge, "judge")
    try:
        data = _pickled((workflow, judge))
    except Exception:  # whose fault it is
        alone(workflow, "workflow")
        alone(judge, "judge")
        raise
    _check_size(data, workflow, "workflow")
    return PICKLE + base64.b64encode(data).decode("ascii"), TOGETHER


def load_together(workflow: str, judge: str | None) -> tuple[Callable[..., Any], Any]:
    """The workflow and the judge, or None, that `ship_together` named."""
    if judge == TOGETHER:
        both: Any = load(workflow)
        return both[0], both[1]
    return load(workflow), None if judge is None else load(judge)


def load(text: str, *, setting: str = "workflow_args.tuner") -> Callable[..., Any]:
    """The function that `ship` named; `setting` is the key that holds the text, for messages."""
    if text.startswith(PICKLE):
        import cloudpickle

        function: Callable[..., Any] = cloudpickle.loads(
            base64.b64decode(text.removeprefix(PICKLE))
        )
        return function
    return load_function(text, setting=setting)


def _reference(func: Callable[..., Any]) -> str | None:
    if unwrapped(func) is not func or not inspect.isfunction(func):
        return None
    module, name = func.__module__, func.__qualname__
    found = getattr(sys.modules.get(module), name, None) if name.isidentifier() else None
    if found is not func or module == "__main__" or not _is_installed(module):
        return None
    return f"{module}:{name}"


def _is_installed(module: str) -> bool:
    return bool(_places(module))


@cache
def _places(module: str) -> tuple[Path, ...]:
    """The folders of an installed package, or the file of an installed module."""
    command = [sys.executable, "-I", "-c", _FIND, module]
    done = subprocess.run(command, cwd=os.sep, capture_output=True, text=True, check=False)
    return tuple(Path(line).resolve() for line in done.stdout.splitlines())


def _by_value(func: Callable[..., Any], role: str, read_back: bool) -> str:
    try:
        data = _pickled(func)
    except Exception as error:
        raise FunctionError(
            f"the {role} {where(func)} cannot be sent to the workers: {culprit(func, error)}; "
            "create it inside the function, or move the function into an installed package"
        ) from error
    _check_size(data, func, role)
    if read_back:
        _read_back(data, func, role)
    return PICKLE + base64.b64encode(data).decode("ascii")


def _pickled(value: Any) -> bytes:
    """Pickle with everything that it refers to in modules that are not installed."""
    import cloudpickle

    registered = []
    for module in list(_own_modules()):
        if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            registered.append(module)
    try:
        data: bytes = cloudpickle.dumps(value)
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)
    return data


def _check_size(data: bytes, func: Callable[..., Any], role: str) -> None:
    """Raise FunctionError if it is too large."""
    if len(data) > LARGEST:
        raise FunctionError(
            f"the {role} {where(func)} is {len(data) / 2**20:.0f} MiB with everything it refers "
            f"to, and every task would carry it; load large objects inside the function (limit: "
            f"{LARGEST >> 20} MiB)"
        )


def _read_back(data: bytes, func: Callable[..., Any], role: str) -> None:
    command = [sys.executable, "-c", _READ_BACK]
    env = {**os.environ, "PYTHONPATH": worker_path()}
    done = subprocess.run(
        command, cwd=os.sep, env=env, input=data, capture_output=True, check=False
    )
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise FunctionError(
            f"the {role} {where(func)} cannot be loaded in another process: "
            f"{lines[-1] if lines else 'it ended without output'}; what it refers to must be "
            "importable on the workers, or be defined in one of your modules"
        )


def worker_path() -> str:
    """PYTHONPATH of a worker: the folder of `tuner`, then this process's own."""
    here = str(Path(__file__).resolve().parents[2])
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([here, *(part for part in given if part)]))


def _own_modules() -> Iterator[ModuleType]:
    """Loaded modules that are neither installed nor part of Python or `tuner`."""
    paths = sysconfig.get_paths()
    elsewhere = [Path(paths[key]).resolve() for key in ("stdlib", "purelib", "platlib")]
    elsewhere.append(Path(__file__).resolve().parents[1])
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None or name == "__main__" or module.__name__ != name:
            continue
        path = Path(file).resolve()
        # An installed package may have the same name as one next to the script.
        installed = [*elsewhere, *_places(name.partition(".")[0])]
        if not any(path.is_relative_to(folder) for folder in installed):
            yield module


def culprit(func: Callable[..., Any], error: Exception) -> str:
    """Which of the things that `func` refers to cannot be pickled."""
    import cloudpickle

    for name, value in _referred(func):
        try:
            cloudpickle.dumps(value)
        except Exception as cause:
            return f"{name} is a {type(value).__name__} ({cause})"
    return str(error)


def _referred(func: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    inner = unwrapped(func)
    owner = getattr(inner, "__self__", inner)
    if not inspect.isroutine(owner):
        for name, value in getattr(owner, "__dict__", {}).items():
            yield f"its attribute {name!r}", value
    code = getattr(inner, "__func__", inner)
    if inspect.isfunction(code):
        variables = inspect.getclosurevars(code)
        for name, value in variables.nonlocals.items():
            yield f"its variable {name!r}", value
        for name, value in variables.globals.items():
            yield f"the global {name!r}", value
    if inner is not func:
        for name, value in getattr(func, "keywords", {}).items():
            yield f"the argument {name!r}", value
