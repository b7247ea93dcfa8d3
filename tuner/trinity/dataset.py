"""The tasks where Trinity-RFT finds them.

It reads folders and names on the Hugging Face Hub with `datasets`; those stay as they are. Rows in
memory and single files, which it cannot read, are written into the run's folder, each row as the
JSON text of one column, so that no reader changes a type or fills a gap.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.config.source import path_or_name
from tuner.data.dataset import DatasetConfig, Task, check_fills_a_batch, load_tasks
from tuner.errors import ConfigError, DatasetError
from tuner.run.directory import write_atomically
from tuner.run.record import fingerprint_of
from tuner.trinity.modes import BUFFER, count_experiences
from tuner.trinity.recorded import as_messages, is_text

if TYPE_CHECKING:
    from tuner.trinity.config import TrinitySettings

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


def put_tasks(settings: TrinitySettings, rows: Any, fingerprint: dict[str, str]) -> list[int]:
    """Put the tasks that are trained on where Trinity-RFT reads them; gives their number by set.

    Args:
        settings: The places of the data are noted there.
        rows: As given to `tune()`.
        fingerprint: Gets what tells the rows of each set from others.

    Raises:
        DatasetError: There are none, or not enough for one batch.
    """
    inputs = settings.tree["buffer"]["explorer_input"]
    sizes = []
    for index, taskset in enumerate(inputs.get("tasksets") or [inputs["taskset"]]):
        tasks = tasks_of(taskset, rows, role="train_dataset")
        sizes.append(len(tasks))
        fingerprint[f"train_{index}"] = fingerprint_of(tasks)
        if not readable_there(taskset):
            folder = _folder(settings) / f"train_{index}"
            taskset.update(write_tasks(tasks, folder, role="train_dataset"))
    batch = int(settings.get("buffer.batch_size"))
    check_fills_a_batch([{}] * sum(sizes), batch, "the training data")
    return sizes


def put_evaluations(
    settings: TrinitySettings, rows: Any, fingerprint: dict[str, str]
) -> dict[str, int]:
    """Put every evaluation set where Trinity-RFT reads it; gives the rollouts of each.

    Raises:
        DatasetError: A set has no rows.
    """
    counts = {}
    sets = settings.get("buffer.explorer_input.eval_tasksets", ())
    for index, taskset in enumerate(sets):
        name = taskset.setdefault("name", f"eval_{index}")
        given = rows.get(name) if isinstance(rows, dict) else rows
        role = f"eval_dataset {name!r}"
        tasks = tasks_of(taskset, given, role=role)
        fingerprint[f"eval/{name}"] = fingerprint_of(tasks)
        counts[name] = len(tasks) * int(taskset.get("repeat_times") or 1)
        if not readable_there(taskset):
            folder = _folder(settings) / f"eval_{index}"
            taskset.update(write_tasks(tasks, folder, role=role))
    return counts


def put_recorded(settings: TrinitySettings, rows: Any) -> int:
    """Put recorded data where Trinity-RFT's trainer reads it; gives its rows or experiences.

    Raises:
        ConfigError: A database's size is not known here, and the steps are not set.
        DatasetError: There is nothing to train on, or not enough for one batch.
    """
    buffer = settings.get(BUFFER)
    batch = int(settings.get("buffer.train_batch_size"))
    if buffer["storage_type"] == "sql":
        buffer.setdefault("name", "experience_buffer")
        count = count_experiences(str(buffer.get("path")), buffer["name"])
        if count is None:
            steps = settings.get("trainer.total_steps")
            if not steps:
                raise ConfigError(
                    f"{BUFFER}.path is {buffer.get('path')}, a database on a server, and "
                    "trainer.total_steps is not set: the trainer would wait for more at its end; "
                    "set the number of steps"
                )
            return int(steps) * batch
        check_fills_a_batch([{}] * count, batch, "the buffer of experiences")
        # Its reader waits for more at the end of a database, and does not know that none comes.
        if not settings.get("trainer.total_steps"):
            settings.tree.setdefault("trainer", {})["total_steps"] = count // batch
        return count
    recorded = tasks_of(buffer, rows, role="train_dataset")
    check_fills_a_batch([{}] * len(recorded), batch, "the recorded data")
    algorithm, form = settings.get("algorithm.algorithm_type"), buffer.get("format") or {}
    as_text = is_text(algorithm, form)
    if as_text:
        recorded, buffer["format"] = as_messages(recorded, form, algorithm=algorithm)
    if as_text or not readable_there(buffer):
        lines = [_json(row, index, "train_dataset") + "\n" for index, row in enumerate(recorded)]
        buffer.update(_written("".join(lines), _folder(settings) / "recorded"))
    return len(recorded)


def _folder(settings: TrinitySettings) -> Path:
    return settings.results_dir / "tuner" / "data"


def write_tasks(tasks: Sequence[Task], folder: Path, *, role: str) -> dict[str, Any]:
    """Write rows where Trinity-RFT reads them; gives the settings of their taskset.

    Raises:
        DatasetError: A row holds something that JSON has not.
    """
    texts = [_json(task, index, role) for index, task in enumerate(tasks)]
    return _written("".join(json.dumps({ROW: text}) + "\n" for text in texts), folder)


def _json(row: Mapping[str, Any], index: int, role: str) -> str:
    try:
        return json.dumps(row, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise DatasetError(
            f"{role}: row {index} cannot be sent to the workers: {error}; rows may hold what "
            "JSON has: text, numbers, lists and dicts"
        ) from None


def _written(text: str, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "train.jsonl", text)
    return {"path": str(folder), "split": "train", "subset_name": None}


def task_of(row: Mapping[str, Any]) -> Task:
    """The row that the user's functions get."""
    if set(row) == {ROW}:
        task: Task = json.loads(row[ROW])
        return task
    return dict(row)
