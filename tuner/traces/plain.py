"""Dataclasses as plain data and back, by the types of their fields.

A field that is added to a dataclass needs nothing here, and data that were written before it
existed are read with its default. Fields may be of JSON's own types, `Any`, enums, dataclasses,
tuples, lists and dicts of these, and each of them or None.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

_AS_IT_IS = (str, int, float, bool, type(None), Any, dict, list)
# None stands for "as it is": most fields, and each of thousands of token ids, need no call.
_Convert = Callable[[Any], Any] | None


def to_plain(value: Any) -> dict[str, Any]:
    """A dataclass as a dict for `json.dumps`, which writes tuples as lists.

    Nothing is copied that is plain already.

    Raises:
        TypeError: A field has a type that this module does not know.
    """
    cls: Any = type(value)
    plain: dict[str, Any] = _of_dataclass(cls, write=True)(value)
    return plain


def from_plain(cls: type[T], data: dict[str, Any]) -> T:
    """The dataclass again, from what `json.loads` gives; equal to the one that was written.

    Raises:
        TypeError, ValueError: `data` has no value for a field without a default, has a field that
            `cls` has not, or one of its values cannot be what the field says.
    """
    kind: Any = cls
    value: T = _of_dataclass(kind, write=False)(data)
    return value


@cache
def _convert(hint: Any, write: bool) -> _Convert:
    origin, args = get_origin(hint), get_args(hint)
    kind: Any = hint  # mypy: a dataclass might not be hashable, its type always is
    if is_dataclass(hint):
        return _of_dataclass(kind, write)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return (lambda member: member.value) if write else hint
    if hint in _AS_IT_IS or origin is Literal:
        return None
    if origin in (Union, types.UnionType):
        return _of_union(hint, args, write)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _of_items(_convert(args[0], write), list if write else tuple, bare=write)
    if origin is tuple:
        return _of_places([_convert(arg, write) for arg in args], write)
    if origin is list:
        return _of_items(_convert(args[0], write), list, bare=True)
    if origin is dict:
        inner = _convert(args[1], write)
        return None if inner is None else lambda items: {k: inner(v) for k, v in items.items()}
    raise TypeError(f"{hint} has no plain form; tuner/traces/plain.py says which types have")


@cache
def _of_dataclass(cls: Any, write: bool) -> Callable[[Any], Any]:
    hints = get_type_hints(cls)
    converts = {field.name: _convert(hints[field.name], write) for field in fields(cls)}
    named = [(name, convert) for name, convert in converts.items() if convert is not None]

    def to_data(value: Any) -> dict[str, Any]:
        data = {name: getattr(value, name) for name in converts}
        return data | {name: convert(data[name]) for name, convert in named}

    def from_data(data: dict[str, Any]) -> Any:
        return cls(**data | {name: convert(data[name]) for name, convert in named if name in data})

    return to_data if write else from_data


def _of_union(hint: Any, args: tuple[Any, ...], write: bool) -> _Convert:
    members = [arg for arg in args if arg is not type(None)]
    converts = [convert for member in members if (convert := _convert(member, write)) is not None]
    if not converts:
        return None
    if len(members) > 1:
        raise TypeError(f"{hint}: plain data do not say which of these a value is")
    (convert,) = converts
    return lambda value: None if value is None else convert(value)


def _of_items(inner: _Convert, sequence: Any, *, bare: bool) -> _Convert:
    """Converts each item; `bare` leaves the sequence alone where the items need nothing."""
    if inner is None:
        return None if bare else sequence
    return lambda items: sequence(map(inner, items))


def _of_places(inner: list[_Convert], write: bool) -> _Convert:
    def convert(items: Any) -> Any:
        pairs = zip(items, inner, strict=True)
        return (list if write else tuple)(item if f is None else f(item) for item, f in pairs)

    return convert
