"""Settings that are fine alone and contradict each other.

A sentence is about the key that it begins with, unless it is a `Problem`, which names another.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from tuner.algorithms.table import ALGORITHMS
from tuner.config.algorithm_conflicts import algorithm_conflicts, recorded_conflicts
from tuner.config.history_conflicts import history_conflicts
from tuner.config.problems import Problem
from tuner.config.schema import RunConfig
from tuner.config.tuner_section import EnvironmentSection

_OFFSET = "synchronizer.sync_offset"
_STRATEGY = "algorithm.sample_strategy"
_STALENESS = "algorithm.sample_strategy_args.max_staleness"

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
    "logprobs_mode": None,
    "enable_prefix_caching": None,
    "generation_config": None,
    "structured_outputs_config": None,
    "worker_extension_cls": None,
}


def conflicts(config: RunConfig, foreign: Mapping[str, Any]) -> list[Problem]:
    """Every contradiction in a configuration whose single values are valid.

    Args:
        config: The typed configuration.
        foreign: Keys that only Trinity-RFT reads, by dotted path, as they were set.
    """
    found = [
        *_sizes(config, foreign),
        *_names(config),
        *_lora(config),
        *_sampling(config),
        *_agents(config),
        *_selector(config),
        *_asynchronous(config),
        *_engine(config),
        *algorithm_conflicts(config),
        *recorded_conflicts(config, foreign),
        *history_conflicts(config),
    ]
    return [one if isinstance(one, Problem) else Problem(one.split(" ")[0], one) for one in found]


def _sizes(config: RunConfig, foreign: Mapping[str, Any]) -> Iterator[str | Problem]:
    batch, group = config.buffer.batch_size, config.algorithm.repeat_times
    train_batch = foreign.get("buffer.train_batch_size")
    if config.mode == "train":
        if train_batch is not None and str(train_batch) not in ("0", str(batch)):
            yield (
                f"buffer.train_batch_size is {train_batch} and buffer.batch_size is {batch}, but "
                "a step on recorded data takes one number of rows: set buffer.batch_size to it"
            )
    elif train_batch is not None and str(train_batch) not in ("0", str(batch * group)):
        yield (
            f"buffer.train_batch_size is {train_batch}, but a step trains on every rollout of its "
            f"tasks, buffer.batch_size {batch} x algorithm.repeat_times {group} = {batch * group}; "
            "remove it, or change the other two"
        )
    optimizer = config.algorithm.optimizer
    if optimizer.lr_warmup_steps >= 0 and optimizer.lr_warmup_steps_ratio > 0:
        yield (
            f"algorithm.optimizer.lr_warmup_steps is {optimizer.lr_warmup_steps} and "
            f"lr_warmup_steps_ratio is {optimizer.lr_warmup_steps_ratio}: set one of them"
        )
    model, rollout_model = config.model, config.explorer.rollout_model
    if (
        model.max_model_len is not None
        and model.max_response_tokens is not None
        and model.max_response_tokens >= model.max_model_len
    ):
        yield (
            f"model.max_response_tokens is {model.max_response_tokens}, which leaves no room for a "
            f"prompt in model.max_model_len {model.max_model_len}; lower it or raise that"
        )
    if model.custom_chat_template is not None and model.chat_template_path is not None:
        yield Problem(
            "model.chat_template_path",
            "model.custom_chat_template and model.chat_template_path are both set: set one of them",
        )
    if config.tuner.reasoning == "keep" and rollout_model.reasoning_parser in (None, "none"):
        yield (
            "tuner.reasoning is keep, but explorer.rollout_model.reasoning_parser is "
            f"{rollout_model.reasoning_parser or 'null'}: reasoning cannot be told from the rest "
            "of an answer; set the parser, or tuner.reasoning to template"
        )


def _names(config: RunConfig) -> Iterator[str]:
    folder = config.checkpoint_root_dir
    for key, value in ("project", config.project), ("name", config.name):
        inside = Path(os.path.normpath(folder / value))
        folder = Path(os.path.normpath(folder))
        if folder not in inside.parents:
            yield f"{key} is {value!r}, which leads out of {folder}: give a name of one folder"
        folder = inside
    seen: set[str] = {"train"}
    for index, taskset in enumerate(config.buffer.explorer_input.eval_tasksets):
        if taskset.name in seen:
            path = f"buffer.explorer_input.eval_tasksets.{index}.name"
            yield f"{path} is {taskset.name!r}, which is taken: give each set its own name"
        seen.add(taskset.name)
    models: set[str] = set(config.tuner.auxiliary_models)
    for index, auxiliary in enumerate(config.explorer.auxiliary_models):
        if auxiliary.name in models:
            path = f"explorer.auxiliary_models.{index}.name"
            yield f"{path} is {auxiliary.name!r}, which is taken: give each model its own name"
        models.add(auxiliary.name)


def _lora(config: RunConfig) -> Iterator[str]:
    for index, lora in enumerate(config.model.lora_configs):
        for key in ("target_modules", "exclude_modules"):
            if lora.path is not None and getattr(lora, key) is not None:
                path = f"model.lora_configs.{index}.{key}"
                yield (
                    f"{path} is set beside path, but the layers of an adapter are in its own "
                    "adapter_config.json; remove it"
                )


def _sampling(config: RunConfig) -> Iterator[str]:
    if config.rollout_args(config.buffer.explorer_input.taskset).temperature == 0:
        path = "buffer.explorer_input.taskset.rollout_args.temperature"
        yield (
            f"{path} is 0: all rollouts of a group would be the same and there would be nothing to "
            "learn from; set it above 0"
        )
    for index, taskset in enumerate(config.buffer.explorer_input.eval_tasksets):
        if taskset.repeat_times > 1 and config.rollout_args(taskset).temperature == 0:
            path = f"buffer.explorer_input.eval_tasksets.{index}"
            yield (
                f"{path}.repeat_times is {taskset.repeat_times}, but {path}.rollout_args."
                "temperature is 0 (as where it is not set): all rollouts of a task would be the "
                "same; set it above 0, or to null for model.temperature"
            )


def _agents(config: RunConfig) -> Iterator[str]:
    tuner = config.tuner
    if tuner.agent is not None and tuner.workflow is not None:
        yield (
            f"tuner.agent is {tuner.agent.type!r} and tuner.workflow is {tuner.workflow!r}: set "
            "one of them"
        )
    if tuner.workers == "ray":
        yield from tuner.ray.problems(
            config.cluster.ray_address, own_models=bool(config.explorer.auxiliary_models)
        )
    for name, model in tuner.auxiliary_models.items():
        most = model.max_concurrent
        if most is not None and isinstance(tuner.workers, int) and most < tuner.workers:
            yield (
                f"tuner.auxiliary_models.{name}.max_concurrent is {most}, and each of "
                f"tuner.workers {tuner.workers} has a share of it: lower tuner.workers, or raise it"
            )
    environment = tuner.environment
    of_agent = isinstance(environment, EnvironmentSection) and environment.type is not None
    if (tuner.agent is not None) != of_agent and (of_agent or environment is None):
        there, missing = ("environment", "agent") if of_agent else ("agent", "environment")
        yield f"tuner.{there} is set without tuner.{missing}: set both of them"
    if environment is None or of_agent:
        return
    for name, given in (
        ("agent", tuner.agent and tuner.agent.type),
        ("workflow", tuner.workflow),
        ("judge", tuner.judge),
    ):
        if given is not None:
            yield (
                f"tuner.{name} is {given!r}, but tuner.environment brings a workflow and its "
                "judge: remove one of them"
            )


def _selector(config: RunConfig) -> Iterator[str]:
    """Settings of drawing tasks that are without use."""
    section, path = config.tuner.tasks.selector, "tuner.tasks.selector"
    if section is None:
        return
    if config.mode == "train":
        yield f"{path} is set, but mode train makes no rollouts: remove it"
    order = "buffer.explorer_input.taskset.data_selector.selector_type"
    if (kind := config.buffer.explorer_input.taskset.data_selector.selector_type) != "sequential":
        yield f"{order} is {kind}, but {path} says which tasks a step draws: remove one of them"
    if section.field is None and section.kind == "stratified":
        yield f"{path}.field is not set, but {path}.kind is stratified: name a field of the tasks"
    if section.field is None and section.weights:
        yield f"{path}.weights is set, but {path}.field is not: name the field that they are about"
    if section.kind == "stratified" and "floor" in section.changed():
        yield (
            f"{path}.floor is {section.floor}, but {path}.kind stratified gives no task a weight: "
            "remove it"
        )


def _asynchronous(config: RunConfig) -> Iterator[str]:
    """Every setting of running ahead that would be without use or sense."""
    offset = config.synchronizer.sync_offset
    algorithm, over = config.algorithm, config.explorer.over_rollout
    limit = algorithm.sample_strategy_args.max_staleness
    recorded = ALGORITHMS[algorithm.algorithm_type].recorded is not None
    if recorded or config.mode == "train":
        who = f"algorithm.algorithm_type {algorithm.algorithm_type}" if recorded else "mode train"
        for key, given in (
            (_OFFSET, offset),
            (_STRATEGY, algorithm.sample_strategy != "default"),
            ("explorer.over_rollout.ratio", over.ratio),
        ):
            if given:
                yield f"{key} is set, but {who} makes no rollouts: remove it"
        return
    if offset and config.tuner.deterministic:
        yield (
            f"{_OFFSET} is {offset} and tuner.deterministic is true, but which weights sample a "
            "token depends on how long things take: set one of them to its default"
        )
    if algorithm.sample_strategy == "staleness_control":
        if not offset:
            yield (
                f"{_STRATEGY} is staleness_control, but with {_OFFSET} 0 nothing is ever old: set "
                f"{_OFFSET}, or remove it"
            )
        if limit is None:
            yield (
                f"{_STALENESS} is not set, but {_STRATEGY} is staleness_control: say how old a "
                f"token may be, as {_OFFSET} does ({offset})"
            )
    elif limit is not None:
        yield (
            f"{_STALENESS} is {limit}, but {_STRATEGY} is default, under which {_OFFSET} is the "
            f"bound: remove it, or set {_STRATEGY} to staleness_control"
        )
    if not over.ratio:
        for name in sorted(over.changed()):
            yield (
                f"explorer.over_rollout.{name} is set, but explorer.over_rollout.ratio is 0 and "
                "nothing is ended early: set ratio too, or remove it"
            )


def _engine(config: RunConfig) -> Iterator[str | Problem]:
    """What the chosen engine cannot do."""
    engine_type = config.explorer.rollout_model.engine_type
    if engine_type in ("transformers", "auto"):
        yield from _without_servers(config)
        return
    yield from _with_servers(config)
    yield from _with_vllm(config) if engine_type == "vllm" else _with_sglang(config)


def beyond_vllm(config: RunConfig) -> str | None:
    """The first setting that vLLM could not be run with, as in "tuner.deterministic is true"."""
    sentences = chain(_with_servers(config), _with_vllm(config))
    return next((sentence.partition(", but ")[0] for sentence in sentences), None)


def _without_servers(config: RunConfig) -> Iterator[str]:
    rollout_model, prefix = config.explorer.rollout_model, "explorer.rollout_model"
    engine = "the engine over transformers"
    if rollout_model.engine_type == "auto":
        engine += f", which {prefix}.engine_type: auto may choose,"
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
            yield (
                f"{path} is {value}, but {engine} is part of this process, with the trainer's own "
                f"weights; remove it, or set {prefix}.engine_type to vllm"
            )
    if config.tuner.placement == "separate":
        yield (
            f"tuner.placement is separate, but {engine} generates with the trainer's own weights: "
            f"set it to colocate, or {prefix}.engine_type to vllm"
        )


def _with_servers(config: RunConfig) -> Iterator[str]:
    rollout_model, prefix = config.explorer.rollout_model, "explorer.rollout_model"
    urls = config.tuner.engine.urls
    if config.tuner.deterministic:
        yield (
            f"tuner.deterministic is true, but {prefix}.engine_type is "
            f"{rollout_model.engine_type}, whose numbers depend on who else is in flight: set that "
            "to transformers"
        )
    if config.tuner.placement == "colocate" and urls:
        yield (
            "tuner.placement is colocate, but tuner.engine.urls names servers elsewhere: set one "
            "of them"
        )
    if urls and rollout_model.engine_num not in (1, len(urls)):
        yield (
            f"{prefix}.engine_num is {rollout_model.engine_num}, but tuner.engine.urls names "
            f"{len(urls)}: remove engine_num"
        )


def _with_vllm(config: RunConfig) -> Iterator[str]:
    rollout_model, prefix = config.explorer.rollout_model, "explorer.rollout_model"
    if config.tuner.placement == "colocate" and rollout_model.engine_num > 1:
        yield (
            f"{prefix}.engine_num is {rollout_model.engine_num}, but tuner.placement is colocate, "
            "which is one engine beside the trainer: set placement to separate, or engine_num to 1"
        )
    if config.tuner.engine.sleep and config.synchronizer.sync_offset:
        yield (
            "tuner.engine.sleep is true, but synchronizer.sync_offset is "
            f"{config.synchronizer.sync_offset}, with which vLLM generates during updates: remove "
            "sleep, or set sync_offset to 0"
        )
    for name in sorted(_OURS.keys() & rollout_model.extra_engine_args.keys()):
        path = f"{prefix}.extra_engine_args.{name}"
        instead = f"set {_OURS[name]}" if _OURS[name] else "log-probs would not be exact otherwise"
        yield f"{path} cannot be set: {instead}"
    lora = config.model.lora
    if lora is not None and (lora.lora_rank or 0) > LARGEST_RANK:
        yield (
            f"model.lora_configs.0.lora_rank is {lora.lora_rank}, but vLLM serves {LARGEST_RANK} "
            f"at most: lower it, or set {prefix}.engine_type to transformers"
        )


def _with_sglang(config: RunConfig) -> Iterator[str | Problem]:
    rollout_model, prefix = config.explorer.rollout_model, "explorer.rollout_model"
    if not config.tuner.engine.urls:
        yield Problem(
            "tuner.engine.urls",
            f"{prefix}.engine_type is sglang, but tuner.engine.urls is not set: SGLang servers are "
            "not started by a run; start one as docs/engines.md says and name its address there",
        )
    if config.tuner.placement == "colocate":
        yield (
            f"tuner.placement is colocate, but {prefix}.engine_type is sglang, whose servers run "
            "elsewhere: remove placement"
        )
    elsewhere: dict[str, tuple[Any, Any]] = {
        "tensor_parallel_size": (rollout_model.tensor_parallel_size, 1),
        "gpu_memory_utilization": (rollout_model.gpu_memory_utilization, None),
        "enforce_eager": (rollout_model.enforce_eager, False),
        "extra_engine_args": (rollout_model.extra_engine_args, {}),
    }
    for name, (value, default) in elsewhere.items():
        if value != default:
            yield (
                f"{prefix}.{name} is {value}, but SGLang servers run elsewhere: set it where they "
                "are started, and remove it here"
            )
    if config.model.lora is not None:
        yield (
            f"model.lora_configs is set, but {prefix}.engine_type is sglang, to which adapters are "
            "not handed over: set it to vllm or transformers"
        )
    if config.model.top_k > 0 and config.model.top_p < 1:
        yield (
            f"model.top_k is {config.model.top_k} and model.top_p is {config.model.top_p}, but "
            f"{prefix}.engine_type is sglang, which cuts both from the whole distribution, where "
            "top_p is meant of what top_k keeps: set one of them alone"
        )
