"""Checks of the installation: Trinity-RFT's version and keys, peft, and Tinker's service.

Also helpers for settings as nested dicts with dotted keys.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import httpx

from tuner.config.keys import located, nearest
from tuner.config.source import PACKAGE, lookup
from tuner.errors import ConfigError, MissingDependencyError, pip_install

SUPPORTED = "0.6"
_TOO_NEW_PEFT = (0, 21)


def require_trinity() -> None:
    """Check that a supported Trinity-RFT is installed."""
    how = pip_install("trinity")
    try:
        version = metadata.version("trinity-rft")
    except metadata.PackageNotFoundError:
        raise MissingDependencyError(
            "this run is for Trinity-RFT (tuner.backend is trinity, or `cluster` declares more "
            f"than one GPU), which is not installed: {how}, or set tuner.backend to local"
        ) from None
    if not version.startswith(f"{SUPPORTED}."):
        raise MissingDependencyError(
            f"this version of tuner needs Trinity-RFT {SUPPORTED}, but {version} is "
            f"installed: {how}"
        )
    try:
        import trinity.common.config  # noqa: F401  # whether it can be
    except Exception as error:
        raise MissingDependencyError(
            f"Trinity-RFT {version} is installed, but importing it fails: "
            f"{type(error).__name__}: {error}"
        ) from error


def refuse_peft_without_weights() -> None:
    """Reject versions of peft with which verl saves adapters without weights."""
    try:
        version = metadata.version("peft")
    except metadata.PackageNotFoundError:
        version = None
    if version is None or tuple(int(part) for part in version.split(".")[:2]) >= _TOO_NEW_PEFT:
        found = "it is not installed" if version is None else f"{version} is installed"
        raise MissingDependencyError(
            "model.lora_configs trains an adapter, which Trinity-RFT 0.6 saves with peft: with "
            f"0.21 it would have no weights, and {found}; pip install 'peft>=0.18,<0.21'"
        )


@cache
def known_keys() -> tuple[str, ...]:
    """Every key of Trinity-RFT, dotted; `*` is an index or a name."""
    return tuple(path for path in _paths(_root(), "") if not path.startswith("stages."))


def _root() -> type[Any]:
    require_trinity()
    from trinity.common.config import Config

    return Config  # type: ignore[no-any-return]  # untyped


def _types(section: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


def _section(hint: Any) -> tuple[type[Any] | None, bool]:
    """(the section in a field or None, whether the field holds several of them)."""
    if dataclasses.is_dataclass(hint):
        return hint, False  # type: ignore[return-value]  # is_dataclass() admits instances
    many = get_origin(hint) in (list, dict)
    if many or get_origin(hint) in (Union, UnionType):
        for argument in get_args(hint):
            found, inner_many = _section(argument)
            if found is not None:
                return found, many or inner_many
    return None, False


def unknown_keys(
    tree: dict[str, Any], section: type[Any] | None = None, prefix: str = ""
) -> Iterator[tuple[str, str | None]]:
    """(dotted key, the key that was probably meant) for every key unknown to Trinity-RFT."""
    types = _types(section or _root())
    for name, value in tree.items():
        if name not in types:
            yield f"{prefix}{name}", nearest(f"{prefix}{name}", known_keys())
            continue
        inner, many = _section(types[name])
        if inner is None:
            continue
        if many and isinstance(value, list):
            items: Any = enumerate(value)
        elif many and isinstance(value, dict):
            items = value.items()
        else:
            items = [("", value)]
        for key, item in items:
            if isinstance(item, dict):
                below = f"{prefix}{name}.{key}." if key != "" else f"{prefix}{name}."
                yield from unknown_keys(item, inner, below)


def _paths(section: type[Any], prefix: str, depth: int = 0) -> Iterator[str]:
    for name, hint in _types(section).items():
        yield f"{prefix}{name}"
        inner, many = _section(hint)
        if inner is not None and depth < 6:
            yield from _paths(
                inner, f"{prefix}{name}.*." if many else f"{prefix}{name}.", depth + 1
            )


def set_default(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key that is missing, null or empty."""
    *sections, last = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    if tree.get(last) in (None, ""):
        tree[last] = value


def tasksets(inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every set of tasks of `buffer.explorer_input`, evaluations last."""
    if inputs.get("taskset"):
        yield inputs["taskset"]
    yield from inputs.get("tasksets") or ()
    yield from inputs.get("eval_tasksets") or ()


def training_sets(tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The training sets."""
    one = lookup(tree, "buffer.explorer_input.taskset")
    return [one] if one else list(lookup(tree, "buffer.explorer_input.tasksets", ()))


SERVICE = "https://tinker.thinkingmachines.dev/services/tinker-prod"
# Content of a checkpoint's folder: the service's path of weights and optimizer.
TINKERS_CHECKPOINT = "remote_checkpoint_path.txt"
_KEY = "TINKER_API_KEY"
_SECONDS_TO_ANSWER = 30.0


def models_as_folders(tree: dict[str, Any]) -> None:
    """Replace paths of models that Trinity-RFT and its engines cannot load (GGUF files, which are
    converted, and packages) by folders."""
    explorer = tree.get("explorer") or {}
    sections: list[tuple[dict[str, Any], str]] = [(tree.get("model") or {}, "model")]
    for index, auxiliary in enumerate(explorer.get("auxiliary_models") or ()):
        sections.append((auxiliary, f"explorer.auxiliary_models[{index}]"))
    for section, where in sections:
        for key in ("model_path", "critic_model_path"):
            path, setting = section.get(key) or "", f"{where}.{key}"
            place = located(path, setting) if path else None
            if place is not None and (place.is_file() or path.startswith(PACKAGE)):
                from tuner.runs.models import model_folder

                section[key] = model_folder(path, setting)


def uses_tinker(tree: Mapping[str, Any]) -> bool:
    """Whether a configuration trains with Tinker's service."""
    return bool(lookup(tree, "model.tinker.enable"))


def require_service(tree: Mapping[str, Any]) -> None:
    """Check Tinker's client, its key, and that the service answers; Tinker's client would retry for
    minutes."""
    if find_spec("tinker") is None:
        raise MissingDependencyError(
            "model.tinker.enable is true, but the package tinker is not installed: "
            "pip install 'tinker>=0.20,<0.25'"
        )
    if not os.environ.get(_KEY):
        raise ConfigError(f"model.tinker.enable is true, but {_KEY} is not set in the environment")
    url = lookup(tree, "model.tinker.base_url") or os.environ.get("TINKER_BASE_URL") or SERVICE
    try:
        answer = httpx.get(f"{url.rstrip('/')}/api/v1/healthz", timeout=_SECONDS_TO_ANSWER)
    except httpx.HTTPError as error:
        raise ConfigError(
            f"model.tinker.enable is true, but nothing answers at {url} "
            f"(model.tinker.base_url): {type(error).__name__}: {error}"
        ) from error
    if answer.is_server_error:
        raise ConfigError(
            f"model.tinker.enable is true, but Tinker's service at {url} is unhealthy: it answers "
            f"{answer.status_code}"
        )


def environment(tree: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables of the workers in addition to the address set by Trinity-RFT: the
    key."""
    return {_KEY: os.environ[_KEY]} if uses_tinker(tree) else {}
