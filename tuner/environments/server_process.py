"""A server that a run starts for itself, and stops with all its processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from tuner.errors import ConfigError

START_SECONDS = 180.0  # until a server answers
STOP_SECONDS = 5.0  # until it ends by itself
_SHOWN = 500
# Its standard input ends when this process ends, in any way; then its group is killed.
_WATCHED = 'exec 3<&0 </dev/null; (read _ <&3; kill -KILL 0) & exec "$@" 3<&-'


class ServerProcess:
    """Starts a server when its address is first needed, and again if it has ended.

    `{port}` in its command is a free port of loopback, which is its address if `url` is None.
    Programs of this Python's environment are found before others. Raises ConfigError if its address
    would be unknown.
    """

    def __init__(
        self, command: Sequence[str], *, url: str | None = None, folder: str | Path | None = None
    ) -> None:
        self._command = [str(part) for part in command]
        self._url = url
        self._folder = folder
        if url is None and not any("{port}" in part for part in self._command):
            raise ConfigError(
                f"the command {' '.join(self._command)!r} does not contain its server's address: "
                "put {port} into it, or give url"
            )
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes]
        self._address = ""

    def __reduce__(self) -> tuple[Any, ...]:
        made = partial(ServerProcess, url=self._url, folder=self._folder)
        return made, (self._command,)  # another process starts one of its own

    def address(self) -> str:
        """The server's address; blocks until the server answers. Raises ConnectionError, with its
        last output, if it ended or did not answer in time."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._stop()
                self._start()
            return self._address

    def close(self) -> None:
        """Stop the server and all processes that it started."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        self._address = self._url or f"http://127.0.0.1:{port}"
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed when it stops
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        self._process = subprocess.Popen(
            ["sh", "-c", _WATCHED, "sh", *(one.replace("{port}", port) for one in self._command)],
            cwd=self._folder,
            env={**os.environ, "PATH": programs},
            stdin=subprocess.PIPE,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            self._wait()
        except BaseException:
            self._stop()
            raise

    def _wait(self) -> None:
        import httpx

        assert self._process is not None
        until = time.monotonic() + START_SECONDS
        problem = f"did not answer at {self._address} within {START_SECONDS:g} s"
        while time.monotonic() < until:
            if self._process.poll() is not None:
                problem = f"ended with {self._process.returncode}"
                break
            with suppress(httpx.HTTPError):
                httpx.get(f"{self._address}/health", trust_env=False, timeout=1.0)
                return
            time.sleep(0.05)
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - _SHOWN))
        said = self._said.read().decode(errors="replace").strip()
        raise ConnectionError(f"the server {self._command[0]} {problem}: {said}")

    def _stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._said.close()
        self._process = None
