"""A process that ends a cluster of our own with the process that started it, however that ends.

Ray's servers die with the process that started them, but not everything that they started does:
an engine's own processes live on when Ray's worker is killed. Everything below the cluster has
inherited a mark in its environment, and is found by it. This file is run by itself and needs
nothing but Python.
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
# How long the guardian may take once it is told to.
_SECONDS = 30.0


def members(mark: str) -> list[int]:
    """Processes that were started with this mark in their environment; Linux only."""
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
    """A mark for the cluster that is started in this block, which ends with the block or with us.

    Args:
        folder: The cluster's temporary folder, removed at the end.
    """
    mark = secrets.token_hex(16)
    guardian = subprocess.Popen(
        [sys.executable, "-I", __file__, mark, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # an interrupt at the terminal is for the run, not for its end
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
    """Kill every member until none is left: new ones may start while others are killed.

    One look that finds none is not enough: a process that is just being started has no environment
    to be known by for a moment.
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
    """Until our parent closes its end of the pipe, or is gone (a fork of it may hold the pipe)."""
    pipe = sys.stdin.fileno()
    while os.getppid() == parent:
        ready, _, _ = select.select([pipe], [], [], 1.0)
        if ready and not os.read(pipe, 1):
            return


if __name__ == "__main__":
    _wait_for_the_end(os.getppid())
    end(sys.argv[1])
    shutil.rmtree(sys.argv[2], ignore_errors=True)
