"""Growing files are read once, torn lines are waited for, replaced files are begun anew."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.examples import few
from tests.tools.viewer.stored import small, store_run
from tuner.errors import TunerError
from tuner.tools.viewer.index import LineFollower, MetricsFollower, TraceIndex
from tuner.traces import Outcome, RolloutId
from tuner.traces.store import trace_to_json


def lines_of(traces):
    return b"".join(json.dumps(trace_to_json(item)).encode() + b"\n" for item in traces)


@settings(deadline=None, max_examples=few(60))
@given(cuts=st.lists(st.integers(0, 10_000), max_size=8), count=st.integers(0, 5))
def test_every_line_is_read_once_however_the_file_grows(tmp_path_factory, cuts, count):
    path = tmp_path_factory.mktemp("growing") / "file"
    content = b"".join(b"line %d \xe2\x82\xac\n" % i for i in range(count))
    follower, found, written = LineFollower(path), [], 0
    for cut in [*sorted(cut % (len(content) + 1) for cut in cuts), len(content)]:
        with path.open("ab") as file:
            file.write(content[written:cut])
        written = cut
        assert not follower.replaced()
        found += follower.new_lines()
    assert b"".join(line for _, line in found) == content
    assert all(content[start:].startswith(line) for start, line in found)


def test_torn_last_line_is_listed_when_it_is_complete(tmp_path):
    index = TraceIndex(tmp_path)
    content = lines_of([small(0, 0, 1.0), small(0, 1, 0.0)])
    (tmp_path / "step_000001.jsonl").write_bytes(content[:-9])
    assert index.refresh()
    assert [row.rollout for row in index.rows()] == [0]
    (tmp_path / "step_000001.jsonl").write_bytes(content)
    index.refresh()
    assert [row.rollout for row in index.rows()] == [0, 1]
    assert index.problems == []


def test_a_run_that_cuts_its_torn_line_and_goes_on_is_followed(tmp_path):
    run = store_run(tmp_path, [small(0, 0, 1.0)])
    index = TraceIndex(run / "traces")
    with (run / "traces/step_000001.jsonl").open("ab") as file:
        file.write(b'{"id": {"ste')
    index.refresh()
    store_run(tmp_path, [small(0, 1, 0.0)])
    index.refresh()
    assert [row.rollout for row in index.rows()] == [0, 1]


def test_rows_say_what_a_list_needs_and_lead_to_their_trace(tmp_path):
    failed = small(3, 1, None, step=2, outcome=Outcome.WORKFLOW_ERROR, error="x" * 999, final=False)
    run = store_run(tmp_path, [small(0, 0, 0.5), failed])
    index = TraceIndex(run / "traces")
    index.refresh()
    first, second = index.rows()
    assert (first.reward, first.tokens, first.calls, first.split) == (0.5, 1, 1, "train")
    assert (second.step, second.task, second.outcome) == (2, 3, "workflow_error")
    assert not second.final
    assert len(second.error) < 200
    assert index.read(second.file, second.offset)["error"] == "x" * 999


def test_files_are_listed_by_step(tmp_path):
    evaluated = dataclasses.replace(small(0, 0, 1.0), id=RolloutId(2, 0, 0, "held-out"))
    run = store_run(tmp_path, [*(small(0, 0, 1.0, step=step) for step in (10, 3, 1)), evaluated])
    index = TraceIndex(run / "traces")
    index.refresh()
    assert [row.step for row in index.rows()] == [1, 2, 3, 10]


def test_reading_for_a_limited_time_goes_on_where_it_stopped(tmp_path):
    run = store_run(tmp_path, [small(0, i, 1.0) for i in range(5)])
    index = TraceIndex(run / "traces")
    rounds = 0
    while not index.refresh(seconds=0):
        rounds += 1
    assert rounds == 5
    assert [row.rollout for row in index.rows()] == [0, 1, 2, 3, 4]


def test_a_replaced_file_begins_anew(tmp_path):
    run = store_run(tmp_path, [small(0, 0, 1.0), small(0, 1, 1.0)])
    index = TraceIndex(run / "traces")
    index.refresh()
    (run / "traces/step_000001.jsonl").write_bytes(lines_of([small(7, 7, 0.0)]))
    index.refresh()
    assert [row.task for row in index.rows()] == [7]


def test_metrics_that_a_resumed_run_rewrote_are_read_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step"')
    metrics = MetricsFollower(path)
    metrics.refresh()
    assert [row["step"] for row in metrics.rows] == [1, 2]
    (tmp_path / "new").write_text('{"step": 1}\n{"step": 5}\n{"step": 6}\n{"step": 7}\n')
    (tmp_path / "new").replace(path)
    metrics.refresh()
    assert [row["step"] for row in metrics.rows] == [1, 5, 6, 7]
    assert metrics.generation == 1


def test_a_damaged_line_is_named_and_the_others_are_listed(tmp_path):
    (tmp_path / "step_000001.jsonl").write_bytes(b"{}\n" + lines_of([small(0, 0, 1.0)]))
    index = TraceIndex(tmp_path)
    index.refresh()
    assert len(index.rows()) == 1
    assert "step_000001.jsonl, byte 0" in index.problems[0]


@pytest.mark.parametrize(("file", "offset"), [("../secret", 0), ("step_000001.jsonl", 1)])
def test_only_traces_are_read(tmp_path, file, offset):
    run = store_run(tmp_path / "run", [small(0, 0, 1.0)])
    (tmp_path / "run" / "secret").write_bytes(lines_of([small(0, 0, 1.0)]))
    with pytest.raises(TunerError):
        TraceIndex(run / "traces").read(file, offset)
