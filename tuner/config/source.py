"""The texts that settings come from: a YAML file and `key=value` overrides."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tuner.errors import ConfigError


@dataclass(frozen=True)
class YamlFile:
    """A file's settings, interpolations not resolved, and the line each key is on."""

    path: Path
    tree: dict[str, Any]
    lines: dict[str, int]


@dataclass(frozen=True)
class Override:
    """One `key=value`, the value read as YAML."""

    key: str
    value: Any
    text: str


def register_resolvers() -> None:
    """Make `${tuner.when_set:NAME,a,b}` known: `a` if the environment variable is set, else `b`."""

    def when_set(name: str, value: Any, otherwise: Any) -> Any:
        return value if os.environ.get(name) else otherwise

    with warnings.catch_warnings():
        # OmegaConf 2.4 renames the function; 2.3 has another one under the new name.
        warnings.simplefilter("ignore")
        OmegaConf.register_new_resolver("tuner.when_set", when_set, replace=True)


def read_yaml(path: Path) -> YamlFile:
    """Read a configuration file.

    Raises:
        ConfigError: There is no such file, or it is not YAML with keys at the top.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"configuration file {str(path)!r} does not exist (looked in {Path.cwd()})"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {str(path)!r} cannot be read: {error}") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        tree = OmegaConf.create(text) if node is not None else OmegaConf.create({})
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        raise ConfigError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(tree, DictConfig) or (node is not None and node.tag.endswith(":str")):
        raise ConfigError(f"{path}: expected keys such as `project: ...` at the top level")
    plain = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(plain, dict)
    return YamlFile(path, {str(key): value for key, value in plain.items()}, _lines(node))


def _lines(node: yaml.Node | None, prefix: str = "") -> dict[str, int]:
    """Line of each key, counted from 1, by dotted path."""
    lines: dict[str, int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = f"{prefix}{key.value}"
            lines[path] = key.start_mark.line + 1
            lines |= _lines(value, f"{path}.")
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[f"{prefix}{index}"] = value.start_mark.line + 1
            lines |= _lines(value, f"{prefix}{index}.")
    return lines


def parse_override(text: str) -> Override:
    """Read `key=value`.

    Raises:
        ConfigError: There is no `=`, no key before it, or no YAML value after it.
    """
    key, equals, value = text.partition("=")
    key = key.strip().replace("[", ".").replace("]", "")
    if not equals:
        raise ConfigError(
            f"override {text!r} has no '=': write key=value, as in buffer.batch_size=8"
        )
    if not key or any(not part for part in key.split(".")):
        raise ConfigError(f"override {text!r} has no key before '=': write key=value")
    try:
        node = OmegaConf.from_dotlist([f"value={value}"])
        parsed = OmegaConf.to_container(node, resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(
            f"override {text!r}: the value does not parse as YAML ({problem}); "
            "quote it if it is text"
        ) from None
    assert isinstance(parsed, dict)
    return Override(key, parsed["value"], text)
