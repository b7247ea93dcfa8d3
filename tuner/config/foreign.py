"""Values that keys of Trinity-RFT may have where the local backend does not use them.

The rules are data, in `foreign_keys.yaml`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tuner.config.source import lookup

RULES = Path(__file__).with_name("foreign_keys.yaml")


@dataclass(frozen=True)
class Values:
    """Accepts these values."""

    allowed: tuple[Any, ...]


@dataclass(frozen=True)
class Same:
    """Accepts what another key is set to."""

    path: str


Accepts = Values | Same | None


@dataclass(frozen=True)
class Foreign:
    """One key, or with `.**` at the end everything under it; `*` stands for an index.

    Attributes:
        path: Dotted path of the key.
        accepts: Values under which the local backend does what is asked; None where no value can
            change what the run does.
        why: The subject of the key, and why there is nothing to set here.
    """

    path: str
    accepts: Accepts
    why: str

    def matches(self, path: str) -> bool:
        """Whether `path`, with indices as numbers, is this key."""
        mine, theirs = self.path.split("."), path.split(".")
        if mine[-1] == "**":
            mine = mine[:-1]
            theirs = theirs[: len(mine)]
        return _fits(mine, theirs)

    def is_below(self, path: str) -> bool:
        """Whether this key is under `path`, with indices as numbers."""
        mine, theirs = self.path.split("."), path.split(".")
        return len(mine) > len(theirs) and _fits(mine[: len(theirs)], theirs)

    def refusal(self, value: Any, config: Mapping[str, Any]) -> str | None:
        """Why `value` cannot be honoured and what to do, or None when it can.

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
            case Same(path):
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
    """Equality in which "1" from an environment variable is 1, and true is not 1."""
    if isinstance(value, bool) or isinstance(wanted, bool):
        if isinstance(value, str):
            return value.lower() == str(wanted).lower()
        return value is wanted
    if isinstance(value, (dict, list)) or isinstance(wanted, (dict, list)):
        return bool(value == wanted)
    return bool(value == wanted) or str(value) == str(wanted)


def read_table(path: Path) -> Any:
    """A table of rules that comes with the package."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), Loader=loader)


def _read(table: Iterable[Any]) -> Iterator[Foreign]:
    """The rules, each key by its whole path, in the order in which they count."""
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
            return Same(path)
        case _:
            return Values(tuple(given))


FOREIGN: tuple[Foreign, ...] = tuple(_read(read_table(RULES)))


def find_foreign(path: str) -> Foreign | None:
    """The first rule for a key, more special ones being listed before `.**`."""
    return next((row for row in FOREIGN if row.matches(path)), None)
