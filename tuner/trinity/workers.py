"""Ray's workers: the cluster that they run on, and how the user's functions get there.

The cluster is one by its address, or one of our own that ends with the run. Never whatever cluster
happens to run on this machine: `address="auto"`, Ray's and Trinity-RFT's default, would join it. A
cluster of our own asks for a token that only this process and its children know.

A configuration names a function in one of two forms, both text, so that it can be saved, loaded and
run again:

    package.module:function     the module is installed in this Python environment
    pickle:gAWVxwEAAAAAAACM...  anything else: the function with all it refers to that is not

Whether a module is installed is asked of a Python that sees neither the script's folder nor
PYTHONPATH, as a worker on another machine would. What is sent by value is read back in another
process before a cluster is touched.
"""

from __future__ import annotations

import base64
import inspect
import logging
import os
import secrets
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from tuner.config.source import lookup
from tuner.errors import ConfigError, FunctionError, TrainingError
from tuner.functions.calling import unwrapped, where
from tuner.trinity.guardian import MARK, guarded
from tuner.trinity.installed import uses_tinker

logger = logging.getLogger("tuner")

LOCAL = "local"
_STARTS = 3
_CONNECT_SECONDS = 10.0
# Trinity-RFT's actors each ask for a CPU, and mostly wait.
FEWEST_CPUS = 8
# Ray makes a cluster of our own ask for a token unless RAY_AUTH_MODE says otherwise, and keeps the
# first one it sees: one for the life of this process.
_TOKEN = secrets.token_hex(32)
_OWN = {"RAY_AUTH_TOKEN": _TOKEN, "RAY_USAGE_STATS_ENABLED": "0"}


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster that this process has joined.

    Attributes:
        address: `host:port`.
        session: The folder with what its processes print, where that is on this machine.
    """

    address: str
    session: Path | None


def is_own(tree: Mapping[str, Any]) -> bool:
    """Whether the run starts a cluster of its own: `cluster.ray_address` is not set, or `local`."""
    return bool(lookup(tree, "cluster.ray_address", LOCAL) == LOCAL)


def with_sizes(tree: dict[str, Any], *, device: str) -> dict[str, Any]:
    """The configuration with this machine's GPUs counted, for a cluster of our own.

    Args:
        tree: Trinity-RFT's YAML.
        device: `tuner.device`; `cpu` takes the declared GPUs as mere numbers.

    Raises:
        ConfigError: More is declared than there is, or nothing is there or declared.
    """
    if not is_own(tree):
        return tree
    cluster = dict(tree.get("cluster") or {})
    if uses_tinker(tree):
        return {**tree, "cluster": {**cluster, "node_num": 1, "gpu_per_node": 0}}
    found = 0 if device == "cpu" else _gpus()
    declared = cluster.get("gpu_per_node") or found
    if (cluster.get("node_num") or 1) != 1:
        raise ConfigError(
            f"cluster.node_num is {cluster['node_num']}, but cluster.ray_address is not set: a "
            "cluster of several machines is started with `ray start`; set its address"
        )
    if not declared:
        raise ConfigError(
            "Trinity-RFT needs GPUs and this machine has none: set cluster.ray_address to a "
            "cluster that has, or tuner.backend to local"
        )
    if device != "cpu" and declared > found:
        raise ConfigError(
            f"cluster.gpu_per_node is {declared}, but this machine has {found}: lower it, or set "
            "cluster.ray_address to a cluster that has more"
        )
    return {**tree, "cluster": {**cluster, "node_num": 1, "gpu_per_node": int(declared)}}


@contextmanager
def joined(address: str, *, gpus: int, namespace: str, env: Mapping[str, str]) -> Iterator[Cluster]:
    """Ray for the time of the block, from this process.

    A cluster of our own ends with the block, or with this process if that is killed.

    Args:
        address: `host:port`, or "local" for a cluster of our own, which ends with the block.
        gpus: GPUs of a cluster of our own.
        namespace: Where the run's actors live.
        env: Environment of the workers, besides what they have.

    Raises:
        ConfigError: There is no cluster at the address, or this process is in one already.
        TrainingError: Ray did not start on this machine.
    """
    import ray

    if ray.is_initialized():
        raise ConfigError(
            "this process is connected to a Ray cluster already: call ray.shutdown() first"
        )
    runtime = {"env_vars": {**env, "PYTHONPATH": worker_path()}}
    options: dict[str, Any] = {"namespace": namespace, "runtime_env": runtime}
    quiet = {"log_to_driver": False, "logging_level": logging.WARNING}
    own = address == LOCAL
    with _environment(_OWN if own else {}):
        try:
            if own:
                with _own_cluster(gpus, **quiet, **options) as found:
                    yield found
                return
            require_answer(address)
            try:
                context = ray.init(address=address, **quiet, **options)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise _not_joined(address, str(error).splitlines()[0]) from error
            yield _cluster(context)
        finally:
            ray.shutdown()


def require_answer(address: str) -> None:
    """Refuse an address where nobody listens; Ray itself would ask there for minutes.

    Raises:
        ConfigError: Nobody does.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection(
            (host.removeprefix("ray://").strip("[]"), int(port)), timeout=_CONNECT_SECONDS
        ).close()
    except (OSError, ValueError) as error:
        raise _not_joined(address, str(error) or type(error).__name__) from error


def _not_joined(address: str, why: str) -> ConfigError:
    return ConfigError(
        f"cluster.ray_address is {address!r}, where no Ray cluster can be joined: {why}"
    )


