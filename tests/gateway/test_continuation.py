"""Conversations go on with the ids that were sampled; what differs is rendered afresh."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines.test_grammar import make_engine
from tests.gateway.drift import (
    CALL,
    SURE,
    TERSE,
    USER,
    Scripted,
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
from tests.kit.toy import ADD_TOOL, TEMPLATE, tokenizer
from tuner.gateway import ChatRenderer, Gateway, SamplingDefaults
from tuner.rollouts.chat_models import chat_model, default_kind
from tuner.traces import ReasoningPolicy

pytestmark = pytest.mark.usefixtures("vocabulary")
MODEL = Path(__file__).parents[2] / "models" / "tiny_math"


async def test_text_that_would_be_tokenized_differently_keeps_its_sampled_ids() -> None:
    gateway = gateway_of(letters("The answer is 42."))
    session = gateway.open_session("r")
    answer = await ask(session, [USER])
    await ask(session, [USER, answer, SURE])
    first, second = session.calls
    assert encoded("The answer is 42.<|im_end|>") != first.completion_ids  # the drift
    assert continues(second, first)
    assert decoded(second.prompt_ids) == rendered(gateway, second)
    assert (
        second.prompt_ids[len(path(first)) :]
        == encoded("<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n")[1:]
    )
    assert (first.reused_ids, first.rerendered, second.rerendered) == (0, None, None)


@pytest.mark.parametrize("script", [CALL, TERSE], ids=["as rendered", "re-formatted"])
async def test_twenty_tool_turns_are_one_path(script: str) -> None:
    gateway = gateway_of(letters(script))
    session = gateway.open_session("r")
    messages: list[Any] = [USER]
    for turn in range(20):
        answer = await ask(session, messages, tools=[ADD_TOOL])
        (call,) = answer["tool_calls"]
        # What frameworks do: another id, arguments parsed and written again, content in parts.
        arguments = json.dumps(json.loads(call["function"]["arguments"]), indent=turn % 3)
        function = {"name": "add", "arguments": arguments}
        messages = [
            *messages,
            {
                "role": "assistant",
                "content": [],
                "name": "solver",
                "tool_calls": [{"id": f"my_{turn}", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": f"my_{turn}", "content": f"the answer is {turn}"},
        ]
    calls = session.calls
    assert len(calls) == 20
    assert all(continues(later, earlier) for earlier, later in itertools.pairwise(calls))
    assert all(call.rerendered is None for call in calls)
    # The model reads its own words, and everything else as the template renders it.
    turns = decoded(calls[-1].prompt_ids).split(script)
    assert len(turns) == 20
    assert "".join(turns) == rendered(gateway, calls[-1]).replace(CALL, "")


@pytest.mark.skipif(default_kind() != "agentscope1", reason="needs AgentScope 1.x")
async def test_agentscope_agent_that_rewrites_arguments_stays_on_one_path() -> None:
    from agentscope.agent import ReActAgent
    from agentscope.formatter import OpenAIChatFormatter
    from agentscope.message import Msg, TextBlock
    from agentscope.tool import Toolkit, ToolResponse

    def add(a: int, b: int) -> ToolResponse:
        """Add two integers.

        Args:
            a (int): first
            b (int): second
        """
        return ToolResponse(content=[TextBlock(type="text", text=str(a + b))])

    toolkit = Toolkit()
    toolkit.register_tool_function(add)
    gateway = gateway_of(*[letters("I add.\n" + TERSE)] * 20, letters("The answer is 42."))
    session = gateway.open_session("r")
    agent = ReActAgent(
        name="solver",
        sys_prompt="You add.",
        model=chat_model(session, kind="agentscope1"),
        formatter=OpenAIChatFormatter(),
        toolkit=toolkit,
        max_iters=30,
    )
    reply = await agent(Msg("user", "2+40?", "user"))
    assert reply.get_text_content() == "The answer is 42."
    calls = session.calls
    assert len(calls) == 21
    assert all(continues(later, earlier) for earlier, later in itertools.pairwise(calls))


@pytest.mark.parametrize(
    "arguments", ['{"a":2,"b":41}', '{"a":2.0,"b":40}', '{"a":true,"b":40}', '{"a":2}', "{}"]
)
async def test_other_arguments_are_another_turn(arguments: str) -> None:
    gateway = gateway_of(letters(TERSE))
    session = gateway.open_session("r")
    answer = await ask(session, [USER], tools=[ADD_TOOL])
    answer["tool_calls"][0]["function"]["arguments"] = arguments
    result = {"role": "tool", "tool_call_id": "x", "content": "42"}
    await ask(session, [USER, answer, result], tools=[ADD_TOOL])
    assert fresh(gateway, session.calls[1])
    assert session.calls[1].rerendered == "text"


async def test_words_that_the_template_puts_before_the_tool_call_are_another_turn() -> None:
    gateway = gateway_of(letters(TERSE + "I add."))
    session = gateway.open_session("r")
    answer = await ask(session, [USER], tools=[ADD_TOOL])
    assert (answer["content"], len(answer["tool_calls"])) == ("I add.", 1)
    await ask(session, [USER, answer, SURE], tools=[ADD_TOOL])
    assert fresh(gateway, session.calls[1])


async def test_turn_that_the_template_or_the_agent_rewrites_is_rendered_afresh() -> None:
    gateway = gateway_of(letters("ok"), letters("<think>\nthe user\n</think>\n\nYes, the answer."))
    session = gateway.open_session("r")
    ok = await ask(session, [USER])
    answer = await ask(session, [USER, ok, SURE])
    assert answer["reasoning_content"] == "the user"
    dropped = {"role": "assistant", "content": answer["content"]}
    edited = {**answer, "content": "Yes,  the answer."}
    for turn in (dropped, edited, answer):
        await ask(session, [USER, ok, SURE, turn, SURE])
    first, second, *later = session.calls
    assert continues(second, first)
    for call in later[:2]:
        # The earlier turn is still what was sampled; what follows is as the template renders it.
        assert continues(call, first)
        assert call.rerendered == "text"
        assert decoded(call.prompt_ids) == rendered(gateway, call)
    assert "<think>" not in decoded(later[0].prompt_ids)
    assert continues(later[2], second)
    assert later[2].rerendered is None


async def test_template_that_strips_reasoning_branches_at_that_turn() -> None:
    stripping = TEMPLATE.replace("message.reasoning_content", "false")
    gateway = gateway_of(letters("<think>\nthe user\n</think>\n\nYes."), template=stripping)
    session = gateway.open_session("r")
    answer = await ask(session, [USER])
    await ask(session, [USER, answer, SURE])
    assert fresh(gateway, session.calls[1])
    assert session.calls[1].rerendered == "text"


async def test_turn_cut_by_the_limit_is_ended_by_the_next_prompt() -> None:
    gateway = gateway_of(letters("The answer is 42."))
    session = gateway.open_session("r")
    cut = await ask(session, [USER], max_tokens=6)
    assert cut["content"] == "The an"
    await ask(session, [USER, cut, SURE])
    first, second = session.calls
    assert first.finish_reason == "length"
    assert continues(second, first)
    assert decoded(second.prompt_ids[second.reused_ids :]).startswith("<|im_end|>\n")
    assert decoded(second.prompt_ids) == rendered(gateway, second)
    # A longer text that begins with the cut one is another turn.
    await ask(session, [USER, {"role": "assistant", "content": "The answer"}, SURE])
    assert fresh(gateway, session.calls[2])
    assert session.calls[2].rerendered == "text"


async def test_other_end_token_than_the_templates_is_not_taken_over() -> None:
    gateway = gateway_of(letters("The answer.", end="<|endoftext|>"))
    session = gateway.open_session("r")
    answer = await ask(session, [USER])
    await ask(session, [USER, answer, SURE])
    first, second = session.calls
    assert second.reused_ids == len(path(first)) - 1
    assert second.prompt_ids[: second.reused_ids] == path(first)[:-1]
    assert decoded(second.prompt_ids) == rendered(gateway, second)


@pytest.mark.parametrize("reasoning", ["template", "keep"])
@pytest.mark.parametrize("end", ["<|endoftext|>", "<|im_start|>", ""])
@pytest.mark.parametrize("script", [CALL, TERSE], ids=["as rendered", "re-formatted"])
async def test_tool_call_keeps_its_ids_whatever_token_ended_it(
    script: str, end: str, reasoning: ReasoningPolicy
) -> None:
    sampled = letters(script, end=end)
    gateway = gateway_of(sampled, reasoning=reasoning)
    session = gateway.open_session("r")
    answer = await ask(session, [USER], tools=[ADD_TOOL], max_tokens=len(letters(script)))
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "42"}
    await ask(session, [USER, answer, result], tools=[ADD_TOOL])
    first, second = session.calls
    assert first.completion_ids == sampled
    kept = path(first)[: -1 if end else None]
    assert second.prompt_ids[: second.reused_ids] == kept
    assert second.rerendered == ("end" if end else None)
    # The template ends the turn in its own way.
    glue = decoded(second.prompt_ids[second.reused_ids :])
    assert glue.startswith("<|im_end|>\n<|im_start|>user\n<tool_response>\n42")
    assert rendered(gateway, second).endswith(CALL + glue)


async def test_text_before_a_stop_string_is_rendered_afresh() -> None:
    gateway = gateway_of(letters("The answer.STOP", end=""))
    session = gateway.open_session("r")
    answer = await ask(session, [USER], stop=["STOP"])
    assert answer["content"] == "The answer."
    await ask(session, [USER, answer, SURE])
    assert fresh(gateway, session.calls[1])


async def test_part_of_a_character_is_not_mistaken_for_its_replacement() -> None:
    gateway = gateway_of((*letters("é", end="")[:1], *letters("x")))
    session = gateway.open_session("r")
    answer = await ask(session, [USER])
    assert answer["content"] == "\ufffdx"
    await ask(session, [USER, answer, SURE])
    assert fresh(gateway, session.calls[1])
    assert session.calls[1].rerendered == "characters"


@pytest.mark.parametrize("reasoning", ["template", "keep"])
@pytest.mark.parametrize(
    "script",
    [
        "An é",
        "<think>the user",
        "<think>\nthe é",
        "<think>the user</think>The answer",
        "<think>the user</think><tool_call>\n{",
        TERSE + "\n" + TERSE[:30],
        "<think>the user</think>" + TERSE + TERSE[:-1],
    ],
)
async def test_turn_cut_off_anywhere_continues_as_it_was_sampled(
    script: str, reasoning: ReasoningPolicy
) -> None:
    # The template closes what is open, and writes words before calls.
    sampled = letters(script, end="")
    sampled = sampled[:-1] if script.endswith("é") else sampled
    gateway = gateway_of((*sampled, *encoded("x")), letters("ok"), reasoning=reasoning)
    session = gateway.open_session("r")
    cut = await ask(session, [USER], tools=[ADD_TOOL], max_tokens=len(sampled))
    called = [call["id"] for call in cut.get("tool_calls", [])]
    results = [{"role": "tool", "tool_call_id": id_, "content": "42"} for id_ in called]
    await ask(session, [USER, {"content": None, **cut}, *results, SURE], tools=[ADD_TOOL])
    edited = {"content": "", **cut}
    edited["content"] += "!"
    await ask(session, [USER, edited, *results, SURE], tools=[ADD_TOOL])
    first, second, third = session.calls
    assert first.finish_reason == "length"
    assert continues(second, first)
    assert second.rerendered is None
    assert decoded(second.prompt_ids[second.reused_ids :]).startswith("<|im_end|>\n")
    assert third.rerendered in ("text", "characters")


async def test_reasoning_of_a_cut_off_turn_that_the_template_drops_stays_dropped() -> None:
    stripping = TEMPLATE.replace("message.reasoning_content", "false")
    sampled = letters("<think>user</think>the user", end="")
    gateway = gateway_of((*sampled, *encoded("x")), template=stripping)
    session = gateway.open_session("r")
    cut = await ask(session, [USER], max_tokens=len(sampled))
    assert (cut["reasoning_content"], cut["content"]) == ("user", "the user")
    await ask(session, [USER, cut, SURE])
    assert fresh(gateway, session.calls[1])
    assert session.calls[1].rerendered == "text"


@pytest.mark.long
@pytest.mark.parametrize("vocabulary", ["small"], indirect=True)  # it has one of its own
async def test_constrained_calls_of_a_random_model_continue_wherever_they_are_cut() -> None:
    engine = make_engine(max_model_len=4096)
    gateway = Gateway(engine, ChatRenderer(tokenizer(), chat_template=TEMPLATE), model_name="tiny")
    for seed in range(4):
        session = gateway.open_session(f"r{seed}", seed=seed)
        messages: list[Any] = [USER]
        for limit in (50, 90, 130, 1):
            answer = await ask(
                session, messages, tools=[ADD_TOOL], tool_choice="required", max_tokens=limit
            )
            called = [call["id"] for call in answer.get("tool_calls", [])]
            results = [{"role": "tool", "tool_call_id": id_, "content": "42"} for id_ in called]
            messages = [*messages, {"content": None, **answer}, *(results or [SURE])]
        for earlier, later in itertools.pairwise(session.calls):
            ended = earlier.finish_reason != "length" and later.rerendered == "end"
            assert ended or (continues(later, earlier) and later.rerendered is None)
    await gateway.aclose()
    await engine.close()


async def test_every_choice_can_be_continued() -> None:
    gateway = gateway_of(letters("The answer"), letters("Another answer"), letters("ok"))
    session = gateway.open_session("r")
    both = await choices(session, [USER], n=2)
    for answer in (both[1], both[0], both[1]):
        await ask(session, [USER, answer, SURE])
    one, two, *later = session.calls
    assert continues(later[0], two)
    assert continues(later[1], one)
    assert later[2].prompt_ids == later[0].prompt_ids


async def test_equal_texts_with_other_ids_continue_the_earlier_one_throughout() -> None:
    gateway = gateway_of(encoded("answer<|im_end|>"), letters("answer"), letters("answer"))
    session = gateway.open_session("r")
    first, _ = await choices(session, [USER], n=2)
    second = await ask(session, [USER, first, SURE])
    await ask(session, [USER, first, SURE, second, SURE])
    one, two, three, four = session.calls
    assert one.completion_ids != two.completion_ids
    assert continues(three, one)
    assert continues(four, three)


async def test_parallel_branches_and_sub_agents_keep_to_their_own_path() -> None:
    gateway = gateway_of(letters("The answer is here."))
    session = gateway.open_session("r")
    root = await ask(session, [USER])

    async def branch(number: int) -> list[int]:
        places = [0]
        messages = [USER, root, {"role": "user", "content": f"branch {number}"}]
        if number % 2:  # a sub-agent: a conversation of its own
            messages = [{"role": "system", "content": f"Helper {number}"}, USER]
        for _ in range(4):
            answer = await ask(session, messages)
            messages = [*messages, answer, SURE]
        return places

    await asyncio.gather(*(branch(number) for number in range(6)))
    calls = session.calls
    assert len(calls) == 25
    by_messages = {json.dumps(call.messages): call for call in calls}
    for call in calls[1:]:
        assert call.rerendered is None
        if len(call.messages) > 2:
            before = by_messages[json.dumps(call.messages[:-2])]
            assert continues(call, before)
        else:
            assert call.reused_ids == 0


async def test_sessions_never_share_what_they_sampled() -> None:
    gateway = gateway_of(letters("The answer is 42."))
    one, two = gateway.open_session("1"), gateway.open_session("2")
    answer = await ask(one, [USER])
    await ask(two, [USER, answer, SURE])
    assert fresh(gateway, two.calls[0])
    assert two.calls[0].rerendered == "text"


async def test_calls_that_are_not_recorded_continue_too() -> None:
    gateway = gateway_of(letters("The answer is 42."))
    session = gateway.open_session("r", recorded=False)
    answer = await ask(session, [USER])
    await ask(session, [USER, answer, SURE])
    engine = gateway.engine
    assert isinstance(engine, Scripted)
    before = (*engine.requests[0][0], *letters("The answer is 42."))
    assert engine.requests[1][0][: len(before)] == before


async def test_tokenizer_that_does_not_split_at_the_end_token_is_not_relied_on(monkeypatch) -> None:
    gateway = gateway_of(letters("The answer is 42."))
    monkeypatch.setattr(gateway.renderer.special_tokens, "_splits", lambda *_: False)
    session = gateway.open_session("r")
    answer = await ask(session, [USER])
    await ask(session, [USER, answer, SURE])
    assert fresh(gateway, session.calls[1])
    assert session.calls[1].rerendered == "tokenizer"


@pytest.mark.parametrize("vocabulary", ["small"], indirect=True)  # it has one of its own
async def test_real_engine_computes_only_what_is_new() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tuner.engines.transformers.engine import TransformersEngine

    spoken = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    engine = TransformersEngine(model, spoken, max_model_len=2048)
    # A stable template: the model's own leaves out the reasoning of earlier turns.
    renderer = ChatRenderer(spoken, chat_template=TEMPLATE, reasoning_parser="none")
    gateway = Gateway(engine, renderer, model_name="tiny")
    session = gateway.open_session("r", defaults=SamplingDefaults(max_tokens=10))
    messages: list[Any] = [{"role": "user", "content": "Tom has 3 apples. How many?"}]
    for turn in range(20):
        answer = await ask(session, messages, tools=[ADD_TOOL])
        result = {"role": "tool", "tool_call_id": f"call_{turn}", "content": f"{turn} more"}
        messages = [*messages, answer, result]
    calls = session.calls
    await gateway.aclose()
    await engine.close()
    for earlier, later in itertools.pairwise(calls):
        assert continues(later, earlier)
        # The last sampled token was never an input, so its keys and values are new as well.
        assert later.cached_tokens >= len(path(earlier)) - 1
