"""The user's YAML, minus `tuner:`, as Trinity-RFT's configuration.

What Trinity-RFT has a key for arrives there unchanged. What `tune()` promises on every backend and
Trinity-RFT has otherwise is put in its words here, each rule with its reason; what it has no words
for is refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from tuner.config.keys import nearest, schema_paths, split_keys
from tuner.config.load import RECORDED, Layers, mode_of
from tuner.config.problems import Problem, describe
from tuner.config.schema import Penalize, TunerSection
from tuner.errors import ConfigError
from tuner.trinity import modes
from tuner.trinity.engine import ENGINE_ARGS
from tuner.trinity.installed import refuse_peft_without_weights
from tuner.trinity.refusals import refused, warn_of_truncated_sampling
from tuner.trinity.saved import (
    CALL_REWARDS,
    MONITOR,
    WORKFLOW,
    restored,
    waits_for_all,
)
from tuner.trinity.schema import unknown_keys, without_empty_sections
from tuner.trinity.tinker import uses_tinker
from tuner.trinity.tree import lookup, set_default, tasksets

if TYPE_CHECKING:
    from trinity.common.config import Config

# What tune() does where nothing is set; Trinity-RFT would do something else.
DEFAULTS: dict[str, Any] = {
    "project": "AgentScope",
    "checkpoint_root_dir": "./checkpoints",
    "algorithm.algorithm_type": "multi_step_grpo",
    "buffer.batch_size": 32,
    "monitor.monitor_type": "tensorboard",
}
GROUP_SIZE = 8
# Trinity-RFT's own defaults, of keys that are read here as well.
MAX_TIMEOUT, MAX_RETRY_TIMES = 1800, 2
# Algorithms that compare nothing within a group.
WITHOUT_GROUPS = ("ppo", *RECORDED)

# Keys of `tuner:` that this backend reads, and those that only say how the local one computes.
USED = frozenset(
    {
        "workflow",
        "judge",
        "backend",
        "device",
        "seed",
        "on_failure",
        "max_calls",
        "max_tokens",
        "reasoning",
        "signal_patience",
        "auxiliary_models",
        "trinity",
    }
)
WITHOUT_EFFECT = frozenset({"max_slots", "token_tree"})


@dataclass(frozen=True)
class TrinitySettings:
    """A run's settings, sorted by who reads them.

    Attributes:
        tree: Trinity-RFT's YAML as nested dicts.
        tuner: Our own section.
        rollout: Limits of one rollout and how its model speaks, as plain data for the workers.
        trackers: Names of the trackers besides `metrics.jsonl`.
        folder: Where traces and results go, below the run's own folder; empty for that one.
    """

    tree: dict[str, Any]
    tuner: TunerSection
    rollout: dict[str, Any]
    trackers: tuple[str, ...]
    folder: str = ""

    @property
    def mode(self) -> str:
        """One of `modes.MODES`."""
        return mode_of(self.tree)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key, `default` where it is not set."""
        return lookup(self.tree, key, default)

    @property
    def run_dir(self) -> Path:
        """Where Trinity-RFT keeps the run: `<checkpoint_root_dir>/<project>/<group>/<name>`."""
        parts = (self.tree["project"], self.tree.get("group", ""), self.tree["name"])
        return Path(self.tree["checkpoint_root_dir"]).joinpath(*(part for part in parts if part))

    @property
    def results_dir(self) -> Path:
        """Where traces, metrics and the result go."""
        return self.run_dir / self.folder


