"""Settings that are fine alone and contradict each other.

A sentence is about the key that it begins with, unless it is a `Problem`, which names another.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from tuner.config.algorithms import (
    ADVANTAGES,
    ALGORITHMS,
    POLICY_LOSSES,
    TURN_DISCOUNTED,
    PPOLoss,
    Recorded,
)
from tuner.config.keys import Problem
from tuner.config.schema import PARTS, EnvironmentSection, Penalize, RunConfig

# Settings of the algorithm, or of its source of data, that nothing reads or that contradict.


BUFFER = "buffer.trainer_input.experience_buffer"
# Columns that the other kind of recorded data has.
NOT_READ: Mapping[Recorded, tuple[str, ...]] = {
    "conversations": ("chosen_key", "rejected_key"),
    "pairs": ("response_key", "enable_concatenated_multi_turn"),
}
# Of `tuner.algorithm`: what is done with rewards, which a teacher does not need.
REWARDS = (
    "reward_scale",
    "reward_bias",
    "overlong_buffer",
    "overlong_penalty",
    "dynamic_sampling",
    "success_rate_lb",
    "success_rate_ub",
)
# What only a loss with a ratio to the policy that a step began with can use.
CORRECTIONS = (
    "proximal",
    "importance_sampling",
    "importance_cap",
    "rejection_low",
    "rejection_high",
)


def algorithm_conflicts(config: RunConfig) -> Iterator[str]:
    """Every setting of `algorithm` and `tuner.algorithm` that would be without use or sense."""
    algorithm, extras = config.algorithm, config.tuner.algorithm
    for key, users in algorithm.unused():
        choice = key.removeprefix("algorithm.").partition("_args.")[0]
        yield (
            f"{key} is set, but algorithm.{choice} is {getattr(algorithm, choice)} (of "
            f"algorithm.algorithm_type {algorithm.algorithm_type}), which does not use it: remove "
            f"it, or set algorithm.{choice} to {users}"
        )
    longest = longest_answer(config)
    if algorithm.loss_agg_mode == "seq-mean-token-sum-norm" and longest is None:
        yield (
            "algorithm.loss_agg_mode is seq-mean-token-sum-norm, which divides by the tokens that "
            "an answer may have: set model.max_response_tokens"
        )
    if ALGORITHMS[algorithm.algorithm_type].recorded is not None:
        # Nothing is rolled out: `recorded_conflicts` has what matters then.
        return
    yield from _of_recorded_data(config)
    if (algorithm.advantage_fn == "best_of_group") != (algorithm.policy_loss_fn == "sft"):
        yield (
            f"algorithm.policy_loss_fn {algorithm.policy_loss_fn} and algorithm.advantage_fn "
            f"{algorithm.advantage_fn} do not go together: sft imitates what best_of_group keeps; "
            "set both, as algorithm.algorithm_type raft does, or neither"
        )
    if algorithm.advantage_fn == "best_of_group" and algorithm.kl_penalty_fn != "none":
        yield (
            f"algorithm.kl_penalty_fn is {algorithm.kl_penalty_fn}, but raft chooses by rewards "
            "before they are changed: set algorithm.kl_loss_fn instead"
        )
    tau_pos, tau_neg = (
        getattr(algorithm.policy_loss_fn_args, key) for key in ("tau_pos", "tau_neg")
    )
    if tau_pos is not None and tau_neg is not None and tau_neg < tau_pos:
        yield (
            f"algorithm.policy_loss_fn_args.tau_neg is {tau_neg}, below tau_pos "
            f"{tau_pos}: bad answers would be pushed further than good ones; raise it"
        )
    if isinstance(algorithm.policy_loss, PPOLoss) and algorithm.policy_loss.low >= 1:
        yield (
            "algorithm.policy_loss_fn_args.clip_range_low is 1: a ratio never falls below 0, so "
            "nothing would be clipped; lower it"
        )
    if extras.success_rate_lb > extras.success_rate_ub:
        yield (
            f"tuner.algorithm.success_rate_lb is {extras.success_rate_lb}, above success_rate_ub "
            f"{extras.success_rate_ub}: every group would be left out"
        )
    if (extras.rejection_low is None) != (extras.rejection_high is None):
        yield (
            f"tuner.algorithm.rejection_low is {extras.rejection_low} and rejection_high is "
            f"{extras.rejection_high}: set both or none"
        )
    if extras.overlong_buffer is None and "overlong_penalty" in extras.changed():
        yield (
            f"tuner.algorithm.overlong_penalty is {extras.overlong_penalty}, but long answers are "
            "not punished: set tuner.algorithm.overlong_buffer too"
        )
    if extras.importance_sampling == "none" and "importance_cap" in extras.changed():
        yield (
            f"tuner.algorithm.importance_cap is {extras.importance_cap}, but "
            "tuner.algorithm.importance_sampling is none: remove one of them"
        )
    yield from _groups(config)
    yield from _branching(config)
    yield from _critic(config)
    yield from _corrections(config)
    if extras.overlong_buffer is not None and (longest is None or extras.overlong_buffer > longest):
        yield (
            f"tuner.algorithm.overlong_buffer is {extras.overlong_buffer}, but an answer may have "
            f"{longest or 'any number of'} tokens: set model.max_response_tokens to more"
        )


def _of_recorded_data(config: RunConfig) -> Iterator[str]:
    """Parts that only algorithms without rollouts have."""
    algorithm = config.algorithm
    for key, name, owner in (
        ("advantage_fn", "none", "sft or dpo"),
        ("policy_loss_fn", "dpo", "dpo"),
    ):
        if getattr(algorithm, key) == name:
            yield (
                f"algorithm.{key} is {name}, which is for recorded data: set "
                f"algorithm.algorithm_type to {owner}"
            )


def _groups(config: RunConfig) -> Iterator[str]:
    """What needs a group, or what calls lead to, where the advantage looks at neither."""
    algorithm, extras = config.algorithm, config.tuner.algorithm
    advantage = algorithm.advantage_fn
    rolls_out = config.mode != "train"  # else groups are as large as they were recorded
    if rolls_out and algorithm.repeat_times == 1 and ADVANTAGES[advantage].needs_group:
        yield (
            f"algorithm.repeat_times is 1, but algorithm.advantage_fn {advantage} compares the "
            "rollouts of a task with each other: set it to 2 or more, or algorithm.algorithm_type "
            "to ppo"
        )
    if rolls_out and algorithm.repeat_times == 1 and extras.dynamic_sampling:
        yield (
            "tuner.algorithm.dynamic_sampling is true, but algorithm.repeat_times is 1: the one "
            "reward of a group is always equal to itself and every group would be left out; "
            "remove it"
        )
    if extras.turn_discount is not None and advantage not in TURN_DISCOUNTED:
        mend = {
            "ppo": "set algorithm.advantage_fn_args.gamma, which discounts from token to token",
            "reinforceplusplus": "set algorithm.advantage_fn_args.gamma, which discounts from "
            "token to token of an answer, or another algorithm",
        }.get(advantage, "remove it")
        yield (
            f"tuner.algorithm.turn_discount is {extras.turn_discount}, but algorithm.advantage_fn "
            f"{advantage} does not compare what calls lead to: {mend}"
        )


def _branching(config: RunConfig) -> Iterator[str]:
    """Rollouts inside others, where the rest of the settings has no use for them."""
    algorithm, section = config.algorithm, config.tuner.branching
    if algorithm.advantage_fn == "tree" and algorithm.kl_penalty_fn != "none":
        yield (
            f"algorithm.kl_penalty_fn is {algorithm.kl_penalty_fn}, but algorithm.advantage_fn "
            "tree compares rewards of whole rollouts: set algorithm.kl_loss_fn instead"
        )
    if section is None:
        return
    if algorithm.advantage_fn != "tree":
        yield (
            f"tuner.branching is set, but algorithm.advantage_fn is {algorithm.advantage_fn}, for "
            "which the rollouts of a group must not share anything: set algorithm.algorithm_type "
            "to tree"
        )
    if (section.trunks or 2) >= algorithm.repeat_times:
        yield (
            f"tuner.branching.trunks is {section.trunks or 2}, but algorithm.repeat_times is "
            f"{algorithm.repeat_times}: no rollout is left to begin inside others; raise that"
        )
    for name in sorted(section.changed() & {"ends", "trunks"} if section.where == "best" else ()):
        yield (
            f"tuner.branching.{name} is {getattr(section, name)}, but tuner.branching.where is "
            "best, which chooses it: remove it"
        )
    if section.seed_functions and config.explorer.runner_per_model > 1:
        yield (
            "tuner.branching.seed_functions is true, but random states are the process's own and "
            f"{config.explorer.runner_per_model} rollouts run at a time: set "
            "explorer.runner_per_model to 1"
        )
    if config.explorer.over_rollout.ratio:
        yield (
            f"explorer.over_rollout.ratio is {config.explorer.over_rollout.ratio}, but with "
            "tuner.branching a group's rollouts begin one after the other: remove it"
        )


def _critic(config: RunConfig) -> Iterator[str]:
    """Settings of a critic where there is none."""
    if config.algorithm.advantage_fn == "ppo":
        return
    given = [f"tuner.critic.{name}" for name in sorted(config.tuner.critic.changed())]
    if config.model.critic_model_path:
        given.append("model.critic_model_path")
    if config.trainer.critic_warmup:
        given.append("trainer.critic_warmup")
    for key in given:
        yield (
            f"{key} is set, but algorithm.advantage_fn {config.algorithm.advantage_fn} has no "
            "critic: remove it, or set algorithm.algorithm_type to ppo"
        )


def _corrections(config: RunConfig) -> Iterator[str]:
    """What only a loss with a ratio to the policy that a step began with can use."""
    loss, extras = config.algorithm.policy_loss_fn, config.tuner.algorithm
    if POLICY_LOSSES[loss].ratio_to == "proximal":
        return
    for name in CORRECTIONS:
        if name in extras.changed():
            yield (
                f"tuner.algorithm.{name} is {getattr(extras, name)}, but algorithm.policy_loss_fn "
                f"{loss} has no ratio to the weights that a step began with: remove it"
            )


def longest_answer(config: RunConfig) -> int | None:
    """The most tokens that an answer may have while training, or None where only the context
    limits it."""
    return config.rollout_args(config.buffer.explorer_input.taskset).max_tokens


def recorded_conflicts(config: RunConfig, foreign: Mapping[str, Any]) -> Iterator[str]:
    """Every setting that the chosen source of training data has no use for."""
    name = config.algorithm.algorithm_type
    recorded = ALGORITHMS[name].recorded
    storage = foreign.get(f"{BUFFER}.storage_type")
    if recorded is None:
        if config.mode == "train" and config.tuner.history is None:
            yield (
                f"mode is train, but algorithm.algorithm_type {name} trains on its own rollouts: "
                "set mode to both, tuner.history.sources to rollouts that were recorded before, or "
                "algorithm.algorithm_type to sft or dpo"
            )
        if config.mode != "train" and storage not in (None, "queue"):
            yield (
                f"{BUFFER}.storage_type is {storage!r}, but rollouts are trained as they come: "
                "set it to queue, or remove it"
            )
        yield from _teacher(config)
        yield from _prompt(config)
        return
    if config.mode != "train":
        yield (
            f"mode is {config.mode}, but algorithm.algorithm_type {name} trains on recorded data "
            "and makes no rollouts: set mode to train, or remove it"
        )
    if storage not in (None, "file"):
        yield (
            f"{BUFFER}.storage_type is {storage!r}, but recorded data is read from files: set it "
            "to file, or remove it"
        )
    yield from _parts(config)
    yield from _without_rollouts(config, recorded)


def _parts(config: RunConfig) -> Iterator[str]:
    """An algorithm on recorded data is one formula: its parts cannot be exchanged."""
    algorithm = config.algorithm
    row = ALGORITHMS[algorithm.algorithm_type]
    keys = [*PARTS, *(["loss_agg_mode"] if row.recorded == "pairs" else [])]
    for key in keys:
        own, value = getattr(row, key, "none"), getattr(algorithm, key)
        if value != own:
            hint = ""
            if row.recorded == "pairs" and key == "kl_loss_fn":
                hint = " (algorithm.policy_loss_fn_args.beta is what holds dpo at the reference)"
            yield (
                f"algorithm.{key} is {value}, which algorithm.algorithm_type "
                f"{algorithm.algorithm_type} has no place for: remove it{hint}"
            )


def _without_rollouts(config: RunConfig, recorded: Recorded) -> Iterator[str]:
    name, extras = config.algorithm.algorithm_type, config.tuner.algorithm
    unread = {f"tuner.algorithm.{key}": getattr(extras, key) for key in sorted(extras.changed())}
    if config.tuner.on_failure != "drop":
        unread["tuner.on_failure"] = config.tuner.on_failure
    form = config.buffer.trainer_input.experience_buffer.format
    unread_keys = set(NOT_READ[recorded]) if config.tuner.history is None else set()
    for key in sorted(form.changed() & unread_keys):
        unread[f"{BUFFER}.format.{key}"] = getattr(form, key)
    for path, value in unread.items():
        yield (
            f"{path} is {value}, but algorithm.algorithm_type {name} does not read it: remove it"
        )
    if config.buffer.explorer_input.taskset.path is not None and config.tuner.history is None:
        path = "buffer.explorer_input.taskset.path"
        yield (
            f"{path} is set, but algorithm.algorithm_type {name} makes no rollouts: set "
            f"{BUFFER}.path instead"
        )


def _prompt(config: RunConfig) -> Iterator[str]:
    """The prompt that an algorithm needs, or has no use for."""
    extras, advantage = config.tuner.algorithm, config.algorithm.advantage_fn
    if advantage == "prompt_distill":
        if extras.prompt is None:
            yield (
                "tuner.algorithm.prompt is not set, but prompt_distill needs the system prompt "
                "that the model is to do without: write it there, or use tuner distill-prompt"
            )
        return
    for name in sorted(extras.changed() & {"prompt", "prompt_teacher"}):
        yield (
            f"tuner.algorithm.{name} is {getattr(extras, name)!r:.60}, but algorithm.advantage_fn "
            f"{advantage} has no use for a prompt: remove it, or set algorithm.algorithm_type to "
            "prompt_distill"
        )


def _teacher(config: RunConfig) -> Iterator[str]:
    extras, algorithm = config.tuner.algorithm, config.algorithm
    names = [model.name for model in config.explorer.auxiliary_models]
    if algorithm.advantage_fn != "on_policy_distill":
        if extras.teacher is not None:
            yield (
                f"tuner.algorithm.teacher is {extras.teacher!r}, but algorithm.advantage_fn "
                f"{algorithm.advantage_fn} has no teacher: remove it"
            )
    elif not names:
        yield (
            "explorer.auxiliary_models is empty, but on_policy_distill needs a teacher: name one "
            "there, with its model_path"
        )
    elif extras.teacher is not None and extras.teacher not in names:
        yield (
            f"tuner.algorithm.teacher is {extras.teacher!r}, but explorer.auxiliary_models has "
            f"{', '.join(names)}"
        )
    if ADVANTAGES[algorithm.advantage_fn].needs_reward:
        return
    unread = {f"tuner.algorithm.{key}" for key in extras.changed() & set(REWARDS)}
    if isinstance(config.tuner.on_failure, Penalize):
        unread.add("tuner.on_failure")
    if algorithm.kl_penalty_fn != "none":
        unread.add("algorithm.kl_penalty_fn")
    for path in sorted(unread):
        yield (
            f"{path} is about rewards, which {algorithm.advantage_fn} does not train on: remove it"
        )


# Settings of `tuner.history` that nothing reads or that contradict others.


# Of `tuner.history`: what only one kind of algorithm reads.
OF_HISTORY: Mapping[str, Recorded | None] = {
    "best": "conversations",
    "pairs": "pairs",
    "min_gap": "pairs",
    "min_effective_samples": None,
}


def history_conflicts(config: RunConfig) -> Iterator[str]:
    """Rollouts that were recorded before, where the rest of the settings has no use for them."""
    section, source = config.tuner.history, config.buffer.trainer_input.experience_buffer
    if section is None:
        return
    name = config.algorithm.algorithm_type
    if config.mode != "train":
        yield (
            f"mode is {config.mode}, but tuner.history says what was recorded before, which only "
            "mode train learns from: set mode to train, or remove tuner.history"
        )
    form = source.format
    given = {f"{BUFFER}.format.{key}": getattr(form, key) for key in form.changed()}
    given |= {f"{BUFFER}.path": source.path}
    for path, value in sorted(given.items()):
        if value is not None:
            yield (
                f"{path} is {value}, but with tuner.history what is learned from is in "
                "tuner.history.sources, whose forms are known: remove one of them"
            )
    if config.tuner.branching is not None:
        yield "tuner.branching is set, but mode train makes no rollouts: remove it"
    for key, recorded in OF_HISTORY.items():
        if key in section.changed() and ALGORITHMS[name].recorded != recorded:
            yield (
                f"tuner.history.{key} is {getattr(section, key)}, but algorithm.algorithm_type "
                f"{name} does not read it: remove it"
            )
    for what in ("reward", "version", "step"):
        low, high = (getattr(section, f"{end}_{what}") for end in ("min", "max"))
        if low is not None and high is not None and low > high:
            yield (
                f"tuner.history.min_{what} is {low}, above max_{what} {high}: nothing would be "
                "learned from"
            )


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
            "not started by a run; start one as docs/operations.md says and name its address there",
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
