"""Checks for settings that contradict each other: the rules of `rules.yaml`.

Checks that the table cannot express (reserved names, keys that only Trinity-RFT has) are functions.
"""

from __future__ import annotations

import os
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tuner.config.foreign import read_table
from tuner.config.keys import Problem
from tuner.config.schema import PARTS, RunConfig, Section

BUFFER = "buffer.trainer_input.experience_buffer"
_ENGINE = "explorer.rollout_model"


@dataclass(frozen=True)
class Rule:
    """One entry of `rules.yaml`, which documents the fields; `when` excludes the group's."""

    keys: tuple[str, ...]
    when: Mapping[str, Any]
    says: str
    unset: bool = False

    def problems(self, config: RunConfig) -> Iterator[Problem]:
        """A sentence for each key that is contradicted."""
        for key in self.keys:
            for path, section, name in _places(config, key):
                if not self.unset and section.is_default(name):
                    continue
                given = {"value": getattr(section, name), "item": section}
                if _holds(self.when, config, given):
                    names = {**dict(config), **given, "longest_answer": config.longest_answer}
                    names["at"] = path.rpartition(".")[0]
                    yield Problem(path, f"{path} {_SENTENCES.format(self.says, **names)}")


@dataclass(frozen=True)
class RuleGroup:
    """Rules with the same conditions.

    Attributes:
        engine: The engine whose limits they are.
    """

    where: Mapping[str, Any]
    rules: tuple[Rule, ...]
    engine: str | None

    def problems(self, config: RunConfig) -> Iterator[Problem]:
        if _holds(self.where, config, {}):
            for rule in self.rules:
                yield from rule.problems(config)


@cache
def rules() -> tuple[RuleGroup, ...]:
    """All groups of rules."""
    groups = []
    for group in read_table(Path(__file__).with_name("rules.yaml")):
        found = []
        for row in group["rules"]:
            prefix = f"{row['under']}." if "under" in row else ""
            keys = tuple(prefix + key for key in row["keys"])
            found.append(Rule(keys, row.get("when", {}), row["says"], row.get("unset", False)))
        groups.append(RuleGroup(group["where"], tuple(found), group.get("for")))
    return tuple(groups)


def _places(config: RunConfig, key: str) -> Iterator[tuple[str, Section, str]]:
    """(dotted path, section, name in it) of a key; none below a missing section."""
    found: list[tuple[str, Any]] = [("", config)]
    *parts, name = key.split(".")
    for part in parts:
        if part == "*":
            found = [(f"{at}{i}.", one) for at, many in found for i, one in _numbered(many)]
        else:
            found = [(f"{at}{part}.", getattr(section, part)) for at, section in found]
    return ((f"{at}{name}", section, name) for at, section in found if isinstance(section, Section))


def _numbered(many: Any) -> Iterable[tuple[Any, Any]]:
    """The items of a list by index, or of a dict by name."""
    return many.items() if isinstance(many, Mapping) else enumerate(many)


def _holds(conditions: Mapping[str, Any], config: RunConfig, given: Mapping[str, Any]) -> bool:
    def value_of(path: str) -> Any:
        """The value of a path; None below a missing section."""
        head, *rest = path.split(".")
        value = given[head] if head in given else getattr(config, head)
        for part in rest:
            value = getattr(value, part, None)
        return list(value) if isinstance(value, tuple) else value

    def fits(value: Any, wanted: Any) -> bool:
        match wanted:
            case {"not": other}:
                return not fits(value, other)
            case {"as": path}:
                return fits(value, value_of(path))
            case {"above": other} | {"at_least": other}:
                limit = value_of(other) if isinstance(other, str) else other
                if value is None or limit is None:
                    return False
                return bool(value >= limit if "at_least" in wanted else value > limit)
            case [_, *_]:
                return value in wanted
        return bool(value == wanted)

    return all(fits(value_of(path), wanted) for path, wanted in conditions.items())