def resolve(layers: Layers) -> TrinitySettings:
    """The settings of a configuration for Trinity-RFT, checked.

    Raises:
        ConfigError: A key is unknown, of the wrong type, or asks for what cannot be done there.
        MissingDependencyError: Trinity-RFT is not installed.
    """
    tree = restored(layers.tree)
    tuner = _tuner_section(tree.pop("tuner", None), layers.problems)
    tree = without_empty_sections(tree)
    for key, meant in unknown_keys(tree):
        hint = f"did you mean {meant}?" if meant else "Trinity-RFT 0.6 has no key like it"
        layers.problems.append(Problem(key, f"unknown key {key}; {hint}"))
    layers.problems.extend(refused(tree))
    mode = mode_of(tree)
    layers.problems.extend(modes.problems(tree, mode))
    layers.raise_problems()
    assert tuner is not None
    trackers = _trackers(tree)
    warn_of_truncated_sampling(tree)
    _fill(tree)
    resolved = TrinitySettings(tree, tuner, _rollout(tree, tuner), trackers)
    if mode == "bench":
        return replace(resolved, folder=modes.bench_folder(resolved.run_dir))
    return resolved


def install(
    settings: TrinitySettings, *, workflow: str | None, judge: str | None
) -> dict[str, Any]:
    """Trinity-RFT's YAML with our workflow, monitor and limits in their places.

    Args:
        settings: What `resolve` gave.
        workflow, judge: The user's functions, as `functions.ship` names them.
    """
    tree = copy.deepcopy(settings.tree)
    algorithm = tree["algorithm"]
    compares_calls = (
        algorithm["algorithm_type"] == "multi_step_grpo"
        and algorithm.get("advantage_fn") in (None, "step_wise_grpo", CALL_REWARDS)
        and settings.mode in modes.READS_TASKS
    )
    if compares_calls:
        algorithm["advantage_fn"] = CALL_REWARDS
    ours = {
        **settings.rollout,
        "workflow": workflow,
        "judge": judge,
        "folder": settings.folder,
        "call_rewards": compares_calls,
    }
    inputs = tree.setdefault("buffer", {}).setdefault("explorer_input", {})
    inputs["default_workflow_type"] = WORKFLOW
    inputs["default_eval_workflow_type"] = WORKFLOW
    for taskset in tasksets(inputs):
        taskset.pop("default_workflow_type", None)
        taskset["workflow_args"] = {**(taskset.get("workflow_args") or {}), "tuner": ours}
    explorer = tree.setdefault("explorer", {})
    timeout, retries = settings.rollout["timeout"], settings.rollout["max_retries"]
    # Attempts are ours to limit, repeat and keep apart; Trinity-RFT's retry would begin while the
    # attempt before it still runs.
    explorer["max_retry_times"] = 0
    explorer["max_timeout"] = waits_for_all(timeout, retries)
    policy = explorer.setdefault("rollout_model", {})
    policy["enable_openai_api"] = True
    if adapters := lookup(tree, "model.lora_configs"):
        refuse_peft_without_weights()
        policy["enable_runtime_lora_updating"] = True  # agents ask for the adapter by its version
        for adapter in adapters:
            # Without one, vLLM refuses the adapter of the first step's weights.
            adapter["name"] = adapter.get("name") or "adapter"
    reasoning_parser = policy.get("reasoning_parser")
    if settings.mode in modes.ROLLS_OUT:
        policy["reasoning_parser"] = None  # reasoning is read by our gateway
        for model in (policy, *(explorer.get("auxiliary_models") or ())):
            model["extra_engine_args"] = {**(model.get("extra_engine_args") or {}), **ENGINE_ARGS}
    monitor = tree.setdefault("monitor", {})
    monitor["monitor_type"] = MONITOR
    monitor["monitor_args"] = {
        **(monitor.get("monitor_args") or {}),
        "tuner": {
            "trackers": list(settings.trackers),
            "folder": settings.folder,
            "limits": {"timeout": timeout, "max_retries": retries},
            "reasoning_parser": reasoning_parser,
            "section": _section(settings.tuner),
        },
    }
    return tree


def _section(tuner: TunerSection) -> dict[str, Any]:
    """Our own section as it can be read back; the functions travel with the tasks."""
    given = tuner.model_dump(mode="json", exclude_defaults=True, exclude={"workflow", "judge"})
    return {**given, "backend": "trinity"}


