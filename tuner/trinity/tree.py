"""Settings as nested dicts, by dotted keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def lookup(tree: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value of a dotted key, `default` where it is not set or null."""
    value: Any = tree
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return default if value is None else value


def set_default(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key that is not set, or null or empty."""
    *sections, last = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    if tree.get(last) in (None, ""):
        tree[last] = value


def tasksets(inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every set of tasks of `buffer.explorer_input`, those of evaluations last."""
    if inputs.get("taskset"):
        yield inputs["taskset"]
    yield from inputs.get("tasksets") or ()
    yield from inputs.get("eval_tasksets") or ()


def training_sets(tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The sets of tasks that are trained on."""
    one = lookup(tree, "buffer.explorer_input.taskset")
    return [one] if one else list(lookup(tree, "buffer.explorer_input.tasksets", ()))
