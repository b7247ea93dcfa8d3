"""Names of keys: which exist, and which was probably meant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from typing import Any, get_origin

from pydantic.fields import FieldInfo

from tuner.config.foreign import FOREIGN, find_foreign
from tuner.config.schema import RunConfig
from tuner.config.section import Section, section_of

# Below SIMILAR a suggestion would be a guess; the tests have typical slips.
SIMILAR = 0.7
SAME_SECTION = 0.15
# What AgentScope's objects call some keys.
OTHER_NAMES = {
    "learning_rate": "algorithm.optimizer.lr",
    "max_tokens": "model.max_response_tokens",
    "group_size": "algorithm.repeat_times",
    "save_interval_steps": "trainer.save_interval",
    "eval_interval_steps": "explorer.eval_interval",
}


def fields(section: type[Section] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field as (dotted path, field), sections before what they hold; `*` is an index."""
    for name, info in section.model_fields.items():
        path = prefix + name
        yield path, info
        inner = section_of(info.annotation)
        if inner is not None:
            many = get_origin(info.annotation) in (tuple, dict)
            yield from fields(inner, f"{path}.*." if many else f"{path}.")


@cache
def schema_paths() -> tuple[str, ...]:
    """Every key that the local backend uses; `*` is an index or a name."""
    return tuple(path for path, _ in fields())


@cache
def known_paths() -> tuple[str, ...]:
    """Every key that may be written, those of the schema first."""
    return (*schema_paths(), *(row.path.removesuffix(".**") for row in FOREIGN))


def nearest(path: str, known_keys: Iterable[str] | None = None) -> str | None:
    """The known key that `path` was probably meant to be: by its name, its path, its section.

    Args:
        path: Dotted path of a key that does not exist.
        known_keys: Those that do, `*` for an index; None is what the local backend knows.
    """
    parts = path.split(".")
    if parts[-1] in OTHER_NAMES:
        return OTHER_NAMES[parts[-1]]
    plain = ".".join("*" if part.isdecimal() else part for part in parts)
    section, _, leaf = plain.rpartition(".")

    def similarity(known: str) -> float:
        known_section, _, known_leaf = known.rpartition(".")
        whole = SequenceMatcher(None, plain, known).ratio()
        last = SequenceMatcher(None, leaf, known_leaf).ratio()
        return (whole + last) / 2 + (SAME_SECTION if section == known_section else 0)

    best = max(known_paths() if known_keys is None else known_keys, key=similarity)
    if similarity(best) < SIMILAR:
        return None
    for index in (part for part in parts if part.isdecimal()):
        best = best.replace("*", index, 1)
    return best


@dataclass
class SplitKeys:
    """A tree of settings, sorted by who reads them.

    Attributes:
        own: Nested dict of what the schema has.
        foreign: What only Trinity-RFT reads, by dotted path.
        unknown: Dotted paths of the rest.
    """

    own: dict[str, Any]
    foreign: dict[str, Any]
    unknown: list[str]


def split_keys(tree: dict[str, Any]) -> SplitKeys:
    """Sort a tree of settings by who reads them."""
    split = SplitKeys({}, {}, [])
    split.own = _own(tree, RunConfig, "", split)
    return split


def _own(tree: Any, section: type[Section] | None, prefix: str, split: SplitKeys) -> Any:
    """What the schema has of a section's tree; the rest goes into `split`."""
    if section is None or not isinstance(tree, dict):
        return tree
    own: dict[str, Any] = {}
    for name, value in tree.items():
        info = section.model_fields.get(name)
        if info is None:
            if section.takes_more(tree):
                own[name] = value
            else:
                _not_own(f"{prefix}{name}", value, split)
            continue
        inner, many = section_of(info.annotation), get_origin(info.annotation)
        path = f"{prefix}{name}."
        if many is tuple and isinstance(value, list):
            own[name] = [_own(one, inner, f"{path}{i}.", split) for i, one in enumerate(value)]
        elif many is dict and isinstance(value, dict):
            own[name] = {k: _own(one, inner, f"{path}{k}.", split) for k, one in value.items()}
        else:
            own[name] = _own(value, inner, path, split)
    return own


def _not_own(path: str, value: Any, split: SplitKeys) -> None:
    row = find_foreign(path)
    has_keys = any(one.is_below(path) for one in FOREIGN)
    if has_keys and isinstance(value, dict):
        for name, item in value.items():
            _not_own(f"{path}.{name}", item, split)
    elif row is not None:
        split.foreign[path] = value
    elif not (has_keys and value is None):
        split.unknown.append(path)
