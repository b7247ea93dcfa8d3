"""`keep`: reasoning that the template or the agent leaves out is put back as it was sampled."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.drift import (
    CALL,
    SURE,
    TERSE,
    USER,
    ask,
    choices,
    continues,
    decoded,
    encoded,
    fresh,
    gateway_of,
    letters,
    path,
    rendered,
)
from tests.kit.toy import ADD_TOOL, TEMPLATE
from tuner.errors import ConfigError
from tuner.gateway import ChatRenderer, Gateway, SamplingDefaults
from tuner.traces import Call, branches

pytestmark = pytest.mark.usefixtures("vocabulary")
MODEL = Path(__file__).parents[2] / "models" / "tiny_math"
RESULT = {"role": "tool", "tool_call_id": "x", "content": "42"}
YES = "<think>\nthe user\n</think>\n\nYes, the answer."

# Writes whatever reasoning it is given, or none.
OBEDIENT = TEMPLATE
DROPS = TEMPLATE.replace("message.reasoning_content", "false")
# Qwen3's: drops reasoning before the last user query, keeps it in the tool loop behind that.
QWEN3 = (MODEL / "chat_template.jinja").read_text(encoding="utf-8")
# Writes an empty block where there is no reasoning, as Qwen3 does for turns without thinking.
EMPTY = DROPS.replace(
    "{{- content }}\n        {%- for call",
    "{{- '<think>\\n\\n</think>\\n\\n' + content }}\n        {%- for call",
)
# Opens the reasoning in the generation prompt, and shows none of it in a history, as R1's does.
OPENED = DROPS.replace(
    "{%- elif open_thinking is defined and open_thinking %}", "{%- else %}"
).replace(
    "{{- content }}\n        {%- for call",
    "{{- content.split('</think>')[-1] }}\n        {%- for call",
)
# The same, but a history shows the reasoning that is sent back.
OPENED_OBEDIENT = TEMPLATE.replace(
    "{%- elif open_thinking is defined and open_thinking %}", "{%- else %}"
)
ALL = {"obedient": OBEDIENT, "drops": DROPS, "qwen3": QWEN3, "empty block": EMPTY}
every_template = pytest.mark.parametrize("template", ALL.values(), ids=ALL.keys())
opening = pytest.mark.parametrize("template", [OPENED, OPENED_OBEDIENT], ids=["drops", "obedient"])


def bare(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer as agents send it back that know nothing of reasoning."""
    return {key: value for key, value in answer.items() if key != "reasoning_content"}


def one_path(calls: Sequence[Call]) -> bool:
    straight = all(continues(later, earlier) for earlier, later in itertools.pairwise(calls))
    return straight and not branches(calls) and all(call.rerendered is None for call in calls)


def test_variants_of_the_template_are_what_their_names_say() -> None:
    turn = {"role": "assistant", "content": "Yes", "reasoning_content": "hm"}
    texts = {
        name: gateway_of((), template=template).renderer.render_text([USER, turn, SURE], ())
        for name, template in {**ALL, "opened": OPENED, "opened obedient": OPENED_OBEDIENT}.items()
    }
    said = {
        name: text.split("assistant\n")[1].split("<|im_end|>")[0] for name, text in texts.items()
    }
    assert said == {
        "obedient": "<think>\nhm\n</think>\n\nYes",
        "drops": "Yes",
        "qwen3": "Yes",
        "empty block": "<think>\n\n</think>\n\nYes",
        "opened": "Yes",
        "opened obedient": "<think>\nhm\n</think>\n\nYes",
    }
    opens = {name for name, text in texts.items() if text.endswith("<think>\n")}
    assert opens == {"opened", "opened obedient"}


@every_template
@pytest.mark.parametrize("sent_back", [True, False])
async def test_conversation_that_reasons_is_one_path(template: str, sent_back: bool) -> None:
    gateway = gateway_of(letters(YES), template=template, reasoning="keep")
    session = gateway.open_session("r")
    messages: list[Any] = [USER]
    for _ in range(5):
        answer = await ask(session, messages)
        assert answer["reasoning_content"] == "the user"
        messages = [*messages, answer if sent_back else bare(answer), SURE]
    calls = session.calls
    assert one_path(calls)
    assert decoded(calls[-1].prompt_ids).count(YES) == 4
    assert {call.reasoning_policy for call in calls} == {"keep"}
    # Reasoning that the template has written itself costs nothing more.
    shown = sent_back and template is OBEDIENT
    cost = 0 if shown else len(letters("<think>\nthe user\n</think>\n\n", end=""))
    assert [call.kept_reasoning_ids for call in calls] == [turn * cost for turn in range(5)]


