"""Supervises one program: its limits, and the end of everything that it started.

`tuner.rewards.sandbox` runs this file as a script, in a separate interpreter without `tuner`: as
the first process inside bubblewrap, or next to the program. Orphans of the program become its
children, so none of them outlives it. It measures time itself, so a program is ended at its
deadline even while the calling process is busy.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NoReturn

LOOK_EVERY = 0.05
"""Seconds from one check of the processes to the next."""
WEIGH_EVERY = 0.2
"""Minimum seconds between two checks of the folders."""
_BLOCK = 4096
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_SIGNALS = {signal.SIGCHLD, signal.SIGTERM}


def main(order: dict[str, Any], command: list[str]) -> None:
    """Run `command` within the limits of `order`, end everything that it started, and report.

    Args:
        order: `report` (the file descriptor for one line of JSON), `parent` (the process that it
            must not outlive; None inside its own namespace), `seconds`, `memory`, `disk` (bytes),
            `processes`, `threads` (None: not limited by the kernel), `folders` (whose size counts),
            `port` and `socket` (to be forwarded, or None).
        command: The program and its arguments.
    """
    os.set_inheritable(order["report"], False)
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_DUMPABLE, 0)  # the program cannot write into this process, or its report
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if order["parent"] is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != order["parent"]:
            return
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    listener = _listening(order["port"]) if order["port"] else None
    was_there = _size(order["folders"])
    child = os.fork()
    if not child:
        _become(command, order, prctl)
    if listener is not None:
        threading.Thread(target=_forward, args=(listener, order["socket"]), daemon=True).start()
    ended, status = _watch(child, order, was_there)
    _end_all(child)
    line = json.dumps({"ended": ended, "status": status})
    os.write(order["report"], line.encode() + b"\n")


def _become(command: list[str], order: dict[str, Any], prctl: Any) -> NoReturn:
    """In the child: apply the limits, then become the program."""
    try:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python's own
            signal.signal(ignored, signal.SIG_DFL)
        limits = [
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_FSIZE, order["disk"]),
            # Not RLIMIT_AS: Node reserves gigabytes that it never touches. Above the measured
            # limit, which reports what happened.
            (resource.RLIMIT_DATA, order["memory"] * 2),
        ]
        if order["threads"] is not None:
            limits.append((resource.RLIMIT_NPROC, order["threads"]))
        for which, most in limits:
            resource.setrlimit(which, (most, most))
        os.execvp(command[0], command)
    except OSError as error:
        line = json.dumps({"failed": f"{command[0]}: {error.strerror}"})
        os.write(order["report"], line.encode() + b"\n")
    finally:
        os._exit(127)


def _watch(child: int, order: dict[str, Any], was_there: int) -> tuple[str, int | None]:
    """How the program ended, and its status as in a shell if it ended by itself."""
    deadline = time.monotonic() + order["seconds"]
    weigh_at = 0.0
    while True:
        left = deadline - time.monotonic()
        got = signal.sigtimedwait(_SIGNALS, max(0.0, min(LOOK_EVERY, left)))
        if got is not None and got.si_signo == signal.SIGTERM:
            return "cancelled", None
        for pid, status in _reaped():
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                if code == -signal.SIGXFSZ:
                    return "disk", None
                return "exited", code if code >= 0 else 128 - code
        now = time.monotonic()
        if now >= deadline:
            return "timeout", None
        running = list(_descendants(os.getpid()))
        if len(running) > order["processes"]:
            return "processes", None
        if sum(map(_memory, running)) > order["memory"]:
            return "memory", None
        if now >= weigh_at:
            if _size(order["folders"], most=was_there + order["disk"]) > was_there + order["disk"]:
                return "disk", None
            weigh_at = time.monotonic() + max(WEIGH_EVERY, 10 * (time.monotonic() - now))


def _reaped() -> Iterator[tuple[int, int]]:
    """Children that have ended, with their wait statuses."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        yield pid, status


def _end_all(group: int) -> None:
    """Kill every descendant, including those created meanwhile.

    Args:
        group: Process group of the program, which is killed at once, however fast it forks.
    """
    give_up = time.monotonic() + 10.0  # one that hangs in the kernel cannot be waited for
    while time.monotonic() < give_up:
        with suppress(OSError):  # nobody is left
            # All of the namespace except its first process, which this is; or those of the group.
            os.kill(-1 if os.getpid() == 1 else -group, signal.SIGKILL)
        running = list(_descendants(os.getpid()))
        for pid in running:
            with suppress(OSError):  # it has ended
                os.kill(pid, signal.SIGKILL)
        for _ in _reaped():
            pass
        if not running:
            return
        time.sleep(0.001)


def _descendants(pid: int) -> Iterator[int]:
    """Processes below one, including zombies."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                children = [int(child) for child in file.read().split()]
        except OSError:
            continue
        for child in children:
            yield child
            yield from _descendants(child)


def _memory(pid: int) -> int:
    """Bytes of memory of a process, without files."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            lines = [line.split() for line in file]
    except OSError:
        return 0
    own = ("RssAnon:", "RssShmem:")
    return sum(1024 * int(words[1]) for words in lines if words and words[0] in own)


def _size(folders: list[str], most: float = float("inf")) -> int:
    """Bytes on disk in folders, each entry at least a block; counted up to `most`."""
    found, waiting = 0, list(folders)
    while waiting and found <= most:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    try:
                        found += max(_BLOCK, entry.stat(follow_symlinks=False).st_blocks * 512)
                    except OSError:  # it is gone again
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError:
            continue
    return found


def _listening(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port), backlog=128)


def _forward(listener: socket.socket, path: str) -> None:
    """Forward each connection to the socket at `path`, which leads out of the namespace."""
    while True:
        inner, _ = listener.accept()
        outer = socket.socket(socket.AF_UNIX)
        try:
            outer.connect(path)
        except OSError:
            inner.close()
            continue
        for ends in ((inner, outer), (outer, inner)):
            threading.Thread(target=_pump, args=ends, daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # one of them has hung up; the other is told
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
