"""Random models and agents under `keep`: one path, and never another turn in a turn's place."""

from __future__ import annotations

import asyncio
from typing import Any
from unicodedata import normalize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateway.drift import (
    CALL,
    SURE,
    TERSE,
    USER,
    ask,
    decoded,
    encoded,
    gateway_of,
    letters,
    path,
    rendered,
)
from tests.gateway.test_continuation_property import _SAMPLED, _sample
from tests.gateway.test_keep_reasoning import ALL, OPENED, OPENED_OBEDIENT, RESULT, bare, one_path
from tests.kit.examples import few
from tests.kit.toy import ADD_TOOL
from tuner.gateway import ChatRenderer

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("vocabulary")]
_WORDS = st.lists(st.sampled_from(["answer", " is", "the user", " ", "\n", "{", "1"]))
_THOUGHT = st.tuples(_WORDS.map("".join), st.sampled_from(["", "\n"]), st.integers(0, 2))
_TURN = st.tuples(
    st.none() | _THOUGHT,
    _WORDS.map("".join).map(str.strip),
    st.sampled_from(["", "", CALL, TERSE, CALL + "\n" + TERSE]),
    st.none() | st.integers(1, 30),  # cut off after so many tokens
    st.booleans(),  # whether the agent sends the reasoning back
)


def _spelled(turn: Any, opened: bool) -> str:
    thought, words, call, _, _ = turn
    text = words + ("\n" if words and call else "") + call
    if thought is None:
        return ("</think>" if opened else "") + text
    reasoning, line, lines = thought
    block = f"{line}{reasoning}{line}</think>" + "\n" * lines
    return ("" if opened else "<think>") + block + text


@settings(max_examples=few(80), deadline=None)
@given(
    st.sampled_from([*ALL.values(), OPENED, OPENED_OBEDIENT]),
    st.lists(_TURN, min_size=2, max_size=6),
)
def test_agent_that_changes_nothing_but_reasoning_stays_on_one_path(
    template: str, turns: list[Any]
) -> None:
    asyncio.run(_talk(template, turns))


async def _talk(template: str, turns: list[Any]) -> None:
    opened = template in (OPENED, OPENED_OBEDIENT)
    script = [letters(_spelled(turn, opened)) for turn in turns]
    gateway = gateway_of(*script, template=template, reasoning="keep")
    session = gateway.open_session("r")
    messages: list[Any] = [USER]
    for *_, limit, sends_back in turns:
        answer = await ask(session, messages, tools=[ADD_TOOL], max_tokens=limit)
        sent = {"content": None, **(answer if sends_back else bare(answer))}
        results = [RESULT] * len(answer.get("tool_calls", ()))
        messages = [*messages, sent, *(results or [SURE])]
    assert one_path(session.calls)


_STEP = st.tuples(
    _SAMPLED,
    st.integers(0, 4),  # which earlier conversation goes on
    st.sampled_from(["echo", "drop", "drop", "strip", "edit", "rethink", "retry"]),
)


@settings(max_examples=few(80), deadline=None)
@given(st.sampled_from([*ALL.values(), OPENED]), st.lists(_STEP, min_size=2, max_size=8))
def test_only_reasoning_is_put_back(template: str, steps: list[Any]) -> None:
    asyncio.run(_drive(template, steps))


async def _drive(template: str, steps: list[Any]) -> None:
    script = [_sample(sampled) for sampled, _, _ in steps]
    gateway = gateway_of(*script, template=template, reasoning="keep")
    session = gateway.open_session("r")
    conversations: list[list[Any]] = [[USER]]
    for _, which, deed in steps:
        messages = conversations[which % len(conversations)]
        answer = await ask(session, messages, tools=[ADD_TOOL])
        if deed == "drop":
            answer = bare(answer)
        elif deed == "strip":
            answer["content"] = answer.get("content", "").strip()
        elif deed == "edit":
            answer["content"] = answer.get("content", "") + "!"
        elif deed == "rethink":
            answer["reasoning_content"] = "the model"
        if deed != "retry":
            conversations.append([*messages, {"content": None, **answer}, SURE])
    paths: list[tuple[int, ...]] = []
    for call in session.calls:
        text = rendered(gateway, call)
        _compare(gateway.renderer, decoded(call.prompt_ids), text)
        kept = call.prompt_ids[: call.reused_ids]
        assert not kept or kept in paths
        rest = call.prompt_ids[call.reused_ids :]
        assert rest == encoded(text)[len(encoded(text)) - len(rest) :]
        assert 0 <= call.kept_reasoning_ids <= call.reused_ids
        paths += [path(call), path(call)[:-1]]


def _compare(renderer: ChatRenderer, read: str, text: str) -> None:
    """Between the turns both are equal; the turns say the same, reasoning left out or equal."""
    ours, theirs = (_parts(normalize("NFC", spoken)) for spoken in (read, text))
    assert ours[::2] == theirs[::2]
    for one, other in zip(ours[1::2], theirs[1::2], strict=True):
        if one == other:
            continue
        a, b = (renderer.parse_text(turn, tools=True, opened=False) for turn in (one, other))
        assert (a.content or "").lstrip("\n") == (b.content or "").lstrip("\n")
        assert [call.name for call in a.tool_calls] == [call.name for call in b.tool_calls]
        assert not (b.reasoning or "").strip() or _flat(a.reasoning) == _flat(b.reasoning)


def _flat(reasoning: str | None) -> str:
    return (reasoning or "").strip()


def _parts(text: str) -> list[str]:
    """What stands before the first assistant turn, that turn, what follows it, and so on."""
    first, *others = text.split("<|im_start|>assistant\n")
    parts = [first]
    for other in others:
        turn, end, rest = other.partition("<|im_end|>")
        parts += [turn, end + rest]
    return parts
