"""Weights from GPU to GPU, by vLLM's own weight transfer; the trainer's side of it.

vLLM has a pair of engines for each way: one in its workers, which `VllmCore.transfer` reaches, and
one for the trainer, which is used here. The trainer's drives both over a client of four methods;
ours sends them to a server of ours, as JSON:

    connect            once for each start of the server (NCCL: both join a group)
    begin              nothing is served any more
    update             ipc: where each tensor lies in the memory of the GPU that both use
                       nccl: names and shapes of what is being broadcast meanwhile
    finish             served under a new label, with nothing computed by old weights

Written for GPUs and not run on one: the CPU's tests have the messages, their order and what the
workers make of them (tests/integration/vllm/test_direct.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from tuner.engines.base import EngineError, EngineLostError
from tuner.engines.vllm.core import TransferVerb
from tuner.engines.vllm.worker import to_plain

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer import TrainerWeightTransferEngine, WeightSource

TransferCall = Callable[[TransferVerb, dict[str, Any]], None]
"""Has a server do one act of `VllmCore.transfer`."""


@dataclass(frozen=True)
class TrainerWeights:
    """The weights that are trained, where they are.

    Attributes:
        backend: Which of vLLM's engines sends them.
        tensors: Gives them, by the names of a Hugging Face checkpoint.
        device: The GPU that they are on.
        workers: vLLM's workers of one server.
    """

    backend: Literal["ipc", "nccl"]
    tensors: Callable[[], Mapping[str, Tensor]]
    device: torch.device
    workers: int = 1


def transfer_backends() -> frozenset[str]:
    """The ways from GPU to GPU that the installed vLLM has."""
    found = set()
    for name in ("ipc", "nccl"):
        with suppress(ImportError):  # of a package that it is in
            if find_spec(f"vllm.distributed.weight_transfer.{name}_engine") is not None:
                found.add(name)
    return frozenset(found)


class DirectSender:
    """Sends the trainer's weights to one server, as often as they change.

    Args:
        weights: What is sent.
        call: Reaches the server; blocks until it has done its part.
    """

    def __init__(self, weights: TrainerWeights, call: TransferCall) -> None:
        self._weights = weights
        self._client = _Client(call)
        self._engine: TrainerWeightTransferEngine[Any] | None = None

    def forget(self) -> None:
        """The server was started anew: nothing is connected to it."""
        self._engine = None

    def send(self, label: str) -> None:
        """Have the server serve the weights as they are now under `label`.

        Raises:
            EngineLostError: The server died; it can be started from a folder.
            EngineError: It cannot have them, or died while GPUs were joined (NCCL), after which
                this process's GPU may wait for it for ever.
        """
        self._client.label = label
        try:
            with _current(self._weights.device):
                if self._engine is None:
                    self._engine = self._connected()
                self._engine.send_weights()
        except EngineLostError as error:
            self._engine = None
            if self._weights.backend == "ipc":
                raise
            raise EngineError(
                f"weights broke off between GPUs, and the run cannot go on in this process; start "
                f"it again, and it goes on from its checkpoint: {error}"
            ) from error
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(
                f"weights cannot be sent to vLLM by {self._weights.backend}: "
                f"{type(error).__name__}: {error}; set tuner.engine.weights to shared_memory"
            ) from error

    def _connected(self) -> TrainerWeightTransferEngine[Any]:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        return WeightTransferTrainerFactory.trainer_init(
            self._start(), client=self._client, source=_source(self._weights.tensors)
        )

    def _start(self) -> Any:
        if self._weights.backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            return IPCTrainerInitInfo(rank=0)
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        from vllm.utils.network_utils import get_open_port

        # One group for each server, so that one which dies leaves the others' as they are.
        return NCCLTrainerInitInfo(
            rank=0,
            master_address="127.0.0.1",
            master_port=get_open_port(),
            world_size=1 + self._weights.workers,
        )


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """`device` as the GPU that vLLM's engines take, which is the thread's current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class _Client:
    """What vLLM's engines drive a server with (its protocol `VLLMWeightSyncClient`).

    Attributes:
        label: Of the weights that are being sent.
    """

    def __init__(self, call: TransferCall) -> None:
        self.label = ""
        self._call = call

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("connect", init_info)

    def start_weight_update(self) -> None:
        self._call("begin", {})

    def update_weights(self, update_info: Any) -> None:
        info = {name: value for name, value in update_info.items() if value is not None}
        if "ipc_handles" in info:
            info["ipc_handles"] = [to_plain(one) for one in info["ipc_handles"]]
        self._call("update", info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish", {"label": self.label})


def _source(tensors: Callable[[], Mapping[str, Tensor]]) -> WeightSource:
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource

    class Source(WeightSource):  # type: ignore[misc]  # where vLLM is not installed
        def metadata(self) -> list[ParamMeta]:
            return [
                ParamMeta(name, tensor.dtype, tuple(tensor.shape))
                for name, tensor in tensors().items()
            ]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            yield from tensors().items()

    return Source()
