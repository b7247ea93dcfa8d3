"""Traces on disk read back equal, and survive a process that is killed while it writes."""

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.builders import call, trace
from tests.kit.examples import few
from tests.traces.agents import rollouts
from tuner.engines import SamplingParams
from tuner.errors import TunerError
from tuner.traces import Call, Outcome, RolloutId, Trace, TraceStore, branches
from tuner.traces.store import is_one_path, to_plain, trace_from_json, trace_to_json

ids = st.lists(st.integers(0, 2**17), max_size=6).map(tuple)
number = st.floats(allow_nan=False, allow_infinity=False)
text = st.text(st.characters(exclude_categories=()), max_size=8)  # halves of pairs included
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | number | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
records = st.dictionaries(text, json_values, max_size=3)


# Values that Python calls equal and JSON does not, and equal texts in another order.
alike = [{"content": v} for v in (1, True, 1.0, 0, False, -0.0, "", None)]
alike += [{"a": 1, "b": 2}, {"b": 2, "a": 1}]


@st.composite
def calls(draw):
    """The calls of one rollout; most go on from an earlier one in ids, in messages or in both."""
    pool = draw(st.lists(records, max_size=4)) + alike
    some = st.lists(st.sampled_from(pool), max_size=3)
    made = []
    for sent in draw(rollouts(max_calls=5)):
        n = len(sent.completion_ids)
        earlier = draw(st.sampled_from([None, *made]))
        history = [*earlier.messages, earlier.response] if earlier is not None else []
        made.append(
            Call(
                id=draw(text),
                prompt_ids=sent.prompt_ids,
                completion_ids=sent.completion_ids,
                logprobs=tuple(draw(st.lists(st.floats(-50, 0, width=32), min_size=n, max_size=n))),
                # Sometimes one version too few: such a call is invalid and is kept as it is.
                versions=(7,) * draw(st.sampled_from([n, n, max(n - 1, 0)])),
                sampling=SamplingParams(
                    max_tokens=draw(st.integers(1, 99)),
                    stop=tuple(draw(st.lists(text, max_size=2))),
                ),
                finish_reason="stop",
                reused_ids=draw(st.integers(0, 99)),
                rerendered=draw(st.sampled_from([None, "text", "characters", "tokenizer", "end"])),
                messages=history[: draw(st.integers(0, len(history)))] + draw(some),
                tools=draw(some),
                response=draw(st.sampled_from(pool)),
                started=draw(number),
                seconds=draw(number),
            )
        )
    return tuple(made)


traces = st.builds(
    Trace,
    id=st.builds(RolloutId, step=st.just(3), task=st.integers(0, 9), rollout=st.integers(0, 9)),
    task=records,
    calls=calls(),
    outcome=st.sampled_from(Outcome),
    reward=st.none() | number,
    metrics=st.dictionaries(text, number, max_size=2),
    response=text,
    error=st.none() | text,
    final=st.booleans(),
)


@given(original=traces)
@settings(max_examples=few(150), deadline=None)
def test_reading_back_gives_an_equal_trace(tmp_path_factory, original):
    store = TraceStore(tmp_path_factory.mktemp("traces"))
    store.append(original)
    (read,) = store.read("train", 3)
    assert read == original
    assert repr(read) == repr(original)  # 1 is not True, and keys keep their order


@given(original=traces)
@settings(max_examples=few(30), deadline=None)
def test_traces_of_the_first_format_are_still_read(original):
    line = json.dumps(to_plain(original))
    assert repr(trace_from_json(json.loads(line))) == repr(original)


# A line as the first version wrote it, with each call's whole prompt.
FIRST_FORMAT = """{"id": {"step": 1, "task": 0, "rollout": 2, "split": "train"}, "task": {"q": "?"},
"calls": [{"id": "a", "prompt_ids": [1, 2], "completion_ids": [3], "logprobs": [-0.5],
"versions": [4], "sampling": {"max_tokens": 9, "temperature": 1.0, "top_p": 1.0, "top_k": -1,
"stop": ["x"], "seed": 5, "top_logprobs": 0}, "finish_reason": "stop",
"messages": [{"role": "user", "content": "hi"}], "tools": [],
"response": {"role": "assistant", "content": "ho"}, "started": 1.5, "seconds": 0.25,
"cached_tokens": 0, "invalid": null}], "outcome": "completed", "reward": 1.0, "metrics": {},
"response": "ho", "error": null, "attempt": 1, "final": true, "seconds": {"workflow": 2.0}}"""


def test_a_line_of_the_first_format_is_read_with_defaults_for_newer_fields(tmp_path):
    store = TraceStore(tmp_path)
    store.path("train", 1).write_text(FIRST_FORMAT.replace("\n", " ") + "\n")
    (read,) = store.read("train", 1)
    expected = call("a", [1, 2], [3], [-0.5], stop=("x",), seed=5)
    sampling = dataclasses.replace(expected.sampling, max_tokens=9)
    expected = dataclasses.replace(expected, versions=(4,), sampling=sampling)
    assert read.calls == (expected,)
    assert (read.id, read.outcome) == (RolloutId(1, 0, 2), Outcome.COMPLETED)


