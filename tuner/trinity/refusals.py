"""Settings that Trinity-RFT would interpret differently or does not support."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from tuner.config.foreign import read_table
from tuner.config.keys import Problem, describe, nearest, schema_paths, split_keys
from tuner.config.schema import EnvironmentSection, MonitorName, TunerSection
from tuner.config.source import lookup
from tuner.trinity.installed import training_sets, uses_tinker

logger = logging.getLogger("tuner")


@dataclass(frozen=True)
class RefusedValues:
    """A row of `refused_keys.yaml`, which documents the fields."""

    key: str
    why: str
    refused: tuple[Any, ...] | None = None
    accepted: tuple[Any, ...] | None = None
    unless: tuple[str, Any] | None = None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> RefusedValues:
        refused, accepted = (tuple(row[name]) if name in row else None for name in ("is", "but"))
        unless = next(iter(row.get("unless", {}).items()), None)
        return cls(row["key"], row["why"], refused, accepted, unless)

    @property
    def values(self) -> str:
        """The refused values, in words for a table."""
        if self.refused is not None:
            which = ", ".join(f"`{_shown(one)}`" for one in self.refused)
        elif self.accepted is not None:
            # A value that is decided later is not yet a value.
            automatic = ("auto",) if self.key == ENGINE else ()
            which = "all but " + " and ".join(f"`{one}`" for one in (*automatic, *self.accepted))
        else:
            which = "anything"
        if self.unless is None:
            return which
        key, value = self.unless
        said = "is true" if value is True else f"is `{value}`"
        return f"{which}, unless `{key}` {said}"

    def applies(self, tree: Mapping[str, Any]) -> bool:
        """Whether a configuration has the refused value."""
        found = lookup(tree, self.key)
        if found is None or (self.unless and lookup(tree, self.unless[0]) == self.unless[1]):
            return False
        if self.refused is not None:
            return found in self.refused
        if self.accepted is None:
            return bool(found)
        return not any(str(one) == str(found) or _number(found) == one for one in self.accepted)


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _shown(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return "set"
    return str(value).lower() if isinstance(value, bool) else str(value)


ENGINE = "explorer.rollout_model.engine_type"
_TABLE = read_table(Path(__file__).with_name("refused_keys.yaml"))
REFUSALS = tuple(map(RefusedValues.of, _TABLE["always"]))
WITH_TINKER = tuple(map(RefusedValues.of, _TABLE["with_tinker"]))
_EACH_ALONE = "with Tinker, Trinity-RFT computes the loss of each sequence separately"
_IN_TRAINER = "Trinity-RFT 0.6 does not compute its advantages with Tinker"
ALGORITHMS_WITHOUT_TINKER: Mapping[str, str] = {
    "ppo": _IN_TRAINER,
    "reinforceplusplus": _IN_TRAINER,
    "rloo": _IN_TRAINER,
    "grpo_verl": _IN_TRAINER,
    "dpo": f"{_EACH_ALONE}, and a pair is two",
}

_NO_TEACHER = "it needs the log-probs of a teacher, which are not recorded on this backend"
ALGORITHMS_REFUSED: Mapping[str, str] = {
    "jsd": _NO_TEACHER,
    "on_policy_distill": f"{_NO_TEACHER}; set tuner.backend to local",
    "prompt_distill": "Trinity-RFT does not have this algorithm; set tuner.backend to local",
    "tree": "rollouts cannot branch on this backend; set tuner.backend to local",
    "raft": "Trinity-RFT 0.6 refuses its advantage at the start of the run; set another "
    "algorithm, or set tuner.backend to local",
}


def refused(tree: Mapping[str, Any]) -> Iterator[Problem]:
    """Values that Trinity-RFT does not have or would interpret differently."""
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
            "one set of arguments, without tuner's tables; put the arguments into "
            "monitor.monitor_args itself",
        )
    warm = float(lookup(tree, "model.temperature", 1.0))
    for taskset in training_sets(tree):
        own = lookup(taskset, "rollout_args.temperature")
        if own is not None and float(own) != warm:
            yield Problem(
                "buffer.explorer_input.taskset.rollout_args.temperature",
                f"the tasks are sampled at rollout_args.temperature {own}, but Trinity-RFT trains "
                f"at model.temperature {warm:g}, so its ratios would compare two policies; set "
                "both to the same value",
            )
    clip, other = lookup(tree, "trainer.grad_clip"), lookup(tree, "algorithm.optimizer.clip_grad")
    if clip is not None and other is not None and clip != other:
        yield Problem(
            "trainer.grad_clip",
            f"trainer.grad_clip is {clip} and algorithm.optimizer.clip_grad is {other}: both limit "
            "the gradient's norm; set one of them",
        )


# Keys of `tuner:` that this backend reads, and those that only affect computation on the local one.
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
    """Our own section, checked; settings only for the local backend are refused."""
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
    """Warn that the trainer ignores the nucleus that the tasks are sampled from."""
    top_p, top_k = lookup(tree, "model.top_p", 1.0), lookup(tree, "model.top_k", -1)
    for taskset in training_sets(tree):
        top_p = lookup(taskset, "rollout_args.top_p", top_p)
        top_k = lookup(taskset, "rollout_args.top_k", top_k)
    if top_p < 1 or top_k > 0:
        logger.warning(
            "the tasks are sampled with top_p %s and top_k %s, but Trinity-RFT's trainer computes "
            "over all tokens, so its ratios are inexact from the first step on",
            top_p,
            top_k,
        )
