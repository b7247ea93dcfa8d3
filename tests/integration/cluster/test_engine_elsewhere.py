"""An engine on another machine: its key, its disk, a cable that is pulled, a machine that goes.

The server is that of `tuner.engines.vllm.server`, with an engine over transformers in vLLM's place,
and with vLLM where `make test-vllm` has installed it.
"""

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.engines.elsewhere import KEY
from tests.engines.test_elsewhere import counted, run_elsewhere
from tests.integration.cluster import hosts
from tests.integration.cluster.serve_engine import LOADED
from tests.integration.trinity.conftest import REPOSITORY, TINY
from tests.integration.vllm import ON_A_CPU
from tuner.engines import EngineError

VLLM = REPOSITORY / ".venv-vllm" / "bin" / "python"
ENGINES = [
    "transformers",
    pytest.param(
        "vllm", marks=pytest.mark.skipif(not VLLM.exists(), reason="make .venv-vllm/.installed")
    ),
]
# Longer than a connection lives whose other end says nothing.
OUTAGE = 45.0


class Served:
    """A machine with a server.

    Args:
        engine: What generates there.
        shares: Whether it sees the folder that the run is in.
    """

    def __init__(self, folder: Path, number: int, engine: str, *, shares: bool = True) -> None:
        self._number, self._shares = number, shares
        self.engine = engine
        self.shared = folder / "shared"
        self.shared.mkdir(exist_ok=True)
        self._log = folder / f"host{number}.log"
        self.url = f"http://{hosts.NET}.{number}:8100"
        self.start()

    def start(self) -> None:
        self.host = hosts.Host(
            self._number,
            [VLLM if self.engine == "vllm" else sys.executable,
             "-m", "tests.integration.cluster.serve_engine",
             f"{hosts.NET}.{self._number}", TINY, self.engine],
            environment={**os.environ, **ON_A_CPU, "PYTHONPATH": str(REPOSITORY)},
            hidden=[Path("/tmp")],
            shared=self.shared if self._shares else None,
            log=self._log,
        )  # fmt: skip

    def loaded(self) -> int:
        return self._log.read_text().count(LOADED)


@pytest.fixture(params=ENGINES)
def served(request, first_machine, tmp_path, monkeypatch):
    monkeypatch.setenv("TUNER_ENGINE_KEY", KEY)
    made = Served(tmp_path, 4, request.param)
    yield made
    made.host.die()


def meanwhile(served, work):
    """Does something to the machine once it has the weights of the first step."""

    def run():
        while served.loaded() < 2:
            time.sleep(0.05)
        time.sleep(0.3)  # in the middle of the second step's rollouts
        work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def whole(result):
    steps = [row for row in result.history if row["step"]]
    assert len(steps) == 3
    assert all(counted(row) for row in steps)
    assert result.outcomes["completed"] == 24


def test_a_cable_that_is_pulled_for_a_while_ends_no_run(served):
    def pull():
        served.host.cut()
        time.sleep(OUTAGE)
        served.host.mend()

    thread = meanwhile(served, pull)
    result = run_elsewhere(served.url, served.shared)
    thread.join()
    whole(result)
    # It had everything all the time: the start and three updates.
    assert served.loaded() == 4


def test_a_machine_that_is_replaced_gets_the_weights_that_are_served(served):
    def replace():
        served.host.die()
        served.start()

    meanwhile(served, replace)
    whole(run_elsewhere(served.url, served.shared))
    assert served.loaded() == 5


def test_weights_go_through_a_shared_disk_or_not_at_all(served, tmp_path):
    poor = Served(tmp_path, 5, served.engine, shares=False)
    try:
        with pytest.raises(
            EngineError,
            match=r"handed over in .*, which does not exist on the engine's machine: the run",
        ):
            run_elsewhere(poor.url, served.shared, "name=poor")
    finally:
        poor.host.die()
    assert not list(served.shared.rglob("step_1.jsonl"))


def test_a_wrong_key_is_refused_by_name(served, monkeypatch):
    monkeypatch.setenv("TUNER_ENGINE_KEY", "guess")
    with pytest.raises(EngineError, match=r"tuner\.engine\.api_key_env"):
        run_elsewhere(served.url, served.shared, "name=stranger")
    assert served.loaded() == 0
