"""What Trinity-RFT would read as something else, or cannot do: refused by name, or warned of."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from tuner.backends.trinity.tree import lookup, training_sets
from tuner.config.problems import Problem

logger = logging.getLogger("tuner")


def refused(tree: Mapping[str, Any]) -> Iterator[Problem]:
    """Values that are ours and not Trinity-RFT's, or that would be read there as something else."""

    def refusal(key: str, value: Any, why: str) -> Problem | None:
        found = lookup(tree, key)
        return Problem(key, f"{key} is {found}: {why}") if found == value else None

    local = "or set tuner.backend to local"
    rules = [
        refusal(
            "algorithm.advantage_fn_args.std_cal_level",
            "none",
            "Trinity-RFT knows group and batch, and would take this for group; set one of them, "
            + local,
        ),
        refusal(
            "algorithm.loss_agg_mode",
            "rollout-mean",
            "a Trinity-RFT batch does not know which rows are one rollout; set "
            "seq-mean-token-mean, which is the same where each rollout becomes one experience, "
            + local,
        ),
        refusal(
            "algorithm.advantage_fn",
            "best_of_group",
            f"Trinity-RFT has no such advantage; set another, {local}",
        ),
        refusal(
            "explorer.rollout_model.enable_openai_api",
            False,
            "agents are recorded between their requests and Trinity-RFT's OpenAI API; remove it",
        ),
        refusal(
            "cluster.ray_address",
            "auto",
            "it would join whatever cluster runs on this machine; write the cluster's address, or "
            "remove it for a cluster of this run's own",
        ),
    ]
    yield from (problem for problem in rules if problem is not None)
    yield from _not_yet(tree)
    strategy = str(lookup(tree, "trainer.trainer_strategy", "fsdp2"))
    if lookup(tree, "algorithm.optimizer.lr_scheduler_type") == "linear" and "fsdp" in strategy:
        yield Problem(
            "algorithm.optimizer.lr_scheduler_type",
            "algorithm.optimizer.lr_scheduler_type is linear: Trinity-RFT's trainer has constant "
            f"and cosine; set one of them, {local}",
        )
    warm = float(lookup(tree, "model.temperature", 1.0))
    for taskset in training_sets(tree):
        own = lookup(taskset, "rollout_args.temperature")
        if own is not None and float(own) != warm:
            yield Problem(
                "buffer.explorer_input.taskset.rollout_args.temperature",
                f"the tasks are sampled at rollout_args.temperature {own}, and Trinity-RFT trains "
                f"at model.temperature {warm:g}: its ratios would compare two policies; set both "
                "to the same",
            )
    clip, other = lookup(tree, "trainer.grad_clip"), lookup(tree, "algorithm.optimizer.clip_grad")
    if clip is not None and other is not None and clip != other:
        yield Problem(
            "trainer.grad_clip",
            f"trainer.grad_clip is {clip} and algorithm.optimizer.clip_grad is {other}: both limit "
            "the gradient's norm; set one of them",
        )


def _not_yet(tree: Mapping[str, Any]) -> Iterator[Problem]:
    """What Trinity-RFT can do and `TunerWorkflow` has not been run with."""
    engine = lookup(tree, "explorer.rollout_model.engine_type", "vllm")
    if engine != "vllm":
        yield Problem(
            "explorer.rollout_model.engine_type",
            f"explorer.rollout_model.engine_type is {engine}: agents are recorded in front of "
            "Trinity-RFT's vLLM engines; set it to vllm, or remove it",
        )
    for key, what in (
        ("model.tinker.enable", "Tinker"),
        ("model.external_model.enable", "external models"),
        ("model.lora_configs", "LoRA"),
        ("algorithm.enable_router_replay", "router replay"),
        ("stages", "stages"),
    ):
        if lookup(tree, key):
            yield Problem(key, f"{key} is set: tune() does not do {what} on Trinity-RFT; remove it")


def warn_of_truncated_sampling(tree: Mapping[str, Any]) -> None:
    """Say that the trainer does not know of a nucleus that the tasks are sampled from."""
    top_p, top_k = lookup(tree, "model.top_p", 1.0), lookup(tree, "model.top_k", -1)
    for taskset in training_sets(tree):
        top_p = lookup(taskset, "rollout_args.top_p", top_p)
        top_k = lookup(taskset, "rollout_args.top_k", top_k)
    if top_p < 1 or top_k > 0:
        logger.warning(
            "the tasks are sampled with top_p %s and top_k %s; Trinity-RFT's trainer computes over "
            "all tokens, so its ratios are off from the first step on",
            top_p,
            top_k,
        )
