"""Outputs that notebooks of the repository have stored."""

import re
from pathlib import Path

import nbformat
from nbformat import NotebookNode


def check_stored(path: Path, run: NotebookNode) -> None:
    """Whether each cell shows what a run shows, apart from numbers, and nothing of one machine.

    Raises:
        AssertionError: It does not.
    """
    stored = nbformat.read(path, as_version=4)
    assert not re.search(r"/(tmp|home|work|root|Users)/", nbformat.writes(stored))
    assert [_kinds(cell) for cell in stored.cells] == [_kinds(cell) for cell in run.cells], (
        f"run: python -m docs.notebooks {path}"
    )


def _kinds(cell: NotebookNode) -> list[tuple[str, str]]:
    """Of each output its kind and its first words."""
    found = []
    for output in cell.get("outputs", ()):
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        found.append((output.output_type, re.split(r"[\d.(\[{]", text.strip())[0]))
    return found
