"""TRL's `GRPOConfig`, field by field: which setting it is here, or why it is refused."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any

from tuner.errors import ConfigError

logger = logging.getLogger("tuner")

# Fields that are settings here, with TRL's defaults (1.16).
_DEFAULTS: dict[str, Any] = {
    "output_dir": "trainer_output",
    "run_name": None,
    # Batches: TRL counts completions.
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "generation_batch_size": None,
    "steps_per_generation": None,
    "num_generations": 8,
    "num_generations_eval": None,
    "num_iterations": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "shuffle_dataset": True,
    "seed": 42,
    "data_seed": None,
    # The optimizer.
    "learning_rate": 1e-6,
    "optim": "adamw_torch_fused",
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    # The loss.
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "scale_rewards": "group",
    "reward_weights": None,
    "mask_truncated_completions": False,
    # Sampling.
    "max_completion_length": 512,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "chat_template_kwargs": None,
    "max_tool_calling_iterations": None,
    # The engine and the model.
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_tensor_parallel_size": 1,
    "vllm_max_model_length": None,
    "bf16": None,
    "use_cpu": False,
    "model_init_kwargs": None,
    # When to evaluate, to save and whom to tell.
    "eval_strategy": "no",
    "eval_steps": None,
    "save_strategy": "steps",
    "save_steps": 500,
    "save_total_limit": None,
    "report_to": "none",
}
# Fields that change no result here: what they ask for is done otherwise, or always.
_WITHOUT_EFFECT = frozenset(
    """average_tokens_across_devices cache_implementation dataloader_num_workers
    dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor
    disable_tqdm do_eval do_train eval_on_start ds3_gather_for_generation
    gradient_checkpointing gradient_checkpointing_kwargs include_num_input_tokens_seen
    log_completions log_level log_multimodal log_unique_prompts logging_dir
    logging_first_step logging_steps logging_strategy num_completions_to_print
    overwrite_output_dir pad_to_multiple_of per_device_eval_batch_size save_only_model
    save_safetensors torch_compile torch_empty_cache_steps
    transformers_continuous_batching_config use_transformers_continuous_batching
    vllm_enable_sleep_mode""".split()  # noqa: SIM905  # a list of words
)
# What to do in the place of some that are refused.
_INSTEAD = {
    "callbacks": "metrics are in metrics.jsonl and the trackers of report_to",
    "deepspeed": "one process trains here; tuner.backend trinity is for several GPUs",
    "fsdp": "one process trains here; tuner.backend trinity is for several GPUs",
    "fp16": "leave it out: weights are float32, or bfloat16 where the GPU can",
    "generation_kwargs": "give temperature, top_p, top_k, min_p or repetition_penalty",
    "multi_objective_aggregation": "rewards are summed by their weights, then normalised",
    "push_to_hub": "upload result.checkpoint, a Hugging Face folder",
    "remove_unused_columns": "reward functions get all columns",
    "resume_from_checkpoint": "a run with the same output_dir goes on by itself",
    "vllm_server_base_url": "the engine is started here: use_vllm=True",
}
# Of the others these may be given where they ask for nothing.
_MAY_BE_OFF = frozenset(
    """auto_find_batch_size bf16_full_eval disable_dropout entropy_coef fp16_full_eval
    group_by_length load_best_model_at_end log_completions_hub_repo neftune_noise_alpha
    off_policy_mask_threshold sync_ref_model tf32 trust_remote_code use_adaptive_entropy
    use_liger_kernel vllm_importance_sampling_correction""".split()  # noqa: SIM905  # a list of words
)
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "auto": "auto"}
# loss_type, with ratios of tokens or of sequences -> algorithm, aggregation.
_LOSSES = {
    ("grpo", "token"): ("grpo", "seq-mean-token-mean"),
    ("bnpo", "token"): ("grpo", "token-mean"),
    ("dapo", "token"): ("grpo", "token-mean"),
    ("dr_grpo", "token"): ("grpo", "seq-mean-token-sum-norm"),
    ("grpo", "sequence"): ("gspo", "seq-mean-token-mean"),
    ("cispo", "token"): ("cispo", "token-mean"),
    ("sapo", "token"): ("sapo", "seq-mean-token-mean"),
}
_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_torch_xla")
_SCHEDULES = {name: name for name in ("linear", "cosine", "constant")}
_SCHEDULES["constant_with_warmup"] = "constant"


class GRPOConfig:
    """TRL's `GRPOConfig` where TRL is not installed; its own works as well.

    Args:
        output_dir: The run is in `<output_dir>/trl/<run_name>`.
        fields: As TRL names them, with TRL's defaults.

    Raises:
        ConfigError: A field is nothing that can be set here.
    """

    def __init__(self, output_dir: str | None = None, **fields: Any) -> None:
        given = fields if output_dir is None else {"output_dir": str(output_dir), **fields}
        _check_known(given)
        self.__dict__.update(_DEFAULTS | given)

    def __getattr__(self, name: str) -> Any:  # for type checkers: the fields are in __dict__
        raise AttributeError(f"GRPOConfig has no field {name!r} here")


def _check_known(given: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: A field is given that is not known here, and not off.
    """
    for name, value in given.items():
        off = name in _MAY_BE_OFF or name in _INSTEAD
        if name in _DEFAULTS or name in _WITHOUT_EFFECT or (off and not value):
            continue
        instead = _INSTEAD.get(name)
        raise ConfigError(
            f"GRPOConfig.{name} is {value!r}, which is no setting here"
            + (f": {instead}" if instead else ": leave it out")
        )
    if idle := sorted(name for name in given if name in _WITHOUT_EFFECT):
        logger.info("GRPOConfig: %s: of no effect on the result here", ", ".join(idle))


