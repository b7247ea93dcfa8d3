"""A run of vLLM and verl on three machines that loses one in a rollout, in an update and in a sync.

The first machine has the driver and no GPU; of the others one generates and one trains, each on the
GPU that it is said to have. They share the run directory and nothing else; three things that need a
GPU are replaced, as in `tests/integration/trinity`.
"""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from tests.integration.cluster.conftest import Cluster
from tests.integration.trinity import held_run
from tests.integration.trinity.conftest import REPOSITORY
from tests.integration.trinity.test_killed import Killed, check_whole
from tuner.trinity.workers import joined

MACHINES = (2, 3)


class Run(Killed):
    """A run whose script is on the first machine alone."""

    def __init__(self, cluster: Cluster, script) -> None:
        folder = cluster.shared / "held"
        folder.mkdir()
        super().__init__(folder)
        self.cluster = cluster
        self._script = script

    def start(self) -> subprocess.Popen:
        more = [
            f"cluster.ray_address={self.cluster.address}",
            "cluster.node_num=2",
            "cluster.gpu_per_node=1",
        ]
        path = os.pathsep.join([str(self.cluster.shared / "shim"), str(REPOSITORY)])
        with self.said.open("w") as out:
            return subprocess.Popen(
                [sys.executable, str(self._script), str(self.folder), *more],
                cwd="/",
                env={**os.environ, "PYTHONPATH": path},
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def log(self, name: str) -> str:
        file = self.run_dir / "log" / f"{name}.log"
        return file.read_text() if file.exists() else ""


def place_of(part: str) -> int:
    """The machine on which an actor lives whose name or class has this in it."""
    from ray._private.state import actors

    found = {
        info["Address"]["IPAddress"]
        for info in actors(actor_state_name="ALIVE").values()
        if part in info["Name"] or part in info["ActorClassName"]
    }
    [address] = found
    return int(address.rpartition(".")[2])


@pytest.fixture
def three(first_machine, tmp_path):
    made = Cluster(tmp_path)
    for number in MACHINES:
        made.add(number)
    with joined(made.address, gpus=0, namespace="tests", env={}):
        made.wait(lambda: _alive() == 3)
        yield made
    made.end()


def _alive() -> int:
    from tuner.trinity.nodes import alive

    return len(alive())


def lose(run: Run, driver: subprocess.Popen, number: int) -> str:
    """A machine goes; what the driver says in the end."""
    begun = time.monotonic()
    run.cluster.hosts[number].die()
    said = run.ended(driver)
    print(f"the run ended {time.monotonic() - begun:.0f} s after machine {number} did")
    assert driver.returncode == 1, said
    assert "TrainingError: Trinity-RFT ended early" in said
    assert f"on 10.77.0.{number}) died: " in said
    assert "The run is in" in said
    # Another machine takes its place.
    run.cluster.wait(lambda: _alive() == 2)
    run.cluster.add(number)
    run.cluster.wait(lambda: _alive() == 3)
    return said


@pytest.mark.nightly
def test_a_run_that_loses_machines_says_which_and_trains_every_step_once(three, tmp_path):
    script = tmp_path / "script" / "main.py"
    script.parent.mkdir()
    shutil.copyfile(held_run.__file__, script)
    run = Run(three, script)

    # In a rollout: the machine that generates, while one of the second step's groups is running.
    run.hold(3)
    driver = run.start()
    run.wait(driver, lambda: run.checkpoint() == 1 and len(run.recorded(2)) == 2)
    assert place_of("rollout_model") in MACHINES
    assert place_of("WorkerDict") in MACHINES
    said = lose(run, driver, place_of("rollout_model"))
    assert "the same command resumes after step 1" in said
    before = {step: run.recorded(step) for step in (1, 2)}
    assert [len(found) for found in before.values()] == [4, 2]

    # In an update: the machine that trains, as soon as the second step has its experiences.
    run.release(3)
    driver = run.start()
    run.wait(driver, lambda: "Sample data for step 2 finished" in run.log("trainer"))
    said = lose(run, driver, place_of("WorkerDict"))
    assert "resumes after step" in said

    # In a sync: the machine that generates, while it is to take over the weights of a step.
    begun = run.checkpoint()
    driver = run.start()
    weights = run.run_dir / "latest_state_dict_iteration.txt"
    run.wait(driver, lambda: weights.exists() and int(weights.read_text()) > begun)
    lose(run, driver, place_of("rollout_model"))

    # To the end.
    driver = run.start()
    said = run.ended(driver, minutes=20)
    assert driver.returncode == 0, said
    assert "resuming after step" in said
    check_whole(run, before)
    result = json.loads((run.run_dir / "result.json").read_text())["tokens"]
    assert result["sampled"] == result["trained"] + sum(result["dropped"].values())
