"""Convert the user's YAML, without `tuner:`, to Trinity-RFT's configuration, and back.

Trinity-RFT's own keys are passed on unchanged. Behaviour that `tune()` has on every backend, and
that differs in Trinity-RFT, is set here through its keys, each rule with its reason; what it does
not support is rejected by name (`refusals`).

`install` puts our workflow, monitor and limits into Trinity-RFT's keys, and stores the previous
values under `monitor.monitor_args.tuner`. So the `config.yaml` of a run can be given directly to
`trinity run --config`, and also to `tuner run` and `tune(config_path=...)`, for which `restored`
converts it back.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.config.keys import Problem
from tuner.config.load import RECORDED, Layers, mode_of, without_empty_sections
from tuner.config.schema import Penalize, RunConfig, TunerSection
from tuner.config.source import lookup
from tuner.errors import ConfigError
from tuner.runs.directory import free_name
from tuner.trinity.endpoints import ENGINE_ARGS
from tuner.trinity.installed import (
    known_keys,
    models_as_folders,
    refuse_peft_without_weights,
    set_default,
    tasksets,
    unknown_keys,
    uses_tinker,
)
from tuner.trinity.refusals import ENGINE, refused, tuner_section, warn_of_truncated_sampling
from tuner.trinity.stage import READS_TASKS, ROLLS_OUT, fill_mode, mode_problems

if TYPE_CHECKING:
    from trinity.common.config import Config

NOTE = "monitor.monitor_args.tuner"
WORKFLOW = "tuner.trinity.workflow.TunerWorkflow"
MONITOR = "tuner.trinity.plugins.TunerMonitor"
CALL_REWARDS = "tuner.trinity.plugins.CallRewards"
# Seconds that Trinity-RFT waits for a group in addition to the time limits of its attempts.
SLACK = 60
# Defaults of tune() on every backend; Trinity-RFT has others.
OUR_DEFAULTS = (
    "project",
    "name",
    "checkpoint_root_dir",
    "algorithm.algorithm_type",
    "buffer.batch_size",
    "monitor.monitor_type",
)
# Algorithms that compare nothing within a group.
WITHOUT_GROUPS = ("ppo", *RECORDED)


@dataclass(frozen=True)
class TrinitySettings:
    """A run's settings, grouped by their readers.

    Attributes:
        tree: Trinity-RFT's YAML as nested dicts.
        tuner: Our own section.
        rollout: Limits of one rollout and the parsers of its model, as plain data for the workers.
        trackers: Names of the trackers in addition to `metrics.jsonl`.
        folder: Subfolder of the run's folder for traces and results; empty for the folder itself. A
            benchmark's is below the run whose checkpoints it evaluates.
        references: Secrets from the environment, in the form that `source.concealed` takes.
    """

    tree: dict[str, Any]
    tuner: TunerSection
    rollout: dict[str, Any]
    trackers: tuple[str, ...]
    folder: str = ""
    references: Mapping[str, str] = field(default_factory=dict)

    @property
    def mode(self) -> str:
        """One of `stage.MODES`."""
        return mode_of(self.tree)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key; `default` if it is not set."""
        return lookup(self.tree, key, default)

    @property
    def run_dir(self) -> Path:
        """Trinity-RFT's folder of the run: `<checkpoint_root_dir>/<project>/<group>/<name>`."""
        parts = (self.tree["project"], self.tree.get("group", ""), self.tree["name"])
        return Path(self.tree["checkpoint_root_dir"]).joinpath(*(part for part in parts if part))

    @property
    def results_dir(self) -> Path:
        """Folder of traces, metrics and the result."""
        return self.run_dir / self.folder


def resolve(layers: Layers) -> TrinitySettings:
    """Resolve and check the settings of a configuration for Trinity-RFT."""
    tree = restored(layers.tree)
    tuner = tuner_section(tree.pop("tuner", None), layers.problems)
    tree = without_empty_sections(tree, known_keys())
    for key, meant in unknown_keys(tree):
        hint = f"did you mean {meant}?" if meant else "Trinity-RFT 0.6 has no key like it"
        layers.problems.append(Problem(key, f"unknown key {key}; {hint}"))
    if lookup(tree, ENGINE) == "auto":
        del tree["explorer"]["rollout_model"]["engine_type"]  # like an unset value
    layers.problems.extend(refused(tree))
    mode = mode_of(tree)
    layers.problems.extend(mode_problems(tree, mode))
    asked = tuner.trinity.model_dump(exclude_unset=True) if tuner is not None else {}
    if asked.get("experiences") == "merged" and _compares_states(tree):
        text = (
            "tuner.trinity.experiences is merged, but gigpo has an advantage for each call: remove "
            "it, or set it to calls"
        )
        layers.problems.append(Problem("tuner.trinity.experiences", text))
    layers.raise_problems()
    assert tuner is not None
    warn_of_truncated_sampling(tree)
    _fill(tree)
    kinds = lookup(tree, "monitor.monitor_type")
    trackers = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    resolved = TrinitySettings(
        tree, tuner, _rollout(tree, tuner), trackers, references=layers.references
    )
    if mode == "bench":
        return replace(resolved, folder=free_name(resolved.run_dir / "bench").name)
    return resolved


