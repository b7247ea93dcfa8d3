"""The tables of what judges call equal, beside this file."""

from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent


def table(judge: str) -> dict[str, list[list[Any]]]:
    """The rows of a judge's table by their heading."""
    found: dict[str, list[list[Any]]] = yaml.safe_load(
        (FOLDER / f"{judge}.yaml").read_text("utf-8")
    )
    return found


def rows(judge: str) -> list[list[Any]]:
    return [row for group in table(judge).values() for row in group]
