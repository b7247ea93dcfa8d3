"""Settings that are fine alone and contradict each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tuner.config.algorithm_conflicts import algorithm_conflicts
from tuner.config.asynchronous_conflicts import asynchronous_conflicts
from tuner.config.engine import engine_conflicts
from tuner.config.problems import Problem
from tuner.config.recorded_conflicts import recorded_conflicts
from tuner.config.schema import RunConfig


def conflicts(config: RunConfig, foreign: Mapping[str, Any]) -> list[Problem]:
    """Every contradiction in a configuration whose single values are valid.

    Args:
        config: The typed configuration.
        foreign: Keys that only Trinity-RFT reads, by dotted path, as they were set.
    """
    return [
        *_sizes(config, foreign),
        *_names(config),
        *_lora(config),
        *_sampling(config),
        *_agents(config),
        *asynchronous_conflicts(config),
        *engine_conflicts(config),
        *algorithm_conflicts(config),
        *recorded_conflicts(config, foreign),
    ]


def _sizes(config: RunConfig, foreign: Mapping[str, Any]) -> Iterator[Problem]:
    batch, group = config.buffer.batch_size, config.algorithm.repeat_times
    train_batch = foreign.get("buffer.train_batch_size")
    if config.mode == "train":
        if train_batch is not None and str(train_batch) not in ("0", str(batch)):
            yield Problem(
                "buffer.train_batch_size",
                f"buffer.train_batch_size is {train_batch} and buffer.batch_size is {batch}, but "
                "a step on recorded data takes one number of rows: set buffer.batch_size to it",
            )
    elif train_batch is not None and str(train_batch) not in ("0", str(batch * group)):
        yield Problem(
            "buffer.train_batch_size",
            f"buffer.train_batch_size is {train_batch}, but a step trains on every rollout of its "
            f"tasks, buffer.batch_size {batch} x algorithm.repeat_times {group} = {batch * group}; "
            "remove it, or change the other two",
        )
    optimizer = config.algorithm.optimizer
    if optimizer.lr_warmup_steps >= 0 and optimizer.lr_warmup_steps_ratio > 0:
        yield Problem(
            "algorithm.optimizer.lr_warmup_steps",
            f"algorithm.optimizer.lr_warmup_steps is {optimizer.lr_warmup_steps} and "
            f"lr_warmup_steps_ratio is {optimizer.lr_warmup_steps_ratio}: set one of them",
        )
    model, rollout_model = config.model, config.explorer.rollout_model
    if (
        model.max_model_len is not None
        and model.max_response_tokens is not None
        and model.max_response_tokens >= model.max_model_len
    ):
        yield Problem(
            "model.max_response_tokens",
            f"model.max_response_tokens is {model.max_response_tokens}, which leaves no room for a "
            f"prompt in model.max_model_len {model.max_model_len}; lower it or raise that",
        )
    if model.custom_chat_template is not None and model.chat_template_path is not None:
        yield Problem(
            "model.chat_template_path",
            "model.custom_chat_template and model.chat_template_path are both set: set one of them",
        )
    if config.tuner.reasoning == "keep" and rollout_model.reasoning_parser in (None, "none"):
        yield Problem(
            "tuner.reasoning",
            "tuner.reasoning is keep, but explorer.rollout_model.reasoning_parser is "
            f"{rollout_model.reasoning_parser or 'null'}: reasoning cannot be told from the rest "
            "of an answer; set the parser, or tuner.reasoning to template",
        )


def _names(config: RunConfig) -> Iterator[Problem]:
    seen: set[str] = {"train"}
    for index, taskset in enumerate(config.buffer.explorer_input.eval_tasksets):
        if taskset.name in seen:
            path = f"buffer.explorer_input.eval_tasksets.{index}.name"
            yield Problem(
                path, f"{path} is {taskset.name!r}, which is taken: give each set its own name"
            )
        seen.add(taskset.name)
    models: set[str] = set(config.tuner.auxiliary_models)
    for index, auxiliary in enumerate(config.explorer.auxiliary_models):
        if auxiliary.name in models:
            path = f"explorer.auxiliary_models.{index}.name"
            yield Problem(
                path, f"{path} is {auxiliary.name!r}, which is taken: give each model its own name"
            )
        models.add(auxiliary.name)


def _lora(config: RunConfig) -> Iterator[Problem]:
    for index, lora in enumerate(config.model.lora_configs):
        for key in ("target_modules", "exclude_modules"):
            if lora.path is not None and getattr(lora, key) is not None:
                path = f"model.lora_configs.{index}.{key}"
                yield Problem(
                    path,
                    f"{path} is set beside path, but the layers of an adapter are in its own "
                    "adapter_config.json; remove it",
                )


def _sampling(config: RunConfig) -> Iterator[Problem]:
    if config.rollout_args(config.buffer.explorer_input.taskset).temperature == 0:
        path = "buffer.explorer_input.taskset.rollout_args.temperature"
        yield Problem(
            path,
            f"{path} is 0: all rollouts of a group would be the same and there would be nothing to "
            "learn from; set it above 0",
        )


def _agents(config: RunConfig) -> Iterator[Problem]:
    tuner = config.tuner
    if tuner.agent is not None and tuner.workflow is not None:
        yield Problem(
            "tuner.agent",
            f"tuner.agent is {tuner.agent.type!r} and tuner.workflow is {tuner.workflow!r}: set "
            "one of them",
        )
    if (tuner.agent is None) != (tuner.environment is None):
        there, missing = (
            ("agent", "environment") if tuner.environment is None else ("environment", "agent")
        )
        yield Problem(
            f"tuner.{there}", f"tuner.{there} is set without tuner.{missing}: set both of them"
        )
