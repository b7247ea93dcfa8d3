"""Clients of vLLM servers: those that somebody else runs, and those that we start."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tuner.engines.base import EngineError, EngineLostError, SamplingParams
from tuner.engines.servers import RemoteServer, SampledTokens, Weights
from tuner.engines.vllm.core import TransferVerb, VllmSettings
from tuner.engines.vllm.server import KEY
from tuner.engines.vllm.worker import to_plain

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer import TrainerWeightTransferEngine, WeightSource


# The trainer's side of vLLM's weight transfer from GPU to GPU.
#
# vLLM has a pair of transfer engines for each method: one in its workers, which `VllmCore.transfer`
# calls, and one for the trainer, used here. The trainer's engine drives both through a client of
# four
# methods; ours sends them to our server as JSON:
#
#     connect            once per start of the server (NCCL: both join a group)
#     begin              serving stops
#     update             ipc: where each tensor lies in the memory of the shared GPU
#                        nccl: names and shapes of the tensors being broadcast
#     finish             serving continues under a new label, with nothing cached for old weights
#
# Written for GPUs and not run on one: the CPU tests cover the messages, their order and the
# workers' handling of them (tests/integration/vllm/test_direct.py).


TransferCall = Callable[[TransferVerb, dict[str, Any]], None]
"""Makes a server carry out one step of `VllmCore.transfer`."""


@dataclass(frozen=True)
class TrainerWeights:
    """Location of the trained weights.

    Attributes:
        backend: vLLM's transfer engine to use.
        tensors: Returns them, by the names of a Hugging Face checkpoint.
        device: The GPU that they are on.
        workers: Number of vLLM workers of one server.
    """

    backend: Literal["ipc", "nccl"]
    tensors: Callable[[], Mapping[str, Tensor]]
    device: torch.device
    workers: int = 1


def transfer_backends() -> frozenset[str]:
    """Transfer methods that the installed vLLM supports."""
    found = set()
    for name in ("ipc", "nccl"):
        with suppress(ImportError):  # the parent package may be missing
            if find_spec(f"vllm.distributed.weight_transfer.{name}_engine") is not None:
                found.add(name)
    return frozenset(found)


class DirectSender:
    """Sends the trainer's weights to one server whenever they change.

    Args:
        weights: The weights to send.
        call: Calls the server; blocks until it has done its part.
    """

    def __init__(self, weights: TrainerWeights, call: TransferCall) -> None:
        self._weights = weights
        self._client = _Client(call)
        self._engine: TrainerWeightTransferEngine[Any] | None = None

    def forget(self) -> None:
        """Drop the connection after the server was restarted."""
        self._engine = None

    def send(self, label: str) -> None:
        """Make the server serve the current weights as `label`.

        Raises:
            EngineLostError: The server died; it can be started from a folder.
            EngineError: It cannot load them, or died while GPUs were joined (NCCL), after which
                this process's GPU may wait for it forever.
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
                f"the transfer of weights between GPUs broke off, and the run cannot continue in "
                f"this process; start it again to resume from its checkpoint: {error}"
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

        # One group per server, so that one that dies does not affect the others.
        return NCCLTrainerInitInfo(
            rank=0,
            master_address="127.0.0.1",
            master_port=get_open_port(),
            world_size=1 + self._weights.workers,
        )


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the thread's current GPU, which vLLM's engines use."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class _Client:
    """Client that vLLM's engines drive (its protocol `VLLMWeightSyncClient`).

    Attributes:
        label: Label of the weights being sent.
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

    class TensorSource(WeightSource):  # type: ignore[misc]  # where vLLM is not installed
        def metadata(self) -> list[ParamMeta]:
            return [
                ParamMeta(name, tensor.dtype, tuple(tensor.shape))
                for name, tensor in tensors().items()
            ]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            yield from tensors().items()

    return TensorSource()


_LOG_LINES = 25


class VllmServer(RemoteServer):
    """A server of `tuner.engines.vllm.server` that somebody else runs.

    Args:
        url: For example `http://10.0.0.2:8100`.
        key: The key that the server got as TUNER_ENGINE_KEY.
        settings: How the server must run vLLM.
        trained: Source of new weights once it runs; None: folders only.
    """

    def __init__(
        self,
        url: str,
        key: str,
        settings: VllmSettings,
        trained: TrainerWeights | None = None,
    ) -> None:
        super().__init__("vLLM", url, key)
        self._sender = None if trained is None else DirectSender(trained, self._transfer)
        self._settings = asdict(settings)

    def start(self, weights: Weights) -> None:
        """Load the weights as soon as the server can be reached.

        Raises:
            EngineLostError: It cannot be reached for five minutes, or dies.
            EngineError: It cannot load them.
        """
        self._wait_for("/health")
        self.load(weights)

    def serves(self, label: str) -> bool:
        """See `TokenServer.serves`; waits for it as `start` does."""
        self._wait_for("/health")
        return bool(self._ask("/health")["label"] == label)

    def load(self, weights: Weights) -> None:
        """See `TokenServer.load`."""
        if weights.folder is None:
            assert self._sender is not None
            self._sender.send(weights.label)
            return
        self._ask(
            "/load",
            {
                "settings": self._settings,
                "folder": str(weights.folder),
                "label": weights.label,
            },
        )

    def _transfer(self, verb: TransferVerb, info: dict[str, Any]) -> None:
        self._ask("/transfer", {"verb": verb, "info": info})

    async def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        label: str,
        adapter: str | None = None,
    ) -> AsyncGenerator[SampledTokens, None]:
        """See `TokenServer.stream`."""
        body = {
            "prompt_ids": list(prompt_ids),
            "sampling": asdict(sampling),
            "label": label,
            "adapter": adapter,
        }
        async with aclosing(self._lines("/generate", body)) as lines:
            async for line in lines:
                yield self._sampled(json.loads(line))

    def _sampled(self, line: Any) -> SampledTokens:
        if isinstance(line, dict):
            raise self._error(line)
        ids, logprobs, top, cached, reason, left = line
        pairs = tuple(tuple((id_, logprob) for id_, logprob in place) for place in top)
        kept = tuple(map(tuple, left))
        return SampledTokens(tuple(ids), tuple(logprobs), pairs, cached, reason, kept)

    def _refusal(self, status: int, body: bytes) -> EngineError:
        try:
            return self._error(json.loads(body))
        except (ValueError, KeyError, TypeError):
            return super()._refusal(status, body)

    def _error(self, found: Mapping[str, Any]) -> EngineError:
        kind = EngineLostError if found["lost"] else EngineError
        return kind(f"{self.name}: {found['error']}")


class VllmProcess(VllmServer):
    """A server that we start on a loopback port, and that ends with this process in any case.

    Args:
        settings: How the server must run vLLM.
        log: File for its output.
        environment: Additional variables, for example CUDA_VISIBLE_DEVICES.
        trained: Source of new weights once it runs; None: folders only.
    """

    def __init__(
        self,
        settings: VllmSettings,
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        trained: TrainerWeights | None = None,
    ) -> None:
        super().__init__("", secrets.token_urlsafe(24), settings, trained)
        self._log = log
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return f"the vLLM server that logs to {self._log}"

    @property
    def pid(self) -> int | None:
        """Process id, which is also its group's; None if it does not run."""
        return None if self._process is None else self._process.pid

    def start(self, weights: Weights) -> None:
        """Start a process in place of the previous one; see `TokenServer.start`."""
        self.stop()
        if self._sender is not None:
            self._sender.forget()
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as door:
            door.bind(("127.0.0.1", 0))
            # What arrives before the server listens waits in the socket's queue.
            door.listen(2048)
            self._url = f"http://127.0.0.1:{door.getsockname()[1]}"
            self._clients = WeakKeyDictionary()
            self._process = self._launch(door)
        self.load(weights)

    def load(self, weights: Weights) -> None:
        """See `TokenServer.load`."""
        if self._settings["sleeps"]:
            torch.cuda.empty_cache()  # vLLM needs the memory that training freed
        super().load(weights)

    def sleep(self) -> None:
        """See `TokenServer.sleep`."""
        self._ask("/sleep", {})

    def serves(self, label: str) -> bool:
        """False: only the process itself can fail, not a connection to it."""
        return False

    def _launch(self, door: socket.socket) -> subprocess.Popen[bytes]:
        key = self._headers["authorization"].removeprefix("Bearer ")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tuner.engines.vllm.server", "--fd", str(door.fileno())],
                env={**os.environ, **self._environment, KEY: key},
                stdin=subprocess.PIPE,  # at its end the server ends
                stdout=log,
                stderr=log,
                pass_fds=[door.fileno()],
                start_new_session=True,
            )

    def stop(self) -> None:
        """Kill it and its children."""
        process = self._process
        if process is None:
            return
        self._process = None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()

    def _error(self, found: Mapping[str, Any]) -> EngineError:
        error = super()._error(found)
        return EngineLostError(f"{error}\n{self._tail()}") if found["lost"] else error

    def _lost(self, what: str, error: Exception) -> EngineLostError:
        ended = ""
        if self._process is not None:
            try:
                ended = f" (it ended with {self._process.wait(timeout=5)})"
            except subprocess.TimeoutExpired:
                ended = " (it still runs)"
        return EngineLostError(f"{super()._lost(what, error)}{ended}\n{self._tail()}")

    def _tail(self) -> str:
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return "it left no log"
        return "\n".join(["the last lines of its log:", *lines[-_LOG_LINES:]])
