"""What vLLM's workers do for us, through its `worker_extension_cls`.

They take tensors in a GPU's memory as plain values by which another process can open them (CUDA
IPC). PyTorch describes a shared tensor by the arguments of `rebuild_cuda_tensor`, among them
classes and bytes, which vLLM's own transports pickle. Whoever may send a pickle may run any code,
so it is not one here: JSON goes over, of a fixed form, and the classes are those below.

    {"GPU-52f1...": {"size": [4, 8], "stride": [8, 1], "offset": 0, "dtype": "bfloat16", ...}}
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.storage import TypedStorage

Handles = Mapping[str, tuple[Any, ...]]
"""By a GPU's UUID the arguments of `rebuild_cuda_tensor`, as vLLM has them."""


def to_plain(handles: Handles) -> dict[str, dict[str, Any]]:
    """What JSON can carry of `handles`, which are those of plain tensors."""
    return {gpu: _plain(arguments) for gpu, arguments in handles.items()}


def from_plain(plain: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """What `to_plain` was given.

    Raises:
        ValueError: A value is not of its form.
    """
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
        raise TypeError(f"{tensor_class} in {storage_class} cannot be shared, but plain tensors")
    del fields["requires_grad"]
    for name in ("size", "stride"):
        fields[name] = list(fields[name])
    for name in ("storage", "counter", "event"):
        fields[name] = base64.b64encode(fields[name]).decode("ascii")
    return {**fields, "dtype": str(fields["dtype"]).removeprefix("torch.")}


def _arguments(fields: Mapping[str, Any]) -> tuple[Any, ...]:
    dtype = getattr(torch, str(fields["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype is {fields['dtype']!r}, which is no type of torch's")
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
        raise ValueError(f"{name} is {fields[name]!r}, but must be made of whole numbers")
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
        """Take the weights that `info` tells of: to be broadcast, or in memory that is shared."""
        if "ipc_handles" in info:
            info = {**info, "ipc_handles": [from_plain(one) for one in info["ipc_handles"]]}
        self.update_weights(info)

    def tuner_load_weights(self, folder: str) -> None:
        """Load a model's folder in place, in whatever form vLLM keeps the weights."""
        self.model_runner.reload_weights(weights_path=folder)
        self._pack_output_layers_again()

    def _pack_output_layers_again(self) -> None:
        # On a CPU vLLM multiplies with packed copies. Its reload makes new ones where a layer's
        # weights were in the checkpoint, which those of an output layer tied to the embeddings are
        # not: 0.32 went on with the old ones.
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
