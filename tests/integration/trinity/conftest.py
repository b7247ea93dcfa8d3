"""These tests need Trinity-RFT, in an environment of their own: `make test-trinity`."""

import importlib.util
import os
from pathlib import Path

import pytest

HERE = importlib.util.find_spec("trinity") is not None
collect_ignore_glob = [] if HERE else ["test_*.py"]

REPOSITORY = Path(__file__).parents[3]
SHIM = Path(__file__).with_name("shim")
TINY = REPOSITORY / "models" / "tiny_math"

if HERE:
    os.environ.update(
        {
            # Before any worker starts: they read it when they do.
            "PYTHONPATH": os.pathsep.join([str(SHIM), os.environ.get("PYTHONPATH", "")]).strip(":"),
            "VERL_USE_EXTERNAL_MODULES": "trinity_cpu_shim_verl",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "AGENTSCOPE_DISABLE_CONSOLE_OUTPUT": "true",
            "OMP_NUM_THREADS": "1",
            # vLLM's processes otherwise call g++ for helpers; our few tokens do not pay for that.
            "TORCH_COMPILE_DISABLE": "1",
            # On a few busy cores workers take long to start, and idle ones are in the way.
            "RAY_prestart_worker_first_driver": "0",
            "RAY_raylet_start_wait_time_s": "300",
            "RAY_worker_register_timeout_seconds": "900",
            # Ray otherwise kills its workers where whatever runs beside them fills the memory.
            "RAY_memory_monitor_refresh_ms": "0",
            # Ray's workers otherwise give way to whatever else the machine does.
            "RAY_worker_niceness": "0",
        }
    )


@pytest.fixture
def tinker_key(monkeypatch):
    """The key of the tests' Tinker service is in the environment."""
    from tests.integration.trinity.tinker_service import KEY

    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


@pytest.fixture(scope="module")
def tinker_service():
    """A Tinker service of the repository's tiny model."""
    from tests.integration.trinity.tinker_service import Service

    return Service(str(TINY))


@pytest.fixture(scope="module")
def tinker_address(tinker_service):
    """Where it listens."""
    from tests.integration.trinity.tinker_service import served

    with served(tinker_service) as url:
        yield url
