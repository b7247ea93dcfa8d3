"""Text that an encoding cannot hold, and text files that people write.

A model can sample, and JSON can contain, half of a UTF-16 pair (`"\\ud83d"`), which UTF-8 cannot
hold. Such text is kept as it is, stored as JSON's escape so that it reads back equal, and shown as
U+FFFD wherever it leaves as bytes.
"""

from __future__ import annotations

import codecs
import json
from io import IncrementalNewlineDecoder, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from pydantic import BaseModel

T = TypeVar("T")

DISPLAY_ERRORS = "tuner.display"
"""Handler for errors of encoding: U+FFFD, or a question mark where the encoding lacks that too."""


def _replacement(error: UnicodeError) -> tuple[bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    mark = "\ufffd".encode(error.encoding, "replace")
    return mark * (error.end - error.start), error.end


codecs.register_error(DISPLAY_ERRORS, _replacement)


def displayable(value: T, encoding: str | None = "utf-8") -> T:
    """A text that an encoding can hold, of the same length; likewise all texts of a JSON value.

    Args:
        value: Lists and dicts are copied, values of other types returned unchanged.
        encoding: Of a stream; None is UTF-8.
    """
    found: Any = value
    if isinstance(value, str):
        try:
            value.encode(encoding or "utf-8")
        except UnicodeEncodeError:
            name = encoding or "utf-8"
            found = value.encode(name, DISPLAY_ERRORS).decode(name)
    elif isinstance(value, dict):
        found = {displayable(k, encoding): displayable(v, encoding) for k, v in value.items()}
    elif isinstance(value, list):
        found = [displayable(item, encoding) for item in value]
    return cast("T", found)


def show_all(stream: Any) -> None:
    """Let a stream show U+FFFD or a question mark for what its encoding lacks, not raise."""
    if isinstance(stream, TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors=DISPLAY_ERRORS)


def json_text(value: Any, **options: Any) -> str:
    """`json.dumps`, for every parser: without halves of UTF-16 pairs."""
    text = json.dumps(value, **options)
    return json.dumps(displayable(value), **options) if "\\ud" in text else text


def kept_json(value: Any) -> str:
    """JSON with readable letters, and with halves of UTF-16 pairs as escapes."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if displayable(text) == text else json.dumps(value)


def model_json(model: BaseModel, indent: int | None = 2) -> str:
    """A model as JSON, with halves of UTF-16 pairs as escapes, which pydantic refuses to write."""
    from pydantic_core import PydanticSerializationError, to_jsonable_python

    try:
        return model.model_dump_json(indent=indent)
    except PydanticSerializationError:
        data = model.model_dump()
        return json.dumps(data, default=to_jsonable_python, indent=indent)


class NotText(ValueError):
    """A file is not text in UTF-8; the message completes a sentence that names the file."""


def read_text_file(path: Path) -> str:
    """The text of a file that a person wrote: without a byte order mark, line ends as `\\n`.

    Raises:
        OSError: It cannot be read.
        NotText: It is not UTF-8.
    """
    return file_text(path.read_bytes())


def file_text(data: bytes) -> str:
    """The content of such a file as text; raises NotText if it is not UTF-8."""
    return IncrementalNewlineDecoder(None, translate=True).decode(decoded(data), final=True)


def decoded(data: bytes, line: int = 1) -> str:
    """UTF-8 as text, without a byte order mark.

    Args:
        line: Number of its first line, for the message.

    Raises:
        NotText: It is not UTF-8, or has zero bytes.
    """
    place = data.find(b"\0")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = error.start
    if place < 0:
        return text
    line += data.count(b"\n", 0, place)
    raise NotText(
        f"line {line} has the byte 0x{data[place]:02x}, so it is not text in UTF-8 (it looks like "
        f"{_encoding(data) or 'binary data'}): save it as UTF-8"
    )


# Of UTF-32 first: its mark begins with that of UTF-16.
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_SAMPLE = 1 << 16  # bytes that an encoding is guessed from


def _encoding(data: bytes) -> str | None:
    """The encoding that some bytes look like; None for none."""
    from charset_normalizer import from_bytes

    for mark, name in _MARKS.items():
        if data.startswith(mark):
            return name
    if b"\0" in data[:_SAMPLE]:
        return "UTF-16 or binary data"
    found = from_bytes(data[:_SAMPLE]).best()
    return None if found is None else found.encoding
