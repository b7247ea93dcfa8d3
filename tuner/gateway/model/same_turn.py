"""When two texts are the same assistant turn, though they are not the same text."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tuner.gateway.model.parsing import ParsedMessage, Tools
from tuner.gateway.model.renderer import ChatRenderer
from tuner.gateway.model.template import Message, said

# The end of a prompt gives a completion's first tokens their context when they are decoded.
CONTEXT = 8
LONGEST_OPENER = 64  # characters; "<think>\n\n</think>\n\n" has 19


@dataclass(frozen=True)
class Turn:
    """A turn's text, cut behind its reasoning.

    Attributes:
        reasoning: Without the white space at its tags; "" where it says nothing, None without tags.
        answer: Content and tool calls, as they stand in the text.
    """

    reasoning: str | None
    answer: str


def turn(renderer: ChatRenderer, text: str, *, opened: bool = False) -> Turn:
    """The turn that `text` spells; `opened` if the prompt before it has opened the reasoning."""
    reasoning, answer = renderer.reasoning(text, opened)
    return Turn(None if reasoning is None else reasoning.strip(), answer)


def sent_reasoning(renderer: ChatRenderer, messages: Sequence[Message]) -> list[str]:
    """The reasoning of each assistant turn as the agent sent it back, "" for none."""
    sent = []
    for reasoning, content in (said(m) for m in messages if m["role"] == "assistant"):
        sent.append((reasoning or turn(renderer, content).reasoning or "").strip())
    return sent


def reasoning_ids(
    renderer: ChatRenderer,
    prompt_ids: Sequence[int],
    ids: Sequence[int],
    before: int,
    tags: str,
) -> int:
    """How many ids of a completion, and of its prompt's end, stand before its answer.

    Args:
        renderer: What decodes.
        prompt_ids: Shape [P].
        ids: What was sampled after it, shape [T].
        before: Characters of the completion before its answer.
        tags: What the prompt's end writes of the reasoning; see `opener`.
    """
    context = list(prompt_ids[-CONTEXT:])
    base = len(renderer.decode(context))

    def length(count: int) -> int:
        return len(renderer.decode([*context, *ids[:count]])) - base

    def tail(count: int) -> int:
        return len(renderer.decode(prompt_ids[len(prompt_ids) - count :]))

    # Lengths of decoded text only grow with the ids, so the border is found without decoding all.
    spoken = bisect_left(range(len(ids)), before, key=length)
    return spoken + bisect_left(range(len(prompt_ids)), len(tags), key=tail)


def opener(renderer: ChatRenderer, tail: str) -> str:
    r"""What the end of a prompt writes of the reasoning: "<think>\n", an empty block, or "".

    Args:
        renderer: What reads reasoning.
        tail: The last `LONGEST_OPENER` characters of the prompt.
    """
    ends = (tail[start:] for start in range(len(tail)) if not tail[start].isspace())
    return next((end for end in ends if turn(renderer, end) == Turn("", "")), "")


def same_but_for_reasoning(
    renderer: ChatRenderer, sampled: Turn, rendered: Turn, *, opened: bool, tools: Tools
) -> bool:
    """Whether `rendered` is `sampled`, or is that without its reasoning.

    The rest agrees word for word, or in all but the formatting of its tool calls. Line ends between
    the reasoning's tags and the answer belong to the tags: where one of the texts has tags there,
    the two may differ in them.

    Args:
        renderer: What reads tool calls.
        sampled, rendered: The two turns.
        opened: Whether the prompt before `sampled` ends with the reasoning's tags.
        tools: Tools the model was shown; without any, no tool calls are looked for.
    """
    if rendered.reasoning and rendered.reasoning != sampled.reasoning:
        return False
    one, other = sampled.answer, rendered.answer
    if opened or sampled.reasoning is not None or rendered.reasoning is not None:
        one, other = one.lstrip("\n"), other.lstrip("\n")
    if one == other:
        return True
    if not tools:
        return False
    ours, theirs = (
        comparable(renderer.parse_text(text, tools=tools, opened=False), text)
        for text in (one, other)
    )
    return ours is not None and ours == theirs


def comparable(message: ParsedMessage, text: str) -> tuple[object, ...] | None:
    """What a message says: equal for texts that differ in the formatting of tool calls alone.

    Everything up to the end of reasoning and content counts word for word: a template that writes
    their tags anew, or moves them, rewrites the turn. Arguments are compared as JSON, where 1, 1.0
    and true differ. A message without tool calls is its text alone, and equals no other.
    """
    if not message.tool_calls:
        return None
    spoken = 0
    for part in (message.reasoning, message.content):
        if part is not None:
            start = text.find(part, spoken)
            if start < 0:
                return None
            spoken = start + len(part)
    try:
        calls: list[Any] = [
            (call.name, json.dumps(json.loads(call.arguments), sort_keys=True))
            for call in message.tool_calls
        ]
    except (ValueError, RecursionError):
        return None
    return (text[:spoken], message.content, message.reasoning, calls)
