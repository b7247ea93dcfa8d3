"""Configurations of a trainer, by short names of the settings that the tests are about."""

from __future__ import annotations

from typing import Any

from tuner.config import RunConfig

OPTIMIZER = "algorithm.optimizer"
KEYS = {
    "total_steps": "buffer.total_steps",
    "lr": f"{OPTIMIZER}.lr",
    "lr_scheduler": f"{OPTIMIZER}.lr_scheduler_type",
    "warmup_steps": f"{OPTIMIZER}.lr_warmup_steps",
    "min_lr_ratio": f"{OPTIMIZER}.min_lr_ratio",
    "betas": f"{OPTIMIZER}.betas",
    "weight_decay": f"{OPTIMIZER}.weight_decay",
    "grad_clip": "trainer.grad_clip",
    "max_tokens_per_micro_batch": "trainer.max_token_len_per_gpu",
    "optimizer_offload": "trainer.optimizer_offload",
    "critic_warmup": "trainer.critic_warmup",
    "critic_lr": "tuner.critic.lr",
    "critic_clip": "tuner.critic.cliprange_value",
    "max_completion": "model.max_response_tokens",
    "advantage": "algorithm.advantage_fn",
    "advantage_args": "algorithm.advantage_fn_args",
    "policy_loss": "algorithm.policy_loss_fn",
    "policy_loss_args": "algorithm.policy_loss_fn_args",
    "kl": "algorithm.kl_loss_fn",
    "kl_args": "algorithm.kl_loss_fn_args",
    "kl_penalty": "algorithm.kl_penalty_fn",
    "kl_penalty_args": "algorithm.kl_penalty_fn_args",
    "entropy": "algorithm.entropy_loss_fn_args",
    "aggregation": "algorithm.loss_agg_mode",
    "rejection_low": "tuner.algorithm.rejection_low",
    "rejection_high": "tuner.algorithm.rejection_high",
}


def changed(config: RunConfig, **numbers: Any) -> RunConfig:
    """`config` with some settings changed; a part that is exchanged has its own numbers."""
    tree = config.model_dump()
    if "rejection" in numbers:
        low, high = numbers.pop("rejection") or (None, None)
        numbers |= {"rejection_low": low, "rejection_high": high}
    if numbers.get("importance_cap", 1) is None:
        numbers |= {"importance_sampling": "none", "importance_cap": 2.0}
    for part in {"advantage", "policy_loss"} & numbers.keys():
        numbers.setdefault(f"{part}_args", None)
    for name, value in numbers.items():
        section = "tuner" if hasattr(config.tuner, name) else "tuner.algorithm"
        *path, key = KEYS.get(name, f"{section}.{name}").split(".")
        node = tree
        for one in path:
            node = node[one]
        assert key in node, name
        node[key] = value.model_dump() if hasattr(value, "model_dump") else value
    return RunConfig.model_validate(tree)


def training(**numbers: Any) -> RunConfig:
    """The configuration of a trainer with `multi_step_grpo`'s defaults, on the token tree."""
    return changed(RunConfig(name="a-run"), **{"layout": "tree", **numbers})
