"""Load a run's configuration: defaults < YAML < Python objects < `key=value` overrides.

All problems are collected and reported together, each with the source of the value.

Interpolations (`${...}`) are OmegaConf's and are resolved after all layers are merged, so
`${model.max_model_len}` sees an override. `${oc.env:NAME,default}` reads the environment;
`${tuner.when_set:NAME,a,b}` is `a` if the environment variable is set, otherwise `b`.

Relative paths in a file start at the file's folder; those in Python or in an override start at the
current folder. A model or dataset that does not exist as a path is a name on the Hub.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from tuner.config.algorithms import ALGORITHMS, Recorded
from tuner.config.foreign import find_foreign
from tuner.config.keys import Problem, describe, nearest, schema_paths, split_keys
from tuner.config.rules import conflicts
from tuner.config.schema import RunConfig
from tuner.config.source import (
    Override,
    YamlFile,
    absolute_paths,
    check_interpolations,
    concealed,
    lookup,
    masked,
    parse_override,
    read_yaml,
    register_resolvers,
    remember_secrets,
    secret_references,
)
from tuner.errors import ConfigError

TOTAL_STEPS = "buffer.total_steps"
OTHER_TOTAL_STEPS = "trainer.total_steps"

Backend = Literal["local", "trinity"]
# Algorithms that train on recorded data without rollouts, with the contents of a row. `cpt`, which
# only Trinity-RFT has, trains on plain text.
RECORDED: Mapping[str, Recorded | None] = {
    "cpt": None,
    **{name: row.recorded for name, row in ALGORITHMS.items() if row.recorded},
}


@dataclass(frozen=True)
class Layers:
    """A configuration before it is checked, the same for both backends.

    Attributes:
        backend: The backend (`tuner.backend`); `auto` is trinity if more than one GPU or node is
            declared, or Tinker.
        tree: All layers as one nested dict, with interpolations resolved and absolute paths.
        problems: Problems found so far; add to them, then `raise_problems`.
        references: Secrets from the environment, for `source.concealed`.
    """

    backend: Backend
    tree: dict[str, Any]
    problems: list[Problem]
    file: YamlFile | None
    settings: Mapping[str, Any]
    overrides: Sequence[Override]
    references: Mapping[str, str]

    def raise_problems(self) -> None:
        """Report all problems, each with the source of its value.

        Raises:
            ConfigError: There is a problem.
        """
        lines = [
            f"{where}: {problem.text}" if where else problem.text
            for problem in self.problems
            for where in [self._where(problem.path)]
        ]
        if len(lines) == 1:
            raise ConfigError(lines[0])
        if lines:
            head = f"{len(lines)} problems in the configuration:"
            raise ConfigError("\n".join([head, *(f"- {line}" for line in lines)]))

    def _where(self, path: str) -> str:
        """The last source of a key; empty if the problem names its location itself."""
        if not path:
            return ""
        for override in reversed(self.overrides):
            if path == override.key or path.startswith(override.key + "."):
                return f"override {override.text!r}"
        if _is_set(self.settings, path):
            return "set in Python"
        if self.file is None:
            return ""
        while path and path not in self.file.lines:
            path = path.rpartition(".")[0]
        return f"{self.file.path}:{self.file.lines[path]}" if path else str(self.file.path)


def _is_set(settings: Mapping[str, Any], path: str) -> bool:
    node: Any = settings
    for part in path.split("."):
        if not isinstance(node, Mapping):
            return True
        if part not in node:
            # By-name dicts have become lists whose contents were set in Python.
            return part.isdecimal() and bool(node)
        node = node[part]
    return True


def read_layers(
    path: Path | str | None,
    settings: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    *,
    backend: Backend | None = None,
    train: Mapping[str, Any] | None = None,
    stored: bool = False,
) -> Layers:
    """Read and merge the arguments of `load_config`, and determine the backend.

    Args:
        backend: The backend, which overrides the configuration; None: the configuration's.
        train: Location of training data given in Python, as settings of a taskset. Their section
            depends on the algorithm, which may be named in the file or an override.
        stored: Mask secrets and do not require them: the file describes a run that was started.

    Raises:
        ConfigError: The file cannot be read.
    """
    register_resolvers()
    file = None if path is None else read_yaml(Path(path))
    if file is not None and stored:
        file = replace(file, tree=concealed(file.tree, {}))
    given = dict(settings or {})
    problems: list[Problem] = []
    parsed: list[Override] = []
    for text in overrides:
        try:
            parsed.append(parse_override(text))
        except ConfigError as error:
            problems.append(Problem("", str(error)))
    if backend is None or train is not None:
        # Errors here are reported again below.
        decided = _merge(file, given, parsed, [], {}, one_total_steps=False)
        backend = backend or _backend_of(decided)
        if train is not None:
            # A mode that contradicts the algorithm is refused later.
            mode = mode_of({**decided, "mode": None} if backend == "local" else decided)
            given = _with_source(given, train, source_key(mode))
    # Another name of `buffer.total_steps` if one step is one update; on a cluster they differ.
    one_total_steps = backend == "local"
    if one_total_steps:
        parsed = [
            replace(one, key=TOTAL_STEPS) if one.key == OTHER_TOTAL_STEPS else one for one in parsed
        ]
    references: dict[str, str] = {}
    tree = _merge(file, given, parsed, problems, references, one_total_steps=one_total_steps)
    problems += [
        Problem(
            key,
            f"{key} was given in clear text when the run was started, so it was not written: give "
            f"it again, preferably as {key}=${{oc.env:NAME}}, which a run keeps",
        )
        for key in masked(tree)
        if not stored
    ]
    return Layers(backend, tree, problems, file, given, parsed, references)


def load_config(
    path: Path | str | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> RunConfig:
    """Read and check a configuration for the local backend.

    Args:
        path: YAML file in Trinity-RFT's format, or None for the defaults.
        settings: Nested dict of settings from Python; takes precedence over the file. Evaluation
            sets and auxiliary models may be dicts by name: a model is added to the file's or
            updates the one with its name; evaluation sets replace the file's.
        overrides: `a.b=c` strings; take precedence over everything. List items have numbers:
            `a.0.b=c`.

    Raises:
        ConfigError: One or more keys are unknown, unsupported, of the wrong type or in conflict, or
            the file or an override cannot be read.
    """
    return checked(read_layers(path, settings, overrides, backend="local"))


def checked(layers: Layers) -> RunConfig:
    """The typed configuration of a run on the local backend.

    Raises:
        ConfigError: See `load_config`.
    """
    problems = layers.problems
    split = split_keys(layers.tree)
    own, foreign = split.own, split.foreign
    for key in split.unknown:
        meant = nearest(key)
        hint = (
            f"did you mean {meant}?"
            if meant
            else "see docs/reference/configuration.md for the keys"
        )
        problems.append(Problem(key, f"unknown key {key}; {hint}"))
    try:
        config = RunConfig.model_validate(own)
    except ValidationError as error:
        problems += [
            problem
            for problem in describe(error, RunConfig, schema_paths())
            if not any(key.startswith(f"{problem.path}.") for key in split.unknown)
        ]
        config = None
    if config is not None:
        effective = config.model_dump(mode="json")
        for key, value in foreign.items():
            row = find_foreign(key)
            refusal = row.refusal(value, effective) if row else None
            if refusal is not None:
                problems.append(Problem(key, f"{key} is {value!r}: {refusal}"))
        problems += conflicts(config, foreign)
    layers.raise_problems()
    assert config is not None
    config._references = dict(layers.references)
    remember_secrets(config.model_dump(mode="json"), config._references)
    return config


def _merge(
    file: YamlFile | None,
    settings: dict[str, Any],
    overrides: Sequence[Override],
    problems: list[Problem],
    references: dict[str, str],
    *,
    one_total_steps: bool,
) -> dict[str, Any]:
    """All layers as one nested dict, with interpolations resolved and absolute paths."""
    here = Path.cwd()
    in_file = without_empty_sections(file.tree, schema_paths()) if file is not None else {}
    if one_total_steps:
        in_file = _with_one_total_steps(in_file, problems)
    merged = OmegaConf.merge(in_file, absolute_paths(_by_name(settings, in_file), here))
    decided: set[str] = set()
    for override in overrides:
        value = override.value
        if isinstance(value, str) and "${" not in value:
            value = absolute_paths(value, here, at=override.key)
            decided.add(override.key)
        elif isinstance(value, list):
            value = absolute_paths(value, here, at=override.key)
        try:
            OmegaConf.update(merged, override.key, value, merge=False, force_add=True)
        except (OmegaConfBaseException, AttributeError, IndexError, TypeError, ValueError) as error:
            text = f"override {override.text!r} cannot be applied: {str(error).splitlines()[0]}"
            problems.append(Problem(override.key, text))
    raw = OmegaConf.to_container(merged)
    check_interpolations(raw)
    resolved = _resolve(merged, "", problems)
    references |= secret_references(raw, resolved)
    folder = file.path.resolve().parent if file is not None else here
    tree = absolute_paths(resolved, folder, without=frozenset(decided))
    assert isinstance(tree, dict)
    return tree


def without_empty_sections(
    tree: dict[str, Any], known: Sequence[str], prefix: str = ""
) -> dict[str, Any]:
    """`tree` without empty sections of known keys: `cluster:` has no effect."""
    sections = {path.rsplit(".", 1)[0] for path in known if "." in path}
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        if value is None and f"{prefix}{key}" in sections:
            continue
        inner = isinstance(value, dict) and f"{prefix}{key}" in sections
        kept[key] = without_empty_sections(value, known, f"{prefix}{key}.") if inner else value
    return kept


def _by_name(settings: dict[str, Any], in_file: dict[str, Any]) -> dict[str, Any]:
    """Settings with dicts by name converted to the lists of the file."""
    settings = OmegaConf.to_container(OmegaConf.create(settings))  # type: ignore[assignment]
    inputs = settings.get("buffer", {}).get("explorer_input", {})
    given = inputs.get("eval_tasksets")
    if isinstance(given, dict):
        there = in_file.get("buffer", {}).get("explorer_input", {}).get("eval_tasksets") or []
        known = {item.get("name", "eval"): item for item in there if isinstance(item, dict)}
        if "" in given:
            # A set without a name replaces all others of the file.
            given = {next(iter(known)) if len(known) == 1 else "eval": given[""]}
        inputs["eval_tasksets"] = [
            {**known.get(name, {}), "name": name, **item} for name, item in given.items()
        ]
    explorer = settings.get("explorer", {})
    given = explorer.get("auxiliary_models")
    if isinstance(given, dict):
        there = in_file.get("explorer", {}).get("auxiliary_models") or []
        known = {item.get("name"): item for item in there if isinstance(item, dict)}
        for name, item in given.items():
            known[name] = {**known.get(name, {}), "name": name, **item}
        explorer["auxiliary_models"] = list(known.values())
    return settings


def _resolve(node: Any, path: str, problems: list[Problem]) -> Any:
    """`node` as plain Python; reports each interpolation that fails."""
    if OmegaConf.is_list(node):
        keys: Any = range(len(node))
    elif OmegaConf.is_dict(node):
        keys = list(node)
    else:
        return node
    items: dict[Any, Any] = {}
    for key in keys:
        inner = f"{path}.{key}" if path else str(key)
        try:
            items[key] = _resolve(node[key], inner, problems)
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            if "Environment variable" in reason:
                name = reason.split("'")[1]
                reason = (
                    f"the environment variable {name} is not set; set it, or give a default: "
                    f"${{oc.env:{name},default}}"
                )
            problems.append(Problem(inner, f"{inner} cannot be resolved: {reason}"))
    return list(items.values()) if OmegaConf.is_list(node) else items


def _with_one_total_steps(tree: dict[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """A file's settings with `trainer.total_steps` renamed to `buffer.total_steps`."""
    trainer, buffer = tree.get("trainer"), tree.get("buffer", {})
    if not isinstance(trainer, dict) or not isinstance(buffer, dict):
        return tree
    steps = trainer.get("total_steps")
    if steps is None:
        return tree
    own = buffer.get("total_steps")
    if own is not None and str(own) != str(steps):
        text = f"{OTHER_TOTAL_STEPS} is {steps}, but {TOTAL_STEPS} is {own}: set one of them"
        problems.append(Problem(OTHER_TOTAL_STEPS, text))
    without = {key: value for key, value in trainer.items() if key != "total_steps"}
    return {**tree, "trainer": without, "buffer": {**buffer, "total_steps": steps}}


