"""Machines that share no network, no processes and no files but a folder, out of Linux' namespaces.

The process that makes them is in a network and mount namespace of its own, which is the first
machine (`make test-cluster` starts pytest so). Every other one is a process with namespaces of its
own, on a bridge; what lies in the hidden folders is not there on it, but for the shared folder.
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

NET = "10.77.0"
BRIDGE = "tuner0"
_LINES = itertools.count(1)


def command(*words: str | Path) -> None:
    """Run a command, which must succeed."""
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


def possible() -> bool:
    """Whether this process may make machines: it is alone in its network."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return False
    made = subprocess.run(["ip", "-brief", "link"], check=False, capture_output=True, text=True)
    alone = [line for line in made.stdout.splitlines() if not line.startswith(("lo ", BRIDGE))]
    return made.returncode == 0 and not alone and os.access("/proc/self/ns/net", os.R_OK)


def make_first() -> str:
    """Give this machine an address; gives it."""
    address = f"{NET}.1"
    command("ip", "link", "set", "lo", "up")
    command("ip", "link", "add", BRIDGE, "type", "bridge")
    command("ip", "address", "add", f"{address}/24", "dev", BRIDGE)
    command("ip", "link", "set", BRIDGE, "up")
    # Ray asks which of its addresses a machine would take to the outside.
    command("ip", "route", "add", "default", "dev", BRIDGE)
    return address


class Host:
    """A machine that runs one command.

    Args:
        number: The end of its address, 2 to 254.
        run: The command.
        environment: Its variables.
        hidden: Folders whose files are not there.
        shared: The folder that is there all the same.
        log: What it prints goes there.
    """

    def __init__(
        self,
        number: int,
        run: Sequence[str | Path],
        *,
        environment: Mapping[str, str],
        hidden: Sequence[Path],
        shared: Path | None,
        log: Path,
    ) -> None:
        self.address = f"{NET}.{number}"
        self.dead = False
        # A name of its own: the line of a machine that it replaces goes a moment later.
        self._line = f"tuner{next(_LINES)}"
        steps = ["read go", "ip link set lo up", f"ip address add {self.address}/24 dev eth0"]
        steps += ["ip link set eth0 up", f"ip route add default via {NET}.1"]
        if shared is not None:
            steps.append(f"mount --bind {shared} /mnt")
        steps += [f"mount -t tmpfs -o mode=1777 none {folder}" for folder in hidden]
        if shared is not None:
            steps += [f"mkdir -p {shared}", f"mount --bind /mnt {shared}"]
        steps.append("cd /")
        steps.append("exec " + shlex.join(map(str, run)))
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
                 "sh", "-ec", "\n".join(steps)],
                stdin=subprocess.PIPE, stdout=out, stderr=out, env=dict(environment),
            )  # fmt: skip
        command("ip", "link", "add", self._line, "type", "veth", "peer", "name", "eth0", "netns",
                str(self._inside()))  # fmt: skip
        command("ip", "link", "set", self._line, "master", BRIDGE, "up")
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.close()

    def _inside(self) -> int:
        """Its first process, which `unshare` has forked."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        while not (found := children.read_text().split()):
            if self._process.poll() is not None:
                raise RuntimeError("no namespaces can be had here")
        return int(found[0])

    def cut(self) -> None:
        """Pull the cable: nothing arrives any more, and nobody is told."""
        command("ip", "link", "set", self._line, "down")

    def mend(self) -> None:
        """Plug it in again."""
        command("ip", "link", "set", self._line, "up")

    def die(self) -> None:
        """As in a power cut."""
        self.dead = True
        if self._process.poll() is None:
            self.cut()
            os.kill(self._inside(), signal.SIGKILL)
            self._process.wait(30)

    @property
    def alive(self) -> bool:
        """Whether its command runs."""
        return self._process.poll() is None
