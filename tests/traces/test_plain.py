"""Dataclasses go to plain data and back by the types of their fields, whatever fields they get."""

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import pytest

from tuner.traces.store import from_plain, to_plain


class Kind(StrEnum):
    A = "a"
    B = "b"


@dataclass(frozen=True)
class Inner:
    values: tuple[int, ...] = ()
    kind: Kind | None = None


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    maybe: Inner | None = None
    many: tuple[Inner, ...] = ()
    pair: tuple[int, Inner] = (0, Inner())
    listed: list[Kind] = field(default_factory=list)
    by_name: dict[str, Inner] = field(default_factory=dict)
    word: Literal["x", "y"] = "x"
    rows: list[dict[str, Any]] = field(default_factory=list)
    grammar: dict[str, Any] | str | None = None


FULL = Outer(
    name="n",
    inner=Inner((1, 2), Kind.B),
    maybe=Inner((3,)),
    many=(Inner(), Inner((4,), Kind.A)),
    pair=(5, Inner((6,))),
    listed=[Kind.A, Kind.B],
    by_name={"k": Inner((7,))},
    word="y",
    rows=[{"any": [1, {"thing": None}]}],
    grammar={"type": "object"},
)


@pytest.mark.parametrize("value", [FULL, Outer("n", Inner())])
def test_every_kind_of_field_comes_back_as_it_was(value):
    assert from_plain(Outer, json.loads(json.dumps(to_plain(value)))) == value


def test_fields_that_data_have_not_get_their_defaults_at_every_depth():
    read = from_plain(Outer, {"name": "n", "inner": {}, "maybe": {"values": [1]}})
    assert read == Outer("n", Inner(), maybe=Inner((1,)))


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"name": "n"}, "inner"),
        ({"name": "n", "inner": {}, "added": 1}, "added"),
        ({"name": "n", "inner": {"kind": "c"}}, "'c' is not a valid Kind"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(data, named):
    with pytest.raises((TypeError, ValueError), match=named):
        from_plain(Outer, data)


def test_a_type_without_a_plain_form_is_refused_and_not_written_as_its_repr():
    @dataclass
    class Odd:
        numbers: set[int]

    with pytest.raises(TypeError, match="has no plain form"):
        to_plain(Odd({1}))
