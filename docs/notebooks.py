"""Stores the outputs of a run in the notebooks: `python -m docs.notebooks [NOTEBOOK ...]`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*/*.ipynb"))


def executed(path: Path, notebook: NotebookNode | None = None) -> NotebookNode:
    """The notebook with the outputs of one run, in the folder that it is in."""
    # nbformat has no types.
    notebook = notebook or nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    resources = {"metadata": {"path": path.parent}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    return notebook


def for_people(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Leaves out this machine's paths, its clock, and progress bars and warnings (stderr).

    Args:
        folder: where the run wrote its files.
    """
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        cell.metadata.pop("execution", None)
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.outputs:
            texts = output if output.output_type == "stream" else output.data
            for kind in texts.keys() & {"text", "text/plain", "text/html"}:
                text = texts[kind].replace(str(folder), "checkpoints")
                texts[kind] = text.replace(f"{ROOT}/", "")
    return notebook


def main(names: list[str]) -> None:
    for path in [Path(name).resolve() for name in names] or NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TUNER_CHECKPOINT_ROOT_DIR"] = folder
            notebook = for_people(executed(path), Path(folder))
        nbformat.write(notebook, path)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main(sys.argv[1:])
