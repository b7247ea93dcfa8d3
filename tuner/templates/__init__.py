"""Folders to begin with, which `tuner init` copies: what all share, and what each has beside it."""

from __future__ import annotations

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
        raise ConfigError(f"{', '.join(there)} exists already: name another folder, or remove it")
    try:
        for file, source in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, file)
    except OSError as error:
        raise ConfigError(
            f"the folder {str(folder)!r} cannot be written ({error}): name another one"
        ) from None
    return sorted(files)
