"""Reading datasets, and what is said when they cannot be read."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import huggingface_hub
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.kit import builders
from tuner import Dataset, DatasetConfig
from tuner.config import keys
from tuner.config.load import load_config
from tuner.errors import ConfigError, DatasetError
from tuner.runs.record import fingerprint_of
from tuner.tasks import datasets as reading
from tuner.tasks.datasets import check_fills_a_batch, load_tasks, row_text
from tuner.tasks.functions import shown
from tuner.tasks.selection import evaluation_tasks, training_tasks
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


def test_csv_goes_through_the_datasets_library_which_says_nothing(tmp_path, capfd):
    (tmp_path / "train.csv").write_text("a,b\n1,x\n2,y\n")
    assert load_tasks(str(tmp_path), role="t") == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    with pytest.raises(DatasetError, match='Unknown split "test"'):
        load_tasks(Dataset(path=str(tmp_path), split="test"), role="t")
    (tmp_path / "train.csv").write_text("a,b\n1,x\n1,2,3,4\n")
    with pytest.raises(DatasetError, match="Expected 2 fields in line 3, saw 4"):
        load_tasks(str(tmp_path), role="t")
    assert capfd.readouterr() == ("", "")
    assert datasets.is_progress_bar_enabled()


CELLS = {
    "code": (["007", "2139", ""], ["007", "2139", None]),
    "last": (["1", "2", "03"], ["1", "2", "03"]),
    "signed": (["-07", "+08", "9"], ["-07", "+08", "9"]),
    "version": (["1.10", "02.5", "NA"], ["1.10", "02.5", None]),
    "spaced": ([" 007", "8", "9"], [" 007", "8", "9"]),
    "number": (["0", "10", "-3"], [0, 10, -3]),
    "fraction": (["0.5", "-0.25", "1e05"], [0.5, -0.25, 1e5]),
    "gaps": (["", "1.5", "NA"], [None, 1.5, None]),
    "empty": (["", "", ""], [None, None, None]),
    "truth": (["True", "", "False"], [True, None, False]),
    "text": (["0,1", "x\ny", "007"], ["0,1", "x\ny", "007"]),
}


@pytest.mark.parametrize("in_memory", [0, reading.IN_MEMORY])
@pytest.mark.parametrize("columns", [list(CELLS), ["code"], ["number", "fraction", "text"]])
@pytest.mark.parametrize("folder", [True, False])
def test_numbers_in_csv_files_keep_leading_zeros(tmp_path, monkeypatch, in_memory, columns, folder):
    monkeypatch.setattr(reading, "IN_MEMORY", in_memory)
    with (tmp_path / "train.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*(CELLS[name][0] for name in columns), strict=True))
    found = load_tasks(tmp_path if folder else tmp_path / "train.csv", role="t")
    assert isinstance(found, reading.ArrowRows) == (in_memory == 0)
    values = {name: [row[name] for row in found] for name in columns}
    assert values == {name: CELLS[name][1] for name in columns}
    assert [list(row) for row in found] == 3 * [columns]


def test_a_leading_zero_far_down_a_csv_file_counts(tmp_path):
    """The library infers types from 10,000 rows at a time."""
    cells = [*map(str, range(10_010)), "007"]
    (tmp_path / "rows.csv").write_text("\n".join(["code", *cells]))
    rows = load_tasks(tmp_path / "rows.csv", role="t")
    assert [row["code"] for row in rows] == cells


COMPRESSIONS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
PLAIN = {
    ".jsonl": "\n".join(map(json.dumps, [*ROWS, {"day": "2020-01-01", "no": "007"}])),
    ".json": json.dumps([*ROWS, {"day": "2020-01-01", "no": "007"}]),
    ".csv": "question,no\nWhat?,007\nWhy?,8\n",
}


@pytest.mark.long
@pytest.mark.parametrize("in_memory", [0, 64, reading.IN_MEMORY])
@pytest.mark.parametrize("suffix", PLAIN)
def test_rows_of_compressed_files_are_those_of_plain_ones(tmp_path, monkeypatch, suffix, in_memory):
    monkeypatch.setattr(reading, "IN_MEMORY", in_memory)
    (tmp_path / f"train{suffix}").write_text(PLAIN[suffix])
    rows = load_tasks(tmp_path / f"train{suffix}", role="t")
    for ending, compress in COMPRESSIONS.items():
        inside = tmp_path / ending
        inside.mkdir()
        (inside / f"train{suffix}{ending}").write_bytes(compress(PLAIN[suffix].encode()))
        for source in (inside, inside / f"train{suffix}{ending}", Dataset(path=str(inside))):
            found = load_tasks(source, role="t")
            assert type(found) is type(rows)
            assert list(found) == list(rows)
        if suffix != ".csv":
            with pytest.raises(DatasetError, match="has no split 'dev'; it has: train"):
                load_tasks(Dataset(path=str(inside), split="dev"), role="t")


@pytest.mark.parametrize("ending", COMPRESSIONS)
@given(place=st.integers(0, 10_000), byte=st.none() | st.integers(1, 255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_compressed_file_is_named_or_read_whole(tmp_path, ending, place, byte):
    """One byte is changed, or the file ends there."""
    whole = bytearray(COMPRESSIONS[ending](PLAIN[".jsonl"].encode()))
    place %= len(whole)
    damaged = whole[:place]
    if byte is not None:
        damaged = whole
        damaged[place] ^= byte
    path = tmp_path / f"train.jsonl{ending}"
    path.write_bytes(damaged)
    try:
        outcome = str(len(load_tasks(path, role="t")))
    except DatasetError as error:
        outcome = str(error)
    assert outcome == "3" or str(path) in outcome


def test_a_compressed_file_that_is_missing_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train.jsonl.gz", "rows.csv.bz2", "my/rows.parquet.xz"):
        assert f"does not exist (looked for {tmp_path / name})" in message(name)
    (tmp_path / "rows.txt.gz").write_bytes(gzip.compress(b"x"))
    assert "is a gz file; supported are .parquet" in message(tmp_path / "rows.txt.gz")
    (tmp_path / "rows.parquet.xz").touch()
    assert "is a xz file; supported are .parquet" in message(tmp_path / "rows.parquet.xz")


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

    for error in (
        ConnectionError("Couldn't reach 'a/b' on the Hub"),
        FileNotFoundError("Couldn't find 'a/b' on the Hub: LocalEntryNotFoundError: no connection"),
    ):
        asked = Mock(side_effect=error)
        monkeypatch.setattr(datasets, "get_dataset_config_names", asked)
        assert "the Hugging Face Hub cannot be reached" in message("a/b")


def test_without_a_network_a_hub_dataset_is_given_up_at_once_in_one_sentence(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    keys._hub_answers.cache_clear()
    said = message(Dataset(path="a/b", name="main"))
    keys._hub_answers.cache_clear()
    assert said.count("cannot be reached") == 1
    assert "check the path, or download the dataset" in said


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


@pytest.fixture
def copy_of_hub(tmp_path: Path) -> str:
    """A folder as `git clone` makes it of a dataset on the Hub."""
    card = "---\nconfigs:\n"
    for subset in ("socratic", "main"):
        (tmp_path / subset).mkdir()
        card += f"- config_name: {subset}\n  data_files:\n"
        for split in ("train", "test"):
            name = f"{subset}/{split}-00000-of-00001.jsonl"
            (tmp_path / name).write_text(json.dumps({"from": f"{subset} {split}"}))
            card += f"  - {{split: {split}, path: {name}}}\n"
    (tmp_path / "README.md").write_text(f"{card}---\n")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("subset", "split", "found"),
    [
        (None, "train", "main train"),
        (None, "test", "main test"),
        ("main", "train", "main train"),
        ("socratic", "test", "socratic test"),
        ("socratic", "train[:1]", "socratic train"),
    ],
)
def test_a_copy_of_a_hub_dataset_has_its_subsets_and_splits(copy_of_hub, subset, split, found):
    assert load_tasks(Dataset(path=copy_of_hub, name=subset, split=split), role="t") == [
        {"from": found}
    ]
    file = Path(copy_of_hub, "config.yaml")
    taskset = json.dumps({"path": copy_of_hub, "split": split, "subset_name": subset})
    file.write_text(
        f"model: {{model_path: org/name}}\nbuffer: {{batch_size: 1, explorer_input: "
        f"{{taskset: {taskset}, eval_tasksets: [{taskset}]}}}}\n"
    )
    config = load_config(file)
    assert training_tasks(config, None) == [{"from": found}]
    assert evaluation_tasks(config, None) == {"eval": [{"from": found}]}


@pytest.mark.parametrize("subset", [None, "main"])
def test_a_csv_dataset_in_the_hubs_cache_keeps_its_zeros_or_says_so(
    tmp_path, monkeypatch, caplog, subset
):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "zips").mkdir()
    (tmp_path / "zips" / "train.csv").write_text("zip;n\n02139;1\n10115;2\n")
    card = "configs:\n- {config_name: main, sep: ';', data_files: train.csv}\n"
    (tmp_path / "zips" / "README.md").write_text(f"---\n{card}---\n")
    rows = [{"zip": "02139", "n": 1}, {"zip": "10115", "n": 2}]
    assert load_tasks(Dataset(path=str(tmp_path / "zips"), name=subset), role="t") == rows
    (tmp_path / "cache" / "zips").rename(tmp_path / "cache" / "org___zips")
    cached = Dataset(path="org/zips", name=subset)
    assert load_tasks(cached, role="t") == rows
    assert "leading zeros" not in caplog.text
    (texts,) = (tmp_path / "cache" / "org___zips").glob("main-*")
    shutil.rmtree(texts)
    assert load_tasks(cached, role="t") == [{"zip": 2139, "n": 1}, {"zip": 10115, "n": 2}]
    assert "no texts of the columns zip, n" in caplog.text


def test_a_subset_or_split_that_a_copy_lacks_is_told_with_those_it_has(copy_of_hub):
    said = message(Dataset(path=copy_of_hub, name="other"))
    assert "'other' not found. Available: ['socratic', 'main']" in said
    said = message(Dataset(path=copy_of_hub, name="main", split="dev"))
    assert "Unknown split \"dev\". Should be one of ['train', 'test']" in said


@pytest.mark.parametrize("name", ["openai/gsm8k:main", "gsm8k@main", "openai/gsm8k:main:train"])
def test_a_hub_name_with_its_subset_inside_says_where_that_belongs(name):
    said = message(name)
    assert "give the name alone" in said
    assert "subset_name" in said


def test_a_readme_beside_the_only_split_changes_nothing(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"a": 1}')
    (tmp_path / "README.md").write_text("my rows")
    for split in (None, "rows"):
        assert load_tasks(Dataset(path=str(tmp_path), split=split), role="t") == [{"a": 1}]


def test_parts_of_a_split_are_one_split(tmp_path):
    for part in range(2):
        name = f"train-0000{part}-of-00002.jsonl"
        (tmp_path / name).write_text(json.dumps({"part": part}))
    assert load_tasks(tmp_path, role="t") == [{"part": 0}, {"part": 1}]


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
    both: dict = {"question": "hi"}
    both |= {"one": both, "other": both}
    for row in (circle, both):
        with pytest.raises(DatasetError, match=r"row 1 of .* cannot be serialised"):
            load_tasks([{"question": "a"}, row], role="train_dataset")
    both["other"] = {1: both}
    assert "the key 1 (int)" in message([both])


_KEYS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.tuples(st.integers()), st.binary()
)


@given(st.data())
@settings(max_examples=40)
def test_a_key_that_is_no_string_is_named_wherever_it_is(data):
    row: Any = {data.draw(_KEYS): 0, **data.draw(st.dictionaries(st.text(), st.integers()))}
    key = next(iter(row))
    for wrap in data.draw(st.lists(st.sampled_from(["dict", "list", "tuple"]), max_size=6)):
        row = {"a": 1, "b": row} if wrap == "dict" else [2, row] if wrap == "list" else (row,)
    said = message([row if isinstance(row, dict) else {"a": row}])
    assert f"row 0 of the list given as dataset has the key {shown(key)}: " in said
    assert f"write {str(key)!r}" in said


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


@pytest.mark.long
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
