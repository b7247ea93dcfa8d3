"""Tasks and recorded data, in the places and formats that Trinity-RFT reads.

It reads folders and names on the Hugging Face Hub with `datasets`; those are unchanged. Rows in
memory and single files, which it cannot read, are written into the run's folder, each row as the
JSON text of one column, so that no reader changes a type or fills a gap.

A row of recorded data has several possible forms (docs/recorded_data.md): text or messages,
lists or JSON text, columns of any name. Trinity-RFT finds an unreadable row only in the middle of a
run; so every row is read here first, as on the local backend, and written as messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from tuner.config.keys import describe
from tuner.config.load import RECORDED
from tuner.config.schema import FormatSection
from tuner.config.source import path_or_name, uncompressed
from tuner.errors import ConfigError, DatasetError
from tuner.runs.directory import write_atomically
from tuner.runs.record import fingerprint_of
from tuner.runs.recorded import SETTING, conversation, pair
from tuner.tasks.datasets import DatasetConfig, Task, check_fills_a_batch, load_tasks
from tuner.trinity.stage import BUFFER, count_experiences

if TYPE_CHECKING:
    from tuner.trinity.handover import TrinitySettings

ROW = "tuner_row"


def readable_there(taskset: Mapping[str, Any]) -> bool:
    """Whether Trinity-RFT reads the same rows at the path of a taskset: a folder, or a name on the
    Hub. In CSV files it would drop leading zeros."""
    path = taskset.get("path")
    if not path:
        return False
    local = Path(path_or_name(str(path), Path.cwd()))
    if local.is_dir():
        return all(uncompressed(file).suffix != ".csv" for file in local.rglob("*"))
    return not local.is_file() and not local.is_absolute()


def tasks_of(taskset: Mapping[str, Any], rows: Any, *, role: str) -> Sequence[Task]:
    """All rows of a taskset, or those given in Python if it has no path."""
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
    """Write the training tasks for Trinity-RFT; returns their number by set.

    Args:
        settings: Gets the new paths of the data.
        rows: The training data given to `tune()`.
        fingerprint: Gets the fingerprint of each set's rows.
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
    """Write every evaluation set for Trinity-RFT; returns the number of rollouts of each."""
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
    """Write recorded data for Trinity-RFT's trainer; returns the number of rows or experiences."""
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
                    "trainer.total_steps is not set: the trainer would wait for more data at its "
                    "end; set the number of steps"
                )
            return int(steps) * batch
        check_fills_a_batch([{}] * count, batch, "the buffer of experiences")
        # Its reader waits for more at the end of a database, even if nothing will come.
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
    """Write rows for Trinity-RFT; returns the settings of their taskset."""
    texts = [_json(task, index, role) for index, task in enumerate(tasks)]
    return _written("".join(json.dumps({ROW: text}) + "\n" for text in texts), folder)


def _json(row: Mapping[str, Any], index: int, role: str) -> str:
    try:
        return json.dumps(row, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise DatasetError(
            f"{role}: row {index} cannot be sent to the workers: {error}; rows may contain "
            "JSON values only: text, numbers, lists and dicts"
        ) from None


def _written(text: str, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "train.jsonl", text)
    return {"path": str(folder), "split": "train", "subset_name": None}


def task_of(row: Mapping[str, Any]) -> Task:
    """The row for the user's functions."""
    if set(row) == {ROW}:
        task: Task = json.loads(row[ROW])
        return task
    return dict(row)


def is_text(algorithm: str, form: Mapping[str, Any]) -> bool:
    """Whether an algorithm's rows are conversations, or pairs of them, of text only: those with
    pictures are passed to Trinity-RFT unchanged."""
    pictured = form.get("image_key") or form.get("video_key")
    return bool(RECORDED.get(algorithm)) and not pictured


def as_messages(
    rows: Sequence[Mapping[str, Any]], form: Mapping[str, Any], *, algorithm: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows as messages, and the `format` that describes them.

    Args:
        rows: The dataset.
        form: The given `format`.
        algorithm: `sft` or `dpo`.
    """
    columns = _columns(form)
    read = _conversation if RECORDED[algorithm] == "conversations" else _pair
    written = []
    for number, row in enumerate(rows):
        try:
            written.append(read(row, columns))
        except DatasetError as error:
            raise DatasetError(f"train_dataset: row {number}: {error}") from None
    names = {
        "prompt_type": "messages",
        "messages_key": "messages",
        "tools_key": "tools",
        "chosen_key": "chosen",
        "rejected_key": "rejected",
        "enable_concatenated_multi_turn": columns.enable_concatenated_multi_turn,
    }
    kept = {name: value for name, value in form.items() if name not in FormatSection.model_fields}
    return written, {**kept, **names}


def _columns(form: Mapping[str, Any]) -> FormatSection:
    known = {name: form[name] for name in FormatSection.model_fields if name in form}
    if isinstance(kind := known.get("prompt_type"), str):
        known["prompt_type"] = kind.lower()  # Trinity-RFT accepts both
    try:
        return FormatSection.model_validate(known)
    except ValidationError as error:
        problems = describe(error, FormatSection, list(FormatSection.model_fields))
        raise ConfigError("; ".join(f"{SETTING}.{one.text}" for one in problems)) from None


def _conversation(row: Mapping[str, Any], columns: FormatSection) -> dict[str, Any]:
    found = conversation(row, columns)
    answers = [at for at, message in enumerate(found.messages) if message["role"] == "assistant"]
    wanted = answers if columns.enable_concatenated_multi_turn else [len(found.messages) - 1]
    if list(found.trained) != wanted:
        raise DatasetError(
            "Trinity-RFT trains every answer of a conversation, or only the last message "
            "(format.enable_concatenated_multi_turn), and does not support a message's weight; "
            "drop such rows, or set tuner.backend to local"
        )
    return {
        "messages": json.dumps(found.messages, ensure_ascii=False),
        "tools": json.dumps(found.tools, ensure_ascii=False) if found.tools else "",
    }


def _pair(row: Mapping[str, Any], columns: FormatSection) -> dict[str, Any]:
    chosen, rejected = pair(row, columns)
    if chosen.tools:
        raise DatasetError(
            "Trinity-RFT's dpo does not show tools to the model; remove them, or set "
            "tuner.backend to local"
        )
    shared = chosen.messages[:-1]
    for one in (chosen, rejected):
        if one.messages[:-1] != shared or one.trained != (len(shared),):
            raise DatasetError(
                "Trinity-RFT trains everything after the shared messages: both ends must be one "
                "assistant message of weight 1; drop such rows, or set tuner.backend to local"
            )
    return {
        "messages": shared,
        "chosen": chosen.messages[-1:],
        "rejected": rejected.messages[-1:],
    }
