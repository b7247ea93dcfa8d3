"""These tests need Harbor, on Python 3.12, and podman: `make test-harbor`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from tuner.errors import MissingDependencyError

ROOT = Path(__file__).resolve().parents[3]
TASKS = ROOT / "examples" / "terminal" / "tasks"
IMAGE = "localhost/local/debian:bookworm"
USABLE = importlib.util.find_spec("harbor") is not None and shutil.which("podman") is not None

collect_ignore = [] if USABLE else [path.name for path in Path(__file__).parent.glob("test_*.py")]


def podman(*words: str) -> str:
    return subprocess.run(["podman", *words], capture_output=True, text=True, check=True).stdout


NO_CONTAINER = 75
"""Exit status where no container can be started, so that no test ran."""


@pytest.fixture(scope="session", autouse=True)
def image() -> None:
    from tuner.environments.containers import ContainerEngine, ContainerLimits

    async def start() -> None:
        engine = ContainerEngine(ContainerLimits(), "podman")
        await engine.need(IMAGE, lambda: engine.pull(IMAGE, seconds=1))
        await engine.close()

    try:
        subprocess.run(["sh", ROOT / "examples/terminal/make_image.sh"], check=True)
        asyncio.run(start())
    except (subprocess.CalledProcessError, MissingDependencyError) as error:
        pytest.exit(str(error), NO_CONTAINER)


def left() -> dict[str, list[str]]:
    """Containers, volumes, processes of containers and folders that are there."""
    commands = {"containers": ("ps", "-aq", "--external"), "volumes": ("volume", "ls", "-q")}
    found = {name: podman(*words).split() for name, words in commands.items()}
    for name, pattern in {"processes": "tuner-box", "monitors": "conmon"}.items():
        done = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True)
        found[name] = done.stdout.split()
    found["folders"] = [path.name for path in Path(tempfile.gettempdir()).glob("tuner-box-*")]
    return found


NOTHING: dict[str, list[str]] = {
    name: [] for name in ("containers", "volumes", "processes", "monitors", "folders")
}


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    """Whatever a test does, nothing of it is there when it has ended."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    yield
    wait_for_nothing()


def wait_for_nothing(seconds: float = 60) -> None:
    """Check that nothing is left, or not for long."""
    until = time.monotonic() + seconds
    found = None
    while found != NOTHING and time.monotonic() < until:
        # podman lists nothing while it removes what it lists.
        with contextlib.suppress(subprocess.CalledProcessError):
            found = left()
        time.sleep(0.1)
    assert found == NOTHING


class Model:
    """As much of a model as an agent that asks for nothing needs."""

    base_url, api_key, model_name = "http://127.0.0.1:9/v1", "the-key", "tiny"


# Asks the model by bash alone, writes what it said, and counts its network's devices.
PROGRAM = """
exec 3<>/dev/tcp/127.0.0.1/$(echo $OPENAI_BASE_URL | tr -dc '0-9\\n' | sed 's/^127001//; s/1$//')
body='{"model": "'$OPENAI_MODEL'", "messages": [{"role": "user", "content": "{prompt}"}]}'
printf 'POST /v1/chat/completions HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\nConnection: close\\r\\n' >&3
printf 'Authorization: Bearer %s\\r\\nContent-Type: application/json\\r\\n' $OPENAI_API_KEY >&3
printf 'Content-Length: %s\\r\\n\\r\\n%s' ${#body} "$body" >&3
grep -o hello <&3 | head -1 >greeting.txt
! (exec 4<>/dev/tcp/127.0.0.1/9) 2>/dev/null
grep -c : /proc/net/dev
"""


@pytest.fixture
async def harbor():
    """Makes environments, which are closed when the test has ended."""
    from tuner.environments import Harbor

    made = []

    def make(folder, **given):
        made.append(Harbor(folder, **given))
        return made[-1]

    yield make
    for one in made:
        await one.close()


@pytest.fixture
def task_of(tmp_path):
    """Writes a task: the greeting with other tests, and settings in place of some."""

    def write(tests: str | None = None, name: str = "greeting", **settings: str) -> Path:
        folder = tmp_path / "tasks" / name
        shutil.copytree(TASKS / "greeting", folder, dirs_exist_ok=True)
        text = (folder / "task.toml").read_text()
        for section, lines in settings.items():
            header, _, rest = text.partition(f"[{section}]\n")
            text = f"{header}[{section}]\n{lines}\n{without(rest, lines)}"
        (folder / "task.toml").write_text(text)
        if tests is not None:
            (folder / "tests" / "test.sh").write_text(f"#!/bin/bash\n{tests}\n")
        return folder

    return write


def without(text: str, lines: str) -> str:
    """The text of a section without the keys that other lines set."""
    keys = {line.partition("=")[0].strip() for line in lines.splitlines()}
    body, mark, rest = text.partition("\n[")
    kept = [line for line in body.splitlines() if line.partition("=")[0].strip() not in keys]
    return "\n".join(kept) + "\n" * (not mark) + mark + rest
