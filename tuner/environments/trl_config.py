"""TRL's `GRPOConfig`: the equivalent setting of each field, or the reason that it is refused."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tuner.config.foreign import read_table
from tuner.errors import ConfigError

logger = logging.getLogger("tuner")

_TABLE = read_table(Path(__file__).with_name("trl_keys.yaml"))
_DEFAULTS: dict[str, Any] = {name: row["default"] for name, row in _TABLE["read"].items()}
_DTYPES = ("float32", "bfloat16", "auto")
# loss_type and level of the ratios (token or sequence) -> algorithm, aggregation.
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


class GRPOConfig:
    """TRL's `GRPOConfig` for use without TRL; TRL's own works as well.

    Args:
        output_dir: The run is in `<output_dir>/trl/<run_name>`.
        fields: Fields of TRL's `GRPOConfig`, with TRL's defaults.

    Raises:
        ConfigError: A field is not supported here.
    """

    def __init__(self, output_dir: str | None = None, **fields: Any) -> None:
        given = fields if output_dir is None else {"output_dir": str(output_dir), **fields}
        _check_known(given)
        self.__dict__.update(_DEFAULTS | given)

    def __getattr__(self, name: str) -> Any:  # for type checkers: the fields are in __dict__
        raise AttributeError(f"GRPOConfig has no field {name!r} here")


def _check_known(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a field that is unknown here and not off."""
    for name, value in given.items():
        instead = _TABLE["refused"].get(name)
        off = (instead is not None or name in _TABLE["off"]) and not value
        if off or name in _DEFAULTS or name in _TABLE["ignored"]:
            continue
        raise ConfigError(
            f"GRPOConfig.{name} is {value!r}, which is not supported here"
            + (f": {instead}" if instead else ": remove it")
        )
    if idle := sorted(name for name in given if name in _TABLE["ignored"]):
        logger.info("GRPOConfig: %s: no effect on the result here", ", ".join(idle))


