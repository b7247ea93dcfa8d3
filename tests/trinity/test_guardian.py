"""What belongs to a cluster of our own ends with it, and with the process that started it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tuner.trinity.guardian import MARK, guarded, members

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# Its environment can be read for certain once it runs.
SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
# Starts a sleeper that does not die with its parent, as an engine's processes do not.
STARTER = f"""
import os, subprocess, sys, time
from pathlib import Path
from tuner.trinity.guardian import MARK, guarded
with guarded(Path(sys.argv[1])) as mark:
    env = {{**os.environ, MARK: mark}}
    sleeper = subprocess.Popen(
        {SLEEPER!r}, env=env, start_new_session=True, stdout=subprocess.PIPE
    )
    sleeper.stdout.readline()
    print(mark, flush=True)
    time.sleep(600)
"""


def gone(mark):
    deadline = time.monotonic() + 60
    while members(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not members(mark)


def test_processes_that_outlive_the_cluster_end_with_the_block(tmp_path):
    folder = tmp_path / "ray"
    folder.mkdir()
    with guarded(folder) as mark:
        env = {**os.environ, MARK: mark}
        process = subprocess.Popen(
            SLEEPER, env=env, start_new_session=True, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "up\n"
        assert members(mark) == [process.pid]
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert not folder.exists()


def test_they_end_when_the_process_that_started_them_is_killed(tmp_path):
    folder = tmp_path / "ray"
    folder.mkdir()
    root = str(Path(__file__).parents[2])
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    mark = starter.stdout.readline().strip()
    assert len(members(mark)) == 1
    starter.kill()
    starter.wait()
    assert gone(mark)
    deadline = time.monotonic() + 60
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()


def test_other_processes_are_left_alone(tmp_path):
    other = subprocess.Popen(SLEEPER, env={**os.environ, MARK: "another"})
    try:
        with guarded(tmp_path / "none") as mark:
            assert members(mark) == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
