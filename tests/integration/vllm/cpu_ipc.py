"""CUDA IPC without CUDA: a tensor is shared as a file, and everything else is vLLM's and ours."""

import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.storage import TypedStorage
from vllm.distributed.weight_transfer import ipc_engine

from tuner.engines.vllm.worker import WeightsExtension

FOLDER = Path("/dev/shm")


def share(tensor):
    """For `reduce_tensor`: the same values in the same places, but the handle is a file's name."""
    path = FOLDER / f"tuner-test-{uuid.uuid4().hex}"
    path.write_bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    size, stride = tensor.size(), tensor.stride()
    start = (torch.Tensor, size, stride, 0, TypedStorage, tensor.dtype, 0, str(path).encode())
    return None, (*start, path.stat().st_size, 0, False, b"counter", 0, b"event", True)


def rebuild(*arguments):
    """For `rebuild_cuda_tensor`."""
    path = Path(arguments[7].decode())
    data = torch.frombuffer(bytearray(path.read_bytes()), dtype=arguments[5])
    path.unlink()
    return data.reshape(arguments[1])


def stand_in(replace: Callable[[Any, str, Any], None]) -> None:
    """Put the stand-ins in place, by `setattr` or what takes it back."""
    engine = ipc_engine.IPCWeightTransferEngine
    finish = engine.finish_weight_update

    def finish_and_pack(self):
        finish(self)
        # As after a folder: on a CPU vLLM multiplies with packed copies.
        runner = SimpleNamespace(get_model=lambda: self.model)
        WeightsExtension._pack_output_layers_again(SimpleNamespace(model_runner=runner))

    replace(engine, "finish_weight_update", finish_and_pack)
    replace(ipc_engine, "reduce_tensor", share)
    replace(ipc_engine, "rebuild_cuda_tensor", rebuild)
    gpu = SimpleNamespace(uuid="GPU-of-this-test")
    replace(torch.cuda, "get_device_properties", lambda device: gpu)
    replace(torch.cuda, "ipc_collect", lambda: None)
    replace(torch.accelerator, "current_device_index", lambda: 0)
    replace(torch.accelerator, "synchronize", lambda: None)
