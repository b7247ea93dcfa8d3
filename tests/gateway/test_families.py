"""What each family's template writes is read back, and its malformed calls stay in the text."""

# The bars of DeepSeek's tags are full-width.
# ruff: noqa: RUF001

from __future__ import annotations

import asyncio
import itertools
import json
import re
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import BadRequestError
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.gateway.drift import USER, Scripted, ask, continues, merging, path
from tests.gateway.families import DEEPSEEK, FAMILIES, REAL, TEMPLATES, Family, texts, turn
from tests.gateway.template_matrix import speech_of, spelled
from tests.kit.examples import few, grid
from tests.kit.toy import ADD_TOOL, TEMPLATE, tokenizer
from tuner.errors import ConfigError
from tuner.gateway import ChatRenderer, Gateway
from tuner.gateway.families.forms import ParsedToolCall
from tuner.gateway.families.parsing import TOOL_CALL_PARSERS
from tuner.gateway.request_error import RequestError
from tuner.gateway.requests import check_messages
from tuner.traces import ReasoningPolicy

ANY_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "a"},
                "b": {"type": "number", "description": "b"},
                "flag": {"type": "boolean", "description": "flag"},
                "word": {"type": "string", "description": "word"},
                "items": {"type": "array", "items": {}, "description": "items"},
                "maybe": {
                    "anyOf": [{"$ref": "#/$defs/Inner"}, {"type": "null"}],
                    "description": "maybe",
                },
            },
            "$defs": {"Inner": {"type": "object", "properties": {"x": {"type": "integer"}}}},
        },
    },
}
family_of = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
words = st.text("ab é…\n{}\"';", min_size=1, max_size=12).map(str.strip).filter(bool)
leaf = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | words
arguments = st.fixed_dictionaries(
    {},
    optional={
        "a": st.integers(),
        "b": st.floats(allow_nan=False, allow_infinity=False),
        "flag": st.booleans(),
        "word": words,
        "items": st.lists(leaf | st.lists(leaf, max_size=2), max_size=3),
        "maybe": st.none() | st.dictionaries(st.sampled_from("xyz"), leaf, max_size=2),
    },
)


def tool_call(given: dict[str, Any], index: int = 0) -> dict[str, Any]:
    function = {"name": "add", "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": f"call{index:05d}", "type": "function", "function": function}


@family_of
@settings(deadline=None, max_examples=few(30))
@given(data=st.data())
def test_turn_that_the_template_writes_is_read_back(family: Family, data: Any) -> None:
    calls = data.draw(st.lists(arguments, min_size=1, max_size=3 if family.several else 1))
    message: dict[str, Any] = {
        "role": "assistant",
        "content": data.draw(st.none() | words) if family.content else None,
        "tool_calls": [tool_call(given, index) for index, given in enumerate(calls)],
    }
    if family.reasoning:
        message["reasoning_content"] = data.draw(words)
    text, opened = turn(family, message, [ANY_TOOL])
    parsed = family.renderer().parse_text(text, tools=[ANY_TOOL], opened=opened)
    assert [call.name for call in parsed.tool_calls] == ["add"] * len(calls)
    assert [json.loads(call.arguments) for call in parsed.tool_calls] == calls
    assert (parsed.content or None) == message["content"]
    if family.reasoning:
        assert parsed.reasoning == message["reasoning_content"]
    assert parsed.malformed_tool_calls == 0


@family_of
@pytest.mark.parametrize("given", ['{"a":1,  "b": 2}', "{ }", '{"b": 1.50, "é": "\\u00e9"}'])
def test_arguments_are_the_text_that_the_model_wrote(family: Family, given: str) -> None:
    if family.tool_call_parser == "qwen3_coder":
        pytest.skip("the form holds no JSON")
    text = "Let me see. " + family.call % given
    read = TOOL_CALL_PARSERS[family.tool_call_parser]
    assert read(text, [ANY_TOOL]) == ("Let me see. ", (ParsedToolCall("add", given),), 0)


@family_of
@settings(deadline=None, max_examples=few(30))
@given(data=st.data())
def test_every_call_that_is_answered_may_be_sent_back(family: Family, data: Any) -> None:
    given = st.text('{}[]":, 1eNa\\', max_size=12) | st.just('{"a": 1e999}')
    shown = data.draw(
        st.lists(given.map(lambda text: family.call % text) | texts(family), max_size=4)
    )
    read = TOOL_CALL_PARSERS[family.tool_call_parser]
    for call in read("".join(shown), [ANY_TOOL])[1]:
        function = {"name": call.name, "arguments": call.arguments}
        sent = {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}
        assert check_messages([sent]) == [sent]


@family_of
@pytest.mark.parametrize("given", ["", "{", "[1]", '{"a": NaN}', "{} {", '"text"'])
def test_malformed_call_stays_in_the_text_beside_good_ones(family: Family, given: str) -> None:
    if family.tool_call_parser == "qwen3_coder":
        bad = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>"
    else:
        bad = family.call % given
    good = family.call % '{"a": 1}'
    read = TOOL_CALL_PARSERS[family.tool_call_parser]
    rest, calls, malformed = read(f"x{bad}", [ANY_TOOL])
    if given == "{} {" and family.call.endswith("%s"):
        # Nothing closes a call here but its JSON.
        assert (rest, len(calls)) == ("x {", 1)
        return
    if given == "{} {" and family.tool_call_parser == "llama3_json":
        assert (rest, len(calls), malformed) == (f"x{bad}", 0, 1)
        return
    assert (rest, calls, malformed) == (f"x{bad}", (), 1)
    rest, calls, malformed = read(f"x{bad}{good}", [ANY_TOOL])
    assert (rest, len(calls), malformed) == (f"x{bad}", 1, 1)


