"""A program in a container, by docker or podman: the same limits, the image's own files."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tuner.errors import MissingDependencyError
from tuner.rewards.sandbox import Finished, Limits, run

# What their clients find their service by.
_CLIENTS = (
    *("HOME", "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_CERT_PATH"),
    *("DOCKER_TLS_VERIFY", "CONTAINER_HOST", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS"),
)
_PATIENCE = 30.0
"""Seconds that the service may take for what is no rollout."""


@dataclass(frozen=True)
class Container:
    """How programs are run in an image.

    Attributes:
        image: Its name.
        engine: The client's executable.
    """

    image: str
    engine: str

    @classmethod
    def of(cls, image: str) -> Container:
        """What runs this image here.

        Raises:
            MissingDependencyError: There is neither docker nor podman, its service does not
                answer, or it does not have the image.
        """
        found = {kind: shutil.which(kind) for kind in ("docker", "podman")}
        refused = []
        for kind, engine in found.items():
            if engine is None:
                refused.append(f"{kind} is not installed")
                continue
            if problem := _asked(engine, "info"):
                refused.append(f"{kind} is installed, but its service does not answer: {problem}")
                continue
            if _asked(engine, "image", "inspect", image):
                refused.append(f"{kind} does not have it: {kind} pull {image}")
                continue
            return cls(image, engine)
        raise MissingDependencyError(f"image is {image!r}: {'; '.join(refused)}")

    @property
    def kind(self) -> str:
        """ "docker" or "podman"."""
        return Path(self.engine).name

    async def run(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        stdin: str | None,
        environment: Mapping[str, str],
        limits: Limits,
    ) -> Finished:
        """As `sandbox.run`, in a container of its own, which is removed."""
        name = f"tuner-{uuid.uuid4().hex}"
        own = {key: os.environ[key] for key in _CLIENTS if key in os.environ}
        words = self._words(name, folder, stdin is not None, environment, limits)
        try:
            finished = await run(
                [*words, self.image, *command],
                folder=folder,
                stdin=stdin,
                environment=own | dict(environment),
                limits=limits,
                isolation="process",
            )
            # 128 and SIGKILL: whether for its memory, only the service knows.
            if finished.status == 137 and await self._ended_for_memory(name):
                return replace(finished, status=None, ended="memory")
            return finished
        finally:
            await asyncio.shield(asyncio.ensure_future(self._call("rm", "--force", name)))

    def _words(
        self, name: str, folder: Path, fed: bool, environment: Mapping[str, str], limits: Limits
    ) -> list[str]:
        mib, block = f"{limits.memory_mb}m", limits.disk_mb * 2**20
        words = [self.engine, "run", "--name", name, "--init", "--network", "host"]
        words += ["--memory", mib, "--memory-swap", mib, "--pids-limit", str(limits.processes)]
        words += ["--ulimit", f"fsize={block}", "--ulimit", "core=0", "--cap-drop", "ALL"]
        words += ["--security-opt", "no-new-privileges", "--user", f"{os.getuid()}:{os.getgid()}"]
        words += ["--read-only", "--tmpfs", f"/tmp:rw,size={limits.disk_mb}m", "--env", "HOME=/tmp"]
        words += ["--volume", f"{folder}:{folder}", "--workdir", str(folder)]
        if self.kind == "podman" and os.getuid():
            words += ["--userns", "keep-id"]
        if fed:
            words.append("--interactive")
        for variable in environment:  # values stay out of the list of processes
            words += ["--env", variable]
        return words

    async def _ended_for_memory(self, name: str) -> bool:
        return await self._call("inspect", "--format", "{{.State.OOMKilled}}", name) == "true"

    async def _call(self, *arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            self.engine,
            *arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            said, _ = await asyncio.wait_for(process.communicate(), _PATIENCE)
        except TimeoutError:
            return ""
        finally:
            with suppress(ProcessLookupError):
                if process.returncode is None:
                    process.kill()
        return said.decode(errors="replace").strip()


def _asked(engine: str, *arguments: str) -> str:
    """What is wrong where a client is asked for something; empty where nothing is."""
    try:
        done = subprocess.run(
            [engine, *arguments],
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stderr.strip() or f"it ended with {done.returncode}") if done.returncode else ""
