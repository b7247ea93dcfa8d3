"""The worker extension with CUDA IPC without CUDA; imported by vLLM's workers alone."""

from tests.integration.vllm.cpu_ipc import stand_in
from tuner.engines.vllm.worker import WeightsExtension

stand_in(setattr)


class CpuExtension(WeightsExtension):
    """Brings this module into the worker."""
