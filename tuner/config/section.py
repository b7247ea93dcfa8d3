"""The base of every section of the configuration: strict names, typed values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationInfo, field_validator


def null_is(empty: Callable[[], Any]) -> BeforeValidator:
    """A key with nothing under it (`monitor_args:`) is as empty as one that is not there."""
    return BeforeValidator(lambda given: empty() if given is None else given)


# Given to something else as they are.
Arguments = Annotated[dict[str, Any], null_is(dict)]


class Section(BaseModel):
    """A part of the configuration. Unknown keys and booleans in place of numbers are refused."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        coerce_numbers_to_str=True,
        protected_namespaces=(),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and info.field_name is not None:
            annotation = cls.model_fields[info.field_name].annotation
            if annotation in (int, float) or {int, float} & set(get_args(annotation)):
                raise ValueError("Input should be a number, not true or false")
        return value

    @classmethod
    def takes_more(cls, given: Mapping[str, Any]) -> bool:
        """Whether a section like this may have keys that it does not name."""
        return False

    def changed(self) -> set[str]:
        """Names of the settings that are not their defaults."""
        fields = type(self).model_fields
        return {name for name, info in fields.items() if getattr(self, name) != info.default}


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field's type holds: itself, in a union, a tuple or a dict's values."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if get_origin(annotation) is Annotated:
        return section_of(get_args(annotation)[0])
    if get_origin(annotation) in (tuple, dict, Union, UnionType):
        found = (section_of(argument) for argument in get_args(annotation))
        return next((section for section in found if section is not None), None)
    return None
