"""Cases that other recorders get wrong, one test each; docs/traces.md says what becomes of them.

`shape` is what is asked of each: how many paths the token tree of the session has, and why it
branches where it does. That no case loses a sampled token is asserted for all.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.gateway.drift import (
    CALL,
    SURE,
    USER,
    Scripted,
    ask,
    choices,
    continues,
    decoded,
    encoded,
    gateway_of,
    letters,
    path,
)
from tests.kit.toy import ADD_TOOL
from tuner.gateway import Session
from tuner.traces import TokenTree, branches

THOUGHT = "<think>\nthe user\n</think>\n\nIt is 42."


def session_of(*script: tuple[int, ...], **options: Any) -> Session:
    return gateway_of(*script, **options).open_session("r")


def shape(session: Session) -> tuple[int, list[str]]:
    """How many paths there are, and the causes of the branches; nothing sampled is missing."""
    calls = session.seal()
    assert all(call.invalid is None and not call.undelivered for call in calls)
    tree = TokenTree.build(calls)
    assert tree.sampled_tokens == sum(len(call.completion_ids) for call in calls)
    assert sum(row.samples.sum() for row in tree.rows()) == tree.sampled_tokens
    causes = [branch.cause.value for branch in branches(calls)]
    return len(list(tree.rows())), causes


async def converse(session: Session, turns: int, change: Any = lambda turn: turn) -> None:
    """`turns` calls, each with the answers so far as `change` makes them."""
    messages = [USER]
    for _ in range(turns):
        answer = await ask(session, messages)
        messages = [*messages, change({"content": None, **answer}), SURE]


async def test_linear_conversation_is_one_path() -> None:
    session = session_of(encoded("It is 42.<|im_end|>"))
    await converse(session, 4)
    assert shape(session) == (1, [])


async def test_drift_of_the_tokenizer_is_bridged() -> None:
    session = session_of(letters("the answer is 42"))
    await converse(session, 4)
    assert session.calls[0].completion_ids != encoded("the answer is 42<|im_end|>")
    assert shape(session) == (1, [])


async def test_dropped_reasoning_branches_and_is_trained() -> None:
    session = session_of(encoded(f"{THOUGHT}<|im_end|>"))
    await converse(session, 3, lambda turn: {**turn, "reasoning_content": None})
    assert shape(session) == (3, ["reasoning", "reasoning"])


async def test_stripped_whitespace_branches_and_is_trained() -> None:
    session = session_of(encoded(" It is 42. <|im_end|>"))
    await converse(session, 2, lambda turn: {**turn, "content": turn["content"].strip()})
    assert shape(session) == (2, ["whitespace"])


async def test_renamed_tool_call_ids_do_not_matter() -> None:
    session = session_of(letters(CALL), letters("It is 42."))
    answer = await ask(session, [USER], tools=[ADD_TOOL])
    (call,) = answer["tool_calls"]
    renamed = {**answer, "content": None, "tool_calls": [{**call, "id": "mine"}]}
    result = {"role": "tool", "tool_call_id": "mine", "content": "42"}
    await ask(session, [USER, renamed, result], tools=[ADD_TOOL])
    assert shape(session) == (1, [])


async def test_reformatted_arguments_do_not_matter() -> None:
    terse = CALL.replace('{"a": 2, "b": 40}', '{"a":2,"b":40}')
    session = session_of(letters(terse), letters("It is 42."))
    answer = await ask(session, [USER], tools=[ADD_TOOL])
    (call,) = answer["tool_calls"]
    arguments = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
    call = {**call, "function": {"name": "add", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
    turn = {**answer, "content": None, "tool_calls": [call]}
    await ask(session, [USER, turn, result], tools=[ADD_TOOL])
    assert shape(session) == (1, [])


async def test_rewritten_answer_branches_and_both_are_trained() -> None:
    session = session_of(encoded("It is 41.<|im_end|>"), encoded("Yes.<|im_end|>"))
    await converse(session, 2, lambda turn: {**turn, "content": "It is 42."})
    assert "It is 42." in decoded(session.calls[1].prompt_ids)
    assert shape(session) == (2, ["rewrite"])


async def test_foreign_answer_is_context() -> None:
    session = session_of(encoded("Yes.<|im_end|>"))
    foreign = {"role": "assistant", "content": "It is 42."}
    await ask(session, [USER, foreign, SURE])
    assert "It is 42." in decoded(session.calls[0].prompt_ids)
    assert shape(session) == (1, [])


async def test_interleaved_sub_agent_has_a_path_of_its_own() -> None:
    session = session_of(letters("the answer"))
    helper = {"role": "system", "content": "You help."}
    main, side = [USER], [helper, USER]
    for _ in range(4):
        main = [*main, await ask(session, main), SURE]
        side = [*side, await ask(session, side), SURE]
    assert shape(session) == (2, ["sub_agent"])


async def test_a_candidate_of_several_sequential_ones_is_continued() -> None:
    session = session_of(letters("the answer"), letters("the user"), letters("answer"))
    first, _, third = [await ask(session, [USER]) for _ in range(3)]
    await ask(session, [USER, first, SURE])
    await ask(session, [USER, third, SURE])
    calls = session.calls
    assert continues(calls[3], calls[0])
    assert continues(calls[4], calls[2])
    assert shape(session) == (3, ["resampled", "resampled"])


async def test_a_candidate_of_several_parallel_ones_is_continued() -> None:
    session = session_of(*(letters(text) for text in ("answer", "the user", " is", "add", "42")))
    answers = await asyncio.gather(*(ask(session, [USER]) for _ in range(4)))
    await ask(session, [USER, answers[0], SURE])
    earlier = next(c for c in session.calls if c.response["content"] == answers[0]["content"])
    assert continues(session.calls[4], earlier)
    assert shape(session) == (4, ["resampled"] * 3)


async def test_equal_texts_in_other_ids_are_two_paths_and_the_first_goes_on() -> None:
    session = session_of(letters("the answer"), encoded("the answer<|im_end|>"), letters("Yes."))
    answer = await ask(session, [USER])
    assert answer == {**await ask(session, [USER])}
    await ask(session, [USER, answer, SURE])
    assert continues(session.calls[2], session.calls[0])
    assert shape(session) == (2, ["resampled"])


async def test_retry_of_the_client_is_replayed() -> None:
    session = session_of(letters("the answer"), letters("the user"))
    headers = {"Idempotency-Key": "one"}
    first = await ask(session, [USER], extra_headers=headers)
    assert await ask(session, [USER], extra_headers=headers) == first
    assert len(session.calls) == 1
    assert shape(session) == (1, [])


async def test_truncated_answer_is_continued_with_its_own_ids() -> None:
    session = session_of(letters("the answer is 42"), letters("Yes."))
    answer = await ask(session, [USER], max_tokens=6)
    await ask(session, [USER, answer, SURE])
    first, second = session.calls
    assert first.finish_reason == "length"
    assert second.prompt_ids[: len(path(first))] == path(first)
    assert shape(session) == (1, [])


async def test_compacted_history_is_a_new_path_and_the_old_one_is_trained() -> None:
    session = session_of(encoded("It is 42.<|im_end|>"))
    await converse(session, 3)
    summary = {"role": "user", "content": "So far: 42."}
    await ask(session, [USER, summary])
    assert shape(session) == (2, ["compaction"])


async def test_changed_tools_are_a_new_path() -> None:
    session = session_of(encoded("It is 42.<|im_end|>"))
    answer = await ask(session, [USER])
    await ask(session, [USER, answer, SURE], tools=[ADD_TOOL])
    assert '"name": "add"' in decoded(session.calls[1].prompt_ids)
    assert shape(session) == (2, ["tools_changed"])


async def test_every_choice_is_recorded() -> None:
    session = session_of(letters("answer"), letters("the user"), letters(" is"))
    answers = await choices(session, [USER], n=3)
    assert [call.response["content"] for call in session.calls] == [a["content"] for a in answers]
    assert shape(session) == (3, ["resampled", "resampled"])


async def test_each_token_keeps_the_version_of_the_weights_that_sampled_it() -> None:
    gateway = gateway_of(letters("abcdefg", end=""))
    engine = gateway.engine
    assert isinstance(engine, Scripted)
    engine.updated_after = 3
    session = gateway.open_session("r")
    await ask(session, [USER])
    assert session.calls[0].versions == (3, 3, 3, 4, 4, 4, 4)
    assert shape(session) == (1, [])
