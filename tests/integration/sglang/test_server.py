"""The engine over SGLang keeps the contract of engines on SGLang's own server, on a CPU."""

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

from tests.engines.conformance import *  # noqa: F403  # pytest collects the suite
from tests.engines.conformance import Rig, as_new
from tests.engines.sglang_rig import ServerProcess, served_toy

FLAGS = """--api-key sesame --dtype float32 --enable-deterministic-inference
--incremental-streaming-output --grammar-backend llguidance --device cpu
--attention-backend torch_native --disable-cuda-graph --disable-overlap-schedule
--max-total-tokens 8192 --max-running-requests 32 --skip-server-warmup --host 127.0.0.1"""


def server(folder: Path) -> ServerProcess:
    """SGLang's server with the model in `folder`."""
    launch = Path(__file__).with_name("launch.py")
    command = [os.environ["SGLANG_PYTHON"], str(launch), "--model-path", str(folder)]
    environment = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONPATH": "",
        **cuda_library(folder.parent),
    }
    return ServerProcess([*command, *FLAGS.split()], environment, folder.parent / "log.txt")


def cuda_library(folder: Path) -> dict[str, str]:
    """Where there is no CUDA driver, a library that has what `import sgl_kernel` looks for."""
    try:
        ctypes.CDLL("libcuda.so.1")
        return {}
    except OSError:
        pass
    source = folder / "cuda.c"
    source.write_text("int cuPointerGetAttribute(void *d, int a, unsigned long long p) {return 1;}")
    library = folder / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return {"LD_LIBRARY_PATH": str(folder)}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """One server for all tests: it takes minutes to start."""
    with served_toy(server, tmp_path_factory.mktemp("sglang")) as parts:
        yield parts


@pytest.fixture
async def rig(parts):
    made, model, process = parts
    await as_new(made, model)
    return Rig(made, model, process.kill, "broke off", both_cuts=False)
