"""Reading datasets, and what is said when they cannot be read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tuner import Dataset, DatasetConfig
from tuner.errors import ConfigError, DatasetError
from tuner.tasks.datasets import check_fills_a_batch, load_tasks

ROWS = [
    {"question": "What is 2 + 2?", "answer": "4"},
    {"question": "What is 4 + 4?", "answer": "8"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS) + "\n")
    (tmp_path / "test.json").write_text(json.dumps(ROWS[:1]))
    return tmp_path


def test_preview_prints_columns_as_in_the_tutorial_and_returns_rows(folder, capsys):
    assert Dataset(path=str(folder), split="train").preview() == ROWS
    assert capsys.readouterr().out == (
        '{\n  "question": [\n    "What is 2 + 2?",\n    "What is 4 + 4?"\n  ],\n'
        '  "answer": [\n    "4",\n    "8"\n  ]\n}\n'
    )
    assert Dataset(path=str(folder)).preview(n=1) == ROWS[:1]
    assert DatasetConfig is Dataset


def test_rows_come_from_folders_files_lists_and_objects(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    for source in (
        Dataset(path=str(folder)),
        Dataset(path=folder.name),
        str(folder),
        folder / "train.jsonl",
        ROWS,
        tuple(ROWS),
    ):
        assert load_tasks(source, role="train_dataset") == ROWS
    assert load_tasks(Dataset(path=str(folder), split="test"), role="e") == ROWS[:1]


def test_plain_rows_equal_those_of_the_datasets_library(tmp_path):
    datasets = pytest.importorskip("datasets")
    mixed = [{"a": 1, "b": "x"}, {"b": "y", "c": [1, 2]}, {"a": 3, "d": {"e": 1.5}}]
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(row) for row in mixed))
    theirs = datasets.load_dataset(str(tmp_path), split="train")
    assert load_tasks(str(tmp_path), role="t") == list(theirs) == load_tasks(theirs, role="t")
    theirs.to_parquet(str(tmp_path / "rows.parquet"))
    assert load_tasks(tmp_path / "rows.parquet", role="t") == list(theirs)


def test_csv_goes_through_the_datasets_library(tmp_path):
    (tmp_path / "train.csv").write_text("a,b\n1,x\n2,y\n")
    assert load_tasks(str(tmp_path), role="t") == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    with pytest.raises(DatasetError, match='Unknown split "test"'):
        load_tasks(Dataset(path=str(tmp_path), split="test"), role="t")


def test_subset_is_a_folder(folder):
    (folder / "hard").mkdir()
    (folder / "hard" / "train.jsonl").write_text('{"a": 1}')
    assert load_tasks(Dataset(path=str(folder), name="hard"), role="t") == [{"a": 1}]


def message(source: object) -> str:
    with pytest.raises(DatasetError) as caught:
        load_tasks(source, role="train_dataset")
    assert str(caught.value).startswith("train_dataset: ")
    return str(caught.value)


def test_missing_things_are_named(folder, tmp_path):
    assert "does not exist (looked for" in message(str(tmp_path / "nowhere"))
    assert "has no split 'dev'; it has: test, train" in message(
        Dataset(path=str(folder), split="dev")
    )
    assert "name a split (test, train)" in message(Dataset(path=str(folder), split=None))
    (tmp_path / "notes.txt").write_text("x")
    assert "is a txt file" in message(tmp_path / "notes.txt")
    assert "is empty" in message([])
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "is empty" in message(tmp_path / "empty.jsonl")
    assert "row 1 of the list given as dataset is 'b' (str)" in message([{"a": 1}, "b"])
    (tmp_path / "rows.json").write_text("[1]")
    assert "is 1 (int); every row must be a dict" in message(tmp_path / "rows.json")
    (tmp_path / "broken.jsonl").write_text('{"a": 1}\n{"a":\n')
    assert "broken.jsonl:2: not valid JSON" in message(tmp_path / "broken.jsonl")
    assert "pass a Dataset" in message(3)


def test_unreachable_hub_is_said(monkeypatch):
    import datasets

    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'a/b' on the Hub")

    monkeypatch.setattr(datasets, "get_dataset_config_names", unreachable)
    assert "the Hugging Face Hub cannot be reached" in message("a/b")


def test_main_subset_of_a_hub_dataset_is_taken_and_said(monkeypatch, caplog):
    import datasets

    asked = {}

    def load_dataset(path, name, split):
        asked.update(path=path, name=name, split=split)
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda path: ["main", "socratic"])
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_tasks("openai/gsm8k", role="t") == ROWS
    assert asked == {"path": "openai/gsm8k", "name": "main", "split": "train"}
    assert "taking subset 'main' of main, socratic" in caplog.text
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda path: ["a", "b"])
    assert "several subsets (a, b): name one" in message("openai/gsm8k")


def test_dataset_smaller_than_a_batch_is_refused():
    with pytest.raises(
        DatasetError, match="has 12 rows but batch_size is 32: no step can run; lower"
    ):
        check_fills_a_batch([{}] * 12, 32, "dataset 'train.jsonl'")
    with pytest.raises(DatasetError, match="has 31 rows"):
        check_fills_a_batch([{}] * 31, 32, "rows")
    check_fills_a_batch([{}] * 32, 32, "rows")


def test_unknown_and_wrong_fields_are_refused():
    with pytest.raises(ConfigError, match=r"DatasetConfig.subset is unknown \(fields: path, name"):
        Dataset(path="x", subset="main")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="total_epochs is 0: must be greater"):
        Dataset(path="x", total_epochs=0)


def test_plain_files_are_read_without_the_datasets_library(folder):
    code = (
        "import sys; from tuner import Dataset; from tuner.tasks.datasets import load_tasks\n"
        f"load_tasks(Dataset(path={str(folder)!r}), role='t')\n"
        "assert 'datasets' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_row_that_cannot_be_written_down_is_refused():
    circle: dict = {"question": "hi"}
    circle["itself"] = circle
    for row in (circle, {("a", "b"): 1}, {1: "a", "b": 2}):
        with pytest.raises(DatasetError, match=r"row 1 of .* cannot be serialised"):
            load_tasks([{"question": "a"}, row], role="train_dataset")
