"""One validating reader for each kind of file that a run writes; errors name file, line and field.

A kind is the type of what the writer writes, as JSON. Pydantic parses and checks in one pass, which
is faster than `json.loads` alone: a trace of 20 calls is read in 5.9 ms instead of 7.8.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Annotated, Any, BinaryIO, Generic, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import core_schema

from tuner.errors import TunerError, problem_text

T = TypeVar("T")
logger = logging.getLogger("tuner")


class _AnyText:
    """Text with halves of UTF-16 pairs, which JSON can hold and pydantic's parser rejects."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return core_schema.json_or_python_schema(
            core_schema.str_schema(strict=True), core_schema.is_instance_schema(str)
        )


Text = Annotated[str, _AnyText()]
Name = Annotated[str, Field(strict=True, min_length=1)]  # also of a file: without halves of pairs
Count = Annotated[int, Field(strict=True, ge=0, lt=2**53)]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
Integer = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**64)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
# For values that the writer may store as not finite: reading one is not a fault of the file.
AnyNumber = Annotated[float, Field(strict=True)]

_TAGS = {"int", "float", "constrained-int"}  # of the members of a union, at the end of a place
_SHOWN = 3  # number of skipped lines whose problem is shown


class InvalidRecord(ValueError):
    """A value is not of its kind; the message names the field and the problem."""


class JsonReader(Generic[T]):
    """Reads files of one kind: a single value, or one on each line.

    Args:
        form: The type of a value, or a function that makes it.
        what: Name of a value in messages: "a trace".
    """

    def __init__(self, form: Any, what: str) -> None:
        self._form, self.what = form, what

    @cached_property
    def _adapter(self) -> TypeAdapter[T]:
        made = isinstance(self._form, FunctionType)
        return TypeAdapter(self._form() if made else self._form)

    def parse(self, text: bytes) -> T:
        """Parse and check a value; raises InvalidRecord."""
        try:
            try:
                return self._adapter.validate_json(text)
            except ValidationError as error:
                if error.errors()[0]["type"] != "json_invalid":
                    raise
                # What Python writes and pydantic's parser rejects: halves of UTF-16 pairs, and
                # more than 200 levels.
                try:
                    value = json.loads(text.decode())
                except (ValueError, RecursionError):
                    raise error from None
            return self._adapter.validate_python(value)
        except ValidationError as error:
            raise InvalidRecord(_sentence(error)) from None

    def check(self, value: Any) -> T:
        """Like `parse`, for plain data."""
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            raise InvalidRecord(_sentence(error)) from None

    def document(self, path: Path, remedy: str) -> T:
        """The content of a file.

        Raises:
            TunerError: It is missing, cannot be read, or is damaged.
        """
        try:
            with open_file(path) as file:
                return self.parse(file.read())
        except (FileNotFoundError, InvalidRecord) as error:
            missing = isinstance(error, FileNotFoundError)
            said = "it is missing" if missing else f"it is not {self.what}: {error}"
            raise TunerError(f"{path} is damaged: {said}; {remedy}") from error

    def lines(
        self, path: Path, remedy: str = "", *, skip: bool = False
    ) -> Iterator[tuple[int, bytes, T]]:
        """(number from 1, line, value) for each line of a file, which may be missing; without a
        torn last line.

        Args:
            remedy: What to do about a damaged line.
            skip: Skip damaged lines and log how many and which, instead of raising.

        Raises:
            TunerError: The file cannot be read, or a line is damaged.
        """
        left_out = list[str]()
        for number, line in complete_lines(path):
            try:
                value = self.parse(line)
            except InvalidRecord as error:
                if not skip:
                    said = f"{path}, line {number} is not {self.what}: {error}"
                    raise TunerError(f"{said}; {remedy}" if remedy else said) from error
                left_out.append(f"line {number}: {error}")
                continue
            yield number, line, value
        if left_out:
            more = len(left_out) - _SHOWN
            named = "; ".join(left_out[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
            count = "1 line" if len(left_out) == 1 else f"{len(left_out)} lines"
            was = "was" if len(left_out) == 1 else "were"
            logger.warning("%s of %s %s left out: %s", count, path, was, named)


def _sentence(error: ValidationError) -> str:
    """The first problem: `calls[0].logprobs[2]: input should be a valid number, not 'x'`."""
    first = error.errors(include_url=False)[0]
    place = first["loc"][:-1] if first["loc"] and first["loc"][-1] in _TAGS else first["loc"]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    said = problem_text(first)
    said = said[:1].lower() + said[1:]
    if first["type"] not in ("json_invalid", "missing", "extra_forbidden"):
        said += f", not {first['input']!r:.60}"
    return f"{field.removeprefix('.')[:200]}: {said}" if field else said


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading; raises FileNotFoundError, or TunerError if it cannot be read (a
    folder, a loop of links, another user's file)."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise TunerError(
            f"{path} cannot be read: {error.strerror}; put a file that a run wrote in its place, "
            "or remove it"
        ) from error


def whole_file(path: Path) -> bytes:
    """The content of a file; empty if it is missing. Raises TunerError if it cannot be read."""
    try:
        with open_file(path) as file:
            return file.read()
    except FileNotFoundError:
        return b""


def complete_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) for each line of a file, which may be missing; a torn last line is
    skipped. Raises TunerError if it cannot be read."""
    try:
        opened = open_file(path)
    except FileNotFoundError:
        return
    with opened as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield number, line