def _fill(tree: dict[str, Any]) -> None:
    """Set defaults, and convert settings with a different meaning in Trinity-RFT."""
    ours = RunConfig().model_dump(mode="json")
    for key in OUR_DEFAULTS:
        set_default(tree, key, lookup(ours, key))
    tree["checkpoint_root_dir"] = str(Path(tree["checkpoint_root_dir"]).resolve())
    models_as_folders(tree)
    if lookup(tree, "algorithm.algorithm_type") not in WITHOUT_GROUPS:
        # Trinity-RFT's own defaults of its algorithms are never applied: groups would have one
        # rollout.
        set_default(tree, "algorithm.repeat_times", lookup(ours, "algorithm.repeat_times"))
    if lookup(tree, "algorithm.algorithm_type") == "gspo" or uses_tinker(tree):
        # Trinity-RFT sets token-mean for every algorithm; this algorithm's own is different, and
        # Tinker's trainer computes token-mean like this one.
        set_default(tree, "algorithm.loss_agg_mode", "seq-mean-token-mean")
    if uses_tinker(tree):
        # The path of new weights is passed on at once. Otherwise Trinity-RFT would look for it in a
        # file once a second, and a resumed run would begin with the weights before training.
        tree["synchronizer"] = {**(tree.get("synchronizer") or {}), "sync_method": "memory"}
    if lookup(tree, "explorer.runner_per_model") == "auto":
        tree["explorer"]["runner_per_model"] = 16  # AgentScope's default
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
    fill_mode(tree, mode, lookup(tree, "algorithm.repeat_times", 1))
    if mode in READS_TASKS and not lookup(tree, "buffer.explorer_input.tasksets"):
        set_default(tree, "buffer.explorer_input.taskset.name", "train")
    top_k = lookup(tree, "model.top_k")
    for taskset in tasksets(lookup(tree, "buffer.explorer_input", {})):
        # Trinity-RFT fills in the other sampling settings of `model`, but not this one.
        if top_k is not None and "top_k" not in (taskset.get("rollout_args") or {}):
            taskset["rollout_args"] = {**(taskset.get("rollout_args") or {}), "top_k": top_k}
    for taskset in lookup(tree, "buffer.explorer_input.eval_tasksets", ()):
        # Evaluations are greedy; Trinity-RFT would sample them like in training.
        if "temperature" not in (taskset.get("rollout_args") or {}):
            taskset["rollout_args"] = {**(taskset.get("rollout_args") or {}), "temperature": 0.0}


def _positions(model_path: str) -> int | None:
    """Length of the model's context, from its folder or the Hub's cache; None if unknown."""
    from transformers import AutoConfig

    try:
        return getattr(AutoConfig.from_pretrained(model_path), "max_position_embeddings", None)
    except Exception:  # Trinity-RFT then asks for model.max_model_len by name
        return None


def _compares_states(tree: Mapping[str, Any]) -> bool:
    """Whether Trinity-RFT reads the states of calls and what each of them gained."""
    name = lookup(tree, "algorithm.advantage_fn") or lookup(tree, "algorithm.algorithm_type")
    return bool(name == "gigpo")


def _rollout(tree: Mapping[str, Any], tuner: TunerSection) -> dict[str, Any]:
    """Settings for a worker, as plain data."""
    failure, ours = tuner.on_failure, RunConfig().explorer

    def of_explorer(key: str) -> Any:
        return lookup(tree, f"explorer.{key}", attrgetter(key)(ours))

    return {
        "timeout": float(of_explorer("max_timeout")),
        "max_retries": int(of_explorer("max_retry_times")),
        "seed": tuner.seed,
        "on_failure": {"penalize": failure.penalize} if isinstance(failure, Penalize) else failure,
        "max_calls": tuner.max_calls,
        "max_tokens": tuner.max_tokens,
        "reasoning": tuner.reasoning,
        "experiences": "calls" if _compares_states(tree) else tuner.trinity.experiences,
        "states": _compares_states(tree),
        "tool_call_parser": of_explorer("rollout_model.tool_call_parser"),
        "reasoning_parser": of_explorer("rollout_model.reasoning_parser"),
        "auxiliary_models": {
            name: model.model_dump() for name, model in tuner.auxiliary_models.items()
        },
    }