def mode_of(tree: Mapping[str, Any]) -> str:
    """`mode`; if it is not set, `train` for recorded data and otherwise `both`."""
    kind, history = lookup(tree, "algorithm.algorithm_type"), lookup(tree, "tuner.history")
    recorded = kind in RECORDED or history is not None
    return str(tree.get("mode") or ("train" if recorded else "both"))


def source_key(mode: str) -> str:
    """Key of the training data's section."""
    if mode == "train":
        return "buffer.trainer_input.experience_buffer"
    return "buffer.explorer_input.taskset"


def _with_source(
    settings: Mapping[str, Any], source: Mapping[str, Any], section: str
) -> dict[str, Any]:
    """`settings` with those of a dataset below a dotted key."""
    head, _, rest = section.partition(".")
    inner = settings.get(head, {})
    below = _with_source(inner, source, rest) if rest else {**inner, **source}
    return {**settings, head: below}


def _backend_of(tree: Mapping[str, Any]) -> Backend:
    backend = lookup(tree, "tuner.backend")
    declared = _declared_gpus(tree) > 1 or lookup(tree, "model.tinker.enable") is True
    # Only the `config.yaml` of a run on Trinity-RFT has this (`tuner.trinity.saved`).
    saved = isinstance(lookup(tree, "monitor.monitor_args.tuner"), Mapping)
    if saved or backend == "trinity" or (backend in (None, "auto") and declared):
        return "trinity"
    return "local"


def _declared_gpus(tree: Mapping[str, Any]) -> int:
    sizes = [lookup(tree, f"cluster.{name}") or 1 for name in ("node_num", "gpu_per_node")]
    try:
        nodes, gpus = map(int, sizes)
    except (TypeError, ValueError):
        return 0  # wrong type, reported by its reader
    return nodes * gpus
