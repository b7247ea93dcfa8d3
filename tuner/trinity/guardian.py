"""A process that ends our Ray cluster together with the process that started it.

Ray's servers die with the process that started them, but some of their children do not: an engine's
processes survive when Ray's worker is killed. Every process of the cluster inherits a mark in its
environment, and is found by it. This file is run by itself and needs only Python.
"""

from __future__ import annotations

import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MARK = "TUNER_CLUSTER"
# Maximum seconds for the guardian to finish.
_SECONDS = 30.0


def members(mark: str) -> list[int]:
    """Processes with this mark in their environment; Linux only."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


@contextmanager
def guarded(folder: Path) -> Iterator[str]:
    """A mark for a cluster started in this block; the cluster ends with the block or with this
    process.

    Args:
        folder: The cluster's temporary folder, removed at the end.
    """
    mark = secrets.token_hex(16)
    guardian = subprocess.Popen(
        [sys.executable, "-I", __file__, mark, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # an interrupt at the terminal is for the run, not for the guardian
    )
    try:
        yield mark
    finally:
        assert guardian.stdin is not None
        guardian.stdin.close()
        try:
            guardian.wait(timeout=2 * _SECONDS)
        except subprocess.TimeoutExpired:
            guardian.kill()


def end(mark: str) -> None:
    """Kill every member until none is left: new ones may start in the meantime.

    One check without members is not enough: a process that is being started has no environment for
    a moment.
    """
    deadline = time.monotonic() + _SECONDS
    looks = 2
    while looks and time.monotonic() < deadline:
        left = members(mark)
        looks = 2 if left else looks - 1
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)


def _wait_for_the_end(parent: int) -> None:
    """Wait until our parent closes its end of the pipe, or is gone (a fork of it may hold the
    pipe)."""
    pipe = sys.stdin.fileno()
    while os.getppid() == parent:
        ready, _, _ = select.select([pipe], [], [], 1.0)
        if ready and not os.read(pipe, 1):
            return


if __name__ == "__main__":
    _wait_for_the_end(os.getppid())
    end(sys.argv[1])
    shutil.rmtree(sys.argv[2], ignore_errors=True)