def checked(tree: Mapping[str, Any]) -> Config:
    """The configuration as Trinity-RFT's own check leaves it. Makes the run's folders.

    Raises:
        ConfigError: Trinity-RFT refuses it; its message is quoted.
    """
    from omegaconf import OmegaConf
    from trinity.common.config import Config

    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(dict(tree)))
        config: Config = OmegaConf.to_object(merged)
    except Exception as error:
        raise ConfigError(f"Trinity-RFT does not read this configuration: {error}") from error
    try:
        _complete_arguments(config.algorithm)
        config.check_and_update()
    except Exception as error:
        raise ConfigError(
            f"Trinity-RFT refuses this configuration: {type(error).__name__}: {error}"
        ) from error
    return config


def _complete_arguments(algorithm: Any) -> None:
    """Fill in the numbers that were left out of a part's arguments.

    Trinity-RFT takes a part's defaults only where none of its numbers is set: with one of them
    alone the others are missing, which its trainer finds out.
    """
    from trinity import algorithm as parts

    chosen = parts.ALGORITHM_TYPE.get(algorithm.algorithm_type).default_config()
    registries = {
        "sample_strategy": parts.SAMPLE_STRATEGY,
        "policy_loss_fn": parts.POLICY_LOSS_FN,
        "advantage_fn": parts.ADVANTAGE_FN,
        "kl_loss_fn": parts.KL_FN,
        "kl_penalty_fn": parts.KL_FN,
        "entropy_loss_fn": parts.ENTROPY_LOSS_FN,
    }
    for key, registry in registries.items():
        given = getattr(algorithm, f"{key}_args")
        name = getattr(algorithm, key) or chosen.get(key)
        if not given or name is None:
            continue
        defaults = registry.get(name).default_args()
        if "clip_range" in given:  # stands for both of its sides
            sides = ("clip_range_low", "clip_range_high")
            defaults = {one: value for one, value in defaults.items() if one not in sides}
        setattr(algorithm, f"{key}_args", {**defaults, **given})


def _tuner_section(section: Any, problems: list[Problem]) -> TunerSection | None:
    """Our own section, checked; what only the local backend does is refused."""
    split = split_keys({"tuner": section or {}})
    known = [path for path in schema_paths() if path.startswith("tuner.")]
    for key in split.unknown:
        meant = nearest(key, known)
        hint = f"did you mean {meant}?" if meant else "see docs/configuration.md for the keys"
        problems.append(Problem(key, f"unknown key {key}; {hint}"))
    try:
        tuner = TunerSection.model_validate(split.own["tuner"])
    except ValidationError as error:
        paths = [path.removeprefix("tuner.") for path in known]
        for problem in describe(error, TunerSection, paths):
            problems.append(Problem(f"tuner.{problem.path}", f"tuner.{problem.text}"))
        return None
    for name, info in TunerSection.model_fields.items():
        value = getattr(tuner, name)
        if name not in USED | WITHOUT_EFFECT and value != info.default:
            shown = _changed(value) if hasattr(value, "model_fields_set") else repr(value)
            problems.append(
                Problem(
                    f"tuner.{name}",
                    f"tuner.{name} is {shown}: only the local backend does this; remove it, or set "
                    "tuner.backend to local",
                )
            )
    return tuner


def _changed(section: Any) -> str:
    return str({name: getattr(section, name) for name in sorted(section.model_fields_set)})