class _Sentences(string.Formatter):
    """Formats values in YAML."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        if value is None or isinstance(value, bool):
            value = "null" if value is None else str(value).lower()
        elif isinstance(value, tuple):
            value = list(value)
        return format(value if format_spec else str(value), format_spec)


_SENTENCES = _Sentences()


def conflicts(config: RunConfig, foreign: Mapping[str, Any]) -> list[Problem]:
    """All contradictions in a configuration whose single values are valid.

    Args:
        config: The typed configuration.
        foreign: Values of keys that only Trinity-RFT reads, by dotted path.
    """
    found = [problem for group in rules() for problem in group.problems(config)]
    others: list[Iterable[str]] = [
        _foreign(config, foreign),
        _taken_names(config),
        _parts(config),
        _models(config),
    ]
    if config.explorer.rollout_model.engine_type == "vllm":
        others.append(_engine_arguments(config))
    return found + [Problem(text.split(" ")[0], text) for texts in others for text in texts]


def beyond_vllm(config: RunConfig) -> str | None:
    """The first setting that vLLM does not support, as in "tuner.deterministic is true"."""
    of_vllm = (rule for group in rules() if group.engine == "vllm" for rule in group.rules)
    problems = (problem.text for rule in of_vllm for problem in rule.problems(config))
    first = next(problems, None) or next(_engine_arguments(config), None)
    return None if first is None else first.partition(", but ")[0]


# Checks that the table cannot express.


def _foreign(config: RunConfig, foreign: Mapping[str, Any]) -> Iterator[str]:
    """Check Trinity-RFT's keys that follow from others."""
    batch, group = config.buffer.batch_size, config.algorithm.repeat_times
    given = str(foreign.get("buffer.train_batch_size") or 0)
    if config.mode == "train" and given not in ("0", str(batch)):
        yield (
            f"buffer.train_batch_size is {given} and buffer.batch_size is {batch}, but a step on "
            "recorded data has one number of rows: set only buffer.batch_size"
        )
    elif config.mode != "train" and given not in ("0", str(batch * group)):
        yield (
            f"buffer.train_batch_size is {given}, but a step trains on every rollout of its tasks, "
            f"buffer.batch_size {batch} x algorithm.repeat_times {group} = {batch * group}; remove "
            "it, or change the other two"
        )
    storage, recorded = foreign.get(f"{BUFFER}.storage_type"), config.algorithm.row.recorded
    wanted = "file" if recorded else "queue"
    if storage not in (None, wanted) and (recorded or config.mode != "train"):
        how = (
            "recorded data is read from files" if recorded else "rollouts are trained as they come"
        )
        yield f"{BUFFER}.storage_type is {storage!r}, but {how}: set it to {wanted}, or remove it"


def _taken_names(config: RunConfig) -> Iterator[str]:
    folder = config.checkpoint_root_dir
    for key, value in ("project", config.project), ("name", config.name):
        inside = Path(os.path.normpath(folder / value))
        folder = Path(os.path.normpath(folder))
        if folder not in inside.parents:
            yield f"{key} is {value!r}, which leads out of {folder}: give a name of one folder"
        folder = inside
    sets, models = config.buffer.explorer_input.eval_tasksets, config.explorer.auxiliary_models
    of_sets = [("buffer.explorer_input.eval_tasksets", i, one.name) for i, one in enumerate(sets)]
    of_models = [("explorer.auxiliary_models", i, one.name) for i, one in enumerate(models)]
    for named, taken in (of_sets, {"train"}), (of_models, set(config.tuner.auxiliary_models)):
        for key, index, name in named:
            if name in taken:
                yield f"{key}.{index}.name is {name!r}, which is taken: give each its own name"
            taken.add(name)


