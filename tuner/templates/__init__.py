"""Folders to begin with, which `tuner init` copies: what all share, and what each has beside it."""

from __future__ import annotations

import importlib.util
import shutil
from enum import StrEnum
from pathlib import Path

from tuner.errors import ConfigError

_HERE = Path(__file__).parent
_SHARED = "shared"


class Template(StrEnum):
    """What the agent of a new folder is written with."""

    OPENAI = "openai"
    REACT = "react"
    LANGGRAPH = "langgraph"
    QUEUE = "queue"
    MULTI_AGENT = "multi-agent"


# What a template imports that tuner does not bring, and how it is installed.
_NEEDS = {
    Template.REACT: ("agentscope", "'agentscope-tuner[agentscope1]'"),
    Template.LANGGRAPH: ("langchain_openai", "langchain langchain-openai"),
}


def missing(template: Template) -> str | None:
    """What `pip install` would still have to bring, in its words; None where nothing is missing."""
    package, requirement = _NEEDS.get(template, ("tuner", None))
    return requirement if importlib.util.find_spec(package) is None else None


def create(template: Template, folder: Path) -> list[Path]:
    """Copy a template's files into a folder, which is made where it is not there.

    Returns:
        The new files.

    Raises:
        ConfigError: One of them is there already, of which none is written then, or the folder
            cannot be written.
    """
    files: dict[Path, Path] = {}
    for source in (_HERE / _SHARED, _HERE / template.replace("-", "_")):
        inside = (path for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc")
        files |= {folder / path.relative_to(source): path for path in inside}
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
