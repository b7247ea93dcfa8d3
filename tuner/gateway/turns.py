"""When two texts are the same assistant turn, though they are not the same text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.gateway.parsing import ParsedMessage, Tools
    from tuner.gateway.renderer import ChatRenderer

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
    reasoning, answer = renderer.split_reasoning(text, opened=opened)
    return Turn(None if reasoning is None else reasoning.strip(), answer)


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
