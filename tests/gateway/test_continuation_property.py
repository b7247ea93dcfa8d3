"""A random agent, a model that writes anything in any tokens: what may never happen."""

from __future__ import annotations

import asyncio
import json
import re
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
from tests.kit.examples import few
from tests.kit.toy import ADD_TOOL

pytestmark = pytest.mark.usefixtures("vocabulary")
_PIECES = st.sampled_from(
    [
        "answer", " is", "the user", "\n", "\n\n", " ", "é", "e\u0301", "汉字🙂", "…", CALL, TERSE,
        "\n" + CALL, "{", "<think>\nthe user\n</think>\n\n", "<think>", "</think>", "<tool_call>",
        "</tool_call>",
    ]
)  # fmt: skip
_SAMPLED = st.tuples(
    st.lists(_PIECES, max_size=4),
    st.sampled_from(["letters", "tokens", "raw"]),
    st.sampled_from(["<|im_end|>", "<|im_end|>", "", "<|endoftext|>", "<|im_start|>"]),
    st.binary(max_size=2),
)
_STEP = st.tuples(
    _SAMPLED,
    st.integers(0, 4),  # which earlier conversation goes on
    st.sampled_from(["echo", "echo", "echo", "drop", "strip", "edit", "retry"]),
)


def _sample(sampled: tuple[list[str], str, str, bytes]) -> tuple[int, ...]:
    pieces, how, end, noise = sampled
    text = "".join(pieces)
    if how == "tokens":
        return encoded(text + end) or encoded("x")
    raw = tuple(letters(chr(byte), end="")[-1] for byte in noise) if how == "raw" else ()
    special = {"<think>", "</think>", "<tool_call>", "</tool_call>"}
    ids: list[int] = []
    for part in re.split("(</?(?:think|tool_call)>)", text):
        # "raw" spells the tags letter by letter, which is no tag to the tokenizer.
        ids += encoded(part) if part in special and how == "letters" else letters(part, end="")
    return (*ids, *raw, *encoded(end)) or encoded("x")


def _meaning(text: str) -> str:
    """`text` with each well-formed tool call and the space around tags in one form."""

    def canonical(match: re.Match[str]) -> str:
        try:
            return f"<call>{json.dumps(json.loads(match[1]), sort_keys=True)}</call>"
        except ValueError:
            return match[0]

    text = re.sub(r"<tool_call>((?:(?!<tool_call>).)*?)</tool_call>", canonical, text, flags=re.S)
    return re.sub(r"\s*(</?(?:call|think|tool_call)>|<\|im_end\|>)\s*", r"\1", text)


@pytest.mark.long
@settings(max_examples=few(60), deadline=None)
@given(st.lists(_STEP, min_size=2, max_size=8))
def test_reuse_never_changes_what_the_model_reads(steps: list[Any]) -> None:
    asyncio.run(_drive(steps))


async def _drive(steps: list[Any]) -> None:
    gateway = gateway_of(*[_sample(sampled) for sampled, _, _ in steps])
    session = gateway.open_session("r")
    conversations: list[list[Any]] = [[USER]]
    for _, which, deed in steps:
        messages = conversations[which % len(conversations)]
        answer = await ask(session, messages, tools=[ADD_TOOL])
        if deed == "drop":
            answer.pop("reasoning_content", None)
        elif deed == "strip":
            answer["content"] = answer.get("content", "").strip()
        elif deed == "edit":
            answer["content"] = answer.get("content", "") + "!"
        if deed != "retry":
            conversations.append([*messages, {"content": None, **answer}, SURE])
    paths = []
    for call in session.calls:
        text = rendered(gateway, call)
        # Qwen's tokenizer composes the characters that it encodes; those that were sampled stay.
        said, read = (normalize("NFC", one) for one in (text, decoded(call.prompt_ids)))
        if "tool_call" in said or "<think>" in read:
            assert _meaning(read) == _meaning(said)
        else:
            assert read == said
        # Whatever was taken over is an earlier path; the rest is what the tokenizer makes of it.
        kept = call.prompt_ids[: call.reused_ids]
        assert not kept or kept in paths
        rest = call.prompt_ids[call.reused_ids :]
        assert rest == encoded(text)[len(encoded(text)) - len(rest) :]
        paths += [path(call), path(call)[:-1]]
