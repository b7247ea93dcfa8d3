"""Where the engine is, how new weights get there, and whether it fits, before it is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from tuner.assembly.memory import Needs
from tuner.config import RunConfig
from tuner.errors import ConfigError

_RESERVE = 1 << 30
"""Bytes of a GPU that stay free for activations and CUDA itself."""
_ASLEEP = 2 << 30
"""Bytes of a GPU that vLLM is expected to keep while it sleeps: CUDA itself and what it has
captured. Not measured."""
_WORKER = 3 << 29
"""Bytes that vLLM's processes take on a CPU, measured with version 0.32."""


@dataclass(frozen=True)
class Machine:
    """What there is.

    Attributes:
        gpus: Bytes of each GPU that PyTorch sees; empty where the run is on the CPU.
        memory: Bytes of main memory that can be had: free ones, and those of files that are cached.
    """

    gpus: tuple[int, ...]
    memory: int

    @staticmethod
    def here(device: torch.device) -> Machine:
        """This one, as far as a run on `device` may use it."""
        gpus: tuple[int, ...] = ()
        if device.type == "cuda":
            gpus = tuple(
                torch.cuda.get_device_properties(index).total_memory
                for index in range(torch.cuda.device_count())
            )
        return Machine(gpus, _available(Path("/proc/meminfo")))


