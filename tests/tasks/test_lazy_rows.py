"""Datasets that memory would not hold: their rows are read when a step takes them."""

import json
import os

import datasets
import pytest

from tests.kit.agents import answer
from tuner import Dataset, WorkflowOutput, tune
from tuner.errors import DatasetError
from tuner.runs.record import fingerprint_of
from tuner.tasks import datasets as dataset
from tuner.tasks import datasets as lazy_rows
from tuner.tasks.datasets import ArrowRows, JsonLines, StreamRows, load_tasks
from tuner.traces import TraceStore

ROWS = [{"question": f"What is {n}?", "hint": None if n % 2 else "count"} for n in range(50)]


@pytest.fixture
def nothing_fits(monkeypatch):
    monkeypatch.setattr(dataset, "IN_MEMORY", 0)


@pytest.fixture
def lines(tmp_path):
    """A file whose rows say only what there is to say, with an empty line in it."""
    path = tmp_path / "rows.jsonl"
    said = [{key: value for key, value in row.items() if value is not None} for row in ROWS]
    path.write_text("\n".join([*map(json.dumps, said[:3]), "", *map(json.dumps, said[3:])]))
    return path


def test_rows_that_stay_on_disk_are_those_that_are_read_at_once(
    lines, tmp_path, nothing_fits, monkeypatch
):
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(tmp_path / "rows.parquet")
    found = {
        source: load_tasks(source, role="train_dataset")
        for source in (lines, tmp_path / "rows.parquet", table)
    }
    assert [type(rows) for rows in found.values()] == [JsonLines, ArrowRows, ArrowRows]
    monkeypatch.setattr(dataset, "IN_MEMORY", 1 << 20)
    for source, rows in found.items():
        at_once = load_tasks(source, role="train_dataset")
        assert isinstance(at_once, list)
        assert len(rows) == 50
        assert list(rows) == at_once == ROWS
        assert rows[3:9:2] == ROWS[3:9:2]
        assert rows[-1] == ROWS[-1]
        assert fingerprint_of(rows) == fingerprint_of(at_once)
        for beyond in (50, -51):
            with pytest.raises(IndexError):
                rows[beyond]
    assert Dataset(path=str(lines)).preview(2) == ROWS[:2]


def test_a_row_is_another_object_each_time(lines, nothing_fits):
    rows = load_tasks(lines, role="train_dataset")
    rows[4]["question"] = "changed by an agent"
    assert rows[4] == ROWS[4]


def test_lines_that_are_no_rows_are_named(tmp_path, nothing_fits):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a":\n')
    with pytest.raises(DatasetError, match=r"^train_dataset: .*rows\.jsonl:2: not valid JSON"):
        load_tasks(path, role="train_dataset")
    path.write_text('{"a": 1}\n[1]\n')
    with pytest.raises(DatasetError, match=r"rows\.jsonl:2 is \[1\] \(list\); every row"):
        load_tasks(path, role="train_dataset")


def test_a_file_that_changes_meanwhile_is_not_read_on(lines, nothing_fits):
    rows = load_tasks(lines, role="train_dataset")
    assert rows[40] == ROWS[40]
    os.utime(lines, ns=(1, 1))
    with pytest.raises(DatasetError, match="has changed since the run began"):
        rows[40]


def test_of_very_many_rows_some_tell_them_from_others(monkeypatch):
    monkeypatch.setattr(lazy_rows, "_ALL", 10)
    monkeypatch.setattr(lazy_rows, "_SAMPLE", 25)
    table = datasets.Dataset.from_list(ROWS)
    same, fewer = ArrowRows(table), ArrowRows(table.select(range(49)))
    changed = ArrowRows(table.map(lambda row: {"question": row["question"].upper()}))
    assert len(list(same.sample())) == 26
    prints = [fingerprint_of(rows) for rows in (same, ArrowRows(table), fewer, changed)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


class Stream:
    """A stream that notes how often it is begun, and from where."""

    def __init__(self, count):
        self.count = count
        self.begun = []

    def skip(self, start):
        self.begun.append(start)
        return iter([{"n": n} for n in range(start, self.count)])


def test_a_stream_is_read_once_for_rows_that_lie_near_each_other(monkeypatch):
    monkeypatch.setattr(lazy_rows, "_KEPT", 8)
    stream = Stream(100)
    rows = StreamRows(stream)
    assert [rows[n]["n"] for n in (3, 1, 2, 9, 5, 10)] == [3, 1, 2, 9, 5, 10]
    assert stream.begun == [0]
    # What lies further back is read again, and a run that goes on begins where it was.
    assert rows[2]["n"] == 2
    assert StreamRows(stream)[60]["n"] == 60
    assert stream.begun == [0, 0, 56]
    with pytest.raises(DatasetError, match=r"ended after 100 rows, and row 100 .*total_steps"):
        rows[100]


async def workflow(task, model):
    said = await answer(model, task["question"])
    return WorkflowOutput(reward=float(sum(map(ord, said)) % 17))


def trained(data, folder, model, *more, steps=3):
    return tune(
        workflow,
        train_dataset=data,
        overrides=[
            f"model.model_path={model}",
            f"checkpoint_root_dir={folder}",
            "name=run",
            "buffer.batch_size=2",
            f"buffer.total_steps={steps}",
            "algorithm.repeat_times=2",
            "model.max_response_tokens=4",
            "tuner.deterministic=true",
            "trainer.save_interval=1",
            *more,
        ],
    )


@pytest.mark.long
def test_a_stream_trains_and_goes_on_where_it_was(tmp_path, random_model_path):
    stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    trained(stream, tmp_path, random_model_path, steps=2)
    trained(stream, tmp_path, random_model_path, steps=4)
    (folder,) = tmp_path.rglob("traces")
    asked = [
        {trace.task["question"] for trace in TraceStore(folder).read("train", step)}
        for step in range(1, 5)
    ]
    assert asked == [{ROWS[n]["question"], ROWS[n + 1]["question"]} for n in (0, 2, 4, 6)]


def test_what_a_stream_cannot_be_is_said(tmp_path, random_model_path):
    stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    with pytest.raises(DatasetError, match=r"a stream of unknown length: set buffer\.total"):
        trained(stream, tmp_path, random_model_path, "buffer.total_steps=null")
    shuffled = "buffer.explorer_input.taskset.data_selector.selector_type=shuffle"
    with pytest.raises(DatasetError, match=r"is 'shuffle', but a stream has a fixed order"):
        trained(stream, tmp_path, random_model_path, shuffled)
    with pytest.raises(DatasetError, match="is an endless stream; pass a list"):
        load_tasks(stream, role="eval_dataset")
