"""What Trinity-RFT would read as something else, or cannot do: refused by name, or warned of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from tuner.config.keys import Problem, describe, nearest, schema_paths, split_keys
from tuner.config.schema import EnvironmentSection, MonitorName, TunerSection
from tuner.config.source import lookup
from tuner.trinity.installed import training_sets, uses_tinker

logger = logging.getLogger("tuner")

_LOCAL = "or set tuner.backend to local"


@dataclass(frozen=True)
class Refusal:
    """Values of one key that are refused.

    Attributes:
        key: Dotted path.
        values: Which, in words for a table.
        why: What would happen, and what to do.
        refuses: Whether a value that is set is one of them.
        unless: Another key and its value under which none is.
    """

    key: str
    values: str
    why: str
    refuses: Callable[[Any], bool]
    unless: tuple[str, Any] | None = None

    def applies(self, tree: Mapping[str, Any]) -> bool:
        """Whether a configuration asks for what is refused."""
        found = lookup(tree, self.key)
        if found is None or not self.refuses(found):
            return False
        return self.unless is None or lookup(tree, self.unless[0]) != self.unless[1]


def _shown(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return "set"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _only(key: str, value: Any, why: str) -> Refusal:
    return Refusal(key, f"`{_shown(value)}`", why, lambda found: bool(found == value))


def _set(key: str, why: str) -> Refusal:
    return Refusal(key, "anything", why, bool)


ENGINE = "explorer.rollout_model.engine_type"

REFUSALS = (
    _only(
        "algorithm.advantage_fn_args.std_cal_level",
        "none",
        f"Trinity-RFT knows group and batch, and would take this for group; set one of them, "
        f"{_LOCAL}",
    ),
    _only(
        "algorithm.loss_agg_mode",
        "rollout-mean",
        "a Trinity-RFT batch does not know which rows are one rollout; set seq-mean-token-mean, "
        f"which is the same where each rollout becomes one experience, {_LOCAL}",
    ),
    _only(
        "algorithm.advantage_fn",
        "best_of_group",
        f"Trinity-RFT has no such advantage; set another, {_LOCAL}",
    ),
    Refusal(
        "algorithm.optimizer.lr_scheduler_type",
        "`linear`, unless `trainer.trainer_strategy` is `megatron`",
        f"Trinity-RFT's FSDP trainer has constant and cosine; set one of them, {_LOCAL}",
        lambda found: bool(found == "linear"),
        unless=("trainer.trainer_strategy", "megatron"),
    ),
    _only(
        "explorer.rollout_model.enable_openai_api",
        False,
        "agents are recorded between their requests and Trinity-RFT's OpenAI API; remove it",
    ),
    Refusal(
        ENGINE,
        "all but `auto` and `vllm`, unless `model.tinker.enable` is true",
        "agents are recorded in front of Trinity-RFT's vLLM engines; set it to vllm, or remove it",
        lambda found: found != "vllm",
        unless=("model.tinker.enable", True),
    ),
    _only(
        "cluster.ray_address",
        "auto",
        "it would join whatever cluster runs on this machine; write the cluster's address, or "
        "remove it for a cluster of this run's own",
    ),
    _only(
        "model.external_model.enable",
        True,
        "Trinity-RFT 0.6 asks for an actor that it never makes for such a model; remove it",
    ),
    _only(
        "algorithm.enable_router_replay",
        True,
        "which experts a token went through is not recorded; remove it",
    ),
    Refusal(
        "model.repetition_penalty",
        "all but `1`",
        "Trinity-RFT's trainer computes without it, so that its ratios would compare two policies; "
        "remove it",
        lambda found: float(found) != 1,
    ),
    _set(
        "model.min_response_tokens",
        "agents ask for answers over an API that has no such limit; remove it",
    ),
    _set(
        "explorer.rollout_model.extra_engine_args.structured_outputs_config",
        "forms are enforced by vLLM's backend guidance, which is set here; remove it",
    ),
    _only(
        "explorer.rollout_model.ignore_eos",
        True,
        "agents ask for answers over an API that ends them at their end; remove it",
    ),
    _set("stages", "a run has one stage; run them one after the other"),
)

# What Trinity-RFT does otherwise where Tinker's service trains: its loss sees one sequence at a
# time, and nothing but the log-probs of the sampled tokens.
_EACH_ALONE = "Trinity-RFT computes the loss of each sequence by itself with Tinker"
WITH_TINKER = (
    Refusal(
        "mode",
        "`colocate`, `bench`, `serve`",
        "Tinker's weights are at its service, and this mode reads them here; set it to both, "
        "explore or train",
        lambda found: found in ("colocate", "bench", "serve"),
    ),
    Refusal(
        "algorithm.loss_agg_mode",
        "`token-mean`, `seq-mean-token-sum-norm`",
        f"{_EACH_ALONE}, and would take it for a mean over each sequence's own tokens; set "
        "seq-mean-token-mean or seq-mean-token-sum",
        lambda found: found in ("token-mean", "seq-mean-token-sum-norm"),
    ),
    Refusal(
        "model.temperature",
        "all but `1`",
        "Tinker's service trains at 1, so that the ratios would compare two policies; remove it",
        lambda found: float(found) != 1,
    ),
    _set(
        "algorithm.entropy_loss_fn_args.entropy_coef",
        "Trinity-RFT has the log-probs of the sampled tokens alone with Tinker, and would take "
        "those for the entropy; remove it",
    ),
    _set("model.lora_configs", "Tinker's adapter is described by model.tinker; remove it"),
    Refusal(
        ENGINE,
        "all but `auto` and `tinker`",
        "Tinker's service samples; remove it",
        lambda found: found != "tinker",
    ),
)
_IN_TRAINER = "Trinity-RFT 0.6 does not compute its advantages with Tinker"
ALGORITHMS_WITHOUT_TINKER: Mapping[str, str] = {
    "ppo": _IN_TRAINER,
    "reinforceplusplus": _IN_TRAINER,
    "rloo": _IN_TRAINER,
    "grpo_verl": _IN_TRAINER,
    "dpo": f"{_EACH_ALONE}, and a pair is two",
}

_NO_TEACHER = "it needs the log-probs of a teacher, which are not recorded here"
ALGORITHMS_REFUSED: Mapping[str, str] = {
    "gigpo": "it needs states of the environment, which agents do not give; multi_step_grpo is "
    "for agents",
    "jsd": _NO_TEACHER,
    "on_policy_distill": f"{_NO_TEACHER}; set tuner.backend to local",
    "prompt_distill": "Trinity-RFT has no such algorithm; set tuner.backend to local",
    "tree": "no rollout begins inside another one there; set tuner.backend to local",
    "raft": "Trinity-RFT 0.6 refuses its advantage when the run begins; set another, or set "
    "tuner.backend to local",
}


def refused(tree: Mapping[str, Any]) -> Iterator[Problem]:
    """Values that are ours and not Trinity-RFT's, or that would be read there as something else."""
    with_tinker = uses_tinker(tree)
    for row in (*REFUSALS, *(WITH_TINKER if with_tinker else ())):
        if row.applies(tree):
            yield Problem(row.key, f"{row.key} is {_shown(lookup(tree, row.key))}: {row.why}")
    algorithm = str(lookup(tree, "algorithm.algorithm_type", ""))
    without = ALGORITHMS_WITHOUT_TINKER if with_tinker else {}
    if why := ALGORITHMS_REFUSED.get(algorithm) or without.get(algorithm):
        yield Problem("algorithm.algorithm_type", f"algorithm.algorithm_type is {algorithm}: {why}")
    yield from _conflicts(tree)


