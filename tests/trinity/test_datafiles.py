"""Rows reach the workers as they are, and recorded ones as Trinity-RFT's trainer reads them."""

from __future__ import annotations

import json
import sqlite3

import pytest

from tuner.config.schema import TunerSection
from tuner.errors import ConfigError, DatasetError
from tuner.trinity.datafiles import (
    ROW,
    as_messages,
    is_text,
    put_recorded,
    readable_there,
    task_of,
    tasks_of,
    write_tasks,
)
from tuner.trinity.handover import TrinitySettings

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
    (tmp_path / "more.csv.gz").touch()  # there, 007 would become 7
    assert not readable_there({"path": str(tmp_path)})


def test_a_taskset_without_path_takes_the_rows_given_in_python():
    assert tasks_of({"path": None}, ROWS, role="train_dataset") == ROWS
    with pytest.raises(DatasetError, match="train_dataset: there are no rows"):
        tasks_of({}, None, role="train_dataset")


@pytest.mark.parametrize(("asked", "taken"), [({}, 3), ({"trainer": {"total_steps": 2}}, 2)])
def test_a_database_is_trained_on_once_if_no_steps_are_set(tmp_path, asked, taken):
    file = tmp_path / "experiences.db"
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE experience_buffer (id INTEGER)")
        database.executemany("INSERT INTO experience_buffer VALUES (?)", [(n,) for n in range(7)])
    buffer = {"storage_type": "sql", "path": f"sqlite:///{file}"}
    tree = {
        "buffer": {"train_batch_size": 2, "trainer_input": {"experience_buffer": buffer}},
        **asked,
    }
    settings = TrinitySettings(tree, TunerSection(), {}, ())
    assert put_recorded(settings, None) == 7
    assert settings.get("trainer.total_steps") == taken


ASKED = {"role": "user", "content": "What is 3 + 4?"}
SEVEN = {"role": "assistant", "content": "7."}
EIGHT = {"role": "assistant", "content": "8."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"messages": [ASKED, SEVEN]}, {}),
        ({"messages": json.dumps([ASKED, SEVEN])}, {"prompt_type": "MESSAGES"}),
        ({"said": [ASKED, SEVEN]}, {"messages_key": "said"}),
        ({"prompt": ASKED["content"], "response": "7."}, {}),
        ({"q": ASKED["content"], "a": "7."}, {"prompt_key": "q", "response_key": "a"}),
    ],
)
def test_every_way_to_write_a_conversation_is_the_same_there(row, form):
    (written,), format = as_messages([row], form, algorithm="sft")
    assert json.loads(written["messages"]) == [ASKED, SEVEN]
    assert written["tools"] == ""
    assert format["prompt_type"] == "messages"
    # Every answer is trained, as on the local backend; Trinity-RFT's default is the last one.
    assert format["enable_concatenated_multi_turn"] is True


def test_tools_travel_as_text_which_no_reader_changes():
    row = {"messages": [ASKED, SEVEN], "tools": [TOOL]}
    (written,), _ = as_messages([row], {"enable_thinking": False}, algorithm="sft")
    assert json.loads(written["tools"]) == [TOOL]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASKED["content"], "chosen": "7.", "rejected": "8."},
        {"messages": [ASKED], "chosen": [SEVEN], "rejected": EIGHT},
    ],
)
def test_a_pair_is_what_both_follow_and_two_ends(row):
    (written,), _ = as_messages([row], {}, algorithm="dpo")
    assert written == {"messages": [ASKED], "chosen": [SEVEN], "rejected": [EIGHT]}


@pytest.mark.parametrize(
    ("algorithm", "row", "said"),
    [
        ("sft", {"messages": [ASKED, {**SEVEN, "weight": 0}, ASKED, SEVEN]}, "a message's weight"),
        ("sft", {"text": "a"}, "row 1: there is no column 'prompt'"),
        ("dpo", {"prompt": "a", "chosen": [SEVEN, ASKED, SEVEN], "rejected": [EIGHT]},
         "one assistant message"),
        ("dpo", {"prompt": "a", "chosen": "7.", "rejected": "8.", "tools": [TOOL]}, "show tools"),
        ("dpo", {"prompt": "a", "chosen": "7.", "rejected": "7."}, "are the same"),
    ],
)  # fmt: skip
def test_what_cannot_be_said_there_is_refused_before_it_begins(algorithm, row, said):
    good = {"prompt": "a", "response": "b", "chosen": "b", "rejected": "c"}
    with pytest.raises(DatasetError, match=said):
        as_messages([good, row], {}, algorithm=algorithm)


def test_a_form_that_describes_no_columns_is_named():
    with pytest.raises(ConfigError, match=r"experience_buffer\.format\.enable_concatenated"):
        as_messages([], {"enable_concatenated_multi_turn": "maybe"}, algorithm="sft")


def test_pictures_and_plain_text_are_left_as_they_are():
    assert is_text("sft", {})
    assert is_text("dpo", {"messages_key": "m"})
    assert not is_text("sft", {"image_key": "picture"})
    assert not is_text("cpt", {})
