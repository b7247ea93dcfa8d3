"""From rows of a dataset to what is trained: the assistant's turns, each in its own context."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.kit.toy import ADD_TOOL, TEMPLATE, tokenizer
from tuner.config.schema import FormatSection
from tuner.errors import DatasetError
from tuner.gateway import ChatRenderer
from tuner.runs.recorded import examples_of
from tuner.traces.tree import TokenTree

TINY_MATH = Path(__file__).parents[2] / "models" / "tiny_math"
TOY = ChatRenderer(tokenizer(), chat_template=TEMPLATE)
SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [
    SYSTEM,
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "First."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Second."},
]


@pytest.fixture(scope="module")
def qwen() -> ChatRenderer:
    """Qwen3's template: earlier reasoning is left out."""
    return ChatRenderer(AutoTokenizer.from_pretrained(TINY_MATH))


def read(rows, renderer=TOY, *, recorded="conversations", longest=10_000, **form):
    return examples_of(rows, renderer, FormatSection(**form), recorded=recorded, longest=longest)


def turns_of(row, renderer=TOY, **form):
    ((turns,),) = read([row], renderer, **form).used
    return turns


def text(renderer, ids):
    return renderer.decode(list(ids))


def test_only_assistant_turns_are_trained_each_behind_the_prompt_an_agent_would_send():
    first, second = turns_of({"messages": TALK})
    assert text(TOY, first.completion_ids) == "First.<|im_end|>"
    assert text(TOY, second.completion_ids) == "Second.<|im_end|>"
    assert tuple(first.prompt_ids) == TOY.encode(TOY.render_text(TALK[:2], []))
    assert tuple(second.prompt_ids) == TOY.encode(TOY.render_text(TALK[:4], []))


def test_turns_of_a_template_that_leaves_nothing_out_are_one_path_of_the_tree():
    turns = turns_of({"messages": TALK})
    tree = TokenTree.build(turns)
    assert tree.unique_tokens == len(turns[-1])
    assert tree.sampled_tokens == sum(len(turn.completion_ids) for turn in turns)


def test_reasoning_is_trained_where_it_is_written_and_branches_where_it_is_left_out(qwen):
    talk = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "A.", "reasoning_content": "thought 1"},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "B.", "reasoning": "thought 2"},
    ]
    first, second = turns_of({"messages": talk}, qwen)
    assert text(qwen, first.completion_ids) == "<think>\nthought 1\n</think>\n\nA.<|im_end|>"
    assert text(qwen, second.completion_ids) == "<think>\nthought 2\n</think>\n\nB.<|im_end|>"
    # What the model will be shown at the second turn has no "thought 1" in it.
    assert "thought 1" not in text(qwen, second.prompt_ids)
    assert tuple(second.prompt_ids) == qwen.encode(qwen.render_text(talk[:3], []))


def test_tool_calls_are_trained_and_their_results_are_not():
    arguments = {"a": 1, "b": 2}
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    talk = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "RESULT", "tool_call_id": "c1"},
        {"role": "assistant", "content": "3."},
    ]
    for tools in ([ADD_TOOL], json.dumps([ADD_TOOL])):
        first, second = turns_of({"messages": talk, "tools": tools})
        assert '{"name": "add", "arguments": {"a": 1, "b": 2}}' in text(TOY, first.completion_ids)
        assert text(TOY, second.completion_ids) == "3.<|im_end|>"
        assert "RESULT" in text(TOY, second.prompt_ids)
        assert '"name": "add"' in text(TOY, first.prompt_ids)


def test_a_weight_of_0_leaves_a_turn_as_context():
    talk = [dict(message) for message in TALK]
    talk[2]["weight"] = 0
    (turn,) = turns_of({"messages": talk})
    assert text(TOY, turn.completion_ids) == "Second.<|im_end|>"
    assert "First." in text(TOY, turn.prompt_ids)
    talk[2]["weight"] = 0.5
    with pytest.raises(DatasetError, match=r"row 0: messages\[2\]\.weight is 0\.5"):
        turns_of({"messages": talk})


def test_only_the_last_message_is_trained_where_that_is_asked_for():
    (turn,) = turns_of({"messages": TALK}, enable_concatenated_multi_turn=False)
    assert text(TOY, turn.completion_ids) == "Second.<|im_end|>"


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"prompt": "One?", "response": "First."}, {}),
        ({"q": "One?", "a": "First."}, {"prompt_key": "q", "response_key": "a"}),
        ({"prompt": "One?", "response": "First.", "messages": None}, {}),
        ({"messages": json.dumps(TALK[1:3])}, {}),
        ({"talk": TALK[1:3]}, {"messages_key": "talk"}),
    ],
)
def test_columns_may_have_other_names_and_forms(row, form):
    (turn,) = turns_of(row, **form)
    assert tuple(turn.prompt_ids) == TOY.encode(TOY.render_text(TALK[1:2], []))
    assert text(TOY, turn.completion_ids) == "First.<|im_end|>"