def _conflicts(tree: Mapping[str, Any]) -> Iterator[Problem]:
    ours = ("samples", *get_args(MonitorName))
    for key in (key for key in ours if key in lookup(tree, "monitor.monitor_args", {})):
        yield Problem(
            f"monitor.monitor_args.{key}",
            f"monitor.monitor_args.{key} is for the local backend: Trinity-RFT's trackers share "
            "one set of arguments and get no table of ours; put the arguments into "
            "monitor.monitor_args itself",
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


# Keys of `tuner:` that this backend reads, and those that only say how the local one computes.
USED = frozenset(
    {
        "workflow",
        "judge",
        "environment",
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
WITHOUT_EFFECT = frozenset({"max_slots", "layout"})


def tuner_section(section: Any, problems: list[Problem]) -> TunerSection | None:
    """Our own section, checked; what only the local backend does is refused."""
    split = split_keys({"tuner": section or {}})
    known = [path for path in schema_paths() if path.startswith("tuner.")]
    for key in split.unknown:
        meant = nearest(key, known)
        hint = (
            f"did you mean {meant}?"
            if meant
            else "see docs/reference/configuration.md for the keys"
        )
        problems.append(Problem(key, f"unknown key {key}; {hint}"))
    try:
        tuner = TunerSection.model_validate(split.own["tuner"])
    except ValidationError as error:
        paths = [path.removeprefix("tuner.") for path in known]
        for problem in describe(error, TunerSection, paths):
            problems.append(Problem(f"tuner.{problem.path}", f"tuner.{problem.text}"))
        return None
    if isinstance(tuner.environment, EnvironmentSection) and tuner.environment.type is not None:
        text = (
            f"tuner.environment.type is {tuner.environment.type!r}: only the local backend runs "
            "queue agents; remove it, or set tuner.backend to local"
        )
        problems.append(Problem("tuner.environment.type", text))
    for name, info in TunerSection.model_fields.items():
        value = getattr(tuner, name)
        if name not in USED | WITHOUT_EFFECT and value != info.default:
            shown = repr(value)
            if isinstance(value, BaseModel):
                shown = str({one: getattr(value, one) for one in sorted(value.model_fields_set)})
            text = (
                f"tuner.{name} is {shown}: only the local backend does this; remove it, or set "
                "tuner.backend to local"
            )
            problems.append(Problem(f"tuner.{name}", text))
    return tuner


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