def conversation(turns):
    """A trace whose every call sends all that was said before it."""
    said, ids, made = [], (), []
    for turn in range(turns):
        ids += tuple(range(1000 + 100 * turn, 1050 + 100 * turn))
        said = [*said, {"role": "user", "content": f"question {turn} " * 20}]
        answer = {"role": "assistant", "content": f"answer {turn} " * 20}
        turn_ids = tuple(range(5000 + 100 * turn, 5050 + 100 * turn))
        one = call(str(turn), ids, turn_ids, [-0.5] * 50)
        tools = [{"name": "add", "description": "adds " * 50}]
        made.append(dataclasses.replace(one, messages=said, response=answer, tools=tools))
        said, ids = [*said, answer], ids + turn_ids
    return trace(0, 0, made, reward=1.0)


def test_a_conversation_grows_with_its_turns_and_not_with_their_square(tmp_path):
    store = TraceStore(tmp_path)
    sizes = []
    for step, turns in enumerate((10, 20, 40)):
        talk = dataclasses.replace(conversation(turns), id=RolloutId(step, 0, 0))
        store.append(talk)
        sizes.append(store.path("train", step).stat().st_size)
        assert store.read("train", step) == [talk]
    assert sizes[2] - sizes[1] < 2.05 * (sizes[1] - sizes[0])


def test_a_sequence_is_stored_by_the_earlier_call_that_shares_most_of_it():
    prompts = [(1, 2, 3), (9, 9), (1, 2, 4, 5), (1, 2, 4, 6), (1, 2, 3, 30, 31, 7)]
    made = [call(str(i), prompt, (30 + i, 31), [-1, -1]) for i, prompt in enumerate(prompts)]
    stored = trace_to_json(trace(0, 0, made))
    assert stored["format"] == 2
    assert [one["prompt_ids"] for one in stored["calls"]] == [
        (0, 0, (1, 2, 3)),
        (0, 0, (9, 9)),
        (0, 2, (4, 5)),
        (2, 3, (6,)),
        (0, 5, (7,)),
    ]
    assert stored["distinct"] == {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
        "tools": [[]],
    }


@given(original=traces)
@settings(max_examples=few(100), deadline=None)
def test_what_is_known_to_be_one_path_before_unpacking_has_no_branches(original):
    if is_one_path(json.loads(json.dumps(trace_to_json(original)))):
        assert branches(original.calls) == ()


def test_a_conversation_is_known_to_be_one_path_and_a_second_answer_is_not():
    talk = conversation(4)
    assert is_one_path(trace_to_json(talk))
    again = dataclasses.replace(talk, calls=(*talk.calls, talk.calls[-1]))
    assert not is_one_path(trace_to_json(again))


def test_a_file_of_a_later_version_is_refused_by_its_format(tmp_path):
    store = TraceStore(tmp_path)
    later = {**trace_to_json(trace(0, 0, [])), "format": 3}
    store.path("train", 1).write_text(json.dumps(later) + "\n")
    with pytest.raises(TunerError, match=r"line 1 .*format: input should be 2, not 3: it is of"):
        store.read("train", 1)


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


@pytest.mark.parametrize(
    "line", ["{}", "7", '{"format": 2}', '{"format": 2, "distinct": {}, "calls": [{}]}']
)
def test_damaged_line_names_file_and_line(tmp_path, line):
    store = TraceStore(tmp_path)
    store.append(trace(0, 0, [], outcome=Outcome.NO_CALLS))
    with store.path("train", 1).open("a") as file:
        file.write(line + "\n")
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


def test_traces_from_before_there_were_grammars_are_read() -> None:
    one = trace(0, 0, [call("a", [1], [2], [-1.0])], reward=1.0)
    stored = json.loads(json.dumps(trace_to_json(one)))
    assert '"grammar"' in json.dumps(stored)
    assert trace_from_json(_without_grammar(stored)) == one


def _without_grammar(data):
    if isinstance(data, dict):
        return {k: _without_grammar(v) for k, v in data.items() if k != "grammar"}
    return [_without_grammar(item) for item in data] if isinstance(data, list) else data


def test_lines_about_one_attempt_are_one_trace_and_the_last_counts(tmp_path):
    """A process that is killed between two attempts leaves the first behind, and begins again."""
    store = TraceStore(tmp_path)
    first = trace(0, 0, [], final=False)
    for one in (first, trace(0, 1, []), dataclasses.replace(first, final=True)):
        store.append(one)
    assert [(t.id.rollout, t.final) for t in store.read("train", 1)] == [(1, True), (0, True)]


@pytest.mark.parametrize(("prompt", "completion"), [([1, 5], [2]), ([1], [5])])
def test_a_token_that_the_model_does_not_have_is_named(prompt, completion, tmp_path):
    TraceStore(tmp_path).append(trace(0, 0, [call("a", prompt, completion, [-1.0])]))
    with pytest.raises(TunerError, match=r"token id 5, and the model has 5 tokens"):
        TraceStore(tmp_path, vocabulary=5).read("train", 1)
    assert len(TraceStore(tmp_path, vocabulary=6).read("train", 1)) == 1


@pytest.mark.parametrize("levels", [10, 150, 199, 200, 201, 300, 900])
def test_values_of_many_levels_come_back_as_they_were(tmp_path, levels):
    value = None
    for _ in range(levels // 2):
        value = {"a": [value]}
    made = trace(1, 0, [call("c", [1], [2], [-0.5])], reward=1.0)
    made = dataclasses.replace(made, task={"a": "\ud83d", "q": value}, response="\ud83d")
    TraceStore(tmp_path).append(made)
    assert TraceStore(tmp_path).read("train", 1) == [made]