def test_a_system_prompt_comes_from_a_column_or_from_the_settings():
    row = {"prompt": "One?", "response": "First.", "system": "Be long."}
    for form, system in (
        ({"system_prompt": "Be brief."}, "Be brief."),
        ({"system_prompt": "Be brief.", "system_prompt_key": "system"}, "Be long."),
    ):
        (turn,) = turns_of(row, **form)
        assert text(TOY, turn.prompt_ids).startswith(f"<|im_start|>system\n{system}<|im_end|>")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "One?", "chosen": "Yes.", "rejected": "No."},
        {
            "messages": [{"role": "user", "content": "One?"}],
            "chosen": [{"role": "assistant", "content": "Yes."}],
            "rejected": [{"role": "assistant", "content": "No."}],
        },
        {
            "prompt": [{"role": "user", "content": "One?"}],
            "chosen": {"role": "assistant", "content": "Yes."},
            "rejected": {"role": "assistant", "content": "No."},
        },
    ],
)
def test_pairs_have_one_prompt_and_two_answers(row):
    (((chosen,), (rejected,)),) = read([row], recorded="pairs").used
    assert chosen.prompt_ids == rejected.prompt_ids
    assert text(TOY, chosen.completion_ids) == "Yes.<|im_end|>"
    assert text(TOY, rejected.completion_ids) == "No.<|im_end|>"


def test_of_a_pair_nothing_of_the_shared_conversation_is_trained():
    row = {
        "messages": TALK[:4],
        "chosen": [{"role": "assistant", "content": "Yes."}],
        "rejected": [
            {"role": "assistant", "content": "No."},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "No!"},
        ],
    }
    ((chosen, rejected),) = read([row], recorded="pairs").used
    assert [text(TOY, turn.completion_ids) for turn in chosen] == ["Yes.<|im_end|>"]
    assert [text(TOY, turn.completion_ids) for turn in rejected] == [
        "No.<|im_end|>",
        "No!<|im_end|>",
    ]


def test_rows_that_cannot_be_trained_are_counted_by_reason():
    long = [{"role": "user", "content": "x" * 200}, TALK[2]]
    rows = [
        {"messages": TALK},
        {"messages": TALK[:2]},
        {"messages": long},
        {"messages": [TALK[1], {"role": "assistant", "content": "A.", "weight": 0}]},
    ]
    found = read(rows, longest=150)
    assert found.rows == {"used": 1, "no_assistant_turn": 2, "too_long": 1}
    assert len(found.used) + sum(found.left_out.values()) == len(rows)
    with pytest.raises(DatasetError, match=r"no row can be trained \(1 too_long\)"):
        read(rows[2:3], longest=150)


def test_a_row_of_exactly_the_context_is_not_too_long():
    turn = turns_of({"messages": TALK})[-1]
    assert read([{"messages": TALK}], longest=len(turn)).left_out == {}
    with pytest.raises(DatasetError, match="1 too_long"):
        read([{"messages": TALK}], longest=len(turn) - 1)


def test_turns_that_the_template_writes_in_another_way_are_never_trained_quietly():
    prompted = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    base = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    none = {"tool_call_parser": "none"}
    opened = ChatRenderer(tokenizer(), chat_template=base + prompted, **none)
    with pytest.raises(DatasetError, match="1 turn_does_not_follow_its_prompt"):
        read([{"messages": TALK[1:3]}], opened)
    plain = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    thoughtless = ChatRenderer(tokenizer(), chat_template=base + plain, **none)
    thinking = {"role": "assistant", "content": "A.", "reasoning_content": "thought"}
    with pytest.raises(DatasetError, match="1 reasoning_left_out"):
        read([{"messages": [TALK[1], thinking]}], thoughtless)
    cutting = ChatRenderer(
        tokenizer(), chat_template=base.replace("m.content", "m.content[:3]") + plain, **none
    )
    with pytest.raises(DatasetError, match="1 content_left_out"):
        read([{"messages": TALK[1:3]}], cutting)
    endless = ChatRenderer(
        tokenizer(), chat_template=base.replace("<|im_end|>\n", "\n") + plain, **none
    )
    with pytest.raises(DatasetError, match="does not end an assistant turn with a special token"):
        read([{"messages": TALK[1:3]}], endless)


@pytest.mark.parametrize(
    ("row", "recorded", "message"),
    [
        ({"text": "x"}, "conversations", r"row 1: there is no column 'prompt' .*prompt_key\)"),
        ({"prompt": "x"}, "conversations", "no column 'response'"),
        ({"prompt": "x", "chosen": "a"}, "pairs", "no column 'rejected'"),
        ({"prompt": "x", "chosen": "a", "rejected": "a"}, "pairs", "are the same"),
        ({"messages": "hello"}, "conversations", "prompt_type to plaintext"),
        ({"messages": [{"role": "robot"}]}, "conversations", r'messages\[0\]\.role is "robot"'),
        ({"messages": TALK[:3], "tools": "{"}, "conversations", "'tools' is not JSON"),
        ({"messages": TALK[:3], "tools": ["add"]}, "conversations", r"tools\[0\] must be"),
        (
            {"messages": [{"role": "user", "content": "forbidden"}, TALK[2]]},
            "conversations",
            "no such word",
        ),
    ],
)
def test_rows_of_another_form_are_refused_with_their_number(row, recorded, message):
    good = {
        "conversations": {"messages": TALK},
        "pairs": {"prompt": "x", "chosen": "a", "rejected": "b"},
    }
    with pytest.raises(DatasetError, match=message):
        read([good[recorded], row], recorded=recorded)
