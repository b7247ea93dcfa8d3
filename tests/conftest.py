"""Fixtures that many tests share."""

import gc
import importlib.util
import logging
import os
import signal
import ssl
import subprocess
from pathlib import Path

import pytest

# What is imported stays, so that the collector need not look at it, now or later; and of what tests
# leave behind little lies in circles.
gc.disable()
gc.set_threshold(20_000, 10, 10)

# Its tests run in other files, and a failed assertion shows its values.
pytest.register_assert_rewrite("tests.engines.conformance")

os.environ.setdefault("AGENTSCOPE_DISABLE_CONSOLE_OUTPUT", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Nobody is spoken to by TLS here, and each client would read all certificates first, for 20 ms.
ssl.SSLContext.load_verify_locations = lambda *_, **__: None
ssl.SSLContext.load_default_certs = lambda *_, **__: None

if importlib.util.find_spec("hypothesis"):  # not in every environment
    from hypothesis import HealthCheck, settings

    # How long an example takes says how busy the machine is.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")


def pytest_ignore_collect(collection_path, config):
    """The browser tests need Chromium: they run when named, as `make test-browser` does."""
    named = any("tests/browser" in argument for argument in config.args)
    return True if collection_path.name == "browser" and not named else None


def pytest_collection_modifyitems(items):
    """Files that take longest come first: no core is left without work at the end."""
    long = (
        *("tests/examples/", "tests/test_tutorial", "tests/test_readme", "tests/models/"),
        *("tests/loop/", "tests/rewards/", "tests/training/", "tests/tools/", "tests/rollouts/"),
    )
    items.sort(key=lambda item: not item.nodeid.startswith(long))


def pytest_collection_finish(session):
    """From here on there is something to collect."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def loggers():
    """A server logs in its own way, for the rest of its process; here that is one test."""
    kept = [logging.getLogger(name) for name in ("tuner", "uvicorn")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in kept]
    yield
    for logger, (handlers, propagate, level) in zip(kept, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture(scope="session")
def random_model_path(tmp_path_factory) -> Path:
    """A Hugging Face folder: one layer of random parameters, ChatML, one token per byte."""
    from tests.kit.models import save_chat_model

    return save_chat_model(
        tmp_path_factory.mktemp("model"), num_hidden_layers=1, max_position_embeddings=256
    )


@pytest.fixture
def ctrl_c():
    """It interrupts, also where a shell started the tests in the background and it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def forked_workers():
    """Workers that are forked."""
    from tests.kit.forked import SUBPROCESS
    from tuner.rollouts import any_worker

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(any_worker, "subprocess", SUBPROCESS)
        yield


@pytest.fixture
def real_workers(forked_workers, monkeypatch):
    """Workers that are started as in a run."""
    from tuner.rollouts import any_worker

    monkeypatch.setattr(any_worker, "subprocess", subprocess)