def _fill(tree: dict[str, Any]) -> None:
    """Put what was not set, or means something else there, in Trinity-RFT's words."""
    for key, value in DEFAULTS.items():
        set_default(tree, key, value)
    tree["checkpoint_root_dir"] = str(Path(tree["checkpoint_root_dir"]).resolve())
    if not tree.get("name"):
        tree["name"] = datetime.now().strftime("Experiment-%Y%m%d%H%M%S")
    if lookup(tree, "algorithm.algorithm_type") not in WITHOUT_GROUPS:
        # Trinity-RFT's own defaults of its algorithms are never applied: groups would be of one.
        set_default(tree, "algorithm.repeat_times", GROUP_SIZE)
    if lookup(tree, "algorithm.algorithm_type") == "gspo" or uses_tinker(tree):
        # Trinity-RFT gives every algorithm token-mean, which is not this one's own, and which
        # Tinker's trainer computes as this.
        set_default(tree, "algorithm.loss_agg_mode", "seq-mean-token-mean")
    if uses_tinker(tree):
        # The path of new weights is handed on at once. Trinity-RFT would look for it in a file once
        # a second, and a run that goes on would begin with the weights before training.
        tree["synchronizer"] = {**(tree.get("synchronizer") or {}), "sync_method": "memory"}
    if lookup(tree, "explorer.eval_interval") == 0:
        # Never between the ends; Trinity-RFT divides by it.
        tree["explorer"]["eval_interval"] = 10**9
    if (clip := lookup(tree, "trainer.grad_clip")) is not None:
        # Its FSDP engine reads the other one.
        set_default(tree, "algorithm.optimizer.clip_grad", clip)
    if lookup(tree, "model.max_model_len") is None and not (
        lookup(tree, "model.max_prompt_tokens") and lookup(tree, "model.max_response_tokens")
    ):
        positions = _positions(lookup(tree, "model.model_path", ""))
        if positions:
            set_default(tree, "model.max_model_len", positions)
    mode = mode_of(tree)
    modes.fill(tree, mode, lookup(tree, "algorithm.repeat_times", 1))
    if mode in modes.READS_TASKS and not lookup(tree, "buffer.explorer_input.tasksets"):
        set_default(tree, "buffer.explorer_input.taskset.name", "train")
    top_k = lookup(tree, "model.top_k")
    for taskset in tasksets(lookup(tree, "buffer.explorer_input", {})):
        # Trinity-RFT fills in the other sampling settings of `model`, and not this one.
        if top_k is not None and "top_k" not in (taskset.get("rollout_args") or {}):
            taskset["rollout_args"] = {**(taskset.get("rollout_args") or {}), "top_k": top_k}
    for taskset in lookup(tree, "buffer.explorer_input.eval_tasksets", ()):
        # Evaluations are greedy; Trinity-RFT would sample them as it does while training.
        if "temperature" not in (taskset.get("rollout_args") or {}):
            taskset["rollout_args"] = {**(taskset.get("rollout_args") or {}), "temperature": 0.0}


def _positions(model_path: str) -> int | None:
    """How long the model's context is, where its folder or the Hub's cache says so."""
    from transformers import AutoConfig

    try:
        return getattr(AutoConfig.from_pretrained(model_path), "max_position_embeddings", None)
    except Exception:  # Trinity-RFT then asks for model.max_model_len by name
        return None


def _trackers(tree: dict[str, Any]) -> tuple[str, ...]:
    kinds = lookup(tree, "monitor.monitor_type", DEFAULTS["monitor.monitor_type"])
    return (kinds,) if isinstance(kinds, str) else tuple(kinds)


def _rollout(tree: Mapping[str, Any], tuner: TunerSection) -> dict[str, Any]:
    """What a worker has to know, as plain data."""
    failure = tuner.on_failure
    return {
        "timeout": float(lookup(tree, "explorer.max_timeout", MAX_TIMEOUT)),
        "max_retries": int(lookup(tree, "explorer.max_retry_times", MAX_RETRY_TIMES)),
        "seed": tuner.seed,
        "on_failure": {"penalize": failure.penalize} if isinstance(failure, Penalize) else failure,
        "max_calls": tuner.max_calls,
        "max_tokens": tuner.max_tokens,
        "reasoning": tuner.reasoning,
        "experiences": tuner.trinity.experiences,
        "tool_call_parser": lookup(tree, "explorer.rollout_model.tool_call_parser", "hermes"),
        "reasoning_parser": lookup(tree, "explorer.rollout_model.reasoning_parser", "deepseek_r1"),
        "auxiliary_models": {
            name: model.model_dump() for name, model in tuner.auxiliary_models.items()
        },
    }
