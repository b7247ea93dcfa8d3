"""Every number of every section: used if it can be meant, otherwise refused by its name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.examples import grid
from tuner.config import load_config
from tuner.config.keys import fields
from tuner.config.schema import MOST, numeric
from tuner.errors import ConfigError
from tuner.tasks import settings
from tuner.tasks.datasets import PublicSettings

PATHS = {path: info for path, info in fields() if numeric(info.annotation)}
# What an entry of a list or of names needs beside the field.
NEEDED = {
    "explorer.auxiliary_models": {"name": "a", "model_path": "m"},
    "tuner.auxiliary_models": {"base_url": "http://x/v1", "model_name": "m"},
}
NAMED = {"tuner.auxiliary_models", "model.adapters"}
NEVER = [math.inf, -math.inf, math.nan, 10**30, -(10**30), 10**400, 1e308, 2 * MOST]
NEVER += ["many", True, [True, 0.5], [math.nan, 0.5], [0.1], [], [0.1, 0.2, 0.3], {"a": math.inf}]
MAYBE = [-1, 0, 1, 0.5, 1e-320, 2**31, "1", [0.1, 0.2], [1, 2], {"a": 1}]


def with_number(path: str, value: Any) -> dict[str, Any]:
    """Settings with a value at a path, whose `*` is the first of a list, or a name."""
    names = path.split(".")
    found: Any = value
    for at in range(len(names) - 1, -1, -1):
        if names[at] != "*":
            found = {names[at]: found}
            continue
        above = ".".join(names[:at])
        entry = {**NEEDED.get(above, {}), **found}
        found = {"x": entry} if above in NAMED else [entry]
    return found


def bounds(info: Any) -> Iterator[tuple[str, float]]:
    for one in info.metadata:
        for kind in ("ge", "gt", "le", "lt"):
            if (bound := getattr(one, kind, None)) is not None:
                yield kind, bound


def said(path: str, value: Any) -> str:
    """What is said about a value; empty if it is accepted."""
    try:
        load_config(settings=with_number(path, value))
    except ConfigError as error:
        return str(error)
    return ""


@grid("path", PATHS, quick=22)
def test_a_number_that_cannot_be_meant_is_refused_by_its_name(path):
    above = path.partition(".*")[0]
    key = path.replace("*", "x" if above in NAMED else "0")
    for value in NEVER:
        message = said(path, value)
        assert f"set in Python: {key} is " in message, (value, message)
        assert len(message) < 1000
    for value in MAYBE:
        message = said(path, value)
        # A usual number may contradict another setting.
        assert not message or path.split(".")[-1] in message or "tuner.branching" in message


@pytest.mark.parametrize("path", [path for path, info in PATHS.items() if any(bounds(info))])
def test_bounds_are_those_of_the_schema(path):
    whole = "int" in str(PATHS[path].annotation)
    for kind, bound in bounds(PATHS[path]):
        step = 1 if whole else 1e-6 * max(1, abs(bound))
        past = bound - step if kind.startswith("g") else bound + step
        assert " must be " in said(path, past)
        inside = bound if kind.endswith("e") else bound + (step if kind == "gt" else -step)
        assert f"is {inside!r}: must be" not in said(path, inside)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.top_k", 0),
        ("model.temperature", 1e-9),
        ("algorithm.optimizer.lr", 1e38),
        ("algorithm.optimizer.betas", [0.9, 1.0]),
        ("algorithm.optimizer.betas", [-0.9, 0.9]),
        ("tuner.critic.betas", [0.9, 1.5]),
        ("algorithm.optimizer.weight_decay", 1e6),
        ("algorithm.advantage_fn_args.epsilon", 0),
        ("explorer.max_timeout", 1e12),
        ("tuner.workers", 10**6),
    ],
)
def test_numbers_that_spoil_a_run_later_are_refused(path, value):
    assert re.search(rf"{re.escape(path)} is .*: must be ", said(path, value))


SETTINGS = [
    (kind, name)
    for kind in vars(settings).values()
    if isinstance(kind, type) and issubclass(kind, PublicSettings)
    for name, info in kind.model_fields.items()
    if numeric(info.annotation)
]


@pytest.mark.parametrize(("kind", "name"), SETTINGS)
def test_settings_in_python_are_finite(kind, name):
    for value in (math.inf, -math.inf, math.nan, "many", [1]):
        with pytest.raises(ConfigError, match=rf"{kind.__name__}\.{name} is "):
            kind(**{name: value})