@every_template
async def test_under_template_the_same_conversation_branches_where_reasoning_is_missing(
    template: str,
) -> None:
    gateway = gateway_of(letters(YES), template=template)
    session = gateway.open_session("r")
    answer = await ask(session, [USER])
    await ask(session, [USER, bare(answer), SURE])
    (_, second) = session.calls
    assert fresh(gateway, second)
    assert (second.reasoning_policy, second.kept_reasoning_ids) == ("template", 0)
    block = "<think>\n\n</think>\n\n" if template is EMPTY else ""
    assert second.recomputed_ids == len(encoded(block + "Yes, the answer.<|im_end|>"))
    # The next turn's prompt goes on from this one's; again only its last answer is new.
    third = await ask(session, [USER, bare(answer), SURE])
    await ask(session, [USER, bare(answer), SURE, bare(third), SURE])
    assert session.calls[3].recomputed_ids == second.recomputed_ids


async def test_under_template_a_whole_tool_loop_is_computed_again() -> None:
    turns = [letters(f"<think>\nturn {turn}\n</think>\n\n{CALL}") for turn in range(3)]
    gateway = gateway_of(*turns, letters(YES), template=QWEN3)
    session = gateway.open_session("r")
    messages: list[Any] = [USER]
    for _ in range(3):
        messages = [*messages, await ask(session, messages, tools=[ADD_TOOL]), RESULT]
    messages = [*messages, await ask(session, messages, tools=[ADD_TOOL]), SURE]
    await ask(session, messages, tools=[ADD_TOOL])
    *loop, last = session.calls
    assert one_path(loop)
    assert [call.recomputed_ids for call in loop] == [0] * 4
    history = rendered(gateway, last).split("<|im_start|>assistant\n", 1)[1]
    again, _, _ = history.partition("\n<|im_start|>user\nSure?")
    assert last.recomputed_ids == len(encoded(again))


@every_template
async def test_under_template_turns_that_were_rewritten_otherwise_are_not_counted(
    template: str,
) -> None:
    gateway = gateway_of(letters(YES), template=template)
    session = gateway.open_session("r")
    answer = await ask(session, [USER])
    for edit in ({"content": "No."}, {"reasoning_content": "the model"}):
        await ask(session, [USER, {**bare(answer), **edit}, SURE])
    assert [call.recomputed_ids for call in session.calls] == [0, 0, 0]


@pytest.mark.parametrize("script", [CALL, TERSE, "I add.\n" + TERSE])
@pytest.mark.parametrize("sent_back", [True, False])
async def test_reasoning_of_a_tool_loop_is_still_there_after_the_next_question(
    script: str, sent_back: bool
) -> None:
    turns = [letters(f"<think>\nturn {turn}\n</think>\n\n{script}") for turn in range(3)]
    gateway = gateway_of(*turns, letters(YES), template=QWEN3, reasoning="keep")
    session = gateway.open_session("r")
    messages: list[Any] = [USER]
    for _ in range(3):
        answer = await ask(session, messages, tools=[ADD_TOOL])
        messages = [*messages, answer if sent_back else bare(answer), RESULT]
    answer = await ask(session, messages, tools=[ADD_TOOL])
    messages = [*messages, answer if sent_back else bare(answer), SURE]
    await ask(session, messages, tools=[ADD_TOOL])
    calls = session.calls
    assert one_path(calls)
    in_the_loop = [call.kept_reasoning_ids > 0 for call in calls[1:4]]
    # In the loop the template writes what is sent back; after the question it drops all of it.
    assert in_the_loop == [not sent_back] * 3
    reasoned = ["<think>\nturn 0\n</think>\n\n"] * 3 + ["<think>\nthe user\n</think>\n\n"]
    assert calls[4].kept_reasoning_ids == sum(len(letters(text, end="")) for text in reasoned)
    assert "<think>" not in rendered(gateway, calls[4])


