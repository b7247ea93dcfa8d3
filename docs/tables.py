"""Writes what is generated of the documentation: `python -m docs.tables`.

All of configuration.md, from the schema, and the tables of both backends in capabilities.md, from
the code that checks them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tuner.config.algorithms import ALGORITHMS, NOT_HERE
from tuner.config.foreign import FOREIGN, Foreign, Same, Values
from tuner.config.keys import fields
from tuner.config.schema import Section, section_of
from tuner.trinity.refusals import (
    ALGORITHMS_REFUSED,
    ALGORITHMS_WITHOUT_TINKER,
    REFUSALS,
    USED,
    WITH_TINKER,
    WITHOUT_EFFECT,
)
from tuner.trinity.stage import MODES

CONFIGURATION = Path(__file__).parent / "configuration.md"
CAPABILITIES = Path(__file__).parent / "capabilities.md"
BEGIN = "<!-- begin: python -m docs.tables -->\n"
END = "<!-- end -->\n"

INTRODUCTION = """\
# Configuration

<!-- Written by `python -m docs.tables`; change the schema in tuner/config instead. -->

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

**Secrets.** A setting named `password`, `api_key`, `token` or the like, and a URL with a password
in it, is neither written to the run's `config.yaml` nor sent to a tracker. There stands the
`${oc.env:NAME}` that it came from, without its default; one that was given in clear is masked, and
a run that is started from this `config.yaml` asks for it by name. A run directory is made for its
owner alone (mode 0700); one that is there already keeps its mode.

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


def configuration() -> str:
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


# Keys that this backend sets by itself, whatever the file says.
_OWN_WORKFLOW = "replaced by `TunerWorkflow`, which runs the workflow and the judge"
OURS = {
    "default_workflow_type": _OWN_WORKFLOW,
    "default_eval_workflow_type": _OWN_WORKFLOW,
    "default_reward_fn_type": "no effect",
    "reward_fn_args": "no effect",
}


def capabilities() -> str:
    """docs/capabilities.md with the tables, between their marks, as they have to be."""
    parts = (*_algorithms(), "", *_settings(), "", *_with_tinker())
    before, _, rest = CAPABILITIES.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + "\n".join((*parts, END)) + rest.partition(END)[2]


def _algorithms() -> Iterator[str]:
    yield "| algorithm | `local` | `trinity` |"
    yield "|---|---|---|"
    for name in sorted({*ALGORITHMS, *NOT_HERE}):
        local = f"no: {NOT_HERE[name]}" if name in NOT_HERE else "yes"
        there = f"no: {ALGORITHMS_REFUSED[name]}" if name in ALGORITHMS_REFUSED else "yes"
        yield f"| `{name}` | {local} | {there} |"


def _settings() -> Iterator[str]:
    """The settings that are not the same on both; the others are read by both."""
    yield "| setting | `local` | `trinity` |"
    yield "|---|---|---|"
    refusals = {
        row.key: f"{'no' if row.values == 'anything' else f'not {row.values}'}: {row.why}"
        for row in REFUSALS
    }
    rows = {"mode": ("`both`, `explore`, `train`", ", ".join(f"`{mode}`" for mode in MODES))}
    for path, info in fields():
        if section_of(info.annotation) is None or info.description:
            rows.setdefault(path, ("yes", refusals.pop(path, _of_ours(path))))
    for row in FOREIGN:
        key = row.path.removesuffix(".**")
        there = OURS.get(row.path.rpartition(".")[2], "yes")
        taken = accepted(row)
        local = {"anything": "no effect", "nothing": "no"}.get(taken, f"only {taken}")
        rows[row.path] = (local, refusals.pop(key, there))
    # What is left is a key inside one that the local backend takes no other values of.
    rows |= {key: ("no", why) for key, why in refusals.items()}
    folded: dict[tuple[str, str, str], list[str]] = {}
    for path, (local, there) in rows.items():
        section, _, name = path.removesuffix(".**").rpartition(".")
        if local != there:
            folded.setdefault((section, local, there), []).append(name)
    for (section, local, there), names in folded.items():
        known = ", ".join(f"`{name}`" for name in names)
        cells = (f"`{section}.` {known}" if section else known, local, there)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _with_tinker() -> Iterator[str]:
    """What Tinker's service has not, besides."""
    yield "| with `model.tinker.enable` also refused | |"
    yield "|---|---|"
    for row in WITH_TINKER:
        yield f"| `{row.key}` {row.values} | {row.why} |"
    whys: dict[str, list[str]] = {}
    for name, why in ALGORITHMS_WITHOUT_TINKER.items():
        whys.setdefault(why, []).append(f"`{name}`")
    for why, names in whys.items():
        yield f"| `algorithm.algorithm_type` {', '.join(names)} | {why} |"


def _of_ours(path: str) -> str:
    section, _, rest = path.partition(".")
    if section != "tuner":
        return "yes"
    name = rest.partition(".")[0]
    return "yes" if name in USED else "no effect" if name in WITHOUT_EFFECT else "no"


if __name__ == "__main__":
    CONFIGURATION.write_text(configuration(), encoding="utf-8")
    CAPABILITIES.write_text(capabilities(), encoding="utf-8")