def _parts(config: RunConfig) -> Iterator[str]:
    """Check the components of the algorithm and their arguments against the others."""
    algorithm, row = config.algorithm, config.algorithm.row
    of_algorithm = f"algorithm.algorithm_type {algorithm.algorithm_type}"
    for key, users in algorithm.unused():
        choice = key.removeprefix("algorithm.").partition("_args.")[0]
        yield (
            f"{key} is set, but algorithm.{choice} is {getattr(algorithm, choice)} (of "
            f"{of_algorithm}), which does not use it: remove it, or set algorithm.{choice} to "
            f"{users}"
        )
    if algorithm.loss_agg_mode == "seq-mean-token-sum-norm" and config.longest_answer is None:
        yield (
            "algorithm.loss_agg_mode is seq-mean-token-sum-norm, which divides by the maximum "
            "tokens of an answer: set model.max_response_tokens"
        )
    # The components of an algorithm on recorded data cannot be replaced.
    keys = () if row.recorded is None else PARTS
    for key in (*keys, *(["loss_agg_mode"] if row.recorded == "pairs" else [])):
        value = getattr(algorithm, key)
        if value != getattr(row, key, "none"):
            hint = ""
            if row.recorded == "pairs" and key == "kl_loss_fn":
                hint = " (algorithm.policy_loss_fn_args.beta is what keeps dpo near the reference)"
            yield (
                f"algorithm.{key} is {value}, which {of_algorithm} does not support: remove "
                f"it{hint}"
            )


def _models(config: RunConfig) -> Iterator[str]:
    teacher, names = (
        config.tuner.algorithm.teacher,
        [m.name for m in config.explorer.auxiliary_models],
    )
    if (
        config.algorithm.advantage_fn == "on_policy_distill"
        and names
        and teacher not in (None, *names)
    ):
        yield (
            f"tuner.algorithm.teacher is {teacher!r}, but explorer.auxiliary_models has "
            f"{', '.join(names)}: name one of them"
        )
    workers = config.tuner.workers
    for name, model in config.tuner.auxiliary_models.items():
        most = model.max_concurrent
        if most is not None and isinstance(workers, int) and most < workers:
            yield (
                f"tuner.auxiliary_models.{name}.max_concurrent is {most}, but each of the "
                f"tuner.workers {workers} needs a share of it: lower tuner.workers, or raise it"
            )


# vLLM arguments that follow from other settings; exactness depends on those without a key.
OUR_ENGINE_ARGUMENTS = {
    "model": "model.model_path",
    "tokenizer": "model.model_path",
    "dtype": "tuner.dtype",
    "seed": "tuner.seed",
    "max_model_len": "model.max_model_len",
    "max_num_seqs": "tuner.max_slots",
    "tensor_parallel_size": f"{_ENGINE}.tensor_parallel_size",
    "gpu_memory_utilization": f"{_ENGINE}.gpu_memory_utilization",
    "enforce_eager": f"{_ENGINE}.enforce_eager",
    "enable_sleep_mode": "tuner.engine.sleep",
    "weight_transfer_config": "tuner.engine.weights",
    "enable_lora": "model.lora_configs or model.adapters",
    "max_lora_rank": "model.lora_configs or model.adapters",
    "max_loras": "model.lora_configs or model.adapters",
    "logprobs_mode": None,
    "enable_prefix_caching": None,
    "generation_config": None,
    "structured_outputs_config": None,
    "worker_extension_cls": None,
}
# vLLM's prompt lookup. Its other keys choose other models, or other ways of accepting drafts.
_SPECULATION = ("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")


def _engine_arguments(config: RunConfig) -> Iterator[str]:
    given = config.explorer.rollout_model.extra_engine_args
    for name in sorted(OUR_ENGINE_ARGUMENTS.keys() & given.keys()):
        key = OUR_ENGINE_ARGUMENTS[name]
        instead = f"set {key}" if key else "log-probs would not be exact otherwise"
        yield f"{_ENGINE}.extra_engine_args.{name} cannot be set: {instead}"
    drafts = given.get("speculative_config")
    if drafts is None:
        return
    key = f"{_ENGINE}.extra_engine_args.speculative_config"
    method = drafts.get("method") if isinstance(drafts, dict) else drafts
    if method != "ngram":
        yield (
            f"{key}.method is {method!r}, but only ngram was tested to keep the sampled "
            "distribution and its log-probs: set it to ngram, or remove speculative_config"
        )
    elif unknown := sorted(drafts.keys() - set(_SPECULATION)):
        yield (
            f"{key}.{unknown[0]} cannot be set: exact log-probs were tested with "
            f"{', '.join(_SPECULATION)} only; remove it"
        )
    elif adapters := [*config.model.loras]:
        yield (
            f"{key} is set with {adapters[0]}, but drafts were not tested with adapters: remove "
            "one of them"
        )
