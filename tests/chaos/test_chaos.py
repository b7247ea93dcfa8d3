"""A little of what `make test-chaos` does at length."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import bodies, preload, sessions

pytestmark = pytest.mark.long


@pytest.mark.skipif(shutil.which("cc") is None, reason="the failing file system needs a C compiler")
def test_killed_runs_and_runs_on_a_failing_disk_go_on_to_the_same_bits(tmp_path):
    said = tmp_path / "said"
    with said.open("wb") as output:
        code = preload.run(
            ["tests.chaos.short"],
            cwd=Path(__file__).parents[2],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    assert code == 0, said.read_text()[-5000:]


def test_wrong_requests_break_nothing():
    statuses, _ = bodies.send(500, "short")
    assert statuses[200] > 50
    assert statuses[400] > 100


async def test_sessions_leave_nothing_behind():
    calls, held = await sessions.open_many(200, seed=0)
    assert calls > 200
    assert sessions.grown(held, memory=20) == []


def test_a_server_that_is_killed_loses_nothing():
    # In a process of its own: it forks, which one with threads cannot do safely.
    small = ["--sessions", "16", "--processes", "2", "--kills", "2"]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.chaos.serving", *small],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-5000:]
