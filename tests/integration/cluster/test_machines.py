"""What every machine of a cluster must have, and what is refused where one of them lacks it."""

import importlib
import json
import multiprocessing
import os
import signal
import sys
import time

import pytest
import ray

from tests.integration.cluster.conftest import SITE
from tests.integration.trinity.conftest import TINY
from tests.integration.trinity.on_ray import ON_A_CPU
from tuner import tune
from tuner.errors import ConfigError, FunctionError
from tuner.tasks.loading import ship
from tuner.trinity.nodes import MachineRequirements, alive, end_leftovers, require_alike
from tuner.trinity.preparation import check_trinity
from tuner.trinity.workers import joined

ROWS = [{"question": f"What is {n} plus 4?"} for n in range(8)]
INSTALLED = "partial_json_parser"  # a package that one machine does not have


AGENT = """
from agent_helper import answer
from tuner import JudgeOutput, WorkflowOutput

async def workflow(task, model):
    return WorkflowOutput(response=answer(task))

async def judge(task, response):
    return JudgeOutput(reward=1.0)
"""


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    """A module beside a script, with a neighbour of its own; both are on this machine alone."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "agent.py").write_text(AGENT)
    (folder / "agent_helper.py").write_text("def answer(task):\n    return task['question']\n")
    sys.path.insert(0, str(folder))
    yield importlib.import_module("agent")
    sys.path.remove(str(folder))


def on(cluster, **options):
    return joined(cluster.address, gpus=0, namespace="tests", env={}, **options)


def addresses():
    return [node.address for node in alive()]


def settings(cluster, *more):
    return [
        *ON_A_CPU,
        f"checkpoint_root_dir={cluster.shared}/runs",
        f"cluster.ray_address={cluster.address}",
        "cluster.node_num=2",
        "cluster.gpu_per_node=1",
        *more,
    ]


@pytest.fixture(scope="module")
def two(cluster):
    """A second machine, which shares one folder with the first."""
    cluster.add(2)
    with on(cluster):
        cluster.wait(lambda: len(alive()) == 2)
    return cluster


@pytest.fixture
def poor(two):
    """A third machine, without that folder, without the model, Trinity-RFT and a package."""
    [trinity] = SITE.glob("trinity_rft-*.dist-info")
    host = two.add(3, shares=False, hidden=[trinity, TINY.parent, SITE / INSTALLED])
    with on(two):
        two.wait(lambda: len(alive()) == 3)
    yield two
    host.die()
    with on(two):
        two.wait(lambda: len(alive()) == 2)


def test_machines_that_share_the_run_directory_alone_are_enough(two, agent):
    functions = {"workflow": ship(agent.workflow, role="workflow"), "judge": f"{INSTALLED}:loads"}
    needed = MachineRequirements(two.shared / "run", functions, {"model.model_path": str(TINY)})
    with on(two):
        assert addresses() == ["10.77.0.1", "10.77.0.2"]
        require_alike(needed, alive())
    assert list((two.shared / "run" / "tuner").iterdir()) == []


def test_a_function_whose_module_is_not_everywhere_is_refused_by_name(two):
    here = MachineRequirements(
        two.shared / "run", {"judge": "tests.integration.trinity.on_ray:processes"}
    )
    with on(two), pytest.raises(FunctionError, match=r"10\.77\.0\.2: the judge cannot be loaded"):
        require_alike(here, alive())


def test_what_a_machine_lacks_is_named_before_anything_starts(poor, agent):
    needed = MachineRequirements(
        poor.shared / "run",
        {"workflow": ship(agent.workflow, role="workflow"), "judge": f"{INSTALLED}:loads"},
        {"model.model_path": str(TINY)},
    )
    with on(poor):
        with pytest.raises(ConfigError) as caught:
            require_alike(needed, alive())
        lines = str(caught.value).splitlines()[1:]
        assert all(line.startswith("- 10.77.0.3: ") for line in lines)
        assert f"{poor.shared / 'run'} is not the same folder as here" in lines[0]
        assert "set checkpoint_root_dir to a disk that every machine mounts" in lines[0]
        assert "trinity-rft 0.6.0 is here, but none of it is there" in lines[1]
        assert f"model.model_path is {TINY}, which is missing there" in lines[2]
        assert "the judge cannot be loaded" in lines[3]
        assert len(lines) == 4

    # A run is refused by the same words, and has started nothing.
    with pytest.raises(ConfigError, match=r"(?s)10\.77\.0\.3.*is not the same folder as here"):
        tune(agent.workflow, agent.judge, ROWS, backend="trinity", experiment_name="refused",
             overrides=settings(poor))  # fmt: skip
    run_dir = poor.shared / "runs" / "runs" / "refused"
    assert not list((run_dir / "traces").iterdir())
    assert not list(run_dir.rglob("*.log"))

    verdict = check(poor, agent)
    assert not verdict.ready
    assert "NOT READY: the machines of the cluster" in verdict.text
    assert "10.77.0.3: 8 CPUs, 1 GPUs" in verdict.text


def check(cluster, agent, *more):
    file = cluster.shared / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    given = settings(cluster, f"buffer.explorer_input.taskset.path={file}", *more)
    return check_trinity(None, given, workflow=agent.workflow, judge=agent.judge)


def test_check_asks_the_cluster_and_says_what_would_be_where(two, agent):
    verdict = check(two, agent)
    # The first machine has no GPU here, and two are asked for.
    assert not verdict.ready
    assert "10.77.0.1: 8 CPUs, 0 GPUs" in verdict.text
    assert "10.77.0.2: 8 CPUs, 1 GPUs" in verdict.text
    assert "training on 1 machine(s), 1 GPUs of each" in verdict.text
    assert (
        "NOT READY: an engine takes 1 GPUs of one machine in addition to training's 1 x 1"
        in verdict.text
    )
    explored = check(two, agent, "mode=explore")
    assert explored.ready, explored.text
    assert "agents and judges in 1 processes, spread over all machines" in explored.text
    assert explored.text.endswith("READY.")
    assert not (two.shared / "runs").exists() or not list((two.shared / "runs").glob(".tuner-*"))


def test_an_address_where_nobody_listens_is_refused_at_once(two, agent):
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=r"10\.77\.0\.1:1', where no Ray cluster can be joined"):
        tune(agent.workflow, agent.judge, ROWS, backend="trinity",
             overrides=settings(two, "cluster.ray_address=10.77.0.1:1"))  # fmt: skip
    assert time.monotonic() - begun < 60
    verdict = check(two, agent, "cluster.ray_address=10.77.0.1:1")
    assert verdict.ready
    assert "The cluster was not asked: cluster.ray_address is '10.77.0.1:1'" in verdict.text


@ray.remote(num_cpus=0)
class Left:
    def pid(self):
        return os.getpid()


def _leave(address, made):
    ray.init(address=address, namespace="a/run", log_to_driver=False)
    actor = Left.options(name="synchronizer", lifetime="detached").remote()
    ray.get(actor.pid.remote())
    made.set()
    signal.pause()


def test_what_a_killed_driver_left_is_ended_and_what_a_living_one_has_is_not(two):
    context = multiprocessing.get_context("spawn")
    made = context.Event()
    driver = context.Process(target=_leave, args=(two.address, made))
    driver.start()
    assert made.wait(300)
    with joined(two.address, gpus=0, namespace="a/run", env={}):
        end_leftovers("a/run")
        actor = ray.get_actor("synchronizer", namespace="a/run")
        assert ray.get(actor.pid.remote())
        driver.kill()
        driver.join()
        two.wait(lambda: _ended(actor))
        end_leftovers("another/run")
        assert ray.get(actor.pid.remote())
        end_leftovers("a/run")
        with pytest.raises(ValueError, match="synchronizer"):
            ray.get_actor("synchronizer", namespace="a/run")
        two.wait(lambda: not _answers(actor))


def _answers(actor):
    try:
        return ray.get(actor.pid.remote()) > 0
    except ray.exceptions.RayActorError:
        return False


def _ended(actor):
    from ray._private.state import actors, jobs

    job = actors(actor._actor_id.hex())["JobID"]
    return all(one["IsDead"] for one in jobs() if one["JobID"] == job)
