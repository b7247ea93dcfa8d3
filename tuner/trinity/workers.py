"""The cluster that Ray's workers run on.

It is a cluster at a given address, or our own, which ends with the run. It is never a cluster that
happens to run on this machine: `address="auto"`, Ray's and Trinity-RFT's default, would join it.
Our own cluster requires a token that only this process and its children know.
"""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.config.source import lookup
from tuner.errors import ConfigError, TrainingError
from tuner.rollouts.worker_pool import not_joined, require_answer
from tuner.tasks.loading import worker_path
from tuner.trinity.guardian import MARK, guarded
from tuner.trinity.installed import uses_tinker

logger = logging.getLogger("tuner")

LOCAL = "local"
_STARTS = 3
# Trinity-RFT's actors each request a CPU, and mostly wait.
FEWEST_CPUS = 8
# Ray makes our own cluster require a token unless RAY_AUTH_MODE says otherwise, and keeps the
# first one it sees: one for the life of this process.
_TOKEN = secrets.token_hex(32)
_OWN = {"RAY_AUTH_TOKEN": _TOKEN, "RAY_USAGE_STATS_ENABLED": "0"}


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster that this process has joined.

    Attributes:
        address: `host:port`.
        session: The folder with the output of its processes, if it is on this machine.
    """

    address: str
    session: Path | None


def is_own(tree: Mapping[str, Any]) -> bool:
    """Whether the run starts its own cluster: `cluster.ray_address` is not set, or `local`."""
    return bool(lookup(tree, "cluster.ray_address", LOCAL) == LOCAL)


def with_sizes(tree: dict[str, Any], *, device: str) -> dict[str, Any]:
    """The configuration with the number of this machine's GPUs, for a cluster of our own.

    Args:
        tree: Trinity-RFT's YAML.
        device: `tuner.device`; with `cpu` the declared GPUs are mere numbers.
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
            f"cluster.node_num is {cluster['node_num']}, but cluster.ray_address is not set: "
            "start a cluster of several machines with `ray start`, and set its address"
        )
    if not declared:
        raise ConfigError(
            "Trinity-RFT needs GPUs, and this machine has none: set cluster.ray_address to a "
            "cluster with GPUs, or tuner.backend to local"
        )
    if device != "cpu" and declared > found:
        raise ConfigError(
            f"cluster.gpu_per_node is {declared}, but this machine has {found}: lower it, or set "
            "cluster.ray_address to a cluster with more"
        )
    return {**tree, "cluster": {**cluster, "node_num": 1, "gpu_per_node": int(declared)}}


@contextmanager
def joined(address: str, *, gpus: int, namespace: str, env: Mapping[str, str]) -> Iterator[Cluster]:
    """Connect this process to Ray inside the block.

    Our own cluster ends with the block, or with this process if that is killed.

    Args:
        address: `host:port`, or "local" for our own cluster.
        gpus: GPUs of our own cluster.
        namespace: Namespace of the run's actors.
        env: Additional environment variables of the workers.
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
                raise not_joined(address, str(error).splitlines()[0]) from error
            yield _cluster(context)
        finally:
            ray.shutdown()


@contextmanager
def _own_cluster(gpus: int, **options: Any) -> Iterator[Cluster]:
    import ray

    with ExitStack() as stack:
        for attempt in range(1, _STARTS + 1):
            # Unix sockets are below it, and long paths of these are rejected.
            folder = Path(tempfile.mkdtemp(prefix="tr"))
            try:
                with ExitStack() as guard:
                    os.environ[MARK] = guard.enter_context(guarded(folder))
                    # Inherited by all processes that Ray starts.
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
                # Ray gives its own servers half a minute, which is not enough on a busy machine.
                if attempt == _STARTS:
                    raise TrainingError(
                        f"no Ray cluster could be started on this machine: {error} (tried "
                        f"{_STARTS} times; is it very busy, or out of memory or disk space in "
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
