"""A run on a local Ray that loses its driver, its trainer and its engine, and ends well."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.trinity.conftest import REPOSITORY
from tests.integration.trinity.held_run import STEPS
from tests.integration.trinity.on_ray import RUN, handed_over, none_is_left, processes
from tuner.traces import TraceStore

MINUTES = 60.0


class Killed:
    """One run in its folder, started again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "runs" / "held"
        self.name = str(folder)
        self.said = folder / "driver.txt"
        self.store = TraceStore(self.run_dir / "traces")

    def start(self) -> subprocess.Popen:
        with self.said.open("w") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.integration.trinity.held_run", str(self.folder)],
                cwd=REPOSITORY,
                env={**os.environ, RUN: self.name},
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def hold(self, *tasks: int) -> None:
        for task in tasks:
            (self.folder / f"hold_{task}").touch()

    def release(self, *tasks: int) -> None:
        for task in tasks:
            (self.folder / f"hold_{task}").unlink()

    def checkpoint(self) -> int:
        noted = self.run_dir / "latest_checkpointed_iteration.txt"
        return int(noted.read_text()) if noted.exists() else 0

    def sampling(self) -> int:
        """How often the trainer has begun to wait for the rollouts of the second step."""
        return (self.run_dir / "log" / "trainer.log").read_text().count("Sample data for step 2 st")

    def wait(self, driver: subprocess.Popen, until, minutes: float = 25) -> None:
        """Until something is so, or the run is over."""
        deadline = time.monotonic() + minutes * MINUTES
        while not until():
            assert driver.poll() is None, self.said.read_text()
            assert time.monotonic() < deadline, "it takes too long"
            time.sleep(0.5)

    def ended(self, driver: subprocess.Popen, minutes: float = 15) -> str:
        """What it said; fails where it does not end."""
        driver.wait(timeout=minutes * MINUTES)
        return self.said.read_text()

    def recorded(self, step: int) -> dict:
        """The completed rollouts of a step and their calls."""
        found = self.store.read("train", step)
        return {t.id: [c.id for c in t.calls] for t in found if t.outcome == "completed"}


@pytest.fixture
def killed(tmp_path):
    run = Killed(tmp_path)
    yield run
    for pid in processes(run.name):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.nightly
def test_a_run_that_loses_its_driver_trainer_and_engine_trains_every_step_once(killed):
    # The driver, while one of the second step's two groups is still running.
    killed.hold(3)
    driver = killed.start()
    killed.wait(driver, lambda: killed.checkpoint() == 1 and len(killed.recorded(2)) == 2)
    driver.kill()
    driver.wait()
    assert none_is_left(killed.name)
    before = {step: killed.recorded(step) for step in (1, 2)}
    assert [len(found) for found in before.values()] == [4, 2]
    handed = len(handed_over(killed.run_dir))
    assert [json.loads(line)["step"] for line in metrics(killed)] == [1]

    # The trainer, at the same place.
    before_it = killed.sampling()
    driver = killed.start()
    killed.wait(driver, lambda: killed.sampling() > before_it)
    [trainer] = processes(killed.name, ":Trainer")
    os.kill(trainer, signal.SIGKILL)
    said = killed.ended(driver)
    assert driver.returncode == 1
    assert "resuming after step 1" in said
    assert "TrainingError: Trinity-RFT ended early: 1 of 4 steps were trained" in said
    assert f"the actor trainer (process {trainer} on " in said
    assert "It printed last:" in said
    assert "the same command resumes after step 1" in said
    assert none_is_left(killed.name)
    assert killed.recorded(2) == before[2]
    assert len(handed_over(killed.run_dir)) >= handed
    assert (killed.run_dir / "report.html").exists()

    # The engine, while a group of the third step is running.
    killed.hold(5)
    killed.release(3)
    driver = killed.start()
    killed.wait(driver, lambda: killed.checkpoint() == 2 and len(killed.recorded(3)) == 2)
    [engine] = processes(killed.name, ":vLLMRolloutModel")
    os.kill(engine, signal.SIGKILL)
    said = killed.ended(driver)
    assert driver.returncode == 1
    assert f"the actor explorer_rollout_model_0_0 (process {engine} on " in said
    assert "the same command resumes after step 2" in said
    assert none_is_left(killed.name)
    before[3] = killed.recorded(3)
    assert len(before[3]) == 2

    # To the end.
    killed.release(5)
    driver = killed.start()
    said = killed.ended(driver, minutes=40)
    assert driver.returncode == 0
    assert "resuming after step 2" in said
    assert "2 recorded rollouts are trained again" in said
    assert none_is_left(killed.name)
    check_whole(killed, before)

    # Once more: it is complete, and Ray is not started.
    driver = killed.start()
    assert "is complete, with" in killed.ended(driver, minutes=10)
    assert driver.returncode == 0


def check_whole(killed, before) -> None:
    result = json.loads((killed.run_dir / "result.json").read_text())
    assert result["steps"] == STEPS
    assert result["outcomes"] == {"completed": 4 * STEPS}
    rows = [json.loads(line) for line in metrics(killed)]
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert all(row["trainer/actor/grad_norm"] > 0 for row in rows)
    # Rollouts that had completed are those that were trained.
    for step, found in before.items():
        assert found.items() <= killed.recorded(step).items()
    last = [e for e in handed_over(killed.run_dir) if e.eid.batch == STEPS]
    assert len(last) == 4
    assert {tuple(e.info["weights_versions"]) for e in last} == {(STEPS - 1,)}


def metrics(killed) -> list[str]:
    return (killed.run_dir / "metrics.jsonl").read_text().splitlines()
