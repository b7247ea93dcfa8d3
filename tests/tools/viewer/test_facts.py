"""What a stored trace says to lists, searches and tables."""

import dataclasses
import json

import pytest

from tests.kit.builders import call, trace
from tuner.tools.viewer.index import (
    NOT_OFFERED,
    UNREADABLE,
    Tally,
    answered,
    asked,
    folded,
    row,
    tallies,
    tool_uses,
)
from tuner.traces import Outcome
from tuner.traces.store import to_plain, trace_to_json


def plain(item):
    """As it comes out of a file, in the form of this version and in the first one."""
    return [json.loads(json.dumps(form(item))) for form in (trace_to_json, to_plain)]


def uses(*names, id="c"):
    made = [
        {"id": f"{id}{i}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for i, name in enumerate(names)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def result(id, text):
    return {"role": "tool", "tool_call_id": id, "content": text}


def turns(*answers_and_results):
    """Calls of a second each, which begin two seconds after one another: (answer, its results)."""
    history, calls = [{"role": "user", "content": "go"}], []
    for i, (answer, results) in enumerate(answers_and_results):
        made = call(f"call-{i}", [1, i], [2], [-0.5])
        calls.append(
            dataclasses.replace(
                made, messages=list(history), response=answer, started=2.0 * i, seconds=1.0
            )
        )
        history += [answer, *results]
    return calls


@pytest.mark.parametrize(
    ("task", "text"),
    [
        ({"answer": 5, "question": "2 + 3?"}, "2 + 3? · 5"),
        ({"id": "", "context": "long", "prompt": [{"role": "user", "content": "Hi"}]}, "Hi · long"),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, "Hi"),
        ({"numbers": [1, 2], "none": None}, "[1, 2]"),
    ],
)
def test_what_is_asked_comes_first_in_the_text_of_a_task(task, text):
    assert asked(task) == text


def test_without_a_response_the_last_answer_of_the_model_is_shown():
    said = {"role": "assistant", "content": "forty-two"}
    calls = turns((uses("add"), [result("c0", "42")]), (said, []))
    for stored in plain(trace(0, 0, calls)):
        assert answered(stored) == "forty-two"
        assert answered({**stored, "response": "42"}) == "42"
    for stored in plain(trace(0, 0, [])):
        assert answered(stored) == ""


def test_search_knows_neither_case_nor_line_breaks_nor_half_characters():
    assert folded("Der GROẞE\n  Preis \ud83d") == b"der grosse preis ?"


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        ("42", False),
        ("No error was found", False),
        ("Error: no such file", True),
        (" Traceback (most recent call last):\n ...", True),
        ("An error occurred while running the tool.", True),
        ('{"error": "not found"}', True),
        ('{"error": null, "value": 3}', False),
        ("{torn", False),
    ],
)
def test_a_tool_failed_where_its_result_says_so(text, failed):
    calls = turns((uses("add"), [result("c0", text)]), ({"role": "assistant", "content": "x"}, []))
    for stored in plain(trace(0, 0, calls)):
        assert list(tool_uses(stored)) == [("add", failed, 1.0)]


def test_each_use_of_a_tool_counts_once_also_where_ids_come_again_and_branches_repeat_it():
    calls = turns(
        (uses("add", "look_up"), [result("c0", "1"), result("c1", "Error")]),
        (uses("add"), [result("c0", "2")]),
        ({"role": "assistant", "content": "x"}, []),
    )
    again = dataclasses.replace(calls[2], id="again", prompt_ids=(9,), started=50.0)
    for stored in plain(trace(0, 0, [*calls, again])):
        assert sorted(tool_uses(stored)) == [
            ("add", False, 1.0),
            ("add", False, 1.0),
            ("look_up", True, 1.0),
        ]


def test_a_tool_whose_result_nobody_sent_has_no_time_and_an_unreadable_call_failed():
    (made,) = turns((uses("finish"), []))
    made = dataclasses.replace(made, malformed_tool_calls=1)
    for stored in plain(trace(0, 0, [made])):
        assert sorted(tool_uses(stored), key=str) == [
            (UNREADABLE, True, None),
            ("finish", False, None),
        ]


def test_tools_that_a_model_invented_are_one_row_and_failed():
    calls = turns(
        (uses("add", "lookup_price", "addd"), [result(f"c{n}", "1") for n in range(3)]),
        ({"role": "assistant", "content": "x"}, []),
    )
    offered = [{"type": "function", "function": {"name": "add"}}]
    calls[0] = dataclasses.replace(calls[0], tools=offered)
    for stored in plain(trace(0, 0, calls)):
        assert sorted(tool_uses(stored), key=str) == [
            (NOT_OFFERED, True, None),
            (NOT_OFFERED, True, None),
            ("add", False, 1.0),
        ]


def test_a_role_s_calls_have_their_own_reward_or_their_rollout_s():
    writer = dataclasses.replace(call("a", [1], [2, 3], [-0.5, -0.5]), role="writer", reward=0.25)
    critic = dataclasses.replace(call("b", [4], [5], [-0.5]), role="critic", finish_reason="length")
    item = trace(0, 0, [writer, critic], reward=1.0, seconds={"workflow": 2.0, "judge": 1.0})
    for stored in plain(item):
        assert tallies(stored) == {
            ("role", "writer"): Tally(1, 0, 2, 0.25, 1, 0.25, 1),
            ("role", "critic"): Tally(1, 1, 1, 0.25, 1, 1.0, 1),
            ("outcome", "completed"): Tally(1, 0, 3, 3.0, 1, 1.0, 1),
        }


def test_a_rollout_without_reward_or_time_is_counted_without_them():
    (stored, _) = plain(trace(0, 0, [], outcome=Outcome.TIMEOUT))
    assert tallies(stored) == {("outcome", "timeout"): Tally(n=1)}


def test_a_line_that_is_no_trace_is_refused():
    with pytest.raises(LookupError):
        row("step_000001.jsonl", 0, 2, {})
