"""The engine that a configuration asks for."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tuner.backends.placement import Machine, Placement, choose_placement, needs_of
from tuner.config import RunConfig
from tuner.engines import TrainingEngine
from tuner.engines.request import end_ids_of
from tuner.engines.served import ServedEngine
from tuner.engines.token_server import TokenServer
from tuner.engines.transformers import TransformersEngine
from tuner.engines.vllm.client import VllmProcess, VllmServer
from tuner.engines.vllm.core import VllmSettings
from tuner.engines.vllm.in_process import InProcessVllm
from tuner.engines.vllm.sampling import check_for_vllm
from tuner.errors import ConfigError, MissingDependencyError

_SHARED_MEMORY = Path("/dev/shm")


def build_engine(
    config: RunConfig,
    model: Any,
    tokenizer: Any,
    *,
    max_model_len: int,
    version: int,
    save: Callable[[Path], None],
    adapter: Any = None,
    references: int = 0,
    critics: int = 0,
) -> tuple[TrainingEngine, Placement | None]:
    """The engine for the policy, and where it is; None where it has the trainer's own weights.

    Args:
        model: The policy, as the trainer has it.
        max_model_len: Prompt and completion tokens of one request at most.
        version: Version of the weights as they are now.
        save: Writes what is trained, model or adapter, into a folder.
        adapter: The peft model, where an adapter is trained.
        references, critics: Further models of its size that the trainer has.

    Raises:
        ConfigError: The engine does not fit, or cannot serve this adapter.
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
        )
        return shared, None
    _require_vllm(config)
    needs = needs_of(config, model, max_model_len, references=references, critics=critics)
    placement = choose_placement(config, needs, Machine.here(model.device))
    rank = None if adapter is None else _rank(adapter)
    end_ids = end_ids_of(model.generation_config, tokenizer)
    settings = vllm_settings(config, max_model_len, end_ids, rank, placement)
    engine = ServedEngine(
        _servers(config, settings, placement),
        save=save,
        folder=_folder(config, needs.weights),
        tokenizer=tokenizer,
        end_ids=end_ids,
        vocabulary=int(model.get_input_embeddings().weight.shape[0]),
        max_model_len=max_model_len,
        # vLLM's grammars know the tokenizer's end token alone.
        grammars=end_ids == {tokenizer.eos_token_id},
        check=check_for_vllm,
        version=version,
        max_restarts=config.tuner.engine.max_restarts,
    )
    return engine, placement


def vllm_settings(
    config: RunConfig,
    max_model_len: int,
    end_ids: Iterable[int],
    rank: int | None,
    placement: Placement,
) -> VllmSettings:
    """How vLLM is run; `rank` is that of the adapter, None where all weights are trained."""
    rollout_model, path = config.explorer.rollout_model, config.model.model_path
    return VllmSettings(
        dtype=config.tuner.dtype,
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
        extra=rollout_model.extra_engine_args,
    )


def _servers(config: RunConfig, settings: VllmSettings, placement: Placement) -> list[TokenServer]:
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
    if placement.mode == "colocate":
        os.environ.update(cache)
        return [InProcessVllm(settings)]
    logs = config.run_dir / "engine"
    return [
        VllmProcess(
            settings,
            log=logs / f"vllm_{number}.log",
            environment={**cache, **_visible(gpus)},
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


def _folder(config: RunConfig, size: int) -> Path:
    """Where weights are handed over: in shared memory, where this machine alone reads them."""
    on_disk = config.run_dir.resolve() / "engine" / "weights"
    shutil.rmtree(on_disk, ignore_errors=True)  # of a run that was killed
    # Old and new weights are there together for a moment.
    room = _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free >= 3 * size
    if config.tuner.engine.urls or not room:
        return on_disk
    run = hashlib.blake2b(str(config.run_dir.resolve()).encode(), digest_size=8).hexdigest()
    folder = _SHARED_MEMORY / f"tuner-{os.getuid()}-{run}"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:  # somebody else's: what is put there would not be ours alone
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
    from importlib.util import find_spec

    if not config.tuner.engine.urls and find_spec("vllm") is None:
        raise MissingDependencyError(
            "explorer.rollout_model.engine_type is vllm, and vLLM is not installed: "
            "pip install 'agentscope-tuner[vllm]', or set it to transformers"
        )
