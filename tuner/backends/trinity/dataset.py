"""The tasks where Trinity-RFT finds them.

It reads folders and names on the Hugging Face Hub with `datasets`; those stay as they are. Rows in
memory and single files, which it cannot read, are written into the run's folder, each row as the
JSON text of one column, so that no reader changes a type or fills a gap.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.backends.run_directory import write_atomically
from tuner.config.paths import path_or_name
from tuner.dataset import DatasetConfig, Task, load_tasks
from tuner.errors import DatasetError

ROW = "tuner_row"


def readable_there(taskset: Mapping[str, Any]) -> bool:
    """Whether Trinity-RFT can read the path of a taskset: a folder, or a name on the Hub."""
    path = taskset.get("path")
    if not path:
        return False
    local = Path(path_or_name(str(path), Path.cwd()))
    return not local.is_file() and (local.is_dir() or not local.is_absolute())


def tasks_of(taskset: Mapping[str, Any], rows: Any, *, role: str) -> list[Task]:
    """All rows of a taskset, or of what was given in Python where it has no path.

    Raises:
        DatasetError: There are none, or they cannot be read.
    """
    source = rows
    if taskset.get("path"):
        source = DatasetConfig(
            path=str(taskset["path"]),
            name=taskset.get("subset_name"),
            split=taskset.get("split") or "train",
        )
    if source is None:
        raise DatasetError(f"{role}: there are no rows; set its path, or pass it to tune()")
    return load_tasks(source, role=role)


def write_tasks(tasks: Sequence[Task], folder: Path, *, role: str) -> dict[str, Any]:
    """Write rows where Trinity-RFT reads them; gives the settings of their taskset.

    Raises:
        DatasetError: A row holds something that JSON has not.
    """
    lines = []
    for index, task in enumerate(tasks):
        try:
            text = json.dumps(task, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise DatasetError(
                f"{role}: row {index} cannot be sent to the workers: {error}; rows may hold what "
                "JSON has: text, numbers, lists and dicts"
            ) from None
        lines.append(json.dumps({ROW: text}) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "train.jsonl", "".join(lines))
    return {"path": str(folder), "split": "train", "subset_name": None}


def task_of(row: Mapping[str, Any]) -> Task:
    """The row that the user's functions get."""
    if set(row) == {ROW}:
        task: Task = json.loads(row[ROW])
        return task
    return dict(row)
