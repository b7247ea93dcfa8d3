"""Ray clusters of several machines, which are namespaces; `make test-cluster` is in one itself."""

import contextlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.cluster import hosts
from tests.integration.trinity.conftest import HERE, REPOSITORY, SHIM

collect_ignore_glob = [] if HERE and hosts.possible() else ["test_*.py"]
if not collect_ignore_glob and Path(sys.prefix).is_relative_to("/tmp"):
    raise pytest.UsageError(f"{sys.prefix} is below /tmp, which the machines do not see: move it")
STARTS, STARTED = 4, "Ray runtime started"
RAY = Path(sys.executable).with_name("ray")
SITE = Path(importlib.util.find_spec("pytest").origin).parents[1]
# What Ray's machines and the driver agree on.
os.environ.update({"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"})
os.environ.pop("RAY_ADDRESS", None)


class Cluster:
    """A Ray cluster whose first machine is this process's.

    Args:
        folder: Where the machines' logs go, and the folder that they share.
        gpus: GPUs that the first one is said to have.
    """

    def __init__(self, folder: Path, *, gpus: int = 0) -> None:
        self.folder = folder
        self.shared = folder / "shared"
        self.shared.mkdir()
        # vLLM's and verl's stand-ins for GPUs are on every machine.
        shutil.copytree(SHIM, self.shared / "shim", dirs_exist_ok=True)
        os.environ["PYTHONPATH"] = str(self.shared / "shim")
        self.address = f"{hosts.NET}.1:6379"
        self.hosts: dict[int, hosts.Host] = {}
        said = folder / "head.log"
        for _ in range(STARTS):
            # Unix sockets live in it, and their paths are short or refused.
            self._temporary = Path(tempfile.mkdtemp(prefix="tr", dir="/tmp"))
            with said.open("ab") as log:
                self._head = subprocess.Popen(
                    self._ray(1, gpus, "--head", "--port=6379", "--include-dashboard=false",
                              f"--temp-dir={self._temporary}"),
                    stdout=log, stderr=log, cwd="/", env=self._environment,
                )  # fmt: skip
            while self._head.poll() is None and STARTED not in said.read_text():
                time.sleep(0.2)
            if self._head.poll() is None:
                return
            self._end_first()
        raise RuntimeError(said.read_text())

    def _ray(self, number: int, gpus: int, *more: str) -> list[str]:
        return [
            str(RAY), "start", "--block", f"--node-ip-address={hosts.NET}.{number}", "--num-cpus=8",
            f"--num-gpus={gpus}", "--object-store-memory=100000000", "--disable-usage-stats",
            # Ports that it chooses itself it waits for, and on a busy machine not long enough; for
            # another one too, so that it may have to be started again.
            "--dashboard-agent-grpc-port=7101", "--runtime-env-agent-port=7102",
            "--dashboard-agent-listen-port=7103", "--metrics-export-port=7104", *more,
        ]  # fmt: skip

    def add(
        self, number: int, *, gpus: int = 1, shares: bool = True, hidden=(), resources="{}"
    ) -> hosts.Host:
        """A further machine, on which nothing of this one's tests and /tmp is there."""
        more = f"--address={self.address}", f"--resources={resources}"
        ray = shlex.join(self._ray(number, gpus, *more))
        host = hosts.Host(
            number,
            ["sh", "-c", "; ".join([ray] * STARTS)],
            environment=self._environment,
            hidden=[Path("/tmp"), REPOSITORY / "tests", REPOSITORY / "docs", *hidden],
            shared=self.shared if shares else None,
            log=self.folder / f"host{number}.log",
        )
        self.hosts[number] = host
        return host

    def wait(self, until, seconds: float = 300) -> None:
        """Until something is so."""
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline
            assert self._head.poll() is None, (self.folder / "head.log").read_text()
            for number, host in self.hosts.items():
                said = self.folder / f"host{number}.log"
                assert host.alive or host.dead, said.read_text()
            time.sleep(0.2)

    def end(self) -> None:
        """End every machine."""
        for host in self.hosts.values():
            host.die()
        self._end_first()

    def _end_first(self) -> None:
        """Kill all that Ray has started on this machine; there is nothing else of Ray's here."""
        for process in psutil.process_iter(["cmdline"]):
            if str(self._temporary) in " ".join(process.info["cmdline"] or ()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._head.kill()
        self._head.wait(60)
        shutil.rmtree(self._temporary, ignore_errors=True)

    @property
    def _environment(self) -> dict[str, str]:
        # What does not come up in this time has died.
        return {**os.environ, "RAY_raylet_start_wait_time_s": "60"}


@pytest.fixture(scope="session")
def first_machine():
    """This machine's address."""
    return hosts.make_first()


@pytest.fixture(scope="module")
def cluster(first_machine, tmp_path_factory):
    """A cluster of this machine alone."""
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.end()
