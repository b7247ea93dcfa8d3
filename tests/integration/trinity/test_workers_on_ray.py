"""Workers that Ray places: the traces and weights of one process, and what a loss becomes."""

import asyncio
import contextlib

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from tests.rollouts.workers import functions
from tests.rollouts.workers.conftest import make_runners, pool_of, waiting
from tests.rollouts.workers.functions import OUTCOMES, FailsWhenLoaded, dying
from tests.rollouts.workers.test_outcomes import DEFAULTS, ID, LIMIT, all_of, told
from tests.rollouts.workers.test_runs import trained
from tuner.config.schema import RaySection
from tuner.errors import ConfigError, FunctionError, WorkerError
from tuner.rollouts import worker_pool as pools
from tuner.rollouts import worker_pool as ray_worker
from tuner.rollouts.worker_pool import RayPlacement
from tuner.traces import Outcome, RolloutId

__all__ = ["make_runners"]
HERE = "127.0.0.1"


@pytest.fixture(scope="module")
def cluster():
    """Two machines, as far as Ray knows; this process is in none of them."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    made.add_node(num_cpus=2)
    yield made
    made.shutdown()


@contextlib.asynccontextmanager
async def on_ray(cluster, *functions, **section):
    placing = RayPlacement(cluster.address, RaySection(**{"gateway": HERE, "cpus": 0.5, **section}))
    async with pool_of(2, *functions, placing=placing) as pool:
        yield pool
    assert not ray.is_initialized()


@pytest.fixture(scope="module")
def both(cluster, make_runners):
    """The traces of all deeds here, and in two workers of the cluster."""

    async def run():
        here = await all_of(
            make_runners(functions.workflow, functions.judge, retries=1, calls=LIMIT)
        )
        async with on_ray(cluster, functions.workflow, functions.judge) as pool:
            runner = make_runners(
                functions.workflow, functions.judge, retries=1, calls=LIMIT, workers=pool
            )
            return here, await all_of(runner)

    return asyncio.run(run())


@pytest.mark.parametrize("do", functions.DOES)
def test_a_worker_of_a_cluster_leaves_the_trace_that_this_process_would(both, do):
    here, there = ([told(trace) for trace in found[do]] for found in both)
    if do == "stops reading":  # how much was sampled meanwhile is a matter of time
        assert [trace.outcome for trace in there] == [trace.outcome for trace in here]
    else:
        assert there == here
    if do in OUTCOMES:
        assert there[-1].outcome is OUTCOMES[do]


def test_a_cluster_trains_the_same_weights_bit_for_bit(cluster, random_model_path, tmp_path):
    """The functions draw from Python's global random state."""
    few = ("buffer.total_steps=2", "explorer.eval_interval=2", "explorer.eval_on_startup=false")
    _, weights = trained(random_model_path, tmp_path / "here", *few)
    there = (
        "tuner.workers=ray",
        f"cluster.ray_address={cluster.address}",
        f"tuner.ray.gateway={HERE}",
        "tuner.ray.cpus=0.5",
        "tuner.ray.workers=2",
    )
    _, others = trained(random_model_path, tmp_path / "there", *few, *there)
    assert others == weights
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("exits", "exited with 3"),
        ("crashes", "was killed by SIGSEGV: Fatal Python error: Segmentation fault"),
    ],
)
async def test_the_outcome_has_the_last_words_of_the_worker(cluster, make_runners, how, words):
    async with on_ray(cluster, dying) as pool:
        (trace,) = await make_runners(dying, workers=pool).run({"dies": how}, ID, DEFAULTS)
        assert trace.outcome is Outcome.WORKER_DIED
        assert words in trace.error
        (after,) = await make_runners(dying, workers=pool).run({}, ID, DEFAULTS)
        assert after.outcome is Outcome.COMPLETED


async def test_a_worker_that_ray_loses_is_replaced_and_its_rollouts_are_tried_again(
    cluster, make_runners
):
    async with on_ray(cluster, dying) as pool:
        runner = make_runners(dying, workers=pool, retries=1)
        async with waiting(runner, 2) as (_, began):
            children = [psutil.Process(pid) for pid in pool.pids]
            children[0].parent().kill()  # Ray's process
            await began.acquire()  # tried again
            await asyncio.to_thread(psutil.wait_procs, children[:1])  # as its line has ended
            assert children[1].is_running()
        (after,) = await runner.run({}, RolloutId(1, 2, 0), DEFAULTS)
        assert after.outcome is Outcome.COMPLETED


async def test_a_check_says_what_there_is(cluster):
    async with on_ray(cluster, dying, cpus=3, workers=None) as pool:
        said = pool.looked_at()
    assert said.startswith("workers: up to 1 run the workflow and the judge, on the Ray cluster at")
    assert "each with 3 CPU; the cluster has free 4 of 4 CPU" in said


async def test_a_cluster_without_room_is_named_with_what_it_has(cluster, make_runners, monkeypatch):
    monkeypatch.setattr(pools, "_PLACED", 0.1)
    monkeypatch.setattr(pools, "_FOUND", 0.1)
    async with on_ray(cluster, dying, cpus=64) as pool:
        with pytest.raises(WorkerError, match=r"each with 64 CPU in 0.1 s: the cluster has free "):
            await make_runners(dying, workers=pool).run({}, ID, DEFAULTS)


async def test_another_version_there_is_named(cluster, make_runners, monkeypatch):
    monkeypatch.setattr(ray_worker.metadata, "version", lambda package: "0.0.1")
    async with on_ray(cluster, dying) as pool:
        with pytest.raises(WorkerError, match=r"is 0\.0\.1 where the run is and .* here: install"):
            await make_runners(dying, workers=pool).run({}, ID, DEFAULTS)


async def test_functions_that_cannot_be_loaded_there_end_the_run(cluster, make_runners):
    workflow = FailsWhenLoaded()
    async with on_ray(cluster, workflow) as pool:
        with pytest.raises(FunctionError, match="cannot be loaded in a worker"):
            await make_runners(workflow, workers=pool).run({}, ID, DEFAULTS)


async def test_an_address_without_a_cluster_is_refused(make_runners):
    placing = RayPlacement("127.0.0.1:1", RaySection(gateway=HERE))
    async with pool_of(1, dying, placing=placing) as pool:
        with pytest.raises(ConfigError, match=r"cluster\.ray_address is '127\.0\.0\.1:1', where"):
            pool.start()