@opening
@pytest.mark.parametrize("sent_back", [True, False])
async def test_reasoning_that_the_prompt_opened_is_kept_with_its_opening(
    template: str, sent_back: bool
) -> None:
    script = letters("the user\n</think>\n\nYes, the answer.")
    gateway = gateway_of(script, template=template, reasoning="keep")
    session = gateway.open_session("r")
    messages: list[Any] = [USER]
    for _ in range(4):
        answer = await ask(session, messages)
        assert answer["reasoning_content"] == "the user"
        messages = [*messages, answer if sent_back else bare(answer), SURE]
    calls = session.calls
    assert one_path(calls)
    assert decoded(calls[-1].prompt_ids).count(YES) == 3
    shown = sent_back and template is OPENED_OBEDIENT
    own = len(letters("the user\n</think>\n\n", end="")) + len(encoded("<think>\n"))
    assert calls[-1].kept_reasoning_ids == (0 if shown else 3 * own)


@pytest.mark.parametrize("template", [DROPS, QWEN3], ids=["drops", "qwen3"])
async def test_empty_block_of_a_prompt_without_thinking_is_kept(template: str) -> None:
    gateway = gateway_of(
        letters("Yes, the answer."), template=template, reasoning="keep", enable_thinking=False
    )
    session = gateway.open_session("r")
    answer = await ask(session, [USER])
    second = await ask(session, [USER, answer, SURE])
    await ask(session, [USER, answer, SURE, second, SURE])
    calls = session.calls
    assert one_path(calls)
    assert calls[2].kept_reasoning_ids == 2 * len(encoded("<think>\n\n</think>\n\n"))


@every_template
async def test_block_that_the_model_left_empty_is_kept(template: str) -> None:
    empty = "<think>\n\n</think>\n\nYes, the answer."
    gateway = gateway_of(letters(empty), template=template, reasoning="keep")
    session = gateway.open_session("r")
    answer = await ask(session, [USER])
    assert answer["content"] == "Yes, the answer."
    await ask(session, [USER, answer, SURE])
    assert one_path(session.calls)


async def test_turn_without_reasoning_is_read_without_the_block_of_the_template() -> None:
    gateway = gateway_of(letters("Yes, the answer."), template=EMPTY, reasoning="keep")
    session = gateway.open_session("r")
    answer = await ask(session, [USER])
    await ask(session, [USER, answer, SURE])
    assert one_path(session.calls)
    assert session.calls[1].kept_reasoning_ids == 0
    assert "<think>" not in decoded(session.calls[1].prompt_ids)


@every_template
@pytest.mark.parametrize("limit", [4, 12, 40], ids=["tag", "reasoning", "answer"])
async def test_turn_that_the_limit_cut_off_is_kept(template: str, limit: int) -> None:
    gateway = gateway_of(letters(YES), template=template, reasoning="keep")
    session = gateway.open_session("r")
    cut = await ask(session, [USER], max_tokens=limit)
    await ask(session, [USER, {"content": None, **bare(cut)}, SURE])
    first, second = session.calls
    assert first.finish_reason == "length"
    assert one_path(session.calls)
    assert decoded(second.prompt_ids[second.reused_ids :]).startswith("<|im_end|>\n")


async def test_other_end_token_than_the_templates_is_not_taken_over() -> None:
    gateway = gateway_of(letters(YES, end="<|endoftext|>"), template=QWEN3, reasoning="keep")
    session = gateway.open_session("r")
    answer = await ask(session, [USER])
    await ask(session, [USER, answer, SURE])
    first, second = session.calls
    assert second.reused_ids == len(path(first)) - 1
    assert second.prompt_ids[: second.reused_ids] == path(first)[:-1]
    assert decoded(second.prompt_ids).count("<|endoftext|>") == 0


@every_template
@pytest.mark.parametrize(
    "edited",
    ["Yes, the  answer.", " Yes, the answer.", "Yes, the answer.\n", "Yes", "", "No."],
)
async def test_other_words_are_another_turn(template: str, edited: str) -> None:
    gateway = gateway_of(letters(YES), template=template, reasoning="keep")
    session = gateway.open_session("r")
    answer = await ask(session, [USER])
    await ask(session, [USER, {**bare(answer), "content": edited}, SURE])
    assert fresh(gateway, session.calls[1])
    assert (session.calls[1].rerendered, session.calls[1].kept_reasoning_ids) == ("text", 0)