def install(
    settings: TrinitySettings, *, workflow: str | None, judge: str | None
) -> dict[str, Any]:
    """Trinity-RFT's YAML with our workflow, monitor and limits.

    Args:
        settings: From `resolve`.
        workflow, judge: Names of the user's functions, from `workers.ship`.
    """
    tree = copy.deepcopy(settings.tree)
    algorithm = tree["algorithm"]
    compares_calls = (
        algorithm["algorithm_type"] == "multi_step_grpo"
        and algorithm.get("advantage_fn") in (None, "step_wise_grpo", CALL_REWARDS)
        and settings.mode in READS_TASKS
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
    # We limit, repeat and separate attempts ourselves; Trinity-RFT's retry would begin while the
    # previous attempt still runs.
    explorer["max_retry_times"] = 0
    explorer["max_timeout"] = waits_for_all(timeout, retries)
    policy = explorer.setdefault("rollout_model", {})
    policy["enable_openai_api"] = True
    if adapters := lookup(tree, "model.lora_configs"):
        refuse_peft_without_weights()
        policy["enable_runtime_lora_updating"] = True  # agents name the adapter by its version
        for adapter in adapters:
            # Without one, vLLM rejects the adapter of the first step's weights.
            adapter["name"] = adapter.get("name") or "adapter"
    reasoning_parser = policy.get("reasoning_parser")
    if settings.mode in ROLLS_OUT:
        policy["reasoning_parser"] = None  # our gateway parses reasoning
        for model in (policy, *(explorer.get("auxiliary_models") or ())):
            model["extra_engine_args"] = {**(model.get("extra_engine_args") or {}), **ENGINE_ARGS}
    # Our own section in readable form; the functions are stored with the tasks.
    section = settings.tuner.model_dump(
        mode="json", exclude_defaults=True, exclude={"workflow", "judge", "environment"}
    )
    monitor = tree.setdefault("monitor", {})
    monitor["monitor_type"] = MONITOR
    monitor["monitor_args"] = {
        **(monitor.get("monitor_args") or {}),
        "tuner": {
            "trackers": list(settings.trackers),
            "folder": settings.folder,
            "limits": {"timeout": timeout, "max_retries": retries},
            "reasoning_parser": reasoning_parser,
            "section": {**section, "backend": "trinity"},
        },
    }
    return tree


def checked(tree: Mapping[str, Any]) -> Config:
    """Run Trinity-RFT's own check; returns its configuration. Creates the run's folders."""
    from omegaconf import OmegaConf
    from trinity.common.config import Config

    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(dict(tree)))
        config: Config = OmegaConf.to_object(merged)
    except Exception as error:
        raise ConfigError(f"Trinity-RFT cannot read this configuration: {error}") from error
    try:
        _complete_arguments(config.algorithm)
        config.check_and_update()
    except Exception as error:
        raise ConfigError(
            f"Trinity-RFT rejects this configuration: {type(error).__name__}: {error}"
        ) from error
    return config


def _complete_arguments(algorithm: Any) -> None:
    """Fill in missing numbers of a component's arguments.

    Trinity-RFT uses a component's defaults only if none of its numbers is set: if one is set, the
    others are missing, and its trainer fails.
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


def waits_for_all(timeout: float, max_retries: int) -> int:
    """Seconds until every attempt at a rollout has reached its time limit."""
    return math.ceil(timeout * (max_retries + 1)) + SLACK


def named_now(value: Any) -> Any:
    """A copy of settings with the current names of our classes: the version of tuner that
    started the run may have had them elsewhere."""
    if isinstance(value, Mapping):
        return {key: named_now(item) for key, item in value.items()}
    if isinstance(value, list):
        return [named_now(item) for item in value]
    if isinstance(value, str) and value.startswith("tuner."):
        ours = {name.rpartition(".")[2]: name for name in (WORKFLOW, MONITOR, CALL_REWARDS)}
        return ours.get(value.rpartition(".")[2], value)
    return value


def restored(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The user's settings of a saved configuration; any other configuration is returned unchanged.

    Values set later, by overrides or in Python, are kept.
    """
    own: dict[str, Any] = named_now(tree)
    note = lookup(own, NOTE)
    if note is None:
        return own
    monitor, explorer = own["monitor"], own.get("explorer", {})
    del monitor["monitor_args"]["tuner"]
    if monitor.get("monitor_type") == MONITOR:
        monitor["monitor_type"] = list(note["trackers"])
    if lookup(own, "algorithm.advantage_fn") == CALL_REWARDS:
        own["algorithm"]["advantage_fn"] = "step_wise_grpo"
    limits = note["limits"]
    if explorer.get("max_timeout") == waits_for_all(limits["timeout"], limits["max_retries"]):
        explorer["max_timeout"] = limits["timeout"]
    if explorer.get("max_retry_times") == 0:
        explorer["max_retry_times"] = limits["max_retries"]
    policy = explorer.get("rollout_model", {})
    if policy.get("reasoning_parser") is None and note["reasoning_parser"] is not None:
        policy["reasoning_parser"] = note["reasoning_parser"]
    for model in (policy, *(explorer.get("auxiliary_models") or ())):
        for name in ENGINE_ARGS:
            (model.get("extra_engine_args") or {}).pop(name, None)
    section = dict(note["section"])
    inputs = lookup(own, "buffer.explorer_input", {})
    for key in ("default_workflow_type", "default_eval_workflow_type"):
        if inputs.get(key) == WORKFLOW:
            del inputs[key]
    for taskset in tasksets(inputs):
        ours = (taskset.get("workflow_args") or {}).pop("tuner", None)
        if ours is not None:
            section |= {"workflow": ours["workflow"], "judge": ours["judge"]}
    given = {key: value for key, value in (own.get("tuner") or {}).items() if value is not None}
    own["tuner"] = {**section, **given}
    return own