def read_config(args: Any) -> GRPOConfig:
    """TRL's configuration, or a mapping, as ours; ours as it is.

    Raises:
        ConfigError: It is neither, or a field is set that has no equal here.
    """
    if args is None or isinstance(args, Mapping):
        return GRPOConfig(**(args or {}))
    if isinstance(args, GRPOConfig):
        return args
    kind: Any = type(args)
    if not dataclasses.is_dataclass(args) or kind.__name__ != "GRPOConfig":
        raise ConfigError(f"args is {args!r:.60}: give a GRPOConfig, TRL's or tuner's")
    # What TRL makes of its defaults, on this machine.
    same = {name: getattr(args, name) for name in ("use_cpu", "bf16", "output_dir")}
    usual = kind(**same)
    given = {
        one.name: getattr(args, one.name)
        for one in dataclasses.fields(args)
        if one.init and getattr(args, one.name) != getattr(usual, one.name)
    }
    given |= {name: value for name, value in same.items() if name != "bf16" or value is False}
    return GRPOConfig(**given)


def settings_of(config: GRPOConfig, rows: int | None) -> dict[str, Any]:
    """The configuration as keys of the file.

    Args:
        rows: Of the training set; None where nobody knows.

    Raises:
        ConfigError: A value has no equal here.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "WORLD_SIZE is more than 1: start the script with python, not with accelerate or "
            "torchrun; one process trains here, and tuner.backend trinity is for several GPUs"
        )
    prompts = prompts_in_a_step(config)
    epoch = None if rows is None else max(1, rows // prompts)
    found = {
        "checkpoint_root_dir": config.output_dir,
        "project": "trl",
        "name": config.run_name or "grpo",
        "buffer.batch_size": prompts,
        "buffer.total_steps": _steps(config, epoch),
        "algorithm.repeat_times": config.num_generations,
        "tuner.algorithm.updates": config.num_iterations,
        "tuner.seed": config.seed,
        "trainer.grad_clip": config.max_grad_norm,
        "explorer.eval_interval": _interval(config, "eval", epoch),
        "trainer.save_interval": _interval(config, "save", epoch),
        **_data(config),
        **_optimizer(config),
        **_loss(config),
        **_sampling(config),
        **_engine(config),
    }
    if (limit := config.save_total_limit) is not None:
        found["trainer.max_checkpoints_to_keep"] = limit
    trackers = config.report_to
    if trackers not in ("none", "all", ["none"], [], None):
        found["monitor.monitor_type"] = [trackers] if isinstance(trackers, str) else trackers
    return found


def _word(value: Any) -> str:
    """One of transformers' enumerations as the text that it is."""
    return str(getattr(value, "value", value))