@every_template
@pytest.mark.parametrize("field", ["reasoning_content", "content"])
async def test_other_reasoning_is_another_turn_even_where_the_template_drops_it(
    template: str, field: str
) -> None:
    gateway = gateway_of(letters(YES), template=template, reasoning="keep")
    session = gateway.open_session("r")
    answer = await ask(session, [USER])
    other = {"reasoning_content": "the model"}
    if field == "content":
        other = {"content": "<think>\nthe model\n</think>\n\nYes, the answer."}
    await ask(session, [USER, {**bare(answer), **other}, SURE])
    assert fresh(gateway, session.calls[1])


@pytest.mark.parametrize("arguments", ['{"a":2,"b":41}', '{"a":2.0,"b":40}', "{}"])
async def test_other_arguments_are_another_turn(arguments: str) -> None:
    script = letters("<think>\nthe user\n</think>\n\n" + TERSE)
    gateway = gateway_of(script, template=QWEN3, reasoning="keep")
    session = gateway.open_session("r")
    answer = await ask(session, [USER], tools=[ADD_TOOL])
    answer["tool_calls"][0]["function"]["arguments"] = arguments
    await ask(session, [USER, bare(answer), RESULT], tools=[ADD_TOOL])
    assert fresh(gateway, session.calls[1])


async def test_line_ends_that_stand_alone_are_words() -> None:
    """White space may differ where one of the two texts has a tag beside it, and nowhere else."""
    gateway = gateway_of(letters("\nYes."), template=DROPS, reasoning="keep")
    session = gateway.open_session("r")
    answer = await ask(session, [USER])
    await ask(session, [USER, {**answer, "content": "Yes."}, SURE])
    assert fresh(gateway, session.calls[1])


@pytest.mark.parametrize(
    ("template", "thinking"),
    [(EMPTY, None), (DROPS.replace("{{- content }}", "{{- content.lstrip('\n') }}"), False)],
    ids=["rendered", "prompt"],
)
async def test_line_ends_beside_an_empty_block_may_differ(
    template: str, thinking: bool | None
) -> None:
    gateway = gateway_of(
        letters("\nYes."), template=template, reasoning="keep", enable_thinking=thinking
    )
    session = gateway.open_session("r")
    answer = await ask(session, [USER])
    await ask(session, [USER, answer, SURE])
    assert one_path(session.calls)


async def test_reasoning_that_the_template_shortens_is_another_turn() -> None:
    shortens = TEMPLATE.replace(
        "+ message.reasoning_content +", "+ message.reasoning_content[:3] +"
    )
    gateway = gateway_of(letters(YES), template=shortens, reasoning="keep")
    session = gateway.open_session("r")
    answer = await ask(session, [USER])
    await ask(session, [USER, answer, SURE])
    assert "<think>\nthe\n</think>" in rendered(gateway, session.calls[1])
    assert fresh(gateway, session.calls[1])


async def test_reasoning_written_with_other_line_ends_is_the_same() -> None:
    gateway = gateway_of(letters("<think>hm</think>Yes."), reasoning="keep")
    session = gateway.open_session("r")
    answer = await ask(session, [USER])
    await ask(session, [USER, answer, SURE])
    assert "<think>\nhm\n</think>\n\nYes." in rendered(gateway, session.calls[1])
    assert one_path(session.calls)
    assert session.calls[1].kept_reasoning_ids == 0


@pytest.mark.parametrize("template", [DROPS, QWEN3, OBEDIENT])
async def test_of_equal_answers_the_first_goes_on_unless_the_reasoning_tells(template: str) -> None:
    one, two = (f"<think>\n{word}\n</think>\n\n42." for word in ("one", "two"))
    gateway = gateway_of(letters(one), letters(two), template=template, reasoning="keep")
    session = gateway.open_session("r")
    first, second = await choices(session, [USER], n=2)
    for sent in (bare(second), second, first, {**bare(second), "content": two}):
        await ask(session, [USER, sent, SURE])
    a, b, *later = session.calls
    assert [continues(call, a) for call in later] == [True, False, True, False]
    assert [continues(call, b) for call in later] == [False, True, False, True]


