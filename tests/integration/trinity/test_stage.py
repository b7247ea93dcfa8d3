"""A stage on a real Ray whose explorer and trainer are small actors that fail as the real ones do.

Trinity-RFT's own take minutes to start; what is tested here is who notices what, and how soon.
"""

import os
import signal
import time
from types import SimpleNamespace

import pytest
import ray
from trinity.common.constants import SyncMethod

from tests.integration.trinity.on_ray import RUN, none_is_left
from tuner.errors import TrainingError
from tuner.trinity import workers as cluster
from tuner.trinity.stage import Stage
from tuner.trinity.watch import deaths


@ray.remote(num_cpus=0, max_concurrency=4)
class Actor:
    """Stands for an explorer or a trainer; `seconds` is how long its work takes."""

    def __init__(self, seconds, prepares=True):
        self.seconds = seconds
        self.prepares = prepares

    async def prepare(self):
        import asyncio

        print("preparing", flush=True)
        if not self.prepares:
            await asyncio.sleep(600)

    async def sync_weight(self):
        pass

    async def explore(self):
        import asyncio

        await asyncio.sleep(self.seconds)
        return "explorer"

    train = explore

    async def shutdown(self):
        pass

    async def pid(self):
        return os.getpid()


class Pair(Stage):
    """The stage with these actors for Trinity-RFT's."""

    def __init__(self, explorer, trainer, *, look=lambda: None, explored=True, timeout=60):
        config = SimpleNamespace(
            mode="both",
            ray_namespace="stage",
            synchronizer=SimpleNamespace(sync_method=SyncMethod.CHECKPOINT, sync_timeout=timeout),
        )
        super().__init__(config, look=look, explored=lambda: explored)
        self.pair = explorer, trainer

    def _explorer(self):
        return self.pair[0]

    def _trainer(self):
        return self.pair[1]

    def run(self):
        self._both()


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """One cluster for all of these tests; nothing of it is left."""
    name = str(tmp_path_factory.mktemp("stage"))
    os.environ[RUN] = name  # not in our own environment as the system shows it
    try:
        with cluster.joined(cluster.LOCAL, gpus=0, namespace="stage", env={}) as joined:
            yield joined.session
    finally:
        del os.environ[RUN]
    assert none_is_left(name)


def test_an_explorer_that_gives_up_ends_the_stage_at_once(session):
    stage = Pair(Actor.remote(0), Actor.remote(600), explored=False)
    started = time.monotonic()
    with pytest.raises(TrainingError, match="the explorer gave up before its last step"):
        stage.run()
    assert time.monotonic() - started < 60


def test_a_trainer_is_waited_for_when_the_explorer_is_done(session):
    looks = []
    Pair(Actor.remote(0), Actor.remote(3), look=lambda: looks.append(1)).run()
    assert len(looks) > 4


def test_an_explorer_is_not_waited_for_when_the_trainer_is_done(session):
    Pair(Actor.remote(600), Actor.remote(0), explored=False).run()


def test_what_is_seen_while_waiting_ends_the_stage(session):
    def look():
        raise TrainingError("nothing to learn from")

    with pytest.raises(TrainingError, match="nothing to learn from"):
        Pair(Actor.remote(600), Actor.remote(600), look=look).run()


def test_models_that_cannot_be_placed_are_not_waited_for_for_ever(session):
    explorer = Actor.options(num_gpus=8).remote(0)
    with pytest.raises(TrainingError) as caught:
        Pair(explorer, Actor.remote(0), timeout=2).run()
    assert "not ready after 2 s (synchronizer.sync_timeout)" in str(caught.value)
    assert "the cluster has 0 GPU" in str(caught.value)


def test_a_killed_actor_is_named_with_what_it_printed_and_an_ended_one_is_not(session, tmp_path):
    ended, victim = Actor.remote(0), Actor.options(name="victim").remote(600)
    ray.get([ended.prepare.remote(), victim.prepare.remote()])
    pid = ray.get(victim.pid.remote())
    ray.kill(ended)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while not (dead := deaths(session, tmp_path / "kept")) and time.monotonic() < deadline:
        time.sleep(0.2)
    [death] = dead
    assert (death.name, death.pid) == ("victim", pid)
    assert "preparing" in death.quote
    assert (tmp_path / "kept" / f"victim_{pid}.out").exists()
