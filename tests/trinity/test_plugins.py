"""What Trinity-RFT's trackers are told, and what they are not; the key in front of its server."""

import importlib
import os
import sys
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from tuner.trinity.stage import SERVE_KEY


@dataclass
class Section:
    monitor_args: dict[str, Any]


@dataclass
class Config:
    """Of Trinity-RFT's configuration what a monitor looks at, and settings with secrets."""

    checkpoint_job_dir: str
    monitor: Section
    buffer: dict[str, Any]
    mode: str = "both"


@pytest.fixture
def monitor(monkeypatch):
    """`TunerMonitor` over trackers that keep the configurations which they are given."""
    given = []

    class Tracker:
        def __init__(self, config, **_):
            given.append(config)

    class Registry:
        get = staticmethod(lambda kind: Tracker)

    parts = {
        "trinity": {},
        "trinity.algorithm": {},
        "trinity.algorithm.advantage_fn": {},
        "trinity.algorithm.advantage_fn.multi_step_grpo_advantage": {
            "StepWiseGRPOAdvantageFn": object
        },
        "trinity.utils": {},
        "trinity.utils.monitor": {"MONITOR": Registry, "Monitor": object},
    }
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "tuner.trinity.plugins", raising=False)
    for variable in ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(variable, "")
    made = importlib.import_module("tuner.trinity.plugins").TunerMonitor
    yield made, given
    del sys.modules["tuner.trinity.plugins"]


@pytest.mark.parametrize(
    ("args", "told", "variables"),
    [
        (
            {"uri": "http://me:hunter%402@host:5/x"},
            {"uri": "http://host:5/x", "username": "me"},
            {"MLFLOW_TRACKING_PASSWORD": "hunter@2"},
        ),
        (
            {"uri": "http://host", "username": "me", "password": "hunter@2"},
            {"uri": "http://host", "username": "me"},
            {"MLFLOW_TRACKING_PASSWORD": "hunter@2"},
        ),
        ({"entity": "e", "api_key": "hunter@2"}, {"entity": "e"}, {"WANDB_API_KEY": "hunter@2"}),
    ],
)
def test_trackers_get_their_secrets_and_are_sent_none(monitor, tmp_path, args, told, variables):
    make, given = monitor
    ours = {"folder": "", "trackers": ["mlflow", "wandb"]}
    config = Config(
        str(tmp_path),
        Section({"tuner": ours, **args}),
        {"path": "postgresql://me:hunter2@host/db", "agent": {"api_key": "hunter2"}, "size": 4},
    )
    before = asdict(config)
    make("p", "g", "n", "explorer", config)
    assert len(given) == 2
    for sent in given:
        assert "hunter" not in str(asdict(sent))
        # What a tracker would take for a password, and set, is not there at all.
        assert sent.monitor.monitor_args == {"tuner": ours, **told}
        assert sent.buffer["size"] == 4
    assert {name: os.environ[name] for name in variables} == variables
    assert asdict(config) == before  # Trinity-RFT itself goes on with it


@pytest.mark.parametrize(("mode", "status"), [("serve", 401), ("explore", 404)])
async def test_the_server_is_behind_the_key_in_its_mode(
    monitor, tmp_path, monkeypatch, mode, status
):
    app = Starlette()
    for name in ("trinity.explorer", "trinity.explorer.proxy", "trinity.explorer.proxy.app"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["trinity.explorer.proxy.app"].app = app
    monkeypatch.setenv(SERVE_KEY, "k1")
    ours = Section({"tuner": {"folder": "", "trackers": []}})
    monitor[0]("p", "g", "n", "explorer", Config(str(tmp_path), ours, {}, mode))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://h") as client:
        assert (await client.get("/v1/models")).status_code == status
        assert (await client.get("/k1/v1/models")).status_code == 404
