"""Containers by podman or docker, through the client's commands: created, used and always removed.

A container has no network unless it is given one, and its name says which process of this machine
it belongs to. A watcher removes the containers of a process that ends in any way, also by SIGKILL;
each new engine removes those of processes that were killed together with their watcher.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.errors import MissingDependencyError, SandboxError
from tuner.rewards.sandbox import finished, gateway_address, relay
from tuner.rewards.sandbox import remove as remove_folder

logger = logging.getLogger("tuner.environments")
PREFIX = "tuner-box"  # of the names of containers, and of temporary folders beside them
_PATIENCE = 120.0  # seconds for a command of the client
_GRACE = 15.0  # more for one that has a time limit inside
_STARTS_AT_ONCE = 4
# Options of the client, and whether limits are set to what this process may give. The first works
# on most machines; the others with hybrid cgroups, an old crun, or limits that cannot be raised.
_WAYS: dict[str, tuple[tuple[tuple[str, ...], bool], ...]] = {
    "podman": (
        ((), False),
        ((), True),
        (("--cgroup-manager=cgroupfs",), True),
        (("--runtime=runc", "--cgroup-manager=cgroupfs"), True),
    ),
    "docker": (((), False), ((), True)),
}
_MOST = {"nofile": (resource.RLIMIT_NOFILE, 1 << 20), "nproc": (resource.RLIMIT_NPROC, 30_000)}
_FOUND: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]] = {}
"""Options and limits that were found, and those that do not hold, by program."""
_WARNED: set[tuple[str, str]] = set()
# Its first process: it ends at once when it is told to, and waits for the orphans of others.
_IDLE = ("sh", "-c", "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done")
# Removes what has this name when its standard input ends, and looks again: on a full disk the
# client may fail at first, and if nobody said "close", one may be about to create something.
_WATCHER = """
trap '' INT TERM HUP
read word
for pause in 0 0 1 3; do
    sleep $pause
    listed=$("$@" ps --all $EXTERNAL --format '{{.Names}}') || continue
    found=$(echo "$listed" | grep "^$OWNER-")
    if [ -n "$found" ]; then "$@" rm --force --volumes $found
    elif [ "$word" = close ]; then break; fi
done
if [ "$word" != close ]; then rm -rf "${TMPDIR:-/tmp}/$PROCESS"-*; fi
"""
_CLIENTS = re.compile(
    r"PATH|HOME|TMPDIR|(DOCKER|CONTAINERS?|PODMAN|STORAGE|XDG|DBUS|LD)_.*|.*_PROXY", re.IGNORECASE
)
"""Variables that the client or its service may read."""
# Opens a socket, and sends it through standard input.
_DOOR = """
import socket, sys
door = socket.create_server(("127.0.0.1", int(sys.argv[1])))
socket.send_fds(socket.socket(fileno=0), [b"door"], [door.fileno()])
"""
# Also what the client has stored without knowing it as a container any more.
_EXTERNAL = {"podman": "--external", "docker": ""}


@dataclass(frozen=True)
class ContainerLimits:
    """Cores, MiB of memory without swap, MiB that may be written, and number of processes; None:
    not limited."""

    cpus: float | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    processes: int | None = 512

    def words(self) -> dict[str, list[str]]:
        """The client's options, by what they limit."""
        given = {
            "cpus": (self.cpus, ["--cpus={}"]),
            "memory": (self.memory_mb, ["--memory={}m", "--memory-swap={}m"]),
            "disk": (self.disk_mb, ["--storage-opt=size={}m"]),
            "processes": (self.processes, ["--pids-limit={}"]),
        }
        return {
            name: [word.format(value) for word in words]
            for name, (value, words) in given.items()
            if value is not None
        }


_TRIED = ContainerLimits(cpus=1, memory_mb=64, disk_mb=64, processes=64)


@dataclass(frozen=True)
class CommandResult:
    """A command's exit status as in a shell, its output up to a limit, whether there was more, and
    whether it was ended at its time limit."""

    status: int
    stdout: bytes
    stderr: bytes
    cut: bool = False
    timed_out: bool = False

    @property
    def problem(self) -> str:
        """The end of what it said about its failure; empty if it has not failed."""
        said = (self.stderr.strip() or self.stdout.strip()).decode(errors="replace")
        return (said[-800:] or f"status {self.status}") if self.status else ""