@family_of
def test_truncated_call_stays_in_the_text(family: Family) -> None:
    whole = family.call % '{"a": 1}'
    read = TOOL_CALL_PARSERS[family.tool_call_parser]
    for end in range(1, len(whole)):
        rest, calls, malformed = read(f"x{whole[:end]}", [ANY_TOOL])
        assert rest == f"x{whole[:end]}" or calls
        assert malformed <= 1
    half = whole[: whole.index("1") + 1]
    assert read(f"x{half}", [ANY_TOOL]) == (f"x{half}", (), 1)


@family_of
@settings(deadline=None, max_examples=few(150))
@given(data=st.data())
def test_no_text_raises_or_loses_more_than_the_form(family: Family, data: Any) -> None:
    text = data.draw(texts(family) | st.text(max_size=20))
    opened = data.draw(st.booleans())
    parsed = family.renderer().parse_text(text, tools=[ANY_TOOL], opened=opened)
    kept = "".join(filter(None, (parsed.reasoning, parsed.content)))
    # Each part is the text without some pieces of the form: in order, and nothing added but the
    # newline between two messages of harmony.
    added = "\n" if family.reasoning_parser == "openai_gptoss" else None
    for part in (parsed.reasoning or "", parsed.content or ""):
        rest = iter(text)
        assert all(letter == added or letter in rest for letter in part)
    for letter in "é…":
        # Letters that are in no tag are lost with a call alone.
        assert parsed.tool_calls or kept.count(letter) == text.count(letter)


def test_calls_keep_their_order() -> None:
    for family in FAMILIES:
        text = "".join(family.call % f'{{"a": {number}}}' for number in range(3))
        if family.tool_call_parser == "qwen3_coder":
            text = "".join(family.call % number for number in range(3))
        calls = TOOL_CALL_PARSERS[family.tool_call_parser](text, [ANY_TOOL])[1]
        assert [json.loads(call.arguments) for call in calls] == [{"a": n} for n in range(3)]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("a", "1", "1"),
        ("a", " 7 ", "7"),
        ("a", "1.5", '"1.5"'),
        ("a", "seven", '"seven"'),
        ("b", "1.50", "1.50"),
        ("b", "3", "3"),
        ("flag", "True", "true"),
        ("flag", "false", "false"),
        ("word", "1", '"1"'),
        ("word", "null", '"null"'),
        ("word", "a\nb\n", '"a\\nb\\n"'),
        ("word", "</parameter>", '"</parameter>"'),
        ("items", '[1,  "a"]', '[1,  "a"]'),
        ("maybe", "None", "null"),
        ("maybe", '{"x":1}', '{"x":1}'),
        ("unknown", "1", '"1"'),
    ],
)
def test_qwen3_xml_values_have_the_types_of_the_schema(key: str, value: str, expected: str) -> None:
    text = (
        f"<tool_call>\n<function=add>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n"
        "</tool_call>"
    )
    _, calls, _ = TOOL_CALL_PARSERS["qwen3_xml"](text, [ANY_TOOL])
    assert calls == (ParsedToolCall("add", f'{{"{key}": {expected}}}'),)


@pytest.mark.parametrize(
    "body",
    [
        "<function=add>\n<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n</function>",
        "<function=add>\n<parameter=a>\n<parameter=b>\n2\n</parameter>\n</function>",
        "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n"
        "<function=add>\n<parameter=a>\n2\n</parameter>\n</function>",
        "<function=add>\n<parameter=a>\n1\n</function>\n"
        "<function=add>\n<parameter=a>\n2\n</parameter>\n</function>",
        "<function=add><parameter=a>1</parameter></function>"
        "<function=add><parameter=a>2</parameter></function>",
    ],
)
def test_tags_that_are_not_closed_are_no_part_of_a_value(body: str) -> None:
    text = f"<tool_call>\n{body}\n</tool_call>"
    content, calls, malformed = TOOL_CALL_PARSERS["qwen3_xml"](text, [ANY_TOOL])
    assert (content, calls, malformed) == (text, (), 1)


@pytest.mark.parametrize(
    "value", ["</parameter>", "a </parameter>\nb", "see <parameter=b> and <function=f></function>"]
)
def test_tags_within_a_line_are_part_of_a_value(value: str) -> None:
    text = (
        "<tool_call>\n<function=add>\n<parameter=text>\n{}\n</parameter>\n</function>\n</tool_call>"
    )
    _, (call,), malformed = TOOL_CALL_PARSERS["qwen3_xml"](text.format(value), [ANY_TOOL])
    assert (json.loads(call.arguments), malformed) == ({"text": value}, 0)