def _refuse(config: GRPOConfig, name: str, instead: str) -> ConfigError:
    return ConfigError(f"GRPOConfig.{name} is {getattr(config, name)!r}: {instead}")


def prompts_in_a_step(config: GRPOConfig) -> int:
    """
    Raises:
        ConfigError: A step has no whole number of them, or trains something else than it samples.
    """
    accumulated = config.gradient_accumulation_steps
    completions = config.per_device_train_batch_size * accumulated
    if config.steps_per_generation not in (None, accumulated):
        raise _refuse(
            config,
            "steps_per_generation",
            "a step trains what it sampled; leave it out, or see synchronizer.sync_offset",
        )
    if config.generation_batch_size not in (None, completions):
        raise _refuse(
            config,
            "generation_batch_size",
            f"a step samples what it trains, {completions} completions; leave it out",
        )
    size = config.num_generations
    if completions % size:
        raise _refuse(
            config, "num_generations", f"a step has {completions} completions, no multiple of it"
        )
    return int(completions // size)


def _steps(config: GRPOConfig, epoch: int | None) -> int:
    """Batches: TRL counts an update of each iteration over a batch."""
    limit, updates = config.max_steps, config.num_iterations
    if limit > 0:
        return int(-(-limit // updates))
    if epoch is None:
        raise _refuse(config, "max_steps", "nobody knows how long the dataset is; set it")
    return max(1, int(config.num_train_epochs * epoch))


def _interval(config: GRPOConfig, what: str, epoch: int | None) -> int:
    strategy = _word(getattr(config, f"{what}_strategy"))
    if strategy == "no":
        return 0
    if strategy == "epoch" and epoch is not None:
        return epoch
    every = getattr(config, f"{what}_steps") if strategy == "steps" else None
    if not every or every < 1:
        raise _refuse(config, f"{what}_strategy", f"'no', 'epoch', or 'steps' with {what}_steps")
    return int(every)


def _data(config: GRPOConfig) -> dict[str, Any]:
    seed, own = config.seed, config.data_seed
    selector = "buffer.explorer_input.taskset.data_selector"
    if config.num_generations_eval not in (None, 1):
        raise _refuse(config, "num_generations_eval", "evaluation is greedy, one answer each")
    return {
        f"{selector}.selector_type": "shuffle" if config.shuffle_dataset else "sequential",
        f"{selector}.seed": seed if own is None else own,
    }


def _optimizer(config: GRPOConfig) -> dict[str, Any]:
    schedule = _word(config.lr_scheduler_type)
    if _word(config.optim) not in _ADAMW:
        raise _refuse(config, "optim", f"one of {', '.join(_ADAMW)}")
    if schedule not in _SCHEDULES:
        raise _refuse(config, "lr_scheduler_type", f"one of {', '.join(_SCHEDULES)}")
    warmup = config.warmup_steps
    ratio = warmup if 0 < warmup < 1 else 0.0
    section = "algorithm.optimizer"
    return {
        f"{section}.lr": config.learning_rate,
        f"{section}.lr_scheduler_type": _SCHEDULES[schedule],
        f"{section}.lr_warmup_steps": -1 if ratio else int(warmup),
        f"{section}.lr_warmup_steps_ratio": ratio,
        f"{section}.min_lr_ratio": 0.0,
        f"{section}.weight_decay": config.weight_decay,
        f"{section}.betas": [config.adam_beta1, config.adam_beta2],
    }


def _loss(config: GRPOConfig) -> dict[str, Any]:
    kind, level = config.loss_type, config.importance_sampling_level
    if (kind, level) not in _LOSSES:
        known = ", ".join(f"{one} of {ratios}s" for one, ratios in _LOSSES)
        raise _refuse(config, "loss_type", f"with ratios of {level}s there is none; known: {known}")
    if kind == "bnpo" and config.gradient_accumulation_steps > 1:
        raise _refuse(config, "loss_type", "micro-batches change no result here: 'dapo' is alike")
    algorithm, aggregation = _LOSSES[kind, level]
    scale = {True: "group", False: "none"}.get(config.scale_rewards, config.scale_rewards)
    kl = "none"
    if config.beta:
        # k2 has the gradient that TRL's weighted k3 has where the policy sampled itself.
        kl = "k2" if config.use_bias_correction_kl else "k3"
    section = "algorithm.policy_loss_fn_args"
    found: dict[str, Any] = {
        "algorithm.algorithm_type": algorithm,
        "algorithm.loss_agg_mode": aggregation,
        "algorithm.advantage_fn_args.std_cal_level": scale,
        "algorithm.advantage_fn_args.epsilon": 1e-4,
        "algorithm.kl_loss_fn": kl,
    }
    if kl != "none":
        found["algorithm.kl_loss_fn_args.kl_coef"] = config.beta
    low, high = config.epsilon, config.epsilon_high
    high = low if high is None else high
    if algorithm == "sapo":
        return found | {
            f"{section}.tau_pos": config.sapo_temperature_pos,
            f"{section}.tau_neg": config.sapo_temperature_neg,
        }
    if algorithm == "cispo":
        if high <= 1:
            raise _refuse(config, "epsilon_high", "cispo's bound on the weight; more than 1")
        return found | {f"{section}.clip_range_low": 1.0, f"{section}.clip_range_high": high - 1}
    found |= {f"{section}.clip_range_low": low, f"{section}.clip_range_high": high}
    if algorithm == "grpo":
        found[f"{section}.clip_ratio_c"] = config.delta or 1e9
    elif config.delta is not None:
        raise _refuse(config, "delta", "for ratios of tokens")
    return found


def _sampling(config: GRPOConfig) -> dict[str, Any]:
    found = {"model.temperature": config.temperature, "model.top_p": config.top_p}
    found["model.top_k"] = config.top_k or -1
    if (limit := config.max_completion_length) is not None:
        found["model.max_response_tokens"] = limit
    return found


def _engine(config: GRPOConfig) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if config.use_cpu:
        found["tuner.device"] = "cpu"
    if config.bf16 is False:
        found["tuner.dtype"] = "float32"
    for name, value in (config.model_init_kwargs or {}).items():
        dtype = _DTYPES.get(str(value).removeprefix("torch."))
        if name not in ("dtype", "torch_dtype") or dtype is None:
            raise ConfigError(
                f"GRPOConfig.model_init_kwargs[{name!r}] is {value!r}: only dtype is read, one of "
                f"{', '.join(_DTYPES)}"
            )
        found["tuner.dtype"] = dtype
    if config.vllm_max_model_length is not None:
        found["model.max_model_len"] = config.vllm_max_model_length
    if config.use_vllm:
        if config.vllm_mode != "colocate":
            raise _refuse(config, "vllm_mode", "the engine is started here; 'colocate'")
        section = "explorer.rollout_model"
        found |= {
            f"{section}.engine_type": "vllm",
            f"{section}.gpu_memory_utilization": config.vllm_gpu_memory_utilization,
            f"{section}.tensor_parallel_size": config.vllm_tensor_parallel_size,
        }
    return found