@contextmanager
def _own_cluster(gpus: int, **options: Any) -> Iterator[Cluster]:
    import ray

    with ExitStack() as stack:
        for attempt in range(1, _STARTS + 1):
            # Unix sockets live below it, and their paths are short or refused.
            folder = Path(tempfile.mkdtemp(prefix="tr"))
            try:
                with ExitStack() as guard:
                    os.environ[MARK] = guard.enter_context(guarded(folder))
                    # Inherited by all that Ray starts.
                    guard.callback(os.environ.pop, MARK, None)
                    context = ray.init(
                        address="local",
                        num_cpus=max(FEWEST_CPUS, os.cpu_count() or 1),
                        num_gpus=gpus,
                        include_dashboard=False,
                        _temp_dir=str(folder),
                        **options,
                    )
                    del os.environ[MARK]
                    stack.push(guard.pop_all())
                break
            except Exception as error:
                # Ray gives its own servers half a minute, which on a busy machine is not enough.
                if attempt == _STARTS:
                    raise TrainingError(
                        f"no Ray cluster could be started on this machine: {error} (tried "
                        f"{_STARTS} times; is it very busy, or without memory or disk in "
                        f"{tempfile.gettempdir()}?)"
                    ) from error
                logger.warning("Ray did not start (%s); trying again", error)
        stack.callback(ray.shutdown)
        yield _cluster(context)


def _cluster(context: Any) -> Cluster:
    session = Path(context.address_info["session_dir"])
    return Cluster(context.address_info["address"], session if session.is_dir() else None)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    # An address in RAY_ADDRESS would win over "local"; Ray sets RAY_AUTH_MODE by itself.
    names = (*values, "RAY_ADDRESS", "RAY_AUTH_MODE")
    before = {name: os.environ.get(name) for name in names}
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


PICKLE = "pickle:"
# Every task carries its functions to a worker.
LARGEST = 8 * 2**20
_READ_BACK = "import sys; from ray import cloudpickle; cloudpickle.loads(sys.stdin.buffer.read())"
_FIND = (
    "import sys, importlib.util as u; "
    "sys.exit(0 if u.find_spec(sys.argv[1].partition('.')[0]) and u.find_spec(sys.argv[1]) else 1)"
)


def ship(func: Callable[..., Any], *, role: str) -> str:
    """The text that names `func` for a worker; `load` gives the function back.

    Args:
        func: Function, callable object, partial or bound method.
        role: "workflow" or "judge", for error messages.

    Raises:
        FunctionError: It is not importable there and cannot be sent by value; names what cannot.
    """
    return _reference(func) or _by_value(func, role)


def load(text: str, *, setting: str = "workflow_args.tuner") -> Callable[..., Any]:
    """The function that `ship` named; `setting` is the key that holds the text, for messages."""
    if text.startswith(PICKLE):
        from ray import cloudpickle

        function: Callable[..., Any] = cloudpickle.loads(
            base64.b64decode(text.removeprefix(PICKLE))
        )
        return function
    from tuner.functions.loading import load_function

    return load_function(text, setting=setting)


def _reference(func: Callable[..., Any]) -> str | None:
    if unwrapped(func) is not func or not inspect.isfunction(func):
        return None
    module, name = func.__module__, func.__qualname__
    found = getattr(sys.modules.get(module), name, None) if name.isidentifier() else None
    if found is not func or module == "__main__" or not _is_installed(module):
        return None
    return f"{module}:{name}"


@cache
def _is_installed(module: str) -> bool:
    command = [sys.executable, "-I", "-c", _FIND, module]
    return subprocess.run(command, cwd=os.sep, capture_output=True, check=False).returncode == 0


def _by_value(func: Callable[..., Any], role: str) -> str:
    from ray import cloudpickle

    own = list(_own_modules())
    registered = []
    for module in own:
        if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            registered.append(module)
    try:
        data: bytes = cloudpickle.dumps(func)
    except Exception as error:
        raise FunctionError(
            f"the {role} {where(func)} cannot be sent to the workers: {_culprit(func, error)}; "
            "make it inside the function, or put the function into an installed package"
        ) from error
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)
    if len(data) > LARGEST:
        raise FunctionError(
            f"the {role} {where(func)} is {len(data) / 2**20:.0f} MiB with all it refers to, and "
            f"every task would carry it; load what is large inside the function (limit: "
            f"{LARGEST >> 20} MiB)"
        )
    _read_back(data, func, role)
    return PICKLE + base64.b64encode(data).decode("ascii")


def _read_back(data: bytes, func: Callable[..., Any], role: str) -> None:
    command = [sys.executable, "-c", _READ_BACK]
    env = {**os.environ, "PYTHONPATH": worker_path()}
    done = subprocess.run(
        command, cwd=os.sep, env=env, input=data, capture_output=True, check=False
    )
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise FunctionError(
            f"the {role} {where(func)} cannot be read back in another process: "
            f"{lines[-1] if lines else 'it ended without a word'}; what it refers to must be "
            "importable on the workers, or be defined in a module of yours"
        )


def worker_path() -> str:
    """PYTHONPATH of a worker: where `tuner` is, then what this process was given."""
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
        if not any(path.is_relative_to(folder) for folder in elsewhere) and not _is_installed(
            name.partition(".")[0]
        ):
            yield module


def _culprit(func: Callable[..., Any], error: Exception) -> str:
    """Which of the things that `func` refers to cannot be pickled."""
    from ray import cloudpickle

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