@pytest.mark.parametrize(
    ("text", "rest", "calls", "malformed"),
    [
        ('{"name": "add", "parameters": {}}', "", 1, 0),
        ('\n{"type": "function", "name": "add", "parameters": {}}', "", 1, 0),
        ('{"name": "add", "parameters": {}}; {"name": "add", "parameters": {}}', "", 2, 0),
        ('{"name": "add", "parameters": {}};\n<|python_tag|>{"name": "add", "arguments": {}}',
         "", 2, 0),
        ('{"name": "add", "parameters": {}}; {"name": "add', '; {"name": "add', 1, 1),
        ('{"name": "add", "parameters": {}} done', " done", 1, 0),
        ('{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', 0, 0),
        ('{"answer": 4', '{"answer": 4', 0, 0),
        ('{"name": "add", "parameters": []}', '{"name": "add", "parameters": []}', 0, 1),
        ('So: {"name": "add", "parameters": {}}', 'So: {"name": "add", "parameters": {}}', 0, 0),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", 0, 1),
    ],
)  # fmt: skip
def test_llama_calls_are_the_objects_at_the_beginning_or_after_the_tag(
    text: str, rest: str, calls: int, malformed: int
) -> None:
    found = TOOL_CALL_PARSERS["llama3_json"](text, [ANY_TOOL])
    assert found == (rest, (ParsedToolCall("add", "{}"),) * calls, malformed)


def test_mistral_array_keeps_what_follows_a_malformed_member() -> None:
    good = '{"name": "add", "arguments": {}}'
    read = TOOL_CALL_PARSERS["mistral"]
    assert read(f'[TOOL_CALLS][{good}, {{"name"', [ANY_TOOL]) == (
        ', {"name"',
        (ParsedToolCall("add", "{}"),),
        1,
    )
    assert read(f"[TOOL_CALLS] [{good}] so", [ANY_TOOL])[0] == " so"


def test_harmony_channels_become_reasoning_content_and_calls() -> None:
    (family,) = (family for family in FAMILIES if family.name == "gpt_oss")
    text = (
        "<|channel|>analysis<|message|>One.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I add.<|end|>"
        "<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>commentary to=python code<|message|>{}<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Done."
    )
    parsed = family.renderer().parse_text(text, tools=[ANY_TOOL], opened=False)
    python = "<|start|>assistant<|channel|>commentary to=python code<|message|>{}<|end|>"
    assert parsed.reasoning == "One.\nTwo."
    assert parsed.content == f"I add.{python}\nDone."
    assert parsed.tool_calls == (ParsedToolCall("add", "{}"),)
    assert parsed.malformed_tool_calls == 1


@pytest.mark.parametrize(
    ("parser", "prompt", "opened"),
    [
        ("deepseek_r1", "x<think>\n", True),
        ("deepseek_r1", "x</think>", False),
        ("mistral", "[/INST][THINK]", True),
        ("mistral", "<think>", False),
        ("openai_gptoss", "<|start|>assistant<|channel|>analysis<|message|>", True),
        ("openai_gptoss", "<|start|>assistant", False),
        ("none", "<think>", False),
    ],
)
def test_prompt_that_ends_with_the_opener_has_opened_the_reasoning(
    parser: str, prompt: str, opened: bool
) -> None:
    renderer = ChatRenderer(tokenizer(), reasoning_parser=parser)
    assert renderer.opened_reasoning(renderer.encode(prompt)) is opened


@family_of
def test_parser_that_cannot_read_the_template_is_refused_with_the_one_that_can(
    family: Family,
) -> None:
    template = (TEMPLATES / f"{family.template}.jinja").read_text(encoding="utf-8")
    wrong = "llama3_json" if family.tool_call_parser != "llama3_json" else "hermes"
    with pytest.raises(ConfigError, match=f"'{wrong}' cannot read; set it to"):
        ChatRenderer(tokenizer(), chat_template=template, tool_call_parser=wrong)
    ChatRenderer(tokenizer(), chat_template=template, tool_call_parser="none")


def test_template_with_a_form_that_nobody_reads_is_refused() -> None:
    template = TEMPLATE.replace("<tool_call>", "<invoke>")
    with pytest.raises(ConfigError, match="set it to null"):
        ChatRenderer(tokenizer(), chat_template=template)


@family_of
def test_template_of_a_family_holds_conversations_with_tools(family: Family) -> None:
    assert family.renderer().no_tools is None


# What real templates do to a conversation with tools: Kimi K2's, LFM2's, Gemma 3's, GLM-4's.
NO_TOOLS = {
    "sandbox": (
        "{% set texts = [] %}{% for m in messages if m.role == 'tool' %}"
        "{% set _ = texts.append(m.content) %}{% endfor %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
        "{% for c in m.tool_calls or [] %}{{ '<tool_call>\n' + (c.function | tojson) }}"
        "{{ '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}",
        "fails on a conversation with tool calls (access to attribute 'append'",
    ),
    "no content": (
        "{{ tools | tojson if tools else '' }}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        "{% endfor %}",
        "leaves earlier tool calls out of the conversation",
    ),
    "alternation": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}{% endfor %}",
        "fails on a conversation with tool calls (roles must alternate)",
    ),
    "calls left out": (
        "{{ tools | tojson if tools else '' }}{% for m in messages %}"
        "{{ '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}{% endfor %}",
        "leaves earlier tool calls out of the conversation",
    ),
    "results left out": (
        TEMPLATE.replace("message.role == 'tool'", "false"),
        "leaves the results of tools out of the conversation",
    ),
}


