"""Trinity-RFT's own configuration classes: which keys there are, and which was probably meant."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from tuner.config.keys import nearest
from tuner.trinity.installed import require_trinity


def unknown_keys(tree: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    """(dotted key, the key that was probably meant) of everything that Trinity-RFT has no key for.

    Raises:
        MissingDependencyError: Trinity-RFT is not installed in a version that works.
    """
    yield from _unknown(tree, _root(), "")


def without_empty_sections(tree: dict[str, Any]) -> dict[str, Any]:
    """`tree` without sections that have nothing under them: `cluster:` says nothing."""
    return _without_empty(tree, _root())


@cache
def known_keys() -> tuple[str, ...]:
    """Every key of Trinity-RFT's, dotted; `*` is an index or a name."""
    return tuple(path for path in _paths(_root(), "") if not path.startswith("stages."))


def _root() -> type[Any]:
    require_trinity()
    from trinity.common.config import Config

    return Config  # type: ignore[no-any-return]  # untyped


def _types(section: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


def _section(hint: Any) -> tuple[type[Any] | None, bool]:
    """(the section that a field holds or None, whether it holds many of them)."""
    if dataclasses.is_dataclass(hint):
        return hint, False  # type: ignore[return-value]  # is_dataclass() admits instances
    many = get_origin(hint) in (list, dict)
    if many or get_origin(hint) in (Union, UnionType):
        for argument in get_args(hint):
            found, inner_many = _section(argument)
            if found is not None:
                return found, many or inner_many
    return None, False


def _unknown(
    tree: dict[str, Any], section: type[Any], prefix: str
) -> Iterator[tuple[str, str | None]]:
    types = _types(section)
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
                yield from _unknown(item, inner, below)


def _without_empty(tree: dict[str, Any], section: type[Any]) -> dict[str, Any]:
    types = _types(section)
    kept = {}
    for name, value in tree.items():
        inner, many = _section(types[name]) if name in types else (None, False)
        if inner is None or many:
            kept[name] = value
        elif value is not None:
            kept[name] = _without_empty(value, inner) if isinstance(value, dict) else value
    return kept


def _paths(section: type[Any], prefix: str, depth: int = 0) -> Iterator[str]:
    for name, hint in _types(section).items():
        yield f"{prefix}{name}"
        inner, many = _section(hint)
        if inner is not None and depth < 6:
            yield from _paths(
                inner, f"{prefix}{name}.*." if many else f"{prefix}{name}.", depth + 1
            )