class ContainerEngine:
    """Containers by a client that works here, which is found when the first image is needed; `kind`
    is "podman", "docker" or "local": whichever works."""

    def __init__(self, default: ContainerLimits, kind: str = "local") -> None:
        self.default, self._given = default, kind
        self._begin()

    def _begin(self) -> None:
        self.program = self.kind = ""
        self.options: tuple[str, ...] = ()  # before a command
        self.limits: tuple[str, ...] = ()  # options for limits of each process
        self.unlimited: dict[str, str] = {}  # what the client cannot limit here, and why
        self._finding, self._starting = asyncio.Lock(), asyncio.Semaphore(_STARTS_AT_ONCE)
        self._images: set[str] = set()
        self._watcher: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None  # its monitors write files to where they are started
        self._owner = f"{_process()}-{os.urandom(3).hex()}"

    def __reduce__(self) -> tuple[Any, ...]:
        return ContainerEngine, (self.default, self._given)  # another process has its own

    async def need(self, image: str, get: Callable[[], Awaitable[None]]) -> None:
        """Have an image, which `get` pulls or builds by this, once; the first time with the first
        client that can run a container of it. Raises MissingDependencyError, which says why none
        can, and SandboxError."""
        async with self._finding:
            if self._watcher is None:  # which is started last
                await self._find(image, get)
            elif image not in self._images:
                await get()
            self._images.add(image)

    async def _find(self, image: str, get: Callable[[], Awaitable[None]]) -> None:
        refused = []
        for kind in ("podman", "docker") if self._given == "local" else (self._given,):
            if (program := shutil.which(kind)) is None:
                refused.append(f"{kind} is not installed")
                continue
            self.program, self.kind = program, kind
            try:
                await get()
                await self._adapt(image)
            except SandboxError as error:
                refused.append(str(error))
                continue
            await self._remove_leftovers()
            self._watch()
            return
        raise MissingDependencyError(
            f"no container of {image!r} can be started: {'; '.join(refused)}"
        )

    async def _adapt(self, image: str) -> None:
        """Find the options with which a container starts, and the limits that do not hold here."""
        if self.program in _FOUND:
            self.options, self.limits, self.unlimited = _FOUND[self.program]
            return

        async def trial(*more: str) -> str:
            words = ("--name", f"{self._owner}-trial", "--network=none", *self.limits, *more)
            done = await self.call("run", "--rm", *words, image, "true")
            said = done.stderr.decode(errors="replace")
            # A service may start a container without its limits, and say so.
            return done.problem or (said if re.search("ignored|discarded", said) else "")

        problem = ""
        for options, limited in _WAYS[self.kind]:
            self.options, self.limits = options, given_limits() if limited else ()
            if not (problem := await trial()):
                break
        else:
            raise SandboxError(f"{self.kind} cannot start {image!r}: {problem}")
        for name, words in _TRIED.words().items():
            if problem := await trial(*words):
                self.unlimited[name] = problem.strip().splitlines()[-1]
        _FOUND[self.program] = self.options, self.limits, self.unlimited

    async def pull(self, image: str, *, seconds: float) -> None:
        """Pull an image, unless the client has it; raises SandboxError."""
        if (await self.call("image", "inspect", image)).status:
            await self._must(f"has no image {image!r}", "pull", image, seconds=seconds)

    async def build(self, folder: Path, tag: str, *, seconds: float) -> None:
        """Build an image from a folder's Dockerfile, unless the client has one of this tag; raises
        SandboxError."""
        if (await self.call("image", "inspect", tag)).status == 0:
            return
        words: tuple[str, ...] = ("--tag", tag, str(folder))
        until = time.monotonic() + seconds
        built = await self.call("build", *words, seconds=seconds)
        if built.status and not built.timed_out and self.kind == "podman":
            # This needs no runtime; the layers that were built are kept.
            words = ("--isolation=chroot", *given_limits(), *words)
            built = await self.call("build", *words, seconds=until - time.monotonic())
        if built.status:
            raise SandboxError(f"{self.kind} cannot build {folder}/Dockerfile: {built.problem}")

    async def create(
        self,
        image: str,
        limits: ContainerLimits,
        *,
        environment: Mapping[str, str] | None = None,
        options: Sequence[str] = ("--network=none",),
    ) -> str:
        """Start a container that does nothing, with further options of the client; returns its
        name. Raises SandboxError."""
        name = f"{self._owner}-{os.urandom(6).hex()}"
        words = [*self.limits, "--stop-timeout=0", "--ulimit=core=0", *options]
        for limited, more in limits.words().items():
            if limited not in self.unlimited:
                words += more
            elif (self.kind, limited) not in _WARNED:
                _WARNED.add((self.kind, limited))
                said = "%s cannot limit %s here, so containers run without that limit: %s"
                logger.warning(said, self.kind, limited, self.unlimited[limited])
        if "disk" in self.unlimited and limits.disk_mb is not None:
            words.append(f"--ulimit=fsize={limits.disk_mb * 2**20}")  # of a single file, at least
        own, variables = _variables(environment or {})
        start = ("run", "--detach", "--name", name, *words, *variables, image, *_IDLE)
        async with self._starting:
            # Ending a client that is about to start one would leave parts of it.
            running = asyncio.ensure_future(self.call(*start, environment=own))
            try:
                done = await asyncio.shield(running)
            except asyncio.CancelledError:
                await finished(self._removed_after(running, name))
                raise
        if done.status:
            await self.remove(name)
            raise SandboxError(f"{self.kind} did not start {image!r}: {done.problem}")
        return name

    async def _removed_after(self, running: asyncio.Future[CommandResult], name: str) -> None:
        await running
        await self.remove(name)

    async def exec(
        self, name: str, *command: str, seconds: float | None = None, **where: Any
    ) -> CommandResult:
        """Run a command in a container, as `exec_words` says; its time limit kills it with its
        children."""
        # Inside, since ending the client would leave the command running.
        limited = [] if seconds is None else ["timeout", "-s", "KILL", f"{seconds:.3f}"]
        patience = None if seconds is None else seconds + _GRACE
        began = time.monotonic()
        words, own = self.exec_words(name, [*limited, *command], **where)
        done = await self.call(*words, environment=own, seconds=patience)
        late = seconds is not None and time.monotonic() - began >= seconds
        killed = done.status == 128 + signal.SIGKILL and late
        return replace(done, timed_out=done.timed_out or killed)

    def exec_words(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        workdir: str | None = None,
        user: str | int | None = None,
    ) -> tuple[list[str], dict[str, str]]:
        """The client's command that runs one in a container, and variables for the client."""
        own, words = _variables(environment or {})
        words += [] if workdir is None else [f"--workdir={workdir}"]
        words += [] if user is None else [f"--user={user}"]
        return ["exec", *words, name, *command], own

    async def out_of_memory(self, name: str) -> bool:
        """Whether a process of a container was ended for its memory limit."""
        # Of cgroups 2 and 1.
        paths = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
        return (await self.exec(name, "grep", "-qs", "^oom_kill [1-9]", *paths)).status == 0

    async def copy_in(self, name: str, source: str, target: str) -> None:
        """Copy a file, or with "/." at its end the content of a folder, into a container; raises
        SandboxError."""
        await self._must(f"cannot copy {source} to {target}", "cp", source, f"{name}:{target}")

    async def copy_out(self, name: str, source: str, *, limit: int) -> bytes:
        """A file or folder of a container as a tar archive; raises SandboxError, also if that is
        larger than `limit` bytes."""
        words = ("cp", f"{name}:{source}", "-")
        done = await self._must(f"cannot copy {source}", *words, output=limit)
        if done.cut:
            raise SandboxError(f"{source} is larger than {limit} bytes: it is not copied")
        return done.stdout

    async def remove(self, name: str) -> None:
        """Remove a container with its processes and volumes, if it is there."""
        for pause in (0.0, 0.1, 1.0):  # on a full disk the first call makes room for the next
            await asyncio.sleep(pause)
            if (await self.call("rm", "--force", "--volumes", name)).status == 0:
                return

    @asynccontextmanager
    async def reaching(self, name: str, gateway: str) -> AsyncIterator[None]:
        """Let programs in a container reach one address of this machine, by its URL here, while the
        block runs. A program of this machine opens the socket in the container's network, which
        takes the rights of the client's service. Raises SandboxError."""
        host, port = gateway_address(gateway)
        found = await self.call("inspect", "--format", "{{.State.Pid}}", name)
        try:
            door = await _listen_inside(int(found.stdout or b"0"), port)
        except OSError as error:
            raise SandboxError(
                f"no socket can be opened in the network of a container ({error}), so a program in "
                "it cannot reach the model: run as root, or as the user whose podman it is; or use "
                "an agent outside of containers, or a program with network 'host'"
            ) from error
        server = await asyncio.start_server(relay(host, port), sock=door)
        try:
            yield
        finally:
            server.close()

    async def _must(self, otherwise: str, *words: str, **more: Any) -> CommandResult:
        done = await self.call(*words, **more)
        if done.status:
            raise SandboxError(f"{self.kind} {otherwise}: {done.problem}")
        return done

    async def call(
        self,
        *words: str,
        environment: Mapping[str, str] | None = None,
        seconds: float | None = _PATIENCE,
        output: int = 1_000_000,
    ) -> CommandResult:
        """Run a command of the client; of each stream `output` bytes are kept."""
        process = await asyncio.create_subprocess_exec(
            *(self.program, *self.options, *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
            cwd=self._folder,
            start_new_session=True,  # Ctrl-C is for us
        )
        reading = asyncio.gather(
            _read(process.stdout, output), _read(process.stderr, output), process.wait()
        )
        try:
            (out, cut), (err, more), status = await asyncio.wait_for(reading, seconds)
        except TimeoutError:
            said = f"{self.kind} {words[0]} took longer than {seconds:g} s".encode()
            return CommandResult(128 + signal.SIGKILL, b"", said, timed_out=True)
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await finished(process.wait())
        return CommandResult(status if status >= 0 else 128 - status, out, err, cut or more)

    async def _remove_leftovers(self) -> None:
        """Remove containers of processes of this machine that have ended."""
        words = [_EXTERNAL[self.kind]] if _EXTERNAL[self.kind] else []
        listed = await self.call("ps", "--all", *words, "--format", "{{.Names}}")
        if left := [name for name in listed.stdout.decode().split() if _orphaned(name)]:
            logger.warning("removing %d containers of processes that were killed", len(left))
            await self.call("rm", "--force", "--volumes", *left)

    def _watch(self) -> None:
        self._folder = owned_folder()
        given = {"OWNER": self._owner, "PROCESS": _process(), "EXTERNAL": _EXTERNAL[self.kind]}
        given["TMPDIR"] = tempfile.gettempdir()
        self._watcher = subprocess.Popen(
            ["sh", "-c", _WATCHER, "sh", self.program, *self.options],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | given,
            start_new_session=True,
        )

    async def close(self) -> None:
        """Remove all containers of this engine."""
        watcher, folder = self._watcher, self._folder
        self._begin()
        if watcher is not None and folder is not None:
            await asyncio.to_thread(watcher.communicate, b"close\n")
            remove_folder(folder)


async def _read(stream: asyncio.StreamReader | None, most: int) -> tuple[bytes, bool]:
    """Read a stream to its end; returns its first `most` bytes, and whether there were more."""
    assert stream is not None
    kept, cut = bytearray(), False
    while data := await stream.read(65536):
        cut = cut or len(kept) + len(data) > most
        kept += data[: most - len(kept)]
    return bytes(kept), cut


def given_limits() -> tuple[str, ...]:
    """Options that set limits to those of this process, which need not be raised for them."""
    found = []
    for name, (own, most) in _MOST.items():
        hard = resource.getrlimit(own)[1]
        most = most if hard == resource.RLIM_INFINITY else min(hard, most)
        found.append(f"--ulimit={name}={most}:{most}")
    return tuple(found)


async def _listen_inside(pid: int, port: int) -> socket.socket:
    """A listening socket in the network of another process; raises OSError."""
    ours, theirs = socket.socketpair()
    own = ["--user", "--preserve-credentials"] if os.getuid() else []
    entering = ["nsenter", f"--target={pid}", "--net", *own]
    with ours, theirs:
        process = await asyncio.create_subprocess_exec(
            *(*entering, sys.executable, "-I", "-S", "-c", _DOOR, str(port)),
            stdin=theirs.fileno(),
            stderr=subprocess.PIPE,
        )
        _, said = await process.communicate()
        if process.returncode:
            raise OSError(said.decode(errors="replace").strip())
        return socket.socket(fileno=socket.recv_fds(ours, 1, 1)[1][0])


def _variables(given: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Variables for the client, and its options that pass them on: their values stay out of the
    list of processes, unless the client itself reads such a variable."""
    own = {name: value for name, value in given.items() if not _CLIENTS.fullmatch(name)}
    words = [name if name in own else f"{name}={value}" for name, value in given.items()]
    return own, [f"--env={word}" for word in words]


def _started(pid: int) -> str:
    """When a process started, so that another one with its id is not taken for it."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return "0"


def _machine() -> str:
    """This machine, or namespace of processes, in which process ids have their meaning."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return f"{zlib.crc32(f'{socket.gethostname()} {space}'.encode()):08x}"


def _process() -> str:
    return f"{PREFIX}-{_machine()}-{os.getpid()}-{_started(os.getpid())}"


def _orphaned(name: str) -> bool:
    """Whether a name is that of a container or folder of a process of this machine that has
    ended."""
    found = re.fullmatch(rf"{PREFIX}-{_machine()}-(\d+)-(\d+)-[\w-]+", name)
    if found is None:
        return False
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return _started(int(found[1])) != found[2]


def owned_folder() -> Path:
    """A temporary folder, which is removed here next time if this process is killed; removes those
    of processes that were."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}-*"):
        if _orphaned(folder.name):
            remove_folder(folder)
    return Path(tempfile.mkdtemp(prefix=f"{_process()}-"))