def test_template_that_knows_no_tools_is_taken_and_the_first_tools_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    template = "{% for m in messages %}{{ m.role + ': ' + (m.content or '') }}{% endfor %}"
    renderer = ChatRenderer(tokenizer(), chat_template=template)
    assert renderer.render_text([USER], []) == "user: 2+40?"
    assert renderer.turn_ends == ()
    assert caplog.messages == []  # an agent without tools hears nothing of them
    for _ in range(2):
        assert renderer.render_text([USER], [ADD_TOOL]) == "user: 2+40?"
    (warning,) = caplog.messages
    assert "chat template shows neither tools nor earlier tool calls: set model.chat_" in warning
    assert renderer.no_tools is None


@pytest.mark.parametrize("name", NO_TOOLS)
async def test_template_that_holds_no_tools_is_found_out_at_the_start(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    template, found = NO_TOOLS[name]
    renderer = ChatRenderer(tokenizer(), chat_template=template)
    (warning,) = caplog.messages
    assert warning == f"{renderer.no_tools}; requests with tools get a 400"
    assert warning.startswith(f"the model's chat template {found}")
    gateway = Gateway(Scripted((1, 2)), renderer, model_name="tiny")
    session = gateway.open_session("r")
    with pytest.raises(BadRequestError) as refused:
        await ask(session, [USER], tools=[ADD_TOOL])
    assert refused.value.param == "tools"
    assert str(renderer.no_tools) in refused.value.message
    assert "set model.chat_template_path" in refused.value.message
    earlier = {"role": "assistant", "content": "", "tool_calls": [tool_call({"a": 1})]}
    result = {"role": "tool", "tool_call_id": "call00000", "content": "3"}
    with pytest.raises(BadRequestError) as refused:
        await ask(session, [USER, earlier, result])
    assert refused.value.param == "messages"
    assert session.calls == ()
    # An agent without tools is not disturbed.
    answer = await ask(session, [USER])
    await ask(session, [USER, answer, USER])
    assert len(session.calls) == 2
    assert len(caplog.messages) == 1
    await gateway.aclose()


def test_template_that_misses_the_content_only_when_a_result_follows_gets_it() -> None:
    # As QwQ's, which cuts the reasoning out of every turn but the last.
    turn = "{{- '<|im_start|>assistant\\n' }}\n        {%- if message.reasoning_content %}"
    assert TEMPLATE.count(turn) == 1
    cut = "{%- if not loop.last %}{%- set content = message.content.split('</think>')[-1] %}"
    template = TEMPLATE.replace(turn, f"{cut}{{%- endif %}}\n        {turn}")
    renderer = ChatRenderer(tokenizer(), chat_template=template)
    assert renderer.no_tools is None
    earlier = {"role": "assistant", "content": None, "tool_calls": [tool_call({"a": 1})]}
    result = {"role": "tool", "tool_call_id": "call00000", "content": "3"}
    assert '{"a": 1}' in renderer.render_text([USER, earlier, result], [ADD_TOOL])


def test_template_that_fails_on_a_tool_without_a_description_gets_an_empty_one() -> None:
    # As GPT-OSS's and Hermes'. Others are shown the tool as it was given.
    bare = {"type": "function", "function": {"name": "add"}}
    given = ChatRenderer(tokenizer(), chat_template=TEMPLATE).render_text([USER], [bare])
    assert '<tools>\n{"type": "function", "function": {"name": "add"}}\n</tools>' in given
    strict = "{{- tool.function.description + (tool.function.parameters.properties | tojson) }}"
    template = TEMPLATE.replace("{{- tool | tojson }}", strict)
    renderer = ChatRenderer(tokenizer(), chat_template=template)
    assert "<tools>\n{}\n</tools>" in renderer.render_text([USER], [bare])
    bare["function"] = {"name": "add", "description": None, "parameters": None}
    assert "<tools>\n{}\n</tools>" in renderer.render_text([USER], [bare])
    assert '<tools>\nAdd two integers.{"a"' in renderer.render_text([USER], [ADD_TOOL])


def test_template_without_tools_that_takes_no_message_without_content_gets_it() -> None:
    # As Phi-3.5's: its model is shown no tools, and its agent is not disturbed.
    template = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
    renderer = ChatRenderer(tokenizer(), chat_template=template)
    assert renderer.no_tools is None
    earlier = {"role": "assistant", "content": None, "tool_calls": [tool_call({"a": 1})]}
    assert renderer.render_text([USER, earlier], [ADD_TOOL]) == "user: 2+40?assistant: "


ONE_CALL = "{%- if message.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"


@pytest.mark.parametrize(
    ("calls", "guard"),
    [
        ("(message.tool_calls or [])[:1]", ""),  # as GPT-OSS's and GigaChat's
        ("message.tool_calls or []", ONE_CALL),  # as Llama 3.1's
    ],
)
def test_calls_of_a_turn_are_shown_in_turn_by_a_template_that_takes_one(
    calls: str, guard: str
) -> None:
    template = TEMPLATE.replace("message.tool_calls or []", calls).replace(
        "{{- '<|im_start|>assistant\\n' }}\n        {%-",
        f"{guard}{{{{- '<|im_start|>assistant\\n' }}}}\n        {{%-",
    )
    renderer = ChatRenderer(tokenizer(), chat_template=template)
    plain = ChatRenderer(tokenizer(), chat_template=TEMPLATE)
    turn = {"role": "assistant", "content": "I add."}
    one, two = tool_call({"a": 1}, 1), tool_call({"a": 2}, 2)
    first, second = (
        {"role": "tool", "tool_call_id": call["id"], "content": call["id"]} for call in (one, two)
    )
    turns = [{**turn, "tool_calls": [one]}, first, {**turn, "content": None, "tool_calls": [two]}]
    expected = plain.render_text([USER, *turns, second], [ADD_TOOL])
    both = {**turn, "tool_calls": [one, two]}
    for results in ([first, second], [second, first]):
        assert renderer.render_text([USER, both, *results], [ADD_TOOL]) == expected
    # A result that belongs to no call is not lost.
    stray = {**first, "tool_call_id": "unknown"}
    assert first["content"] in renderer.render_text([USER, both, stray], [ADD_TOOL])


def test_call_that_a_template_drops_beside_words_is_written_after_them() -> None:
    # As Phi-4-mini's in vLLM.
    dropping = "([] if content else message.tool_calls or [])"
    template = TEMPLATE.replace("message.tool_calls or []", dropping)
    renderer = ChatRenderer(tokenizer(), chat_template=template)
    turn = {"role": "assistant", "content": "I add. ", "tool_calls": [tool_call({"a": 1})]}
    text = renderer.render_text([USER, turn], [ADD_TOOL])
    assert 'assistant\nI add. <tool_call>\n{"name": "add", "arguments": {"a": 1}}' in text


def test_call_ids_have_the_form_that_the_templates_accept() -> None:
    for family in FAMILIES:
        made = family.renderer().tool_call_id(bytes(range(32)))
        if family.tool_call_parser == "mistral":
            assert len(made) == 9
            assert made.isalnum()
        else:
            assert made == f"call_{bytes(range(32)).hex()[:24]}"


def spoken_with(ends: list[str]) -> PreTrainedTokenizerFast:
    """The toy tokenizer, with the families' own end tokens."""
    spoken = deepcopy(tokenizer())
    spoken.add_special_tokens({"additional_special_tokens": ends})
    return spoken


SAMPLED = {
    "qwen2_5": '<tool_call>{"name":"add","arguments":{"a":1,"b":2}}</tool_call>',
    "qwen3_5": (
        "Hm.\n</think>\n\n<tool_call><function=add><parameter=a>1</parameter>"
        "<parameter=b>\n2</parameter></function></tool_call>"
    ),
    "llama3": '{"name":"add","parameters":{"a":1,"b":2}}',
    "mistral_v3": '[TOOL_CALLS][{"name":"add","arguments":{"a":1,"b":2}}]',
    "mistral_v11": '[TOOL_CALLS]add[CALL_ID]xxxxxxxxx[ARGS]{"a":1,"b":2}',
    "mistral_v13": '[THINK]Hm.[/THINK][TOOL_CALLS]add[ARGS]{"a":1,"b":2}',
    "deepseek_v31": DEEPSEEK.format('add<｜tool▁sep｜>{"a":1,"b":2}'),
    "gpt_oss": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.add <|constrain|>json<|message|>{"a":1,"b":2}'
    ),
}


