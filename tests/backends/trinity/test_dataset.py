"""Rows reach the workers as they are."""

import json

import pytest

from tuner.errors import DatasetError
from tuner.trinity.dataset import (
    ROW,
    readable_there,
    task_of,
    tasks_of,
    write_tasks,
)

ROWS = [{"question": "1+1?", "answer": 2}, {"question": "ä", "tags": ["x", None, {"y": 1.5}]}]


def test_rows_with_different_fields_and_types_come_back_unchanged(tmp_path):
    settings = write_tasks(ROWS, tmp_path / "data", role="train_dataset")
    lines = (tmp_path / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    assert [task_of(json.loads(line)) for line in lines] == ROWS
    assert settings["path"] == str(tmp_path / "data")
    assert settings["split"] == "train"


def test_rows_that_trinity_read_by_itself_are_left_alone():
    assert task_of({"question": "1+1?", "answer": "2"}) == {"question": "1+1?", "answer": "2"}
    assert task_of({ROW: '{"a": 1}', "other": 2}) == {ROW: '{"a": 1}', "other": 2}


def test_a_row_that_json_has_no_form_for_is_named(tmp_path):
    with pytest.raises(DatasetError, match=r"train_dataset: row 1 cannot be sent .*set"):
        write_tasks([{"a": 1}, {"a": {1}}], tmp_path, role="train_dataset")


def test_folders_and_hub_names_are_read_there_and_files_are_not(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n')
    assert readable_there({"path": str(tmp_path)})
    assert readable_there({"path": "openai/gsm8k"})
    assert not readable_there({"path": str(file)})
    assert not readable_there({"path": None})


def test_a_taskset_without_path_takes_the_rows_given_in_python():
    assert tasks_of({"path": None}, ROWS, role="train_dataset") == ROWS
    with pytest.raises(DatasetError, match="train_dataset: there are no rows"):
        tasks_of({}, None, role="train_dataset")
