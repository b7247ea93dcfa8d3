"""Accepted values of Trinity-RFT's keys that the local backend does not use.

The rules are data, in `foreign_keys.yaml`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tuner.config.source import LOADER, lookup

RULES = Path(__file__).with_name("foreign_keys.yaml")


@dataclass(frozen=True)
class Values:
    """Accepts these values."""

    allowed: tuple[Any, ...]


@dataclass(frozen=True)
class SameAs:
    """Accepts the value of another key."""

    path: str


Accepts = Values | SameAs | None


@dataclass(frozen=True)
class Foreign:
    """One key, or everything below it if it ends with `.**`; `*` is an index.

    Attributes:
        path: Dotted path of the key.
        accepts: Values that the local backend satisfies; None if no value changes the run.
        why: The reason that there is nothing to set.
    """

    path: str
    accepts: Accepts
    why: str

    def matches(self, path: str) -> bool:
        """Whether `path`, with numeric indices, is this key."""
        mine, theirs = self.path.split("."), path.split(".")
        if mine[-1] == "**":
            mine = mine[:-1]
            theirs = theirs[: len(mine)]
        return _fits(mine, theirs)

    def is_below(self, path: str) -> bool:
        """Whether this key is below `path`, with numeric indices."""
        mine, theirs = self.path.split("."), path.split(".")
        return len(mine) > len(theirs) and _fits(mine[: len(theirs)], theirs)

    def refusal(self, value: Any, config: Mapping[str, Any]) -> str | None:
        """The reason to refuse `value`, with a fix; None if it is accepted.

        Args:
            value: The value that was set.
            config: The effective configuration as nested dicts, for keys that must agree.
        """
        match self.accepts:
            case None:
                return None
            case Values(allowed):
                if value is None or any(_equal(value, one) for one in allowed):
                    return None
                if not allowed:
                    return f"{self.why}; remove it"
                choice = " or ".join(_as_yaml(one) for one in allowed)
                return f"{self.why}; set it to {choice}, or remove it"
            case SameAs(path):
                wanted = lookup(config, path)
                if value is None or _equal(value, wanted):
                    return None
                return f"{self.why}; set {path} (now {_as_yaml(wanted)}) and remove this key"


def _fits(pattern: list[str], parts: list[str]) -> bool:
    return len(pattern) == len(parts) and all(
        a == b or (a == "*" and b.isdecimal()) for a, b in zip(pattern, parts, strict=True)
    )


def _as_yaml(value: Any) -> str:
    if value is None:
        return "not set"
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'


def _equal(value: Any, wanted: Any) -> bool:
    """Equality where "1" from an environment variable equals 1, and true does not."""
    if isinstance(value, bool) or isinstance(wanted, bool):
        if isinstance(value, str):
            return value.lower() == str(wanted).lower()
        return value is wanted
    if isinstance(value, (dict, list)) or isinstance(wanted, (dict, list)):
        return bool(value == wanted)
    return bool(value == wanted) or str(value) == str(wanted)


def read_table(path: Path) -> Any:
    """Read a rules table included in the package."""
    return yaml.load(path.read_text(encoding="utf-8"), Loader=LOADER)


def _read(table: Iterable[Any]) -> Iterator[Foreign]:
    """The rules in their order, each key with its full path."""
    for section in table:
        prefix = f"{section['under']}." if section["under"] else ""
        for rule in section["rules"]:
            for key in rule["keys"]:
                if key not in section.get("without", ()):
                    yield Foreign(f"{prefix}{key}", _accepts(rule["accepts"]), rule["why"])


def _accepts(given: Any) -> Accepts:
    match given:
        case "anything":
            return None
        case {"as": path}:
            return SameAs(path)
        case _:
            return Values(tuple(given))


FOREIGN: tuple[Foreign, ...] = tuple(_read(read_table(RULES)))


def find_foreign(path: str) -> Foreign | None:
    """The first rule that matches a key; specific rules come before `.**`."""
    return next((row for row in FOREIGN if row.matches(path)), None)
