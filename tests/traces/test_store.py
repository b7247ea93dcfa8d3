"""Traces on disk read back equal, and survive a process that is killed while it writes."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import call, trace
from tuner.engines import SamplingParams
from tuner.errors import TunerError
from tuner.traces import Call, Outcome, RolloutId, Trace, TraceStore
from tuner.traces.store import trace_from_json, trace_to_json

ids = st.lists(st.integers(0, 2**17), max_size=6).map(tuple)
number = st.floats(allow_nan=False, allow_infinity=False)
text = st.text(max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | number | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
records = st.dictionaries(text, json_values, max_size=3)


@st.composite
def calls(draw):
    completion = draw(ids)
    n = len(completion)
    return Call(
        id=draw(text),
        prompt_ids=draw(ids),
        completion_ids=completion,
        logprobs=tuple(draw(st.lists(st.floats(-50, 0, width=32), min_size=n, max_size=n))),
        versions=tuple(draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))),
        sampling=SamplingParams(
            max_tokens=draw(st.integers(1, 99)), stop=tuple(draw(st.lists(text, max_size=2)))
        ),
        finish_reason="stop",
        reused_ids=draw(st.integers(0, 99)),
        rerendered=draw(st.sampled_from([None, "text", "characters", "tokenizer"])),
        messages=draw(st.lists(records, max_size=2)),
        tools=draw(st.lists(records, max_size=2)),
        response=draw(records),
        started=draw(number),
        seconds=draw(number),
    )


traces = st.builds(
    Trace,
    id=st.builds(RolloutId, step=st.just(3), task=st.integers(0, 9), rollout=st.integers(0, 9)),
    task=records,
    calls=st.lists(calls(), max_size=3).map(tuple),
    outcome=st.sampled_from(Outcome),
    reward=st.none() | number,
    metrics=st.dictionaries(text, number, max_size=2),
    response=text,
    error=st.none() | text,
    final=st.booleans(),
)


@given(traces)
@settings(max_examples=100, deadline=None)
def test_reading_back_gives_an_equal_trace(original):
    line = json.dumps(trace_to_json(original))
    assert trace_from_json(json.loads(line)) == original


def test_killed_writer_loses_at_most_its_last_line(tmp_path):
    store = TraceStore(tmp_path)
    first = trace(0, 0, [call("a", [1], [2], [-0.5])], reward=1.0)
    second = trace(0, 1, [call("b", [1], [3], [-0.7])], reward=0.0)
    store.append(first)
    path = store.path("train", 1)
    with path.open("a") as file:
        file.write('{"id": {"step": 1, "ta')
    assert store.read("train", 1) == [first]
    resumed = TraceStore(tmp_path)
    resumed.append(second)
    assert resumed.read("train", 1) == [first, second]


def test_damaged_line_names_file_and_line(tmp_path):
    store = TraceStore(tmp_path)
    store.append(trace(0, 0, [], outcome=Outcome.NO_CALLS))
    with store.path("train", 1).open("a") as file:
        file.write("{}\n")
    with pytest.raises(TunerError, match=r"step_000001\.jsonl, line 2 is not a trace"):
        store.read("train", 1)


def test_rows_with_dates_and_arrays_are_kept_readable(tmp_path):
    import datetime

    import numpy as np

    task = {"day": datetime.date(2026, 1, 2), "x": np.array([1, 2]), "n": np.float32(0.5)}
    store = TraceStore(tmp_path)
    store.append(Trace(RolloutId(1, 0, 0), task, (), Outcome.NO_CALLS, None))
    read = store.read("train", 1)[0].task
    assert read == {"day": "2026-01-02", "x": [1, 2], "n": 0.5}


@pytest.mark.parametrize(
    ("completion", "logprobs", "reason"),
    [
        ([1, 2], [-1.0], "2 completion ids, 1 logprobs"),
        ([], [], "no sampled tokens"),
        ([1], [math.nan], "not finite"),
        ([1], [-math.inf], "not finite"),
    ],
)
def test_call_whose_data_disagree_is_marked_invalid(completion, logprobs, reason):
    assert reason in call("a", [1], completion, logprobs).invalid


def test_consistent_call_is_valid():
    assert call("a", [1], [2, 3], [-1.0, 0.0]).invalid is None


def test_calls_written_before_a_field_existed_can_be_read() -> None:
    written = trace_to_json(trace(0, 0, [call("a", [1], [2], [-0.5])]))
    for name in ("reused_ids", "rerendered"):
        del written["calls"][0][name]
    (read,) = trace_from_json(json.loads(json.dumps(written))).calls
    assert (read.reused_ids, read.rerendered) == (0, None)