@pytest.mark.parametrize("name", SAMPLED)
async def test_conversation_goes_on_with_the_call_that_was_sampled(name: str) -> None:
    (family,) = (family for family in FAMILIES if family.name == name)
    spoken = spoken_with([family.end])
    renderer = ChatRenderer(
        spoken,
        chat_template=(TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"),
        tool_call_parser=family.tool_call_parser,
        reasoning_parser=family.reasoning_parser,
    )
    sampled = tuple(spoken.encode(SAMPLED[name] + family.end, add_special_tokens=False))
    gateway = Gateway(Scripted(sampled), renderer, model_name="tiny")
    session = gateway.open_session("r")
    answer = await ask(session, [USER], tools=[ADD_TOOL])
    (call,) = answer["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
    call["function"]["arguments"] = '{"a": 1, "b": 2}'  # as a framework writes it anew
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    await ask(session, [USER, answer, result], tools=[ADD_TOOL])
    earlier, later = session.calls
    assert later.rerendered is None
    assert continues(later, earlier)
    await gateway.aclose()


# What comes before an answer where the prompt opens the reasoning, or a message has a header.
BEGUN = {
    "gpt_oss": "<|channel|>final<|message|>",
    "qwen3_5": "</think>\n\n",
    "deepseek_v3": "</think>",
}


@pytest.mark.parametrize("marked", [True, False])
@family_of
async def test_the_last_token_of_the_template_ends_a_turn(family: Family, marked: bool) -> None:
    """Also if it is not marked special, as in a base model's vocabulary."""
    end = "<|return|>" if family.name == "gpt_oss" else family.end
    begin = BEGUN.get(family.name, "")
    spoken = deepcopy(tokenizer())
    spoken.add_tokens([AddedToken(end, normalized=False)], special_tokens=marked)
    renderer = ChatRenderer(
        spoken,
        chat_template=(TEMPLATES / f"{family.name}.jinja").read_text(encoding="utf-8"),
        tool_call_parser=family.tool_call_parser,
        reasoning_parser=family.reasoning_parser,
    )
    (end_id,) = spoken.encode(end, add_special_tokens=False)
    assert renderer.end_ids == {end_id}
    sampled = tuple(spoken.encode(f"{begin}It is 42.{end}", add_special_tokens=False))
    gateway = Gateway(Scripted(sampled), renderer, model_name="tiny")
    session = gateway.open_session("r")
    answer = await ask(session, [USER])
    assert answer["content"] == "It is 42."
    await ask(session, [USER, answer, USER])
    earlier, later = session.calls
    assert begin or continues(later, earlier)
    await gateway.aclose()


def test_an_end_of_the_configuration_is_not_in_the_text() -> None:
    (word,) = tokenizer().encode("~")
    ids = [*tokenizer().encode("ab"), word]
    assert ChatRenderer(tokenizer()).parse(ids, tools=[]).content == "ab~"
    renderer = ChatRenderer(tokenizer(), end_ids=[word])
    assert renderer.parse(ids, tools=[]).content == "ab"
    assert renderer.end_ids == {tokenizer().eos_token_id}
    assert not list(renderer.special_tokens.borders("a~b"))


@pytest.mark.parametrize("name", sorted(SAMPLED.keys() - {"gpt_oss"}))
def test_nothing_of_an_answer_that_was_cut_off_is_lost(name: str) -> None:
    (family,) = (family for family in FAMILIES if family.name == name)
    tags = [piece for piece in family.pieces if re.fullmatch(r"<\S+>|\[\S+\]", piece)]
    spoken = spoken_with([family.end, *tags])
    renderer = ChatRenderer(
        spoken,
        chat_template=(TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"),
        tool_call_parser=family.tool_call_parser,
        reasoning_parser=family.reasoning_parser,
    )
    ids = spoken.encode(SAMPLED[name], add_special_tokens=False)

    def plain(text: str) -> str:
        return re.sub(r"\s|</?think>|\[/?THINK\]", "", text)

    for stop in range(1, len(ids) + 1):
        text, _ = renderer.completion_text(ids[:stop], cut_off=True)
        found = renderer.parse_text(text, tools=[ADD_TOOL], opened=False)
        if not found.tool_calls:
            said = (found.reasoning or "") + (found.content or "")
            assert plain(said) == plain(spoken.decode(ids[:stop]))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_cut_after_an_opening_tag_keeps_it(stream: bool) -> None:
    tags = ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"]
    spoken = spoken_with(["<｜end▁of▁sentence｜>", *tags])
    template = (TEMPLATES / "deepseek_v31.jinja").read_text(encoding="utf-8")
    renderer = ChatRenderer(
        spoken,
        chat_template=template,
        tool_call_parser="deepseek_v31",
        reasoning_parser="deepseek_v3",
    )
    sampled = tuple(spoken.encode("".join(tags) + "add", add_special_tokens=False))
    gateway = Gateway(Scripted(sampled), renderer, model_name="tiny")
    client = gateway.open_session("r").async_client()
    asked: Any = {"messages": [USER], "tools": [ADD_TOOL], "max_tokens": 2}
    if stream:
        answer = await client.chat.completions.create(model="tiny", stream=True, **asked)
        said = [chunk.choices[0].delta.content or "" async for chunk in answer if chunk.choices]
        assert "".join(said) == "".join(tags)
    else:
        answer = await client.chat.completions.create(model="tiny", **asked)
        assert answer.choices[0].message.content == "".join(tags)
        assert answer.choices[0].finish_reason == "length"
    await gateway.aclose()


@pytest.mark.parametrize("tag", ["", "<|python_tag|>"])
@pytest.mark.parametrize(
    ("sampled_end", "rendered_end"), [("<|eom_id|>", "<|eot_id|>"), ("<|eot_id|>", "<|eom_id|>")]
)
async def test_llama_call_keeps_its_ids_with_the_tag_and_the_end_that_it_chose(
    tag: str, sampled_end: str, rendered_end: str
) -> None:
    spoken = spoken_with(["<|eot_id|>", "<|eom_id|>", "<|python_tag|>"])
    template = (TEMPLATES / "llama3.jinja").read_text(encoding="utf-8")
    of_calls = "{%- endfor %}\n        {{- '<|eot_id|>' }}"
    assert of_calls in template
    renderer = ChatRenderer(
        spoken,
        chat_template=template.replace(of_calls, of_calls.replace("<|eot_id|>", rendered_end)),
        tool_call_parser="llama3_json",
        reasoning_parser="none",
    )
    text = tag + SAMPLED["llama3"] + sampled_end
    sampled = tuple(spoken.encode(text, add_special_tokens=False))
    gateway = Gateway(Scripted(sampled), renderer, model_name="tiny")
    session = gateway.open_session("r")
    answer = await ask(session, [USER], tools=[ADD_TOOL])
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "3"}
    await ask(session, [USER, answer, result], tools=[ADD_TOOL])
    earlier, later = session.calls
    assert later.rerendered == "end"
    assert later.prompt_ids[: later.reused_ids] == path(earlier)[:-1]
    glue = renderer.decode(later.prompt_ids[later.reused_ids :])
    assert glue.startswith(f"{rendered_end}<|start_header_id|>ipython")
    await gateway.aclose()


def gateway_with(
    family: Family, policy: ReasoningPolicy, *said: tuple[str, str, int]
) -> tuple[Gateway, list[tuple[int, ...]]]:
    """A gateway whose model says these turns, and no more; their ids, letter by letter."""
    template = (TEMPLATES / f"{family.template}.jinja").read_text(encoding="utf-8")
    renderer = ChatRenderer(
        speech_of(template, merging),
        chat_template=template,
        tool_call_parser=family.tool_call_parser,
        reasoning_parser=family.reasoning_parser,
    )
    opened = renderer.opened_reasoning(renderer.encode(renderer.render_text([USER], [ADD_TOOL])))
    texts = [family.says(*turn, opened=opened) if any(turn) else "" for turn in said]
    ids = [spelled(renderer, text) for text in texts]
    ended = [spelled(renderer, text + family.end) for text in texts]
    return Gateway(Scripted(*ended), renderer, model_name="tiny", reasoning=policy), ids


def echo(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The answer as a client sends it back, and what follows it."""
    calls = enumerate(answer.get("tool_calls", []))
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"{number} is it."}
        for number, call in calls
    ]
    return [{"content": None, **answer}, *(results or [USER])]


# Reasoning, words, number of calls, and how many letters from its end the turn is cut off.
TURNS = [
    ("Hm.", "It is so.", 0, 12),
    ("Hm.", "It is so.", 0, 2),
    ("Hm, hm.", "", 0, 14),
    ("", "It is so.", 0, 2),
    ("Hm.", "", 1, 3),
    ("Hm.", "", 2, 3),
    ("Hm.", "I add.", 1, 0),
    ("Hm.", "I add.", 2, 0),
    ("", "I add.", 2, 0),
    ("Hm.", "", 2, 0),
    ("", "", 1, 0),
    ("Hm.", "", 0, 0),
    ("", "", 0, 0),
]


# The default parser, with a template that shows no reasoning.
REASONING = replace(FAMILIES[0], reasoning_parser="deepseek_r1")


@grid("family", [*FAMILIES, *REAL, REASONING], quick=5, ids=lambda family: family.name)
@settings(deadline=None, max_examples=few(8))
@given(
    turns=st.lists(st.sampled_from(TURNS), min_size=6, max_size=6, unique=True),
    keep=st.booleans(),
    returned=st.booleans(),
)
def test_whatever_is_answered_can_be_sent_back(
    family: Family, turns: list[tuple[str, str, int, int]], keep: bool, returned: bool
) -> None:
    keep = keep and family.reasoning_parser != "none"
    asyncio.run(_echoed(family, turns, "keep" if keep else "template", returned=returned))


async def _echoed(
    family: Family,
    turns: list[tuple[str, str, int, int]],
    policy: ReasoningPolicy,
    *,
    returned: bool,
) -> None:
    gateway, ids = gateway_with(family, policy, *(turn[:3] for turn in turns))
    session = gateway.open_session("r")
    messages: list[Any] = [USER]
    for said, (*_, cut) in zip(ids, turns, strict=True):
        limit = {"max_tokens": max(1, len(said) - cut)} if cut else {}
        answer = await ask(session, messages, tools=[ADD_TOOL], **limit)
        if not returned:
            answer.pop("reasoning_content", None)
        messages += echo(answer)
    await ask(session, messages, tools=[ADD_TOOL])
    assert len(session.calls) == len(turns) + 1
    renderer = gateway.renderer
    for earlier, later in itertools.pairwise(session.calls):
        # It continues the earlier call, or says why not.
        whole = path(earlier)
        if later.rerendered is None:
            assert later.reused_ids == len(whole)
            assert later.prompt_ids[: len(whole)] == whole
        else:
            assert later.rerendered == "end" or later.prompt_ids[: len(whole)] != whole
            assert later.reused_ids < len(whole)
        rest = renderer.decode(later.prompt_ids[later.reused_ids :])
        text = renderer.render_text(later.messages, later.tools)
        assert text == rest if not later.reused_ids else text.endswith(rest)
    await gateway.aclose()


def family_named(name: str) -> Family:
    (family,) = (family for family in (*FAMILIES, *REAL) if family.name == name)
    return family


def test_tags_around_an_answer_do_not_end_the_turn() -> None:
    # As Kimi K3's.
    template = (
        "{% for m in messages %}{{ '<|open|>response<|sep|>' + m.content }}"
        "{{ '<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>' }}{% endfor %}"
    )
    renderer = ChatRenderer(
        speech_of(template, merging), chat_template=template, reasoning_parser="kimi_k3"
    )
    ends = renderer.turn_ends
    assert [renderer.special_tokens.text(end) for end in ends] == ["<|end_of_msg|>"]


HARMONY = ("gpt_oss", "real/openai-gpt-oss-120b")


NOT_TAKEN: list[tuple[str, tuple[str, str, int], list[Any]]] = [
    *[(name, ("Hm.", "I add.", 1), [ADD_TOOL]) for name in HARMONY],
    *[(name, ("Hm.", "", 2), [ADD_TOOL]) for name in HARMONY],
    *[(name, ("", "I add.", 1), [ADD_TOOL]) for name in HARMONY],
    *[(name, ("Hm.", "I add.", 3), [ADD_TOOL]) for name in HARMONY],
    ("mistral_v3", ("", "I add. ", 1), [ADD_TOOL]),
    ("mistral_v3", ("", "", 0), []),
    ("mistral_v11", ("", "", 0), []),
    ("mistral_v13", ("", "", 0), [ADD_TOOL]),
    ("qwen2_5", ("", "", 0), [ADD_TOOL]),
]
"""Families whose templates do not take a turn: reasoning, words and number of calls; tools."""


@pytest.mark.parametrize(
    ("name", "said", "tools", "policy"),
    [
        (*row, policy)
        for row in NOT_TAKEN
        for policy in ("template", "keep")
        if policy == "template" or family_named(row[0]).reasoning_parser != "none"
    ],
)
async def test_turn_that_the_template_does_not_take_continues_as_it_was_sampled(
    name: str, said: tuple[str, str, int], tools: list[Any], policy: ReasoningPolicy
) -> None:
    family = family_named(name)
    gateway, _ = gateway_with(family, policy, said)
    session = gateway.open_session("r")
    answer = await ask(session, [USER], tools=tools)
    assert len(answer.get("tool_calls", [])) == said[2]
    assert (answer.get("content") or "") == said[1]
    await ask(session, [USER, *echo(answer)], tools=tools)
    earlier, later = session.calls
    assert later.rerendered is None
    assert continues(later, earlier)
    # Elsewhere it is rendered as the model writes it.
    other = gateway.open_session("other")
    await ask(other, [USER, *echo(answer)], tools=tools)
    assert other.calls[0].rerendered == "text"
    renderer = gateway.renderer
    text = renderer.decode(other.calls[0].prompt_ids)
    begin = len(renderer.decode(earlier.prompt_ids))
    rest = renderer.decode(later.prompt_ids[later.reused_ids :])
    turn = text[begin : len(text) - len(rest)].removesuffix(family.end)
    read = renderer.parse_text(turn, tools=tools, opened=False)
    assert (read.reasoning or "", read.content or "", len(read.tool_calls)) == said
    await gateway.aclose()


def test_a_mark_is_no_word_of_the_conversation() -> None:
    renderer = family_named("mistral_v13").renderer()
    word = {"role": "user", "content": "mark0q0x mark1q1x"}
    turns = [word, {"role": "assistant", "content": ""}] * 2
    text = renderer.render_text([*turns, word], [])
    assert text.count("mark0q0x mark1q1x") == 3
    assert text.count("mark") == 6


def test_an_argument_may_hold_the_end_of_a_call() -> None:
    renderer = family_named("gpt_oss").renderer()
    calls = [tool_call({"word": f"<|call|>{number}"}, number) for number in range(2)]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in calls]
    turn = {"role": "assistant", "content": None, "tool_calls": calls}
    text = renderer.render_text([USER, turn, *results], [ADD_TOOL])
    assert all(f'{{"word": "<|call|>{number}"}}<|call|>' in text for number in range(2))


def test_results_of_calls_in_one_turn_keep_the_names_of_their_tools() -> None:
    renderer = family_named("gpt_oss").renderer()
    mul = deepcopy(ADD_TOOL)
    mul["function"]["name"] = "mul"
    one, two = tool_call({"a": 1}, 1), tool_call({"a": 2}, 2)
    two["function"]["name"] = "mul"
    calls = {"role": "assistant", "content": "I try.", "tool_calls": [one, two]}
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": content}
        for call, content in ((two, "8"), (one, "3"))
    ]
    final = {"role": "assistant", "content": "Done."}
    for after in ([], [final, USER]):
        text = renderer.render_text([USER, calls, *results, *after], [ADD_TOOL, mul])
        called = "<|start|>assistant to=functions.{}<|channel|>commentary json<|message|>{}<|call|>"
        result = '<|start|>functions.{} to=assistant<|channel|>commentary<|message|>"{}"<|end|>'
        assert (
            "<|start|>assistant<|channel|>commentary<|message|>I try.<|end|>"
            + called.format("add", '{"a": 1}')
            + called.format("mul", '{"a": 2}')
            + result.format("add", 3)
            + result.format("mul", 8)
        ) in text


@pytest.mark.parametrize("field", ["content", "reasoning_content"])
def test_tags_in_a_text_are_no_reason_to_refuse_the_turn(field: str) -> None:
    renderer = family_named("gpt_oss").renderer()
    text = "x<|channel|>final<|message|>y"
    turn = {"role": "assistant", "content": "", field: text}
    shown = renderer.render_text([USER, turn, USER], [])
    assert (f"<|channel|>final<|message|>{text}<|end|>" in shown) is (field == "content")
    with pytest.raises(RequestError, match="no such word"):  # what it refuses of others stays so
        ChatRenderer(tokenizer()).render_text([{"role": "user", "content": "forbidden"}], [])