def _available(meminfo: Path) -> int:
    """Bytes of main memory that a process can have, as the kernel says; else those unused."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found is None:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 1024 * int(found[1])


@dataclass(frozen=True)
class Placement:
    """Where the engine is.

    Attributes:
        mode: "colocate": on the trainer's device. "separate": on others, where there are GPUs.
        gpus: For each server that is started the GPUs it gets, by PyTorch's numbers.
        gpu_memory_utilization: Part of each GPU's memory; None leaves vLLM's own.
        cpu_cache: Bytes for keys and values of each engine on a CPU.
        sleeps: Whether the engine gives the GPU's memory to the trainer during an update.
        why: The choice and the memory it expects, for people.
    """

    mode: Literal["colocate", "separate"]
    gpus: tuple[tuple[int, ...], ...]
    gpu_memory_utilization: float | None
    cpu_cache: int
    why: str
    sleeps: bool = False

    def __str__(self) -> str:
        return f"placement: {self.mode}, {self.why}"


def choose_placement(config: RunConfig, needs: Needs, machine: Machine) -> Placement:
    """Where an engine with a copy of the weights runs; SGLang always elsewhere.

    Raises:
        ConfigError: It does not fit, with what is needed and what there is; or more GPUs are asked
            for than there are.
    """
    if config.tuner.engine.sleep and not machine.gpus:
        raise ConfigError(
            "tuner.engine.sleep is true, but there is no GPU, and vLLM cannot sleep on a CPU; "
            "remove it"
        )
    if config.tuner.engine.urls:
        names = ", ".join(config.tuner.engine.urls)
        return Placement("separate", (), None, 0, f"because tuner.engine.urls is set: {names}")
    if machine.gpus:
        return _on_gpus(config, needs, machine)
    return _on_cpu(config, needs, machine)


def _on_cpu(config: RunConfig, needs: Needs, machine: Machine) -> Placement:
    asked, rollout_model = config.tuner.placement, config.explorer.rollout_model
    if rollout_model.tensor_parallel_size > 1:
        raise ConfigError(
            f"explorer.rollout_model.tensor_parallel_size is {rollout_model.tensor_parallel_size}, "
            "but there is no GPU; set it to 1"
        )
    mode: Literal["colocate", "separate"] = "colocate" if asked == "colocate" else "separate"
    count = rollout_model.engine_num
    wanted = min(config.tuner.max_slots, 64) * needs.request
    cache = max(1 << 30, -(-wanted // 2**30) * 2**30)
    total = needs.trainer + needs.update + count * (needs.weights + cache + _WORKER)
    parts = (
        f"{_training(needs)} and {count} x {_gib(needs.weights + cache + _WORKER)} "
        f"for vLLM, with {_gib(cache)} of keys and values"
    )
    if total > machine.memory:
        raise ConfigError(
            f"vLLM does not fit: {parts} are {_gib(total)}, and {_gib(machine.memory)} of main "
            "memory are free; lower trainer.max_token_len_per_gpu, tuner.max_slots, "
            "model.max_model_len or explorer.rollout_model.engine_num, or set engine_type to "
            "transformers, which needs no copy of the weights"
        )
    chosen = "asked for" if asked != "auto" else "a process of its own keeps agents responsive"
    return Placement(mode, ((),) * count, None, cache, f"{chosen}; expects {parts}")


def _on_gpus(config: RunConfig, needs: Needs, machine: Machine) -> Placement:
    asked, rollout_model = config.tuner.placement, config.explorer.rollout_model
    size, count = rollout_model.tensor_parallel_size, rollout_model.engine_num
    others = len(machine.gpus) - 1
    if asked == "separate" or (asked == "auto" and others >= size * count):
        if others < size * count:
            raise ConfigError(
                f"tuner.placement is separate: {count} engines of {size} GPUs beside the trainer's "
                f"need {size * count + 1} GPUs, and there are {len(machine.gpus)}; set it to "
                "colocate, or lower explorer.rollout_model.engine_num or tensor_parallel_size"
            )
        if config.tuner.engine.sleep:
            raise ConfigError(
                "tuner.engine.sleep is true, but the engine has GPUs of its own (placement is "
                "separate), so nobody gains by it; remove it"
            )
        _check_trainer(needs.trainer, machine.gpus[0])
        part = rollout_model.gpu_memory_utilization or 0.9
        for gpu in machine.gpus[1 : 1 + size * count]:
            _check_engine(needs, int(part * gpu) * size, gpu * size)
        gpus = tuple(
            tuple(range(1 + size * number, 1 + size * (number + 1))) for number in range(count)
        )
        why = (
            f"{'asked for' if asked == 'separate' else 'there are GPUs beside the first'}; expects "
            f"{_training(needs)} on GPU 0, and {_gib(needs.weights // size)} of "
            f"weights on each of GPUs 1 to {size * count}"
        )
        return Placement("separate", gpus, rollout_model.gpu_memory_utilization, 0, why)
    if size * count > 1:
        raise ConfigError(
            f"{count} engines of {size} GPUs beside the trainer's need {size * count + 1} GPUs, "
            f"and there are {len(machine.gpus)}; set explorer.rollout_model.engine_num and "
            "tensor_parallel_size to 1"
        )
    return _on_one_gpu(config, needs, machine)


def _on_one_gpu(config: RunConfig, needs: Needs, machine: Machine) -> Placement:
    """On the trainer's GPU.

              generating             updating
    awake     trainer, vLLM          trainer with gradients, vLLM
    sleeps    trainer, vLLM          trainer with gradients, what vLLM keeps
    """
    asked, given = config.tuner.placement, config.explorer.rollout_model.gpu_memory_utilization
    whole = machine.gpus[0]
    sleeps = config.tuner.engine.sleep
    if sleeps is None:
        sleeps = config.synchronizer.sync_offset == 0
    if sleeps and config.model.lora is not None and needs.weights > machine.memory:
        raise ConfigError(
            f"while vLLM sleeps, the {_gib(needs.weights)} of weights that the adapter belongs to "
            f"wait in main memory, of which {_gib(machine.memory)} are free; set "
            "tuner.engine.sleep to false"
        )
    _check_trainer(needs.trainer + (_ASLEEP if sleeps else 0), whole)
    resting = needs.trainer - needs.gradients if sleeps else needs.trainer
    left = whole - resting - _RESERVE
    # Awake it leaves room for what an update computes, as far as it has enough itself.
    room = 0 if sleeps else min(needs.update, max(left - _least(needs), 0))
    part = given or int(100 * max(left - room, 0) / whole) / 100
    if given is not None and part * whole > left:
        raise ConfigError(
            f"explorer.rollout_model.gpu_memory_utilization is {part}, {_gib(int(part * whole))}, "
            f"but the trainer leaves {_gib(max(left, 0))} of {_gib(whole)}; lower or remove it"
        )
    _check_engine(needs, int(part * whole), whole)
    until = f"beside {_gib(resting)}, and sleeps during updates" if sleeps else "all the time"
    why = (
        f"{'asked for' if asked == 'colocate' else 'there is one GPU'}; expects "
        f"{_training(needs)} of {_gib(whole)}; vLLM has {_gib(int(part * whole))} "
        f"{until}"
    )
    return Placement("colocate", ((0,),), part, 0, why, sleeps)


def _check_trainer(needed: int, there: int) -> None:
    if needed + _RESERVE > there:
        raise ConfigError(
            f"training needs {_gib(needed)} beside what it computes, and the GPU has "
            f"{_gib(there)}; set tuner.dtype to bfloat16, trainer.optimizer_offload to true, or "
            "model.lora_configs"
        )


def _check_engine(needs: Needs, given: int, whole: int) -> None:
    least = _least(needs)
    if given < least:
        raise ConfigError(
            f"vLLM needs {_gib(least)} for the weights and one request of the greatest length, and "
            f"gets {_gib(given)} of {_gib(whole)}; lower model.max_model_len, set "
            "model.lora_configs, or engine_type to transformers, which needs no copy of the weights"
        )


def _least(needs: Needs) -> int:
    """Bytes without which vLLM has no use."""
    return needs.weights + needs.request + _RESERVE


def _training(needs: Needs) -> str:
    update = f", {_gib(needs.update)} more for its micro-batches," if needs.update else ""
    return f"{_gib(needs.trainer)} for training{update}"


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


PathKind = Literal["cuda_ipc", "nccl", "shared_memory", "disk"]

# Fastest first; the last is always there.
_WORDS: Mapping[PathKind, str] = {
    "cuda_ipc": "vLLM reads them out of the trainer's memory on the GPU that both use",
    "nccl": "they are broadcast from the trainer's GPU to the engine's",
    "shared_memory": "as a checkpoint in this machine's shared memory",
    "disk": "as a checkpoint in the run directory",
}
TRANSFERS: Mapping[PathKind, Literal["ipc", "nccl"]] = {"cuda_ipc": "ipc", "nccl": "nccl"}
"""What vLLM calls the ways from GPU to GPU."""


@dataclass(frozen=True)
class Sides:
    """What trainer and engine have.

    Attributes:
        engine: Where the engine computes: "cpu" (as the trainer does), on "the trainer's gpu", on
            "other gpus" of this machine, or "elsewhere", on servers that somebody else runs.
        adapter: Whether an adapter is trained, and handed over alone.
        backends: The ways from GPU to GPU that the installed vLLM has, by its names.
        size: Bytes of all weights; an adapter's are fewer.
        shared_memory: Bytes that are free in shared memory.
    """

    engine: Literal["cpu", "the trainer's gpu", "other gpus", "elsewhere"]
    adapter: bool
    backends: frozenset[str]
    size: int
    shared_memory: int


@dataclass(frozen=True)
class WeightPath:
    """The way that weights take.

    Attributes:
        why: For people.
    """

    kind: PathKind
    why: str

    def __str__(self) -> str:
        return f"weights: {self.kind}, {_WORDS[self.kind]}; {self.why}"


def choose_weight_path(asked: PathKind | Literal["auto"], sides: Sides) -> WeightPath:
    """The fastest way that both sides have, or the one that was asked for.

    Raises:
        ConfigError: What was asked for cannot be; says why.
    """
    if asked != "auto":
        reason = _obstacle(asked, sides)
        if reason is not None:
            raise ConfigError(
                f"tuner.engine.weights is {asked}, but {reason}: set it to auto, which would be "
                f"{choose_weight_path('auto', sides).kind} here"
            )
        return WeightPath(asked, "asked for")
    passed: list[str] = []
    for kind in _WORDS:
        reason = _obstacle(kind, sides)
        if reason is None:
            return WeightPath(kind, ", ".join(passed) or "nothing is faster")
        passed.append(f"not {kind}: {reason}")
    raise AssertionError("a checkpoint on disk is always possible")


def _obstacle(kind: PathKind, sides: Sides) -> str | None:
    """Why weights cannot take this way; None where they can."""
    if kind == "disk":
        return None
    if sides.engine == "elsewhere":
        return "tuner.engine.urls names servers elsewhere"
    if kind == "shared_memory":
        # Old and new weights are there together for a moment.
        if sides.shared_memory >= 3 * sides.size:
            return None
        return (
            f"/dev/shm has {sides.shared_memory / 2**30:.2f} GiB free, and three times "
            f"{sides.size / 2**30:.2f} GiB are wanted"
        )
    if sides.engine == "cpu":
        return "there is no GPU"
    if kind == "cuda_ipc" and sides.engine == "other gpus":
        return "trainer and engine are on different GPUs"
    if kind == "nccl" and sides.engine == "the trainer's gpu":
        return "trainer and engine share a GPU, and NCCL joins different ones"
    if sides.adapter:
        return "an adapter is trained, which vLLM takes as files"
    if TRANSFERS[kind] not in sides.backends:
        return f"the installed vLLM has no weight transfer {TRANSFERS[kind]!r}"
    return None