@pytest.mark.parametrize("first", ["<think>\none\n</think>\n\n", ""], ids=["reasoned", "plain"])
async def test_a_conversation_stays_with_the_answer_it_went_on_from(first: str) -> None:
    """The template shows the reasoning in the tool loop, and drops it with the next question."""
    script = letters(first + CALL), letters("<think>\ntwo\n</think>\n\n" + CALL), letters(YES)
    gateway = gateway_of(*script, template=QWEN3, reasoning="keep")
    session = gateway.open_session("r")
    _, second = await choices(session, [USER], n=2, tools=[ADD_TOOL])
    answer = await ask(session, [USER, second, RESULT], tools=[ADD_TOOL])
    await ask(session, [USER, bare(second), RESULT, bare(answer), SURE], tools=[ADD_TOOL])
    _, b, c, d = session.calls
    assert continues(c, b)
    assert continues(d, c)


async def test_very_text_goes_before_an_answer_whose_reasoning_is_missing() -> None:
    gateway = gateway_of(
        letters(YES), letters("Yes, the answer."), template=DROPS, reasoning="keep"
    )
    session = gateway.open_session("r")
    reasoned, plain = await choices(session, [USER], n=2)
    await ask(session, [USER, plain, SURE])
    await ask(session, [USER, reasoned, SURE])
    a, b, c, d = session.calls
    assert continues(c, b)
    assert continues(d, a)


async def test_what_was_rewritten_later_leaves_the_turns_before_it_as_they_were() -> None:
    gateway = gateway_of(letters(YES), template=QWEN3, reasoning="keep")
    session = gateway.open_session("r")
    first = bare(await ask(session, [USER]))
    second = bare(await ask(session, [USER, first, SURE]))
    await ask(session, [USER, first, SURE, {**second, "content": "No."}, SURE])
    a, _, c = session.calls
    assert c.prompt_ids[: c.reused_ids] == path(a)
    assert c.rerendered == "text"
    assert c.kept_reasoning_ids == len(letters("<think>\nthe user\n</think>\n\n", end=""))


async def test_letters_in_parts_of_characters_are_no_obstacle_to_the_count() -> None:
    thought = "<think>\né… ünd 𝄞\n</think>\n\n"
    gateway = gateway_of(letters(thought + "é."), template=QWEN3, reasoning="keep")
    session = gateway.open_session("r")
    answer = await ask(session, [USER])
    await ask(session, [USER, bare(answer), SURE])
    assert one_path(session.calls)
    assert session.calls[1].kept_reasoning_ids == len(letters(thought, end=""))


def test_keep_without_a_reasoning_parser_is_refused() -> None:
    with pytest.raises(ConfigError, match="no reasoning_parser"):
        gateway_of((), reasoning="keep", reasoning_parser="none")


@pytest.mark.parametrize("vocabulary", ["small"], indirect=True)  # it has one of its own
async def test_real_engine_computes_only_what_is_new_under_keep() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tuner.engines.transformers.engine import TransformersEngine

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    engine = TransformersEngine(model, tokenizer, max_model_len=512)
    renderer = ChatRenderer(tokenizer)
    question = {"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples?"}
    calls = {}
    for policy in ("template", "keep"):
        gateway = Gateway(engine, renderer, model_name="tiny", reasoning=policy)  # type: ignore[arg-type]
        session = gateway.open_session("r", seed=1, defaults=SamplingDefaults(temperature=0))
        answer = await ask(session, [question])
        await ask(session, [question, answer, SURE])
        calls[policy] = session.calls
        await gateway.aclose()
    await engine.close()
    first, second = calls["keep"]
    assert "<think>" in decoded_by(tokenizer, first.completion_ids)
    assert one_path(calls["keep"])
    # The last sampled token was never an input, so its keys and values are new as well.
    assert second.cached_tokens >= len(path(first)) - 1
    first, second = calls["template"]
    assert [branch.cause for branch in branches(calls["template"])] == ["reasoning"]
    assert second.cached_tokens <= len(first.prompt_ids)


def decoded_by(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids)))
