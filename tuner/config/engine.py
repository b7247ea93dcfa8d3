"""`tuner.engine.*`, and which settings of the engines contradict each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from tuner.config.problems import Problem
from tuner.config.section import Section

if TYPE_CHECKING:
    from tuner.config.schema import RunConfig

LARGEST_RANK = 512
"""Of an adapter that vLLM serves."""

# Arguments of vLLM that follow from other settings, or that exactness hangs on.
_OURS = {
    "model": "model.model_path",
    "tokenizer": "model.model_path",
    "dtype": "tuner.dtype",
    "seed": "tuner.seed",
    "max_model_len": "model.max_model_len",
    "max_num_seqs": "tuner.max_slots",
    "tensor_parallel_size": "explorer.rollout_model.tensor_parallel_size",
    "gpu_memory_utilization": "explorer.rollout_model.gpu_memory_utilization",
    "enforce_eager": "explorer.rollout_model.enforce_eager",
    "enable_sleep_mode": "tuner.engine.sleep",
    "weight_transfer_config": "tuner.engine.weights",
    "enable_lora": "model.lora_configs",
    "max_lora_rank": "model.lora_configs",
    "max_loras": "model.lora_configs",
    "max_logprobs": None,
    "logprobs_mode": None,
    "enable_prefix_caching": None,
    "generation_config": None,
    "structured_outputs_config": None,
    "worker_extension_cls": None,
}


class EngineSection(Section):
    """`tuner.engine.*`: vLLM and SGLang servers, beyond what `explorer.rollout_model` says."""

    urls: tuple[str, ...] = Field(
        default=(),
        description="Servers that run elsewhere ([engines](engines.md)), as in "
        "`http://10.0.0.2:8100`. Not set: vLLM is started here; SGLang is not.",
    )
    api_key_env: str = Field(
        default="TUNER_ENGINE_KEY",
        min_length=1,
        description="Environment variable that holds the key of the servers at `urls`. SGLang's "
        "may have none.",
    )
    max_restarts: int = Field(
        default=3,
        ge=0,
        description="How often servers that died are started again, in all; then the run fails.",
    )

    weights: Literal["auto", "cuda_ipc", "nccl", "shared_memory", "disk"] = Field(
        default="auto",
        description="How new weights get to vLLM ([engines](engines.md)): read out of the GPU that "
        "both use (`cuda_ipc`), broadcast to other GPUs (`nccl`), or as a checkpoint in "
        "`shared_memory` or on `disk`. `auto` is the fastest that is possible, and says why.",
    )
    sleep: bool | None = Field(
        default=None,
        description="Whether vLLM gives the GPU's memory to the trainer during an update, where "
        "they share one. Not set: yes, unless collection runs ahead of training "
        "(`synchronizer.sync_offset`).",
    )

    @field_validator("urls")
    @classmethod
    def _are_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} does not start with http:// or https://")
        return value


def engine_conflicts(config: RunConfig) -> Iterator[Problem]:
    """What the chosen engine cannot do."""
    engine_type = config.explorer.rollout_model.engine_type
    if engine_type == "transformers":
        yield from _without_servers(config)
        return
    yield from _with_servers(config)
    yield from _with_vllm(config) if engine_type == "vllm" else _with_sglang(config)


def _without_servers(config: RunConfig) -> Iterator[Problem]:
    rollout_model, prefix = config.explorer.rollout_model, "explorer.rollout_model"
    given: dict[str, tuple[Any, Any]] = {
        f"{prefix}.engine_num": (rollout_model.engine_num, 1),
        f"{prefix}.tensor_parallel_size": (rollout_model.tensor_parallel_size, 1),
        f"{prefix}.gpu_memory_utilization": (rollout_model.gpu_memory_utilization, None),
        f"{prefix}.extra_engine_args": (rollout_model.extra_engine_args, {}),
        "tuner.engine.urls": (list(config.tuner.engine.urls), []),
        "tuner.engine.weights": (config.tuner.engine.weights, "auto"),
        "tuner.engine.sleep": (config.tuner.engine.sleep, None),
    }
    for path, (value, default) in given.items():
        if value != default:
            yield Problem(
                path,
                f"{path} is {value}, but the engine over transformers is part of this process, "
                f"with the trainer's own weights; remove it, or set {prefix}.engine_type to vllm",
            )
    if config.tuner.placement == "separate":
        yield Problem(
            "tuner.placement",
            "tuner.placement is separate, but the engine over transformers generates with the "
            f"trainer's own weights: set it to colocate, or {prefix}.engine_type to vllm",
        )


def _with_servers(config: RunConfig) -> Iterator[Problem]:
    rollout_model, prefix = config.explorer.rollout_model, "explorer.rollout_model"
    urls = config.tuner.engine.urls
    if config.tuner.deterministic:
        yield Problem(
            "tuner.deterministic",
            f"tuner.deterministic is true, but {prefix}.engine_type is "
            f"{rollout_model.engine_type}, whose numbers depend on who else is in flight: set that "
            "to transformers",
        )
    if config.tuner.placement == "colocate" and urls:
        yield Problem(
            "tuner.placement",
            "tuner.placement is colocate, but tuner.engine.urls names servers elsewhere: set one "
            "of them",
        )
    if urls and rollout_model.engine_num not in (1, len(urls)):
        yield Problem(
            f"{prefix}.engine_num",
            f"{prefix}.engine_num is {rollout_model.engine_num}, but tuner.engine.urls names "
            f"{len(urls)}: remove engine_num",
        )


def _with_vllm(config: RunConfig) -> Iterator[Problem]:
    rollout_model, prefix = config.explorer.rollout_model, "explorer.rollout_model"
    if config.tuner.placement == "colocate" and rollout_model.engine_num > 1:
        yield Problem(
            f"{prefix}.engine_num",
            f"{prefix}.engine_num is {rollout_model.engine_num}, but tuner.placement is colocate, "
            "which is one engine in this process: set placement to separate, or engine_num to 1",
        )
    if config.tuner.engine.sleep and config.synchronizer.sync_offset:
        yield Problem(
            "tuner.engine.sleep",
            "tuner.engine.sleep is true, but synchronizer.sync_offset is "
            f"{config.synchronizer.sync_offset}, with which vLLM generates during updates: remove "
            "sleep, or set sync_offset to 0",
        )
    for name in sorted(_OURS.keys() & rollout_model.extra_engine_args.keys()):
        path = f"{prefix}.extra_engine_args.{name}"
        instead = f"set {_OURS[name]}" if _OURS[name] else "log-probs would not be exact otherwise"
        yield Problem(path, f"{path} cannot be set: {instead}")
    lora = config.model.lora
    if lora is not None and (lora.lora_rank or 0) > LARGEST_RANK:
        yield Problem(
            "model.lora_configs.0.lora_rank",
            f"model.lora_configs.0.lora_rank is {lora.lora_rank}, but vLLM serves {LARGEST_RANK} "
            f"at most: lower it, or set {prefix}.engine_type to transformers",
        )


def _with_sglang(config: RunConfig) -> Iterator[Problem]:
    rollout_model, prefix = config.explorer.rollout_model, "explorer.rollout_model"
    if not config.tuner.engine.urls:
        yield Problem(
            "tuner.engine.urls",
            f"{prefix}.engine_type is sglang, but tuner.engine.urls is not set: SGLang servers are "
            "not started by a run; start one as docs/engines.md says and name its address there",
        )
    if config.tuner.placement == "colocate":
        yield Problem(
            "tuner.placement",
            f"tuner.placement is colocate, but {prefix}.engine_type is sglang, whose servers run "
            "elsewhere: remove placement",
        )
    elsewhere: dict[str, tuple[Any, Any]] = {
        "tensor_parallel_size": (rollout_model.tensor_parallel_size, 1),
        "gpu_memory_utilization": (rollout_model.gpu_memory_utilization, None),
        "enforce_eager": (rollout_model.enforce_eager, False),
        "extra_engine_args": (rollout_model.extra_engine_args, {}),
    }
    for name, (value, default) in elsewhere.items():
        if value != default:
            yield Problem(
                f"{prefix}.{name}",
                f"{prefix}.{name} is {value}, but SGLang servers run elsewhere: set it where they "
                "are started, and remove it here",
            )
    if config.model.lora is not None:
        yield Problem(
            "model.lora_configs",
            f"model.lora_configs is set, but {prefix}.engine_type is sglang, to which adapters are "
            "not handed over: set it to vllm or transformers",
        )
    if config.model.top_k > 0 and config.model.top_p < 1:
        yield Problem(
            "model.top_k",
            f"model.top_k is {config.model.top_k} and model.top_p is {config.model.top_p}, but "
            f"{prefix}.engine_type is sglang, which cuts both from the whole distribution, where "
            "top_p is meant of what top_k keeps: set one of them alone",
        )
