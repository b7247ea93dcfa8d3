"""Branches are counted by cause, behind the list of traces and in the report."""

import dataclasses
import json

import pytest
from starlette.testclient import TestClient

from tests.kit.builders import call, trace
from tests.tools.viewer.stored import read_data, small, store_run
from tuner.tools.viewer import RunReader, write_report
from tuner.tools.viewer import page as report
from tuner.tools.viewer.index import TraceIndex
from tuner.tools.viewer.queries import TraceQuery, find, summary
from tuner.tools.viewer.web import viewer_app


def resampled(task, rollout, times=2, **fields):
    """A trace whose prompt was sampled `times` times: each but the first is a branch."""
    calls = [call(f"c{i}", [1, 2], [3 + i], [-0.5]) for i in range(times)]
    return trace(task, rollout, calls, reward=1.0, **fields)


def goes_on(task, rollout):
    calls = [call("a", [1], [2], [-0.5]), call("b", [1, 2, 3], [4], [-0.5])]
    return trace(task, rollout, calls, reward=1.0)


def counted(index):
    return summary(index)["branches"]


def test_branches_are_counted_behind_the_list_and_in_parts(tmp_path):
    run = store_run(tmp_path, [resampled(0, i) for i in range(3)])
    index = TraceIndex(run / "traces")
    index.refresh()
    assert counted(index) == {"traces": 3, "looked_at": 0, "counts": {}}
    rounds = 1
    while not index.count_branches(seconds=0):
        rounds += 1
        assert index.counted == rounds - 1
    assert rounds == 3
    assert counted(index) == {"traces": 3, "looked_at": 3, "counts": {"resampled": 3}}
    store_run(tmp_path, [resampled(0, 3, times=3), resampled(0, 4, final=False)])
    index.refresh()
    assert index.count_branches()
    assert counted(index) == {"traces": 4, "looked_at": 4, "counts": {"resampled": 5}}


def test_traces_are_found_by_the_cause_of_their_branches_once_it_is_known(tmp_path):
    run = store_run(tmp_path, [resampled(0, 0), goes_on(0, 1), resampled(0, 2)])
    index = TraceIndex(run / "traces")
    index.refresh()
    assert find(index, TraceQuery(cause="none")) == [2]
    assert find(index, TraceQuery(cause="any")) == []
    index.count_branches()
    assert find(index, TraceQuery(cause="any")) == [1, 3]
    assert find(index, TraceQuery(cause="resampled")) == [1, 3]
    assert find(index, TraceQuery(cause="reasoning")) == []


def test_a_replaced_file_is_counted_anew(tmp_path):
    run = store_run(tmp_path, [resampled(0, 0), resampled(0, 1)])
    index = TraceIndex(run / "traces")
    index.refresh()
    index.count_branches()
    (run / "traces/step_000001.jsonl").unlink()
    store_run(tmp_path, [goes_on(0, 0)])
    index.refresh()
    index.count_branches()
    assert counted(index) == {"traces": 1, "looked_at": 1, "counts": {}}


def test_only_traces_that_may_branch_are_read_again(tmp_path, monkeypatch):
    run = store_run(tmp_path, [goes_on(0, 0), small(0, 1, 1.0), resampled(0, 2)])
    index = TraceIndex(run / "traces")
    index.refresh()
    read = []
    monkeypatch.setattr(index, "read", lambda *at, whole=index.read: read.append(at) or whole(*at))
    index.count_branches()
    assert read == [("step_000001.jsonl", index.rows()[2].offset)]


def test_a_trace_that_this_version_does_not_know_is_named_and_the_others_are_counted(tmp_path):
    run = store_run(tmp_path, [resampled(0, 0), resampled(0, 1)])
    path = run / "traces/step_000001.jsonl"
    first, second = path.read_text().splitlines()
    later = json.loads(first)
    later["calls"][0]["mood"] = "good"
    path.write_text(f"{json.dumps(later)}\n{second}\n")
    index = RunReader(run).traces
    index.refresh()
    assert index.count_branches()
    assert counted(index) == {"traces": 1, "looked_at": 1, "counts": {"resampled": 1}}
    assert "step_000001.jsonl, byte 0: not a trace: calls[0].mood" in index.problems[0]


def test_the_server_counts_behind_the_list(tmp_path):
    run = store_run(tmp_path, [resampled(0, 0)])
    client = TestClient(viewer_app(run, "token"), base_url="http://127.0.0.1/token/")
    state = client.get("api/run").json()
    assert (state["complete"], state["counted"], state["more"]) == (True, 1, False)
    assert client.get("api/summary").json()["branches"]["counts"] == {"resampled": 1}
    body = client.get("api/trace", params={"file": "step_000001.jsonl", "offset": 0}).json()
    assert body["branches"] == [{"call": 1, "cause": "resampled", "earlier": 0}]


@pytest.mark.parametrize("seconds", [60.0, -1.0])
def test_the_report_counts_training_traces_that_are_not_in_it_while_there_is_time(
    tmp_path, monkeypatch, seconds
):
    monkeypatch.setattr(report, "CAUSE_SECONDS", seconds)
    traces = [resampled(0, i, step=1 + i) for i in range(6)]
    evaluated = dataclasses.replace(traces[0].id, split="test")
    replaced = resampled(0, 7, final=False)
    run = store_run(tmp_path, [*traces, dataclasses.replace(traces[0], id=evaluated), replaced])
    size = (run / "traces/step_000002.jsonl").stat().st_size
    data = read_data(write_report(run, trace_bytes=4 * size).read_text(encoding="utf-8"))
    assert len(data["traces"]) < 5
    assert all(row["causes"] == {"resampled": 1} for row in data["traces"])
    inside = sum(row["split"] == "train" and row["final"] for row in data["traces"])
    counted = 6 if seconds > 0 else inside
    assert data["summary"]["branches"] == {
        "traces": 6,
        "looked_at": counted,
        "counts": {"resampled": counted},
    }
