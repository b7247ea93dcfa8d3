"""Lets verl 0.8's FSDP2 engine train on a CPU over gloo. For tests alone.

verl loads it in each of its processes, through VERL_USE_EXTERNAL_MODULES.
"""

import importlib.abc
import importlib.machinery
import sys

import torch
import torch.distributed
from torch.distributed.fsdp import CPUOffloadPolicy


def _shim():
    # verl asks torch.cpu what it asks torch.cuda elsewhere.
    for name in (
        "memory_allocated",
        "memory_reserved",
        "max_memory_allocated",
        "max_memory_reserved",
    ):
        setattr(torch.cpu, name, lambda *args, **kwargs: 0)
    for name in ("empty_cache", "reset_peak_memory_stats", "reset_accumulated_memory_stats"):
        setattr(torch.cpu, name, lambda *args, **kwargs: None)
    torch.cpu.ipc_collect = lambda *args, **kwargs: None
    torch.cpu.mem_get_info = lambda *args, **kwargs: (1 << 34, 1 << 34)
    torch.cpu.get_device_name = lambda *args, **kwargs: "CPU"
    torch.cpu.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cpu.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.cuda.get_device_capability = lambda *args, **kwargs: (8, 0)
    # Adapters are saved from there.
    torch.cuda.current_device = lambda: torch.device("cpu")

    # "cpu:gloo,cpu:nccl" names the CPU twice.
    original = torch.distributed.init_process_group

    def init_process_group(backend=None, *args, **kwargs):
        nccl = isinstance(backend, str) and "nccl" in backend
        return original("gloo" if nccl else backend, *args, **kwargs)

    torch.distributed.init_process_group = init_process_group

    # Pinned memory needs an accelerator; the reference model's offload policy asks for it.
    init_policy = CPUOffloadPolicy.__init__
    CPUOffloadPolicy.__init__ = lambda self, pin_memory=False: init_policy(self, pin_memory=False)

    sys.meta_path.insert(0, _EngineForCPU())

    # verl takes flash-attention's padding on CUDA and its own on other devices.
    import verl.utils.attention_utils

    def padding():
        from verl.utils import npu_flash_attn_utils as own

        return own.index_first_axis, own.pad_input, own.rearrange, own.unpad_input

    verl.utils.attention_utils._get_attention_functions = padding


class _EngineForCPU(importlib.abc.MetaPathFinder):
    """verl registers its FSDP engine for "cuda" and "npu"; this adds "cpu"."""

    def find_spec(self, name, path, target=None):
        if name != "verl.workers.engine.base":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            original = module.EngineRegistry.register.__func__

            def register(cls, model_type, backend, device="cuda"):
                devices = [*device] if isinstance(device, list) else [device]
                return original(cls, model_type, backend, [*devices, "cpu"])

            module.EngineRegistry.register = classmethod(register)

        spec.loader.exec_module = exec_module
        return spec


if not torch.cuda.is_available():
    _shim()
