"""These tests need the trackers' libraries, in their own environment: `make test-trackers`."""

import importlib.util

import pytest

_NEEDS = ("wandb", "mlflow", "swanlab")
if any(importlib.util.find_spec(package) is None for package in _NEEDS):
    collect_ignore_glob = ["test_*"]


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path_factory):
    """No account of whoever runs this, and no server: a folder of files for MLflow."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for name in ("WANDB_API_KEY", "SWANLAB_API_KEY", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "")  # what a test sets is taken away again
        monkeypatch.delenv(name)
