"""Writes docs/configuration.md from the schema: `python -m tuner.config.document`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tuner.config.foreign import FOREIGN, Foreign, Same, Values
from tuner.config.keys import fields
from tuner.config.section import Section

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

<!-- Written by `python -m tuner.config.document`; change the schema in tuner/config instead. -->

A run is described by a YAML file with [Trinity-RFT](https://github.com/agentscope-ai/Trinity-RFT)'s
keys, by the objects given to `tune()`, and by `key=value` overrides. Our own keys are under
`tuner:`. The file in the root of the repository, `config.yaml`, explains each line.

**Order.** Defaults < file < Python objects < overrides. Of a Python object, only the fields that
were given count. A dataset given in Python replaces the file's path, split and subset together;
evaluation sets given in Python are the only ones; an auxiliary model is added to the file's.
Without a file, `tune()` starts as AgentScope's does: `explorer.runner_per_model` 16,
`explorer.max_timeout` 3600, `trainer.save_interval` 100.

**Overrides.** `tuner run config.yaml buffer.batch_size=8 model.temperature=0.7`, or
`tune(..., overrides=["buffer.batch_size=8"])`. Values are read as YAML. Items of a list have
numbers: `buffer.explorer_input.eval_tasksets.0.path=test.jsonl`.

**Interpolation.** `${oc.env:NAME,default}` is an environment variable, `${model.max_model_len}`
another key (after overrides), and `${tuner.when_set:NAME,a,b}` is `a` where the environment
variable `NAME` is set, else `b`.

**Paths.** Relative paths in a file start at the file's folder; those in Python and in overrides
start at the current folder. A model or dataset that does not exist as a path is a name on the
Hugging Face Hub. Of a Hub dataset with several subsets, `default` or `main` is taken when none is
named.

**Problems.** A key that is unknown, has a value of the wrong type, or asks for something that this
backend cannot do is refused by name before anything is loaded. All problems are reported together.
"""

FOREIGN_INTRODUCTION = """\
## Keys of Trinity-RFT that the local backend has no use for

One process on one machine has no cluster, no second copy of the weights and no stored rollouts.
These keys are accepted at the values under which it does exactly what they ask, and refused
otherwise. An empty value (`null`) is always accepted. `*` stands for an index, `**` for every key
below.

| key | accepted | why |
|---|---|---|
"""


def page() -> str:
    """The text of docs/configuration.md."""
    sections: dict[str, list[str]] = {}
    for path, info in fields():
        section = path.rpartition(".")[0]
        if not _has_own_heading(info) and section != "tuner.on_failure":
            sections.setdefault(section, []).append(_row(path, info))
    parts = [INTRODUCTION]
    for section, rows in sections.items():
        title = f"`{section}`" if section else "Top level"
        parts.append(
            f"## {title}\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
            + "\n".join(rows)
            + "\n"
        )
    parts.append(FOREIGN_INTRODUCTION + "\n".join(_foreign_rows()) + "\n")
    return "\n".join(parts)


def _has_own_heading(info: FieldInfo) -> bool:
    """Whether a field is a section and nothing else: its keys follow under their own heading."""
    return isinstance(info.annotation, type) and issubclass(info.annotation, Section)


def _row(path: str, info: FieldInfo) -> str:
    kind = _type(info.annotation)
    return _table_row(f"`{path}`", kind, _default(info), info.description or "")


def _table_row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        kinds = [_type(argument) for argument in arguments if argument is not NoneType]
        return ", ".join(kinds)
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "keys"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        names_of_fields = list(annotation.model_fields)
        return f"`{{{names_of_fields[0]}: value}}`" if len(names_of_fields) == 1 else "keys"
    names = {int: "integer", float: "number", str: "text", bool: "true, false", Path: "path"}
    return names.get(annotation, "keys")


def _default(info: FieldInfo) -> str:
    value = info.default
    if value is PydanticUndefined:
        if info.is_required():
            return "required"
        return "none" if info.default_factory is dict else "see meaning"
    if value is None or value in ("", ()):
        return "not set"
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, tuple):
        return ", ".join(f"`{one}`" for one in value)
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _foreign_rows() -> Iterator[str]:
    for row in FOREIGN:
        yield _table_row(f"`{row.path}`", accepted(row), row.why)


def accepted(row: Foreign) -> str:
    """What a key of Trinity-RFT may be set to on the local backend, for a table."""
    match row.accepts:
        case None:
            return "anything"
        case Same(path):
            return f"as `{path}`"
        case Values(()):
            return "nothing"
        case Values(allowed):
            return ", ".join(f"`{_yaml(value)}`" for value in allowed)


def _yaml(value: Any) -> str:
    if value == "":
        return '""'
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
