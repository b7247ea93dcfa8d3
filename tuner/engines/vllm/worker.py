"""Worker extension for vLLM (`worker_extension_cls`).

Workers receive tensors in GPU memory as plain values with which another process can open them (CUDA
IPC). PyTorch describes a shared tensor by the arguments of `rebuild_cuda_tensor`, among them
classes and bytes, which vLLM's own transports pickle. A pickle can run any code, so JSON of a fixed
form is sent instead, and the classes are fixed here.

    {"GPU-52f1...": {"size": [4, 8], "stride": [8, 1], "offset": 0, "dtype": "bfloat16", ...}}
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.storage import TypedStorage

Handles = Mapping[str, tuple[Any, ...]]
"""The arguments of `rebuild_cuda_tensor` by GPU UUID, as vLLM has them."""


def to_plain(handles: Handles) -> dict[str, dict[str, Any]]:
    """Convert the handles of plain tensors to JSON values."""
    return {gpu: _plain(arguments) for gpu, arguments in handles.items()}


def from_plain(plain: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Inverse of `to_plain`; raises ValueError for a malformed value."""
    return {gpu: _arguments(fields) for gpu, fields in plain.items()}


# The arguments of `rebuild_cuda_tensor`, in order.
# fmt: off
_NAMES = (
    "tensor_class", "size", "stride", "offset", "storage_class", "dtype", "device", "storage",
    "storage_size", "storage_offset", "requires_grad", "counter", "counter_offset", "event",
    "event_sync",
)
# fmt: on


def _plain(arguments: tuple[Any, ...]) -> dict[str, Any]:
    fields = dict(zip(_NAMES, arguments, strict=True))
    tensor_class, storage_class = fields.pop("tensor_class"), fields.pop("storage_class")
    if (tensor_class, storage_class) != (torch.Tensor, TypedStorage):
        raise TypeError(f"only plain tensors can be shared, not {tensor_class} in {storage_class}")
    del fields["requires_grad"]
    for name in ("size", "stride"):
        fields[name] = list(fields[name])
    for name in ("storage", "counter", "event"):
        fields[name] = base64.b64encode(fields[name]).decode("ascii")
    return {**fields, "dtype": str(fields["dtype"]).removeprefix("torch.")}


def _arguments(fields: Mapping[str, Any]) -> tuple[Any, ...]:
    dtype = getattr(torch, str(fields["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype is {fields['dtype']!r}, which is not a torch dtype")
    return (
        torch.Tensor,
        torch.Size(_number(fields, "size", at) for at in range(len(fields["size"]))),
        tuple(_number(fields, "stride", at) for at in range(len(fields["stride"]))),
        _number(fields, "offset"),
        TypedStorage,
        dtype,
        _number(fields, "device"),
        _bytes(fields, "storage"),
        _number(fields, "storage_size"),
        _number(fields, "storage_offset"),
        False,
        _bytes(fields, "counter"),
        _number(fields, "counter_offset"),
        _bytes(fields, "event"),
        bool(fields["event_sync"]),
    )


def _number(fields: Mapping[str, Any], name: str, at: int | None = None) -> int:
    value = fields[name] if at is None else fields[name][at]
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is {fields[name]!r}, but must consist of whole numbers")
    return value


def _bytes(fields: Mapping[str, Any], name: str) -> bytes:
    try:
        return base64.b64decode(fields[name], validate=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is {fields[name]!r}, but must be base64") from error


class WeightsExtension:
    """Methods that vLLM adds to its worker class; `self` is that worker."""

    model_runner: Any
    update_weights: Callable[[dict[str, Any]], None]

    def tuner_receive_weights(self, info: dict[str, Any]) -> None:
        """Receive weights, broadcast or in shared memory."""
        if "ipc_handles" in info:
            info = {**info, "ipc_handles": [from_plain(one) for one in info["ipc_handles"]]}
        self.update_weights(info)

    def tuner_load_weights(self, folder: str) -> None:
        """Load a model's folder in place, converted to vLLM's layout."""
        self.model_runner.reload_weights(weights_path=folder)
        self._pack_output_layers_again()

    def _pack_output_layers_again(self) -> None:
        # On a CPU vLLM multiplies with packed copies. Its reload repacks layers whose weights were
        # in the checkpoint; those of an output layer tied to the embeddings were not, so 0.32 kept
        # using the old copy.
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
