"""Reasoning and tool calls out of text: nothing invented, nothing lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.toy import ADD_TOOL, ids_of, tokenizer
from tuner.gateway import ChatRenderer
from tuner.gateway.families.forms import ParsedToolCall
from tuner.gateway.families.parsing import REASONING_PARSERS, TOOL_CALL_PARSERS

parse_deepseek_r1 = REASONING_PARSERS["deepseek_r1"]


def parse_hermes(text: str) -> tuple[str, tuple[ParsedToolCall, ...], int]:
    return TOOL_CALL_PARSERS["hermes"](text, [ADD_TOOL])


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("plain", False, None, "plain"),
        ("<think>\na\n</think>\n\nb", False, "a", "b"),
        ("\n<think>a</think>b ", False, "a", "b "),
        ("<think>cut off", False, "cut off", ""),
        ("<think></think>b", False, "", "b"),
        ("a\n</think>\n\nb", True, "a", "b"),
        ("cut off", True, "cut off", ""),
        ("a</think>b", False, None, "a</think>b"),
        ("<think>a</think>b", True, "a", "b"),
        ("see <think>x</think> y", False, None, "see <think>x</think> y"),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
        ("", False, None, ""),
        ("", True, "", ""),
    ],
)
def test_deepseek_r1_reasoning(text: str, opened: bool, reasoning: str | None, content: str):
    assert parse_deepseek_r1(text, opened) == (reasoning, content)


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


GOOD = '{"name": "f", "arguments": {"a":1,  "b": [2]}}'
GOOD_CALL = ParsedToolCall("f", '{"a":1,  "b": [2]}')


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        ("none", "none", 0),
        (call(GOOD), "", 1),
        (f"Say.\n{call(GOOD)}", "Say.", 1),
        (f"Say.\n\n{call(GOOD)}\n{call(GOOD)}\n", "Say.\n", 2),
        (f"{call(GOOD)}then{call(GOOD)}", "then", 2),
        (f"<tool_call>{GOOD}</tool_call>", "", 1),
        (call('{"arguments": {"a":1,  "b": [2]}, "name" : "f"}'), "", 1),
    ],
)
def test_hermes_reads_every_call_and_keeps_the_rest(text: str, rest: str, calls: int) -> None:
    assert parse_hermes(text) == (rest, (GOOD_CALL,) * calls, 0)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "not json",
        '{"name": "f"}',
        '{"arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": null}',
        '{"name": "f", "arguments": "text"}',
        '{"name": "f", "arguments": "[1]"}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": 1}',
        '{"name": "f", "arguments": {}} {}',
        '{"name": "f", "arguments": {}, }',
        '{"name": "f", "name": "g", "arguments": {}}',
        '[{"name": "f", "arguments": {}}]',
        '{"name": "f", "arguments": ' + "[" * 100_000 + "}",
    ],
)
def test_hermes_leaves_a_malformed_call_in_the_text_and_counts_it(body: str) -> None:
    text = f"before\n{call(body)}\nafter"
    assert parse_hermes(text) == (text, (), 1)


def test_hermes_truncated_call_stays_beside_the_good_one() -> None:
    text = f"{call(GOOD)}\n<tool_call>\n{{"
    assert parse_hermes(text) == ("\n<tool_call>\n{", (GOOD_CALL,), 1)


def test_hermes_unclosed_call_does_not_swallow_the_next() -> None:
    assert parse_hermes(f"<tool_call>{{{call(GOOD)}") == ("<tool_call>{", (GOOD_CALL,), 1)


def test_hermes_arguments_written_as_a_json_string_are_the_string() -> None:
    text = call(json.dumps({"name": "f", "arguments": '{"a": 1}'}))
    assert parse_hermes(text)[1] == (ParsedToolCall("f", '{"a": 1}'),)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@settings(deadline=None)
@given(
    st.dictionaries(st.text("abc", max_size=3), json_values, max_size=4),
    st.sampled_from([None, 2]),
    st.booleans(),
)
def test_hermes_returns_the_argument_text_byte_for_byte(arguments, indent, ascii_) -> None:
    written = json.dumps(arguments, indent=indent, ensure_ascii=ascii_)
    if "tool_call>" in written:
        return
    text = call(f'{{"name": "f", "arguments": {written}}}')
    assert parse_hermes(text) == ("", (ParsedToolCall("f", written),), 0)


fragments = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", GOOD, "<think>", "</think>", "\n", " ", "{", "}", "x"]
    ),
    max_size=12,
).map("".join)


@settings(deadline=None)
@given(fragments)
def test_nothing_but_white_space_and_well_formed_calls_is_lost(text: str) -> None:
    rest, calls, malformed = parse_hermes(text)
    kept = "".join(rest.split())
    whole = "".join(text.split())
    good = "".join(call(GOOD).split())
    assert len(whole) == len(kept) + len(calls) * len(good)
    assert all(found == GOOD_CALL for found in calls)
    assert malformed <= text.count("<tool_call>")
    reasoning, content = parse_deepseek_r1(text, opened=False)
    tags = len("<think></think>") if reasoning is not None else 0
    assert len("".join(text.split())) - tags <= len("".join(((reasoning or "") + content).split()))


def test_special_token_in_the_middle_is_shown_and_the_last_one_is_not() -> None:
    renderer = ChatRenderer(tokenizer())
    ids = ids_of("a<|im_start|>b<|im_end|>")
    assert renderer.parse(ids, tools=[]).content == "a<|im_start|>b"


def test_parsers_named_none_leave_everything_in_the_text() -> None:
    renderer = ChatRenderer(tokenizer(), tool_call_parser="none", reasoning_parser="none")
    text = f"<think>a</think>{call(GOOD)}"
    parsed = renderer.parse(ids_of(text), tools=[ADD_TOOL])
    assert (parsed.content, parsed.reasoning, parsed.tool_calls) == (text, None, ())


def test_tool_call_inside_the_reasoning_is_reasoning() -> None:
    parsed = ChatRenderer(tokenizer()).parse(
        ids_of(f"<think>{call(GOOD)}</think>no"), tools=[ADD_TOOL]
    )
    assert (parsed.reasoning, parsed.content, parsed.tool_calls) == (call(GOOD), "no", ())
