"""Reading datasets, and what is said when they cannot be read."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.kit import builders
from tuner import Dataset, DatasetConfig
from tuner.errors import ConfigError, DatasetError
from tuner.runs.record import fingerprint_of
from tuner.tasks import datasets as reading
from tuner.tasks.datasets import check_fills_a_batch, load_tasks, row_text
from tuner.traces.store import TRACES, trace_line, trace_to_json

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


# Whatever rows hold.


class _Raises:
    """An object none of whose methods works."""

    def __init__(self, error):
        self.error = error

    def __repr__(self):
        raise self.error

    tolist = isoformat = __repr__


def _nested(levels, leaf, wrap):
    for level in range(levels):
        leaf = {"a": leaf} if wrap and level % 2 else [leaf]
    return leaf


_INTEGERS = st.builds(lambda digits, sign: sign * 10**digits, st.integers(0, 6000), st.just(-1))
_TEXTS = st.text(st.characters(exclude_categories=()), max_size=5)
_OBJECTS = st.one_of(
    st.binary(max_size=3),
    st.datetimes(),
    st.sets(st.integers(), max_size=2),
    st.sampled_from([ValueError("no"), RecursionError(), OSError(5, "no")]).map(_Raises),
    st.just(np.ones((2, 2))),
    st.just(Image.new("RGB", (2, 2))),
)
_PLAIN = st.one_of(st.none(), st.booleans(), st.floats(allow_nan=False), _INTEGERS, _TEXTS)
_VALUES = st.recursive(
    _PLAIN | _OBJECTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_TEXTS, inner, max_size=2),
    max_leaves=4,
)
_DEEP = st.builds(_nested, st.integers(0, 300) | st.just(50_000), _PLAIN, st.booleans())


def _stored(task):
    trace = replace(builders.trace(0, 0, []), task=task)
    return TRACES.parse(trace_line(trace_to_json(trace))).task


@given(st.dictionaries(_TEXTS | st.integers(), _VALUES | _DEEP, max_size=3))
def test_a_row_is_refused_at_once_or_can_be_kept_with_its_rollouts(row):
    try:
        (kept,) = load_tasks([row], role="train_dataset")
    except DatasetError:
        return
    assert kept == row
    stored = _stored(kept)
    assert row_text(_stored(stored)) == row_text(stored)


@pytest.mark.parametrize("text", ["1" * 5000, "[" * 500 + "]" * 500, "[" * 100_000 + "]" * 100_000])
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
@pytest.mark.parametrize("large", [False, True])
def test_a_file_with_such_a_row_is_refused_by_its_name(tmp_path, monkeypatch, text, name, large):
    monkeypatch.setattr(reading, "IN_MEMORY", 0 if large else reading.IN_MEMORY)
    row = f'{{"a": {text}}}'
    (tmp_path / name).write_text(f"[{row}]" if name == "rows.json" else f"{row}\n")
    with pytest.raises(DatasetError, match=rf"{name}.*(more than \d+ (digits|levels))"):
        load_tasks(tmp_path / name, role="train_dataset")


def _images(colors):
    rows = {"image": [Image.new("RGB", (2, 2), color) for color in colors]}
    return datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())


@pytest.mark.parametrize("in_memory", [0, reading.IN_MEMORY])
def test_images_are_the_same_rows_each_time_they_are_read(monkeypatch, in_memory):
    monkeypatch.setattr(reading, "IN_MEMORY", in_memory)
    first, second, other = (
        fingerprint_of(load_tasks(_images(colors), role="t"))
        for colors in (["red", "blue"], ["red", "blue"], ["red", "green"])
    )
    assert first == second != other


def test_an_image_that_cannot_be_decoded_is_an_error_of_its_dataset():
    rows = {"image": [{"bytes": b"no image", "path": None}]}
    features = datasets.Features({"image": datasets.Image()})
    with pytest.raises(DatasetError, match="Dataset given as dataset cannot be read"):
        load_tasks(datasets.Dataset.from_dict(rows, features), role="t")