def read_config(args: Any) -> GRPOConfig:
    """Convert TRL's configuration or a mapping to ours; raises ConfigError if a field has no
    equivalent here."""
    if args is None or isinstance(args, Mapping):
        return GRPOConfig(**(args or {}))
    if isinstance(args, GRPOConfig):
        return args
    kind: Any = type(args)
    if not dataclasses.is_dataclass(args) or kind.__name__ != "GRPOConfig":
        raise ConfigError(f"args is {args!r:.60}: give a GRPOConfig, TRL's or tuner's")
    # TRL's defaults on this machine.
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
    """The configuration as keys of the file, for a training set of `rows` (None: unknown); raises
    ConfigError if a value has no equivalent here."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "WORLD_SIZE is more than 1: start the script with python, not with accelerate or "
            "torchrun; training runs in one process; for several GPUs set tuner.backend to trinity"
        )
    if config.num_generations_eval not in (None, 1):
        raise _refuse(config, "num_generations_eval", "evaluation is greedy, one answer each")
    seed = config.seed if config.data_seed is None else config.data_seed
    prompts = prompts_in_a_step(config)
    epoch = None if rows is None else max(1, rows // prompts)
    found = {
        **dict(_translated(config)),
        "project": "trl",
        "name": config.run_name or "grpo",
        "model.top_k": config.top_k or -1,
        "buffer.batch_size": prompts,
        "buffer.total_steps": _steps(config, epoch),
        "explorer.eval_interval": _interval(config, "eval", epoch),
        "trainer.save_interval": _interval(config, "save", epoch),
        "buffer.explorer_input.taskset.data_selector.seed": seed,
        **_optimizer(config),
        **_loss(config),
        **_engine(config),
    }
    trackers = config.report_to
    if trackers not in ("none", "all", ["none"], [], None):
        found["monitor.monitor_type"] = [trackers] if isinstance(trackers, str) else trackers
    return found


def _word(value: Any) -> str:
    """A transformers enumeration value as text."""
    return str(getattr(value, "value", value))


def _refuse(config: GRPOConfig, name: str, instead: str) -> ConfigError:
    return ConfigError(f"GRPOConfig.{name} is {getattr(config, name)!r}: {instead}")


def _translated(config: GRPOConfig) -> Iterator[tuple[str, Any]]:
    """Fields that correspond to one setting each."""
    for name, row in _TABLE["read"].items():
        value = getattr(config, name)
        if "to" not in row or value is None:
            continue
        if (values := row.get("values")) is not None:
            value = value if isinstance(value, bool) else _word(value)
            if value not in values:
                raise _refuse(config, name, f"one of {', '.join(map(str, values))}")
            value = values[value]
        if value is not None:
            yield row["to"], value


def prompts_in_a_step(config: GRPOConfig) -> int:
    """Number of prompts per step; raises ConfigError if it is not a whole number, or a step trains
    other completions than it samples."""
    accumulated = config.gradient_accumulation_steps
    completions = config.per_device_train_batch_size * accumulated
    if config.steps_per_generation not in (None, accumulated):
        instead = "a step trains what it sampled; remove it, or see synchronizer.sync_offset"
        raise _refuse(config, "steps_per_generation", instead)
    if config.generation_batch_size not in (None, completions):
        instead = f"a step samples what it trains, {completions} completions; remove it"
        raise _refuse(config, "generation_batch_size", instead)
    if completions % config.num_generations:
        instead = f"a step's {completions} completions are not a multiple of it"
        raise _refuse(config, "num_generations", instead)
    return int(completions // config.num_generations)


def _steps(config: GRPOConfig, epoch: int | None) -> int:
    """Number of batches: TRL counts an update of each iteration over a batch."""
    limit, updates = config.max_steps, config.num_iterations
    if limit > 0:
        return int(-(-limit // updates))
    if epoch is None:
        raise _refuse(config, "max_steps", "the length of the dataset is unknown; set it")
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


def _optimizer(config: GRPOConfig) -> dict[str, Any]:
    if _word(config.optim) not in _ADAMW:
        raise _refuse(config, "optim", f"one of {', '.join(_ADAMW)}")
    warmup = config.warmup_steps
    ratio = warmup if 0 < warmup < 1 else 0.0
    section = "algorithm.optimizer"
    return {
        f"{section}.lr_warmup_steps": -1 if ratio else int(warmup),
        f"{section}.lr_warmup_steps_ratio": ratio,
        f"{section}.min_lr_ratio": 0.0,
        f"{section}.betas": [config.adam_beta1, config.adam_beta2],
    }


def _loss(config: GRPOConfig) -> dict[str, Any]:
    kind, level = config.loss_type, config.importance_sampling_level
    if (kind, level) not in _LOSSES:
        known = ", ".join(f"{one} of {ratios}s" for one, ratios in _LOSSES)
        raise _refuse(config, "loss_type", f"unknown with ratios of {level}s; known: {known}")
    if kind == "bnpo" and config.gradient_accumulation_steps > 1:
        raise _refuse(config, "loss_type", "micro-batches never change the result; use 'dapo'")
    algorithm, aggregation = _LOSSES[kind, level]
    scale = {True: "group", False: "none"}.get(config.scale_rewards, config.scale_rewards)
    kl = "none"
    if config.beta:
        # k2 has the gradient of TRL's weighted k3 for tokens that the policy sampled.
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


def _engine(config: GRPOConfig) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in (config.model_init_kwargs or {}).items():
        dtype = str(value).removeprefix("torch.")
        if name not in ("dtype", "torch_dtype") or dtype not in _DTYPES:
            raise ConfigError(
                f"GRPOConfig.model_init_kwargs[{name!r}] is {value!r}: only dtype is supported, as "
                f"one of {', '.join(_DTYPES)}"
            )
        found["tuner.dtype"] = dtype
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
