"""Nothing of a run is left, however it ends: containers, volumes, processes, folders."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

from tests.integration.harbor.conftest import ROOT, Model, podman, wait_for_nothing
from tuner.errors import RewardError, SandboxError


def started(task, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.integration.harbor.run", task, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def rollouts(run, count):
    """Read what a run says until that many rollouts have ended; returns the other lines."""
    other = []
    while count:
        line = run.stdout.readline()
        assert line, f"it ended: {''.join(other[-20:])}"
        if line.startswith("done"):
            count -= 1
        else:
            other.append(line)
    return other


def watchers(run):
    found = []
    for child in psutil.Process(run.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if child.cmdline()[:2] == ["sh", "-c"]:
                found.append(child)
    return found


def ended(run, how, draw):
    """End a run in a way, at some time in its rollouts."""
    time.sleep(draw.uniform(0, 1.5))
    if how == "with its watcher":
        for watcher in watchers(run):
            watcher.kill()
    run.send_signal(signal.SIGINT if how == "Ctrl-C" else signal.SIGKILL)
    try:
        run.communicate(timeout=180)
    finally:
        run.kill()  # or it would disturb the other tests


@pytest.mark.parametrize(
    ("kills", "each"), [(3, 3), pytest.param(20, 10, marks=pytest.mark.nightly)]
)
def test_runs_that_are_killed_leave_nothing(kills, each, task_of, tmp_path):
    draw = random.Random(kills)
    ways = ["SIGKILL", "Ctrl-C", "with its watcher"]
    for number in range(kills):
        how = ways[number % len(ways)]
        trained = how == "Ctrl-C"  # which is what a run answers to
        folder = (tmp_path / f"runs-{number}",) if trained else ()
        run = started(task_of(), *folder)
        rollouts(run, each)
        assert podman("ps", "-q")
        ended(run, how, draw)
        if how != "with its watcher":
            wait_for_nothing()
    # What was killed with its watcher is removed at the next start.
    run = started(task_of(), tmp_path / "last", "buffer.total_steps=1")
    rollouts(run, 4)
    assert run.wait(180) == 0
    wait_for_nothing()


@pytest.fixture
def small_disk(tmp_path, monkeypatch):
    """Containers are stored in 40 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    state = tempfile.mkdtemp(dir="/run")  # the paths of its sockets must be short
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "none", disk], check=True)
    store = podman("info", "--format", "{{.Store.GraphRoot}}").strip()
    (tmp_path / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{disk}/graph"\nrunroot = "{state}"\n'
        f'[storage.options]\nadditionalimagestores = ["{store}"]\n'
    )
    with monkeypatch.context() as patch:
        patch.setenv("CONTAINERS_STORAGE_CONF", str(tmp_path / "storage.conf"))
        yield disk
    shutil.rmtree(state)
    subprocess.run(["umount", disk], check=True)


async def test_a_full_disk_fails_rollouts_and_leaves_nothing(small_disk, task_of, harbor):
    async def agent(task, terminal, model):
        await terminal.run("dd if=/dev/zero of=/app/big bs=1M count=100")

    environment = harbor(task_of(), agent=agent, ahead=0)
    row = environment.train_dataset[0]
    outputs, failed = [], []
    for _ in range(3):  # the first fills it; the others cannot even start
        try:
            outputs.append(await environment.workflow(row, Model()))
        except SandboxError as error:
            failed.append(str(error))
    assert len(failed) == 2
    assert "no space left" in failed[0].lower()
    with pytest.raises(RewardError):
        await environment.judge(row, outputs[0].response)
    await environment.close()
    # Without any room podman may not even forget a container: it does when there is some.
    larger = ["mount", "-o", "remount,size=80m", small_disk]
    await asyncio.to_thread(subprocess.run, larger, check=True)
    again = await environment.workflow(row, Model())
    assert again.metrics == {"agent_timeout": 0}
    await environment.close()
    wait_for_nothing()
